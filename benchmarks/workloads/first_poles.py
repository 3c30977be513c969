"""`cart_pole` as it was first, frozen: each pole is simulated by itself, half a millisecond a turn.

96 episodes, a policy of 0.6 M parameters, REINFORCE on whole episodes. Why: with simulators that
take a CPU for each environment a second lane halves the time, which the later form does not show.
Legend: B batch, T steps of all episodes, S the state's figures.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from random import Random

import torch
from ray import cloudpickle
from torch import Tensor, nn

from m2flow import Batch, Flow, Place, Ragged, Stream, Worker, loop, stage
from m2flow.algorithms.sampling import derive_seed, sample_tokens
from m2flow.training.optimizer import AdamWConfig, SumOptimizer
from workloads.common import LEARNING_RATE, Workload

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this file

STATE, ACTIONS, WIDTH = 4, 2, 512
MAX_TURNS = 40
SUBSTEPS = 100
"""Runge-Kutta steps of the simulator in a turn of 20 ms."""

FORCE, LENGTH, POLE, CART, GRAVITY = 10.0, 0.5, 0.1, 1.0, 9.8


def _motion(state: Sequence[float], force: float) -> tuple[float, float, float, float]:
    """Derivatives of place, speed, angle and its rate of a pole on a cart, without friction.

    Source: Barto, Sutton and Anderson 1983, appendix; the pole is a rod of twice `LENGTH`.
    """
    _, speed, angle, rate = state
    sine, cosine = math.sin(angle), math.cos(angle)
    pull = (force + POLE * LENGTH * rate * rate * sine) / (CART + POLE)
    turning = (GRAVITY * sine - cosine * pull) / (
        LENGTH * (4 / 3 - POLE * cosine * cosine / (CART + POLE))
    )
    return speed, pull - POLE * LENGTH * turning * cosine / (CART + POLE), rate, turning


def simulate_turn(state: Sequence[float], force: float) -> list[float]:
    """The state 20 ms later, by the classical Runge-Kutta method."""
    h = 0.02 / SUBSTEPS
    now = list(state)
    for _ in range(SUBSTEPS):
        a = _motion(now, force)
        b = _motion([x + h / 2 * d for x, d in zip(now, a, strict=True)], force)
        c = _motion([x + h / 2 * d for x, d in zip(now, b, strict=True)], force)
        d = _motion([x + h * e for x, e in zip(now, c, strict=True)], force)
        now = [
            x + h / 6 * (p + 2 * q + 2 * r + s)
            for x, p, q, r, s in zip(now, a, b, c, d, strict=True)
        ]
    return now


class World(Worker):
    """Carts with poles; an episode ends when its pole has fallen, or after `MAX_TURNS`."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.tracks: dict[int, tuple[list[float], list[int]]] = {}

    @stage(sticky=True)
    def move(self, episodes: Batch) -> Batch:
        """Carries out `action`; gives `observation`, `done`, and of those that end the track."""
        observations, done, seen, acted = [], [], [], []
        for seed, action in zip(
            episodes["seed"].tolist(), episodes["action"].tolist(), strict=True
        ):
            states, actions = self.tracks.pop(seed, ([], []))
            if action < 0:  # the first turn
                now = [Random(seed + n).uniform(-0.05, 0.05) for n in range(STATE)]
            else:
                actions.append(action)
                now = simulate_turn(states[-STATE:], FORCE if action else -FORCE)
            over = len(actions) >= MAX_TURNS or abs(now[2]) > 0.21 or abs(now[0]) > 2.4
            if not over:
                states += now
                self.tracks[seed] = states, actions
            observations.append(now)
            done.append(over)
            seen.append(torch.tensor(states if over else [], dtype=torch.float32))
            acted.append(torch.tensor(actions if over else [], dtype=torch.int64))
        return episodes.with_columns(
            observation=torch.tensor(observations),
            turn=episodes["turn"] + 1,
            done=done,
            seen=Ragged.from_rows(seen),
            acted=Ragged.from_rows(acted),
        )


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(STATE, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(),
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, ACTIONS),
    )  # fmt: skip


class Policy(Worker):
    """Pushes the cart to the left or to the right."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.model = _network()

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
    """Learns by REINFORCE: every push is as good as the number of turns that came after it."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.model = _network()
        self.optimizer = SumOptimizer(self.model.named_parameters(), AdamWConfig(LEARNING_RATE))
        self.sums = torch.zeros(2, dtype=torch.float64)

    @stage(accumulates=True)
    def train(self, episodes: Batch) -> Batch:
        """Folds whole episodes in."""
        seen, acted = episodes["seen"], episodes["acted"]
        lengths_B = torch.tensor(acted.lengths)
        states_TS = seen.values.view(-1, STATE)
        left_T = torch.cat([torch.arange(n, 0, -1) for n in acted.lengths]).float()
        logprobs = self.model(states_TS).log_softmax(-1)
        chosen_T = logprobs.gather(1, acted.values[:, None])[:, 0]
        loss = -(chosen_T * (left_T / MAX_TURNS - 0.25)).sum()
        loss.backward()
        self.sums += torch.tensor([float(loss.detach()), float(lengths_B.sum())])
        return episodes.only("seed").with_columns(reward=lengths_B.tolist())

    @train.finish
    def train_finish(self) -> dict[str, float]:
        done = self.optimizer.step(self.sums, 1, self.place.all_reduce)
        self.sums = torch.zeros(2, dtype=torch.float64)
        return {"loss": float(done.sums[0] / done.sums[1])}

    def weights(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()


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


EPISODES = 96


def _episodes(step: int) -> Batch:
    numbers = range(EPISODES)
    return Batch(
        {
            "seed": torch.tensor([derive_seed(step, number) for number in numbers]),
            "action": torch.full((EPISODES,), -1, dtype=torch.int64),
            "turn": torch.zeros(EPISODES, dtype=torch.int64),
        }
    )


def first_cart_pole() -> Workload:
    """96 episodes of up to 40 turns."""
    return Workload(
        "first_cart_pole",
        lambda: CartPole(world=World(), policy=Policy(), trainer=Trainer()),
        _episodes,
        EPISODES,
    )
