"""The fixed modes and the planner's own plan, on four workloads, on two lanes of one core each.

For each workload of `workloads.py` the stages are measured (60 seconds at most), the plan is
chosen (`auto`), and a step of every plan is predicted from that same profile. Then all of them take
the same steps from the same model with the same seeds, in turn, block by block, so that whatever
else happens on the machine happens to all of them. Seconds are from the end of one step to the end
of the next one: publishing of weights included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
import workloads
from harness import CACHE, Target, arguments, conclude, table
from workloads import Workload

from m2flow.engine.plan import Plan
from m2flow.flow.graph import FlowGraph
from m2flow.plan import build_plan
from m2flow.runtime.launch import Run, launch

FIXED = ("collocated", "disaggregated", "hybrid")
AUTO = "auto"
BLOCK = 2
"""Steps that a plan takes before it is the next one's turn."""

PROFILED = 10_000
"""The first step whose items the profile is measured with: other ones than those of the runs."""

WARM_UP = 1
"""Blocks that are not counted."""

NAMES = tuple(make.__name__ for make in workloads.WORKLOADS)


@dataclass
class Record:
    """A plan on a workload.

    Attributes:
        plan: what was run.
        predicted: seconds of a step, or None.
        seconds: of every step counted, as measured.
        rewards: of the first step.
    """

    plan: Plan
    predicted: float | None = None
    seconds: list[float] = field(default_factory=list)
    rewards: list[float] | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, relative to the median."""
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median

    @property
    def error(self) -> float | None:
        """Predicted over measured seconds, less 1."""
        return None if self.predicted is None else self.predicted / self.median - 1


def main() -> None:
    options = _options()
    blocks = options.blocks or (5 if options.quick else 10)
    results: dict[str, dict[str, Record]] = {}
    ray.init(num_cpus=2 * (len(FIXED) + 2), include_dashboard=False, logging_level="ERROR")
    try:
        for name in options.workloads.split(","):
            records = _plans(getattr(workloads, name)(), options)
            _measure(getattr(workloads, name)(), records, blocks)
            results[name] = records
            _report(name, records)
    finally:
        ray.shutdown()
    conclude("modes", _figures(results), _targets(results), options)


def _options() -> argparse.Namespace:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--workloads", default=",".join(NAMES), help="some of them, by name")
    parser.add_argument("--blocks", type=int, help=f"blocks of {BLOCK} steps of each plan")
    parser.add_argument("--fixed", action="store_true", help="the fixed modes, unpredicted")
    return parser.parse_args()


def _plans(workload: Workload, options: argparse.Namespace) -> dict[str, Record]:
    """The fixed modes' plans and the planner's, with what is expected of them."""
    graph = workload.make_flow().trace()
    records = {
        mode: Record(build_plan(mode, graph, workload.lanes, workload.items)) for mode in FIXED
    }
    if not options.fixed:
        _predict(workload, graph, records, budget=30.0 if options.quick else 60.0)
    return records


def _predict(
    workload: Workload, graph: FlowGraph, records: dict[str, Record], budget: float
) -> None:
    """Measure the stages, add the planner's choice, and predict a step of every plan."""
    os.environ.setdefault("M2FLOW_CACHE", str(CACHE))  # a user's profiles are not our business
    from m2flow.plan.decide import decide, sized
    from m2flow.plan.simulate import simulate
    from m2flow.runtime.profiling import obtain

    profile, source = obtain(
        workload.make_flow,
        [workload.batch(PROFILED + step) for step in range(4)],
        workload.lanes,
        {"model": {"workload": workload.name}, "shapes": {"items": workload.items}},
        budget=budget,
        cache=False,
    )
    print(f"\n{workload.name}: profile {source}", flush=True)
    decision = decide(graph, profile, workload.lanes, workload.items)
    chosen = decision.chosen
    print(f"chose {chosen.plan.mode} in {decision.seconds_to_decide:.1f} s", flush=True)
    records[AUTO] = Record(chosen.plan, float(chosen.prediction.seconds))
    for record in records.values():
        plan = sized(record.plan, graph, profile, workload.items)
        record.predicted = float(simulate(graph, plan, profile, workload.items, steps=8).seconds)


def _measure(workload: Workload, records: Mapping[str, Record], blocks: int) -> None:
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(_running(workload, record.plan))
            for name, record in records.items()
        }
        for block in range(WARM_UP + blocks):
            batches = [workload.batch(block * BLOCK + step) for step in range(BLOCK)]
            for name, record in records.items():
                seconds = []
                start = time.perf_counter()
                for result in runs[name].steps(iter(batches)):
                    now = time.perf_counter()
                    seconds.append(now - start)
                    start = now
                    if record.rewards is None:
                        record.rewards = list(map(float, result.output["reward"]))
                if block >= WARM_UP:
                    record.seconds += seconds


@contextmanager
def _running(workload: Workload, plan: Plan) -> Iterator[Run]:
    with launch(workload.make_flow(), items_per_step=workload.items, plan=plan) as run:
        yield run


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
                "-" if record.predicted is None else 1e3 * record.predicted,
                "-" if record.error is None else record.error,
            ]
            for plan, record in records.items()
        ],
    )
    print(flush=True)


def _figures(results: Mapping[str, Mapping[str, Record]]) -> dict[str, Any]:
    return {
        name: {
            "steps": len(next(iter(records.values())).seconds),
            "milliseconds_per_step": {plan: 1e3 * one.median for plan, one in records.items()},
            "spread": {plan: one.spread for plan, one in records.items()},
            "predicted_milliseconds": {
                plan: 1e3 * one.predicted
                for plan, one in records.items()
                if one.predicted is not None
            },
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
