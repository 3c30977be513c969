"""How long the choice of a plan takes: PPO, six stages, two models trained, 8 to 4,096 lanes.

The profile is made up in the proportions of a 7B policy and critic on accelerators of 80 GB: states
that do not all fit, layouts over 1 to 8 lanes for training, a long tail of generation, links within
and between machines, mini-batches. Beside it the best plan of a fixed mode.
"""

from __future__ import annotations

import statistics
import time

from harness import Target, arguments, conclude, table

from m2flow.engine.plan import LaneSpec
from m2flow.flow import Flow, FlowGraph, Stream, Worker, stage
from m2flow.flow.batch import Batch
from m2flow.flow.worker import Layout
from m2flow.plan.choose import choose
from m2flow.plan.profile import (
    ByReplicas,
    LinkCost,
    Piecewise,
    Profile,
    PublishCost,
    StageCost,
    StageProfile,
    WorkerCost,
)
from m2flow.plan.units import Bytes, BytesPerSecond, Seconds

GB = 10**9
LANES = (8, 64, 256, 1024, 4096)
PROMPTS = 1024
SAMPLES_PER_PROMPT = 4
MEMORY = 80 * GB
TARGETS = {1024: 2.0, 4096: 10.0}


class Generator(Worker):
    """Makes samples of a prompt."""

    @stage(streaming=True, expands=SAMPLES_PER_PROMPT)
    def generate(self, items: Batch) -> Batch:
        return items


class Scorer(Worker):
    """A model that only looks."""

    @stage
    def score(self, items: Batch) -> Batch:
        return items


class Trained(Worker):
    """A model that looks and is trained."""

    @stage
    def look(self, items: Batch) -> Batch:
        return items

    @stage(accumulates=True, minibatches=4)
    def train(self, *items: Batch) -> Batch:
        return items[0]

    @train.finish
    def update(self) -> dict[str, float]:
        return {}


class PPO(Flow):
    """Generate, score, value, compare with the reference; train the policy and the critic."""

    generator: Generator
    reward: Scorer
    reference: Scorer
    critic: Trained
    actor: Trained

    def step(self, items: Stream) -> Stream:
        samples = self.generator.generate(items)
        rewards = self.reward.score(samples)
        reference = self.reference.score(samples)
        values = self.critic.look(samples)
        self.critic.train(values, rewards, reference)
        return self.actor.train(values, rewards, reference)

    def sync(self) -> None:
        self.actor.publish(self.generator)


def ppo() -> FlowGraph:
    return PPO(
        generator=Generator(),
        reward=Scorer(),
        reference=Scorer(),
        critic=Trained(),
        actor=Trained(),
    ).trace()


def line(first: float, each: float, most: int = 1 << 20) -> Piecewise:
    """A price of one item, and of each further one."""
    return Piecewise(((1, first), (most, first + each * (most - 1))))


def work(first: float, each: float, sizes: tuple[int, ...], finish: float = 0.0) -> StageProfile:
    """A stage whose replicas of several lanes lose a little."""
    return StageProfile(
        tuple(
            StageCost(
                size,
                line(first, each * size**0.08 / size),
                finish=ByReplicas(((1, finish), (4096, 3 * finish))) if finish else None,
                working=Piecewise(((1, 1.0 * GB / size), (16, 16.0 * GB / size))),
                kind="gpu",
            )
            for size in sizes
        ),
        output_bytes=Bytes(64_000),
    )


def state(gigabytes: int, sizes: tuple[int, ...]) -> tuple[WorkerCost, ...]:
    """A worker's state, and its moves over a bus of 25 GB/s."""
    return tuple(
        WorkerCost(
            size,
            Bytes(gigabytes * GB // size),
            Seconds(gigabytes / 25 / size),
            Seconds(gigabytes / 25 / size),
            "gpu",
        )
        for size in sizes
    )


def prices() -> Profile:
    gangs = (2, 4, 8)
    tail = Piecewise(((0, 0), (0.5, 0.35), (0.9, 0.6), (0.97, 0.8), (1, 1)))
    generate = StageCost(
        1,
        Piecewise(((1, 60.0), (64, 110.0), (256, 290.0), (1 << 20, 1.0e6))),
        done=tail,
        working=Piecewise(((1, 1.0 * GB), (48, 40.0 * GB), (1 << 20, 40.0 * GB))),
        kind="gpu",
    )
    stages = {
        "generator.generate": StageProfile((generate,), Bytes(64_000)),
        "reward.score": work(0.05, 0.12, (1,)),
        "reference.score": work(0.05, 0.25, (1, 2)),
        "critic.look": work(0.05, 0.25, gangs),
        "critic.train": work(0.1, 0.8, gangs, 1.0),
        "actor.train": work(0.1, 0.8, gangs, 1.0),
    }
    workers = {
        "generator": state(15, (1,)),
        "reward": state(15, (1,)),
        "reference": state(15, (1, 2)),
        "critic": state(112, gangs),
        "actor": state(112, gangs),
    }
    publish = tuple(
        PublishCost("actor", "generator", place, Seconds(seconds))
        for place, seconds in (("same", 0.8), ("node", 1.5), ("cluster", 3.0))
    )
    links = {
        "node": LinkCost(Seconds(1e-4), BytesPerSecond(200e9)),
        "cluster": LinkCost(Seconds(1e-3), BytesPerSecond(40e9)),
    }
    return Profile(stages, workers, publish, links, source="analytic")


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    graph, profile = ppo(), prices()
    pairs = dict.fromkeys(("critic", "actor"), Layout(lanes=2))
    rows, results, targets = [], {}, []
    for count in LANES:
        lanes = tuple(
            LaneSpec(n, "gpu", gpu=n % 8, memory_bytes=MEMORY, node=n // 8) for n in range(count)
        )
        seconds = []
        for _ in range(1 if options.quick else 3):
            start = time.perf_counter()
            found = choose(graph, profile, lanes, PROMPTS, layouts=pairs)
            seconds.append(time.perf_counter() - start)
        taken, step = statistics.median(seconds), float(found.chosen.prediction.seconds)
        modes = [x for x in (found.chosen, *found.others) if x.plan.mode != "auto"]
        fixed = min((float(x.prediction.seconds) for x in modes), default=float("nan"))
        rows.append((count, taken, step, fixed, found.num_simulated))
        results[str(count)] = {
            "seconds": taken,
            "step_seconds": step,
            "best_fixed_mode_seconds": fixed,
            "simulated": found.num_simulated,
        }
        if count in TARGETS:
            targets.append(Target(f"{count} lanes", taken, TARGETS[count], at_most=True))
    header = ("lanes", "seconds", "predicted step seconds", "best fixed mode", "plans simulated")
    table(header, rows)
    conclude("search", results, targets, options)


if __name__ == "__main__":
    main()
