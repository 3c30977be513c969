"""Episodes of a simulator, frozen: the fourth workload on which the planner was built.

Poles on carts, moved by a simulator of rigid bodies that moves all of them at once, as simulators
for training do: 192 take hardly longer than one. A policy and a critic of 2.1 M parameters each;
advantage actor-critic on whole episodes. Why: in embodied training such a simulator goes round with
the policy dozens of times a step, gains nothing from a second lane, and episodes end when they end.

A change of what it does needs a decision record with the figures before and after; a test holds its
text. Legend: B batch, T steps of all episodes, S the state's figures.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

import torch
from ray import cloudpickle
from torch import Tensor, nn

from m2flow import Batch, Flow, Place, Ragged, Stream, Worker, loop, stage
from m2flow.algorithms.sampling import derive_seed, sample_tokens
from m2flow.training.optimizer import AdamWConfig, SumOptimizer
from workloads.common import LEARNING_RATE, Workload

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this file

STATE, ACTIONS, WIDTH = 4, 2, 1024
MAX_TURNS = 40
SUBSTEPS = 100
"""Runge-Kutta steps of the simulator in a turn of 20 ms."""

FORCE, LENGTH, POLE, CART, GRAVITY = 10.0, 0.5, 0.1, 1.0, 9.8


def _motion(state_SB: Tensor, force_B: Tensor) -> Tensor:
    """Derivatives of place, speed, angle and its rate of poles on carts, without friction.

    Source: Barto, Sutton and Anderson 1983, appendix; the pole is a rod of twice `LENGTH`.
    """
    _, speed, angle, rate = state_SB
    sine, cosine = angle.sin(), angle.cos()
    pull = (force_B + POLE * LENGTH * rate * rate * sine) / (CART + POLE)
    turning = (GRAVITY * sine - cosine * pull) / (
        LENGTH * (4 / 3 - POLE * cosine * cosine / (CART + POLE))
    )
    sliding = pull - POLE * LENGTH * turning * cosine / (CART + POLE)
    return torch.stack([speed, sliding, rate, turning])


def simulate_turn(state_SB: Tensor, force_B: Tensor) -> Tensor:
    """The states 20 ms later, by the classical Runge-Kutta method."""
    h = 0.02 / SUBSTEPS
    now = state_SB
    for _ in range(SUBSTEPS):
        a = _motion(now, force_B)
        b = _motion(now + h / 2 * a, force_B)
        c = _motion(now + h / 2 * b, force_B)
        d = _motion(now + h * c, force_B)
        now = now + h / 6 * (a + 2 * b + 2 * c + d)
    return now


class World(Worker):
    """Carts with poles; an episode ends when its pole has fallen, or after `MAX_TURNS`."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.tracks: dict[int, Track] = {}

    @stage(sticky=True)
    def move(self, episodes: Batch) -> Batch:
        """Carries out `action`; gives `observation`, `done`, and of those that end the track."""
        seeds, actions = episodes["seed"].tolist(), episodes["action"].tolist()
        tracks = [self.tracks.pop(seed, None) or Track.begun(seed) for seed in seeds]
        old = [row for row, action in enumerate(actions) if action >= 0]
        if old:
            before = torch.stack([tracks[row].states[-1] for row in old], dim=1)
            force = episodes["action"][old].double() * 2 * FORCE - FORCE
            for row, state in zip(old, simulate_turn(before, force).T, strict=True):
                tracks[row].moved(actions[row], state)
        for seed, track in zip(seeds, tracks, strict=True):
            if not track.over:
                self.tracks[seed] = track
        ended = [track if track.over else Track() for track in tracks]
        return episodes.with_columns(
            observation=torch.stack([track.states[-1] for track in tracks]).float(),
            turn=episodes["turn"] + 1,
            done=[track.over for track in tracks],
            seen=Ragged.from_rows([track.seen for track in ended]),
            acted=Ragged.from_rows(
                [torch.tensor(track.actions, dtype=torch.int64) for track in ended]
            ),
        )


@dataclass
class Track:
    """An episode so far: its states, float64 [STATE], and the actions that led from each to the
    next."""

    states: list[Tensor] = field(default_factory=list)
    actions: list[int] = field(default_factory=list)

    @classmethod
    def begun(cls, seed: int) -> Track:
        """A pole that stands nearly upright."""
        figures = [Random(seed + number).uniform(-0.05, 0.05) for number in range(STATE)]
        return cls([torch.tensor(figures, dtype=torch.float64)])

    def moved(self, action: int, state: Tensor) -> None:
        self.actions.append(action)
        self.states.append(state)

    @property
    def over(self) -> bool:
        place, _, angle, _ = self.states[-1].tolist()
        return len(self.actions) >= MAX_TURNS or abs(angle) > 0.21 or abs(place) > 2.4

    @property
    def seen(self) -> Tensor:
        """Float32: the states in which an action was taken, one after the other."""
        return torch.cat([torch.empty(0), *(state.float() for state in self.states[:-1])])


def _network(outputs: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(STATE, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(),
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, outputs),
    )  # fmt: skip


class Policy(Worker):
    """Pushes the cart to the left or to the right."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.model = _network(ACTIONS)

    @stage
    @torch.no_grad()
    def act(self, episodes: Batch) -> Batch:
        """Adds `action`."""
        logits = self.model(episodes["observation"])
        action_B, _ = sample_tokens(logits, episodes["seed"], episodes["turn"], 1.0)
        return episodes.with_columns(action=action_B)

    def install(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.model.load_state_dict(weights)


class Trainer(Worker):
    """Advantage actor-critic: a push is as good as the number of turns that came after it, less
    what the critic thought of the state."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.model = nn.ModuleDict({"policy": _network(ACTIONS), "critic": _network(1)})
        self.optimizer = SumOptimizer(self.model.named_parameters(), AdamWConfig(LEARNING_RATE))
        self.sums = torch.zeros(2, dtype=torch.float64)

    @stage(accumulates=True)
    def train(self, episodes: Batch) -> Batch:
        """Folds whole episodes in."""
        seen, acted = episodes["seen"], episodes["acted"]
        lengths_B = torch.tensor(acted.lengths)
        states_TS = seen.values.view(-1, STATE)
        left_T = torch.cat([torch.arange(n, 0, -1) for n in acted.lengths]) / MAX_TURNS
        values_T = self.model["critic"](states_TS)[:, 0]
        logprobs = self.model["policy"](states_TS).log_softmax(-1)
        chosen_T = logprobs.gather(1, acted.values[:, None])[:, 0]
        advantages_T = left_T - values_T.detach()
        loss = (0.5 * (values_T - left_T).square() - chosen_T * advantages_T).sum()
        loss.backward()
        self.sums += torch.tensor([float(loss.detach()), float(lengths_B.sum())])
        return episodes.only("seed").with_columns(reward=lengths_B.tolist())

    @train.finish
    def train_finish(self) -> dict[str, float]:
        done = self.optimizer.step(self.sums, 1, self.place.all_reduce)
        self.sums = torch.zeros(2, dtype=torch.float64)
        return {"loss": float(done.sums[0] / done.sums[1])}

    def weights(self) -> Mapping[str, Tensor]:
        return self.model["policy"].state_dict()


class CartPole(Flow):
    """Balance poles, and learn from how long they stood."""

    world: World
    policy: Policy
    trainer: Trainer

    def step(self, episodes: Stream) -> Stream:
        ended = loop(self.world.move, self.policy.act, until="done")(episodes)
        return self.trainer.train(ended)

    def sync(self) -> None:
        self.trainer.publish(self.policy)


EPISODES = 192


def _episodes(step: int) -> Batch:
    numbers = range(EPISODES)
    return Batch(
        {
            "seed": torch.tensor([derive_seed(step, number) for number in numbers]),
            "action": torch.full((EPISODES,), -1, dtype=torch.int64),
            "turn": torch.zeros(EPISODES, dtype=torch.int64),
        }
    )


def cart_pole() -> Workload:
    """192 episodes of up to 40 turns."""
    return Workload(
        "cart_pole",
        lambda: CartPole(world=World(), policy=Policy(), trainer=Trainer()),
        _episodes,
        EPISODES,
    )
