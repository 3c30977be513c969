"""The fixed modes and the planner's own plan, on four workloads, on two lanes of one core each.

For each workload of `workloads.py` the stages are measured, the plan is chosen (`auto`), and a step
of every plan is predicted from that same profile. Then all of them take the same steps from the
same model with the same seeds, in turn, block by block, so that whatever else happens on the
machine happens to all of them. A block has fresh workers, on the same lanes as every other: nothing
else runs beside it. Seconds are from the end of one step to the end of the next one: publishing of
weights included.

The pace of a machine that others share changes within minutes. So all of this is done in several
rounds, each with a profile of its own: the median of the predictions is held against the median of
all that was measured. The plan is chosen once, in the first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import ray
import workloads
from harness import CACHE, Target, arguments, conclude, table
from workloads import Workload

from m2flow.engine.plan import Plan
from m2flow.flow.graph import FlowGraph
from m2flow.plan import build_plan
from m2flow.plan.choose import choose, sized
from m2flow.plan.profile import Profile
from m2flow.plan.simulate import simulate
from m2flow.runtime.driver.launch import launch
from m2flow.runtime.driver.pool import LanePool

FIXED = ("collocated", "disaggregated", "hybrid")
AUTO = "auto"
SIMULATED = 32
"""Steps that a prediction is the mean of: lengths are drawn, and a few steps may have luck."""

ROUNDS = 3
"""Profiles of a workload, each followed by blocks of all plans."""

BLOCK = 3
"""Steps of a plan that count before it is the next one's turn."""

WARM_UP = 1
"""Steps of a block that do not count: its workers are fresh."""

PROFILED = 10_000
"""The first step whose items the profile is measured with: other ones than those of the runs."""

NAMES = tuple(make.__name__ for make in workloads.WORKLOADS)


@dataclass
class Record:
    """A plan on a workload.

    Attributes:
        plan: what was run.
        predicted: seconds of a step, for each round.
        measured: seconds of the steps counted, for each round.
        rewards: of the first step.
    """

    plan: Plan
    predicted: list[float] = field(default_factory=list)
    measured: list[list[float]] = field(default_factory=list)
    rewards: list[float] | None = None

    @property
    def median(self) -> float:
        return statistics.median(self._seconds)

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, relative to the median."""
        low, _, high = statistics.quantiles(self._seconds, n=4)
        return (high - low) / 2 / self.median

    @property
    def errors(self) -> list[float]:
        """Of each round, predicted over measured seconds, less 1."""
        medians = map(statistics.median, self.measured)
        return [one / other - 1 for one, other in zip(self.predicted, medians, strict=False)]

    @property
    def expected(self) -> float | None:
        """The median of the predicted seconds."""
        return statistics.median(self.predicted) if self.predicted else None

    @property
    def error(self) -> float | None:
        """Expected over measured seconds, less 1, over all rounds."""
        return None if self.expected is None else self.expected / self.median - 1

    @property
    def _seconds(self) -> list[float]:
        return [seconds for some in self.measured for seconds in some]


def main() -> None:
    options = _options()
    results: dict[str, dict[str, Record]] = {}
    os.environ.setdefault("M2FLOW_CACHE", str(CACHE))  # a user's profiles are not our business
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR")
    try:
        for name in options.workloads.split(","):
            results[name] = _compared(getattr(workloads, name)(), options)
            _report(name, results[name])
    finally:
        ray.shutdown()
    conclude("modes", _figures(results), _targets(results), options)


def _options() -> argparse.Namespace:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--workloads", default=",".join(NAMES), help="some of them, by name")
    parser.add_argument("--blocks", type=int, help=f"blocks of {BLOCK} steps of each plan a round")
    parser.add_argument("--fixed", action="store_true", help="the fixed modes, unpredicted")
    return parser.parse_args()


def _compared(workload: Workload, options: argparse.Namespace) -> dict[str, Record]:
    """The fixed modes' plans and the planner's, predicted and measured."""
    graph = workload.make_flow().trace()
    records = {
        mode: Record(build_plan(mode, graph, workloads.LANES, workload.items)) for mode in FIXED
    }
    blocks = options.blocks or (1 if options.quick else 2)
    with closing(LanePool(workloads.LANES)) as pool:
        for number in range(ROUNDS):
            if not options.fixed:
                profile = _profiled(workload, pool, budget=30.0 if options.quick else 90.0)
                _predict(workload, graph, profile, records)
            _measure(workload, records, pool, range(number * blocks, (number + 1) * blocks))
    return records


def _profiled(workload: Workload, pool: LanePool, budget: float) -> Profile:
    from m2flow.runtime.profiling import profile_flow

    batches = [workload.batch(PROFILED + step) for step in range(4)]
    profile = profile_flow(workload.make_flow, batches, lanes=pool, budget_seconds=budget)
    print(f"{workload.name}: profiled", flush=True)
    return profile


def _predict(
    workload: Workload, graph: FlowGraph, profile: Profile, records: dict[str, Record]
) -> None:
    """Add the planner's choice, if it has not chosen yet, and predict a step of every plan."""
    if AUTO not in records:
        decision = choose(graph, profile, workloads.LANES, workload.items)
        chosen = decision.chosen
        print(f"chose {chosen.plan.mode} in {decision.seconds_to_decide:.1f} s", flush=True)
        records[AUTO] = Record(chosen.plan)
    for record in records.values():
        plan = sized(record.plan, graph, profile, workload.items)
        seconds = simulate(graph, plan, profile, workload.items, steps=SIMULATED).seconds
        record.predicted.append(float(seconds))


def _measure(
    workload: Workload, records: Mapping[str, Record], pool: LanePool, blocks: Sequence[int]
) -> None:
    for record in records.values():
        record.measured.append([])
    for block in blocks:
        first = block * (WARM_UP + BLOCK)
        batches = [workload.batch(first + step) for step in range(WARM_UP + BLOCK)]
        for record in records.values():
            flow = workload.make_flow()
            with launch(flow, items_per_step=workload.items, plan=record.plan, lanes=pool) as run:
                start = time.perf_counter()
                for number, result in enumerate(run.steps(iter(batches))):
                    now = time.perf_counter()
                    if number >= WARM_UP:
                        record.measured[-1].append(now - start)
                    start = now
                    if record.rewards is None:
                        record.rewards = list(map(float, result.output["reward"]))


def _report(name: str, records: Mapping[str, Record]) -> None:
    best = min(record.median for record in records.values())
    table(
        [name, "ms/step", "spread", "against best", "predicted ms", "error"],
        [
            [
                plan,
                1e3 * record.median,
                record.spread,
                best / record.median,
                "-" if record.expected is None else 1e3 * record.expected,
                "-" if record.error is None else record.error,
            ]
            for plan, record in records.items()
        ],
    )
    print(flush=True)


def _figures(results: Mapping[str, Mapping[str, Record]]) -> dict[str, Any]:
    return {
        name: {
            "steps": sum(map(len, next(iter(records.values())).measured)),
            "milliseconds_per_step": {plan: 1e3 * one.median for plan, one in records.items()},
            "spread": {plan: one.spread for plan, one in records.items()},
            "predicted_milliseconds": {
                plan: 1e3 * one.expected
                for plan, one in records.items()
                if one.expected is not None
            },
            "errors_of_rounds": {plan: one.errors for plan, one in records.items()},
            "worst_over_best_fixed": _worst(records) / _best(records),
        }
        for name, records in results.items()
    }


def _targets(results: Mapping[str, Mapping[str, Record]]) -> list[Target]:
    """Auto against the fixed modes, every prediction, and the same rewards whatever the plan."""
    targets = []
    for name, records in results.items():
        same = all(one.rewards == records[FIXED[0]].rewards for one in records.values())
        targets.append(Target(f"{name}: the same rewards under every plan (1: yes)", same, 1.0))
        for plan, one in records.items():
            if one.error is not None:
                what = f"{name}, {plan}: error of the prediction"
                targets.append(Target(what, abs(one.error), 0.10, at_most=True))
        if AUTO in records:
            mine = records[AUTO].median
            targets.append(Target(f"{name}: auto over the best mode", _best(records) / mine, 0.97))
            targets.append(Target(f"{name}: auto over the worst", _worst(records) / mine, 1.25))
    winners = {min(FIXED, key=lambda mode: records[mode].median) for records in results.values()}
    if len(results) == len(NAMES):
        targets.append(Target("modes that win somewhere", float(len(winners)), 2.0))
    return targets


def _best(records: Mapping[str, Record]) -> float:
    return min(_fixed(records))


def _worst(records: Mapping[str, Record]) -> float:
    return max(_fixed(records))


def _fixed(records: Mapping[str, Record]) -> Sequence[float]:
    return [records[mode].median for mode in FIXED]


if __name__ == "__main__":
    main()
