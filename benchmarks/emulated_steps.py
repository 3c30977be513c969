"""Three published steps in emulation: what their stages take, how long answers are, which flow.

The steps are RLinf's on H100 (OSDI 2026, arXiv 2509.15965): GRPO on a 7B model, PPO on a 7B model,
PPO of OpenVLA in ManiSkill. Seconds are those of the paper's hardware for what one lane, an
accelerator, has to do; the emulation divides all of them by `scale`. The work of a lane is the same
on any number of lanes: items grow with the lanes.

* GRPO: 512 prompts, 32 answers each, mean 7,652 tokens with the prompt, at most 28,672, four
  mini-batches. Seconds of a round of decoding are 5.65 ms and 0.1625 ms for each running answer, at
  most 64 running: with them 64 and 256 lanes generate in the 591 and 236 s of the paper.
  Log-probabilities and training take what makes 102 and 368 s on 64 lanes. A lane has the work that
  it has on 128 lanes. One emulated answer stands for four of the step's: an answer costs four times
  as much in each round and in each pass, and 16 run at once.
* PPO: answers of the same distribution, at most 12,288 tokens, eight to a lane as on 32 lanes; one
  mini-batch; policy and critic each have a pass and a training, at GRPO's seconds for each token.
* OpenVLA: 80 turns, 32 environments to a lane as on 8 lanes. A turn takes 0.775 s and 2 ms for each
  environment to simulate, 0.125 s and 25 ms to act, as in the published tests of the system; an
  episode takes 3.26 s of a lane to train on, by this project's roofline. One emulated environment
  stands for four, one turn for four.

Where a step publishes nothing about a figure it is assumed: a trainer's call takes 0.5 s and a
pass 0.3 s beside the tokens, a `finish` 2 s, an install of weights 1 s, an onload 1 s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from emulated_workers import (
    EmulatedGenerator,
    EmulatedPolicy,
    EmulatedScorer,
    EmulatedTrainer,
    EmulatedWorld,
    EpisodeTrainer,
    Price,
    State,
    advantage,
    estimate,
)

from m2flow import Batch, Flow, Ragged, Stream, loop
from m2flow.engine.plan import LaneSpec
from m2flow.flow.graph import FlowGraph
from m2flow.models.lengths import LogNormalLengths
from m2flow.plan.profile import (
    ByReplicas,
    Piecewise,
    Profile,
    PublishCost,
    Quantiles,
    StageCost,
    StageProfile,
    WorkerCost,
)
from m2flow.plan.profile.streaming import finish_times
from m2flow.plan.simulate_timing import LENGTH, drawn
from m2flow.plan.units import Bytes, Seconds

GB = 10**9
LANE_BYTES = 80 * GB
PROMPT_TOKENS = 150
LENGTHS = LogNormalLengths(8.658265, 0.763990, 27_648)
ROUND = Price(5.6466e-3, 1.625e-4)
PASS_PER_TOKEN = 102.0 * 64 / (16_384 * 7_652)
TRAIN_PER_TOKEN = 368.0 * 64 / (16_384 * 7_652)
GENERATOR = State(44 * GB, 1.0, install=1.0)
SCORER = State(4 * GB, 0.1, install=1.0)
TRAINER = State(33 * GB, 1.0)
SEED = 1
"""Of the lengths that are run."""

TURNS = 20
"""Emulated turns of an episode."""

FOLD = 4
"""What one emulated answer, environment or turn stands for, where the step has too many."""


@dataclass(frozen=True)
class Step:
    """A published step on a number of emulated lanes.

    Attributes:
        name: for people.
        lanes: the accelerators.
        scale: how many seconds of the paper's hardware one second stands for.
        make_flow: a fresh flow.
        batch: the source items of a step.
        items: how many there are of them.
        profile: exactly what the stages wait.
    """

    name: str
    lanes: tuple[LaneSpec, ...]
    scale: float
    make_flow: Callable[[], Flow]
    batch: Callable[[int], Batch]
    items: int
    profile: Profile

    @property
    def graph(self) -> FlowGraph:
        return self.make_flow().trace()


def lanes_of(count: int) -> tuple[LaneSpec, ...]:
    """Emulated accelerators: bound to no core, with a limit of memory that nothing takes."""
    return tuple(LaneSpec(number, memory_bytes=LANE_BYTES) for number in range(count))


def _scaled(scale: float, *prices: Price) -> tuple[Price, ...]:
    return tuple(Price(one.call / scale, one.each / scale) for one in prices)


def _state(scale: float, state: State) -> State:
    return State(state.num_bytes, state.move / scale, state.install / scale)


# --- GRPO -----------------------------------------------------------------------------------------


class EmulatedGrpo(Flow):
    """Groups of answers, log-probabilities of the policy that is trained, training."""

    generator: EmulatedGenerator
    scorer: EmulatedScorer
    learner: EmulatedTrainer

    def step(self, prompts: Stream) -> Stream:
        answers = advantage(self.generator.generate(prompts), group=self.generator.group)
        return self.learner.train(self.scorer.score(answers))

    def sync(self) -> None:
        self.learner.publish(self.generator, self.scorer)


def grpo(count: int, faster: float) -> Step:
    """32 emulated answers a lane, in groups of 8."""
    scale = 100.0 * faster
    group, limit = 32 // FOLD, 64 // FOLD
    folded = Price(ROUND.call, ROUND.each * FOLD)
    round_price, passing, training = _scaled(
        scale, folded, Price(0.3, PASS_PER_TOKEN * FOLD), Price(0.5, TRAIN_PER_TOKEN * FOLD)
    )
    admit, finish = 0.02 / scale, 2.0 / scale
    generation = _generation(LENGTHS, round_price, admit, limit, group)
    lengths = generation.lengths
    assert lengths is not None
    states = [_state(scale, one) for one in (GENERATOR, SCORER, TRAINER)]

    def make_flow() -> Flow:
        return EmulatedGrpo(
            generator=EmulatedGenerator(states[0], lengths, round_price, admit, limit, group),
            scorer=EmulatedScorer(states[1], passing),
            learner=EmulatedTrainer(states[2], training, finish, minibatches=4),
        )

    stages = {
        "generator.generate": generation,
        "advantage": _free(),
        "scorer.score": _per_token(LENGTHS, passing),
        "learner.train": _per_token(LENGTHS, training, finish),
    }
    profile = _profile(stages, dict(zip(("generator", "scorer", "learner"), states, strict=True)),
                       [("learner", "generator"), ("learner", "scorer")])  # fmt: skip
    items = 4 * count
    return Step(
        "grpo_7b", lanes_of(count), scale, make_flow, _prompts(items, group), items, profile
    )


# --- PPO ------------------------------------------------------------------------------------------


class EmulatedPpo(Flow):
    """Answers, log-probabilities and values beside each other, two trainings beside each other."""

    generator: EmulatedGenerator
    scorer: EmulatedScorer
    valuer: EmulatedScorer
    critic: EmulatedTrainer
    learner: EmulatedTrainer

    def step(self, prompts: Stream) -> Stream:
        answers = self.generator.generate(prompts)
        samples = estimate(self.scorer.score(answers), self.valuer.score(answers))
        self.critic.train(samples)
        return self.learner.train(samples)

    def sync(self) -> None:
        self.learner.publish(self.generator, self.scorer)
        self.critic.publish(self.valuer)


def ppo(count: int, faster: float) -> Step:
    """Eight answers a lane."""
    scale = 15.0 * faster
    lengths, limit = LENGTHS.cut(12_288 - 512), 64
    round_price, passing, training = _scaled(
        scale, ROUND, Price(0.3, PASS_PER_TOKEN), Price(0.5, TRAIN_PER_TOKEN)
    )
    admit, finish = 0.02 / scale, 2.0 / scale
    generation = _generation(lengths, round_price, admit, limit, 1)
    drawn_from = generation.lengths
    assert drawn_from is not None
    names = ("generator", "scorer", "valuer", "critic", "learner")
    kinds = (GENERATOR, SCORER, SCORER, TRAINER, TRAINER)
    states = {name: _state(scale, one) for name, one in zip(names, kinds, strict=True)}

    def make_flow() -> Flow:
        return EmulatedPpo(
            generator=EmulatedGenerator(
                states["generator"], drawn_from, round_price, admit, limit, 1
            ),
            scorer=EmulatedScorer(states["scorer"], passing),
            valuer=EmulatedScorer(states["valuer"], passing),
            critic=EmulatedTrainer(states["critic"], training, finish),
            learner=EmulatedTrainer(states["learner"], training, finish),
        )

    stages = {
        "generator.generate": generation,
        "estimate": _free(),
        **{name: _per_token(lengths, passing) for name in ("scorer.score", "valuer.score")},
        **{
            name: _per_token(lengths, training, finish)
            for name in ("critic.train", "learner.train")
        },
    }
    edges = [("learner", "generator"), ("learner", "scorer"), ("critic", "valuer")]
    items = 8 * count
    return Step(
        "ppo_7b", lanes_of(count), scale, make_flow, _prompts(items, 1), items,
        _profile(stages, states, edges),
    )  # fmt: skip


# --- OpenVLA --------------------------------------------------------------------------------------


class EmulatedEpisodes(Flow):
    """Episodes of one length, then training on them."""

    world: EmulatedWorld
    policy: EmulatedPolicy
    trainer: EpisodeTrainer

    def step(self, episodes: Stream) -> Stream:
        turning = loop(self.world.move, self.policy.act, until="", max_turns=TURNS)
        return self.trainer.train(turning(episodes))

    def sync(self) -> None:
        self.trainer.publish(self.policy)


def openvla(count: int, faster: float) -> Step:
    """Eight emulated environments a lane."""
    scale = 40.0 * faster
    simulating, acting, training = _scaled(
        scale,
        Price(FOLD * 0.775, FOLD * 0.002 * FOLD),
        Price(FOLD * 0.125, FOLD * 0.025 * FOLD),
        Price(0.5, FOLD * 3.26),
    )
    finish = 2.0 / scale
    names, kinds = ("world", "policy", "trainer"), (State(20 * GB, 1.0), GENERATOR, TRAINER)
    states = {name: _state(scale, one) for name, one in zip(names, kinds, strict=True)}
    items = 8 * count

    def make_flow() -> Flow:
        return EmulatedEpisodes(
            world=EmulatedWorld(states["world"], simulating),
            policy=EmulatedPolicy(states["policy"], acting),
            trainer=EpisodeTrainer(states["trainer"], training, finish, 4, TURNS),
        )

    def batch(step: int) -> Batch:
        return Batch({"turn": torch.zeros(items), "action": torch.zeros((items, 7))})

    stages = {
        "world.move": _per_item(simulating, turns=TURNS),
        "policy.act": _per_item(acting),
        "trainer.train": _per_item(training, finish=finish),
    }
    profile = _profile(stages, states, [("trainer", "policy")])
    return Step("openvla", lanes_of(count), scale, make_flow, batch, items, profile)


# --- what the planner is told ---------------------------------------------------------------------


def _prompts(count: int, group: int) -> Callable[[int], Batch]:
    """The prompts of a step; column `drawn` has a number for each answer's length.

    They are what the simulator draws with `SEED` for the same step, so that a prediction can be
    made of the very lengths that are measured. Whoever chooses a plan simulates with another seed.
    """
    ids = Ragged(torch.ones(count * PROMPT_TOKENS, dtype=torch.int64), [PROMPT_TOKENS] * count)

    def batch(step: int) -> Batch:
        shares = [drawn(SEED, LENGTH, 0, step, item) for item in range(count * group)]
        return Batch({"prompt_ids": ids, "drawn": torch.tensor(shares).view(count, group)})

    return batch


def _generation(
    lengths: LogNormalLengths, price: Price, admit: float, limit: int, group: int
) -> StageProfile:
    """By rounds, of so many answers at once."""
    played = []
    for prompts in (1, 2, 4, 8, 16, 32, 64, 128):
        ends = finish_times(
            lengths.sample(prompts * group), lambda running, _: price.seconds(running), limit
        )
        played.append((float(prompts), max(ends) + admit * prompts))
    pace = [(1.0, price.seconds(1)), (float(limit), price.seconds(limit))]
    shares = [(n + 0.5) / 257 for n in range(257)]
    return StageProfile(
        (
            StageCost(
                1,
                _rising(played),
                slots=limit,
                round=Piecewise(tuple(pace)),
                admit=Piecewise(((1.0, admit), (2.0, 2 * admit))),
            ),
        ),
        Bytes(round(8 * lengths.mean)),
        Quantiles(tuple(lengths.quantile(share) for share in shares)),
    )


def _rising(points: Sequence[tuple[float, float]]) -> Piecewise:
    """Sampled points, made to rise."""
    best, found = 0.0, []
    for x, y in points:
        best = max(best, y)
        found.append((x, best))
    return Piecewise(tuple(found))


def _per_token(lengths: LogNormalLengths, price: Price, finish: float = 0.0) -> StageProfile:
    sampled = lengths.sample(4096)
    mean = sum(sampled) / len(sampled)
    deviation = (sum((one - mean) ** 2 for one in sampled) / len(sampled)) ** 0.5
    curve = _line(price, mean)
    share = price.each * deviation / price.seconds(mean)
    return StageProfile((StageCost(1, curve, spread=share, **_finish(finish)),), Bytes(100_000))


def _per_item(price: Price, finish: float = 0.0, turns: int | None = None) -> StageProfile:
    cost = StageCost(1, _line(price, 1.0), **_finish(finish))
    return StageProfile(
        (cost,), Bytes(150_528), turns=None if turns is None else Quantiles((float(turns),))
    )


def _line(price: Price, each: float) -> Piecewise:
    return Piecewise(((1.0, price.seconds(each)), (1024.0, price.seconds(1024 * each))))


def _finish(seconds: float) -> dict[str, Any]:
    if not seconds:
        return {}
    return {"finish": ByReplicas(((1.0, seconds), (1024.0, seconds)))}


def _free() -> StageProfile:
    return StageProfile((StageCost(1, Piecewise(((1.0, 1e-4), (1024.0, 1e-3)))),))


def _profile(
    stages: dict[str, StageProfile], states: dict[str, State], edges: Sequence[tuple[str, str]]
) -> Profile:
    workers = {
        name: (WorkerCost(1, Bytes(one.num_bytes), Seconds(one.move), Seconds(one.move)),)
        for name, one in states.items()
    }
    publish = tuple(
        PublishCost(source, target, place, Seconds(states[target].install))
        for source, target in edges
        for place in ("same", "node")
    )
    return Profile(stages, workers, publish)


STEPS: dict[str, Callable[[int, float], Step]] = {
    "grpo_7b": grpo,
    "ppo_7b": ppo,
    "openvla": openvla,
}
"""By name: makes the step for a number of lanes, so many times as fast as its scale says."""
