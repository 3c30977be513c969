"""Four workloads on which the planner is held against the fixed modes, each with its reason.

  * `long_tail`: GRPO on answers whose lengths are those of a reasoning model. A model of 0.8 M
    parameters writes no chains of thought, so lengths are replayed: log-normal, drawn from the
    item's own seed, and every token of them is really decoded, scored and trained on. Why: answers
    of reasoning models spread over two orders of magnitude, and the last few hold up everybody.
  * `judged`: GRPO with a heavy verifier: a reward model of seven times the policy's size reads all
    answers. Why: reward models are large, and take as long as generation.
  * `ppo`: PPO with a critic, two models trained, on the quick start's task. Why: half of all work
    is training, of which generation knows nothing.
  * `cart_pole`: episodes of a simulator of rigid bodies, written here, that moves all of them at
    once, as simulators for training do: 192 take hardly longer than one. A policy and a critic of
    2.1 M parameters each; advantage actor-critic on whole episodes. Why: in embodied training such
    a simulator goes round with the policy dozens of times a step, gains nothing from a second lane,
    and episodes end when they end.

All are on-policy. Draws belong to the item, so how the work is cut changes no reward of a step.
Legend: B batch, T steps of all episodes, S the state's figures.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from harness import ROOT
from ray import cloudpickle
from starting_point import quickstart
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from m2flow import Batch, Flow, Place, Ragged, Stream, Worker, loop, stage
from m2flow.algorithms.sampling import derive_seed, sample_tokens
from m2flow.cli.recipe import read_recipe
from m2flow.plan import parse_lanes
from m2flow.training.optimizer import AdamWConfig, SumOptimizer
from m2flow.workloads.reasoning.experiment import ReasoningExperiment
from m2flow.workloads.reasoning.flow import recipe_flow
from m2flow.workloads.reasoning.workers import Generator, ModelSource, Verifier

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this file

LANES = parse_lanes("cpu:2")

LEARNING_RATE = 1e-6
"""Where answers or episodes would change their length: so small that the steps of a comparison are
alike."""


@dataclass(frozen=True)
class Workload:
    """What is run.

    Attributes:
        name: for people.
        make_flow: a fresh flow, nothing of it loaded.
        batch: the source items of a step.
        items: how many there are of them.
    """

    name: str
    make_flow: Callable[[], Flow]
    batch: Callable[[int], Batch]
    items: int


# --- GRPO with the lengths of a reasoning model ---------------------------------------------------


@dataclass(frozen=True)
class Lengths:
    """Lengths of answers: log-normal with a median, a spread (of the logarithm), and a limit."""

    median: float
    spread: float
    limit: int

    def of(self, seed: int) -> int:
        """That of the answer with a seed."""
        drawn = Random(seed).lognormvariate(math.log(self.median), self.spread)
        return min(max(1, round(drawn)), self.limit)


class Replaying(Generator):
    """A generator whose answers have the given lengths, whatever the model would say."""

    lengths: Lengths

    def load(self, place: Place) -> None:
        super().load(place)
        engine: Any = self.engine
        submit = engine.submit

        def with_lengths(requests: Sequence[Any]) -> None:
            submit([self._long_enough(request) for request in requests])

        engine.submit = with_lengths

    def _long_enough(self, request: Any) -> Any:
        tokens = self.lengths.of(request.seed)
        params = replace(request.params, max_new_tokens=tokens, stop_token_ids=())
        return replace(request, params=params)


class Odd:
    """Scores the share of odd digits: a reward that answers of any length can have."""

    def score(
        self,
        answer: str,
        completion: str,
        *,
        finished: bool = True,
        metadata: Mapping[str, Any] | None = None,
    ) -> float:
        digits = [character for character in completion if character.isdigit()]
        return sum(int(digit) % 2 for digit in digits) / max(1, len(digits))


def _replayed(
    name: str, lengths: Lengths, scorer: Callable[[ModelSource], Verifier], *overrides: str
) -> Workload:
    recipe, experiment, source = quickstart(
        f"generation.max_new_tokens={lengths.limit}", *overrides
    )

    def make_flow() -> Flow:
        flow = recipe_flow(recipe, source, experiment.task)
        flow.generator = Replaying(
            source,
            samples_per_prompt=recipe.samples_per_prompt,
            max_new_tokens=lengths.limit,
            max_running=recipe.generation.max_running,
        )
        flow.generator.lengths = lengths
        flow.verifier = scorer(source)
        return flow

    return Workload(
        name, make_flow, lambda step: experiment.batch(step, source), recipe.prompts_per_step
    )


def long_tail() -> Workload:
    """28 prompts of 8 answers, 20 tokens in the median and 240 at most."""
    return _replayed(
        "long_tail",
        Lengths(median=20, spread=1.0, limit=240),
        lambda source: Verifier(source, Odd()),
        "prompts_per_step=28",
    )


# --- GRPO with a large judge ----------------------------------------------------------------------

JUDGE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 7}
"""Of the reward model; 8 heads. 5.6 M parameters, seven times the policy's."""


class Judge(Verifier):
    """Scores by a reward model: a transformer that reads an answer and gives one number."""

    def __init__(self, model: ModelSource) -> None:
        super().__init__(model, None)

    def load(self, place: Place) -> None:
        super().load(place)
        config = Qwen2Config(
            vocab_size=len(self.tokenizer), num_attention_heads=8, num_key_value_heads=8,
            num_labels=1, **JUDGE,
        )  # fmt: skip
        torch.manual_seed(0)
        self.judge = Qwen2ForSequenceClassification(config).eval()

    @stage
    @torch.inference_mode()
    def score(self, samples: Batch) -> Batch:
        """Adds `text` and `reward`; answers are read one by one, so that none is padded."""
        answers = samples["completion_ids"].rows()
        texts = self.tokenizer.batch_decode(
            [answer.tolist() for answer in answers], skip_special_tokens=True
        )
        rewards = [float(self.judge(answer[None]).logits) for answer in answers]
        return samples.with_columns(text=texts, reward=rewards)


def judged() -> Workload:
    """16 prompts of 4 answers, 40 tokens in the median and 128 at most."""
    return _replayed(
        "judged",
        Lengths(median=40, spread=0.5, limit=128),
        Judge,
        "prompts_per_step=16",
        "samples_per_prompt=4",
    )


# --- PPO with a critic ----------------------------------------------------------------------------


def ppo() -> Workload:
    """The recipe `ppo_quickstart`, 256 answers a step, in two mini-batches."""
    _, _, source = quickstart()
    rates = [f"{part}.learning_rate={LEARNING_RATE}" for part in ("optimizer", "critic")]
    recipe = read_recipe(ROOT / "recipes" / "ppo_quickstart.yaml", rates)
    experiment = ReasoningExperiment(recipe)
    return Workload(
        "ppo",
        lambda: recipe_flow(recipe, source, experiment.task),
        lambda step: experiment.batch(step, source),
        recipe.prompts_per_step,
    )


# --- an environment loop --------------------------------------------------------------------------

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


WORKLOADS = (long_tail, judged, ppo, cart_pole)
