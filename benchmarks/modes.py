"""The fixed modes and `auto`, on eleven workloads, on two lanes of one core each.

Workloads stand in `workloads/`: four frozen ones on which the planner was built, what two of them
were before, and four made of recipes. On each, a run in mode `auto` finds its plan from its first
step on, and `try3` finds one by three steps of each fixed mode (`mode_runs.py`), both on lanes that
have loaded the workload once. Then the fixed
modes, the plan that `auto` settled on and a twin of one mode take the same steps from the same
model with the same seeds, in turn, block by block, so that whatever else happens on the machine
happens to all of them. A block has fresh workers, on the same lanes as every other: nothing else
runs beside it. Seconds are from the end of one step to the end of the next one: publishing of
weights included.

The twin is the noise floor (`mode_records.py`): the report says which differences exceed it. The
pace of a machine that others share changes within minutes, so all blocks are done in several
rounds, each with a profile of its own from which each plan is predicted: the median of the
predictions is held against the median of all that was measured.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import ray
import workloads
from harness import Target, arguments, conclude, table
from mode_records import AUTO, FIXED, TRY3, TWINS, Record, against, noise_floor, verdict
from mode_runs import WHOLE, Started, run_auto, try_each
from workloads import Workload

from m2flow.plan import build_plan
from m2flow.plan.choose.judge import sized
from m2flow.plan.profile import Profile
from m2flow.plan.simulate import simulate
from m2flow.runtime.driver.launch import launch
from m2flow.runtime.driver.pool import LanePool

SIMULATED = 32
"""Steps that a prediction is the mean of: lengths are drawn, and a few steps may have luck."""

ROUNDS = 3
"""Profiles of a workload, each followed by blocks of all plans."""

BLOCK = 3
"""Steps of a plan that count before it is the next one's turn."""

WARM_UP = 1
"""Steps of a block that do not count: its workers are fresh."""

RACED = 20
"""Steps after which the plan of `auto` is taken to be settled."""

PROFILED = 10_000
"""The first step whose items the profile is measured with: other ones than those of the runs."""

MAKERS = {make.__name__: make for make in workloads.WORKLOADS}
QUICK = "long_tail"
"""The workload of the short version."""


@dataclass
class Result:
    """Plans on a workload, and how `auto` and `try3` came to theirs."""

    records: dict[str, Record]
    auto: Started | None
    try3: Started

    @property
    def tried_mode(self) -> str:
        """The mode that `try3` went on with."""
        return self.try3.plan.mode

    def whole(self) -> dict[str, float]:
        """Seconds of WHOLE steps from launch, for `try3` and `auto`, and steps alone for modes."""
        seconds = {mode: WHOLE * self.records[mode].median for mode in FIXED}
        seconds[TRY3] = self.try3.whole(self.records[self.tried_mode].median)
        if self.auto is not None:
            seconds[AUTO] = self.auto.whole(self.records[AUTO].median)
        return seconds


def main() -> None:
    options = _options()
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory() as cold:
        os.environ["M2FLOW_CACHE"] = cold  # what was learnt on another day is not to help
        ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR")
        try:
            for name in options.workloads.split(","):
                results[name] = compared(MAKERS[name](), options)
                report(name, results[name])
        finally:
            ray.shutdown()
    conclude("modes", figures(results), targets(results), options)


def _options() -> argparse.Namespace:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--workloads", help="some of them, by name")
    parser.add_argument("--blocks", type=int, help=f"blocks of {BLOCK} steps of each plan a round")
    parser.add_argument("--fixed", action="store_true", help="the fixed modes, unpredicted")
    options = parser.parse_args()
    options.workloads = options.workloads or (QUICK if options.quick else ",".join(MAKERS))
    options.rounds = 1 if options.quick else ROUNDS
    return options


def compared(workload: Workload, options: argparse.Namespace) -> Result:
    """The fixed modes' plans and that of `auto`, predicted and measured."""
    graph = workload.make_flow().trace()
    records = {}
    for mode in FIXED:
        plan = build_plan(mode, graph, workload.lanes, workload.items)
        records[mode] = Record(replace(plan, max_staleness=workload.max_staleness))
    blocks = options.blocks or (1 if options.quick else 2)
    with closing(LanePool(workloads.LANES)) as pool:
        auto, first = None, records[FIXED[0]].plan
        with launch(workload.make_flow(), items_per_step=workload.items, plan=first, lanes=pool):
            pass  # lanes have then imported what workers need, whoever is timed first
        if not options.fixed:
            auto = run_auto(workload, pool, RACED)
            records[AUTO] = Record(auto.plan)
        try3 = try_each(workload, pool, records)
        records[TWINS[1]] = Record(records[TWINS[0]].plan)
        for number in range(options.rounds):
            if not options.fixed:
                profile = _profiled(workload, pool, budget=30.0 if options.quick else 90.0)
                _predict(workload, profile, records)
            _measure(workload, records, pool, range(number * blocks, (number + 1) * blocks))
    return Result(records, auto, try3)


def _profiled(workload: Workload, pool: LanePool, budget: float) -> Profile:
    from m2flow.runtime.profiling import profile_flow

    batches = [workload.batch(PROFILED + step) for step in range(4)]
    return profile_flow(workload.make_flow, batches, lanes=pool, budget_seconds=budget)


def _predict(workload: Workload, profile: Profile, records: Mapping[str, Record]) -> None:
    """Predict a step of every plan."""
    graph = workload.make_flow().trace()
    for record in records.values():
        plan = sized(record.plan, graph, profile, workload.items)
        seconds = simulate(graph, plan, profile, workload.items, steps=SIMULATED).seconds
        record.predicted.append(float(seconds))


def _measure(
    workload: Workload, records: Mapping[str, Record], pool: LanePool, blocks: Sequence[int]
) -> None:
    """Blocks of every plan in turn; where steps overlap, the last ones have nothing beside them
    and do not count."""
    counted = range(WARM_UP, WARM_UP + BLOCK)
    for record in records.values():
        record.measured.append([])
    for block in blocks:
        first = block * (WARM_UP + BLOCK)
        steps = WARM_UP + BLOCK + workload.max_staleness
        batches = [workload.batch(first + step) for step in range(steps)]
        for record in records.values():
            flow = workload.make_flow()
            with launch(flow, items_per_step=workload.items, plan=record.plan, lanes=pool) as run:
                start = time.perf_counter()
                for number, result in enumerate(run.steps(iter(batches))):
                    now = time.perf_counter()
                    if number in counted:
                        record.measured[-1].append(now - start)
                    start = now
                    if record.rewards is None:
                        record.rewards = list(map(float, result.output["reward"]))


def report(name: str, result: Result) -> None:
    records = result.records
    best = min(record.median for record in records.values())
    floor = noise_floor(records)
    rows = []
    for plan, record in records.items():
        rest = [mode for mode in FIXED if mode != plan]
        difference = against(records, plan, rest)
        rows.append(
            [
                plan,
                1e3 * record.median,
                record.spread,
                best / record.median,
                "-" if plan in TWINS[1:] else verdict(difference, floor),
                "-" if record.expected is None else 1e3 * record.expected,
                "-" if record.error is None else record.error,
            ]
        )
    header = ["ms/step", "spread", "best over it", "than other modes", "predicted ms", "error"]
    table([name, *header], rows)
    print(f"noise floor, the same plan under two names: {floor:.1%}")
    print(f"seconds of {WHOLE} steps from launch (modes: steps alone): "
          + ", ".join(f"{plan} {seconds:.1f}" for plan, seconds in result.whole().items())
          + f"; try3 went on with {result.tried_mode}\n", flush=True)  # fmt: skip


def figures(results: Mapping[str, Result]) -> dict[str, Any]:
    found = {}
    for name, result in results.items():
        records = result.records
        floor = noise_floor(records)
        found[name] = {
            "steps": sum(map(len, next(iter(records.values())).measured)),
            "milliseconds_per_step": {plan: 1e3 * one.median for plan, one in records.items()},
            "spread": {plan: one.spread for plan, one in records.items()},
            "noise_floor": floor,
            "against_other_modes": {
                plan: verdict(against(records, plan, [m for m in FIXED if m != plan]), floor)
                for plan in records
                if plan != TWINS[1]
            },
            "predicted_milliseconds": {
                plan: 1e3 * one.expected
                for plan, one in records.items()
                if one.expected is not None
            },
            "errors_of_rounds": {plan: one.errors for plan, one in records.items()},
            "worst_over_best_fixed": _worst(records) / _best(records),
            "tried_mode": result.tried_mode,
            f"seconds_of_{WHOLE}_steps": result.whole(),
        }
    return found


def targets(results: Mapping[str, Result]) -> list[Target]:
    """Auto against the fixed modes, every prediction, and the same rewards whatever the plan."""
    targets = []
    frozen = {make.__name__ for make in workloads.FROZEN}
    for name, result in results.items():
        records = result.records
        same = all(one.rewards == records[FIXED[0]].rewards for one in records.values())
        targets.append(Target(f"{name}: the same rewards under every plan (1: yes)", same, 1.0))
        for plan, one in records.items():
            if one.error is not None:
                what = f"{name}, {plan}: error of the prediction"
                targets.append(Target(what, abs(one.error), 0.10, at_most=True))
        if AUTO in records:
            mine = records[AUTO].median
            targets.append(Target(f"{name}: auto over the best mode", _best(records) / mine, 0.97))
            if name in frozen:
                what = f"{name}: auto over the worst"
                targets.append(Target(what, _worst(records) / mine, 1.25))
            whole = result.whole()
            what = f"{name}: seconds of {WHOLE} steps, auto over try3"
            targets.append(Target(what, whole[AUTO] / whole[TRY3], 1.0, at_most=True))
    winners = {
        min(FIXED, key=lambda mode: results[name].records[mode].median)
        for name in frozen & set(results)
    }
    if frozen <= set(results):
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
