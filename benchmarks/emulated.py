"""Many lanes on this machine: published steps on emulated accelerators, and how plans do there.

**These lanes are emulated.** Engine, driver, lanes, control lines and links are the real ones, and
items of real size are handed over; but a stage waits as long as its price says instead of
computing, and many lanes share a process. What is measured is how well a plan was chosen, how well
it was predicted, and what the control plane costs; not how fast any model trains.

On each number of lanes each step of `emulated_steps.py` runs under every fixed mode, under the plan
that `auto` chooses, and under further plans by hand and at random (`emulated_plans.py`). What is
predicted is a step of the lengths that are measured; the planner chooses by other ones. What calls
cost beside their stages is learned from two collocated steps, as a run learns it. Seconds are
from the end of one step to the end of the next. The control plane's seconds are CPU seconds of the
launcher's thread, which carries engine, lines and hand-over of results. What the processes of the
lanes take beside waiting is told too: it is the emulation's own price, and where it comes near to
what the machine has, seconds are too long.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from emulated_plans import at_random, by_hand
from emulated_steps import SEED, STEPS, Step, lanes_of
from harness import CACHE, Target, arguments, conclude, table

from m2flow.engine.plan import Plan
from m2flow.errors import UserError
from m2flow.plan import build_plan
from m2flow.plan.choose import choose
from m2flow.plan.choose.judge import sized
from m2flow.plan.profile.evidence import Evidence
from m2flow.plan.profile.learning import fitted
from m2flow.plan.simulate import simulate
from m2flow.runtime.driver.launch import launch
from m2flow.runtime.driver.pool import LanePool

FIXED = ("collocated", "disaggregated", "hybrid")
AUTO = "auto"
PROCESSES = 2
"""That share the lanes."""

PROFILED = 1000
"""The first step of those that overheads are learned from."""

MEASURED = 2
"""Steps of a plan that count, after one that does not."""

FASTER = 3.0
"""In the short version everything takes so many times less."""

OTHERS = 12
"""Plans by hand and at random beside the modes, at least."""

RANDOM = 4
"""Of them at random, at least."""

HYBRID_GAINS = {"openvla": {"collocated": 1.67, "disaggregated": 1.87}}
"""What the hybrid mode gained over the others as published, on 8 GPUs (RLinf, arXiv 2509.15965)."""


@dataclass
class Record:
    """A plan on a step.

    Attributes:
        plan: what was run.
        predicted: seconds of a step.
        seconds: of the steps counted.
        control: of each, CPU seconds of the launcher's thread.
        lanes: of each, CPU seconds of the processes that host the lanes.
    """

    plan: Plan
    predicted: float
    seconds: list[float] = field(default_factory=list)
    control: list[float] = field(default_factory=list)
    lanes: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return statistics.mean(self.seconds)

    @property
    def error(self) -> float:
        """Predicted over measured seconds, less 1."""
        return self.predicted / self.mean - 1

    @property
    def control_share(self) -> float:
        return sum(self.control) / sum(self.seconds)


def main() -> None:
    options = _options()
    results: dict[str, dict[str, Record]] = {}
    os.environ.setdefault("M2FLOW_CACHE", str(CACHE))
    for count in map(int, options.lanes.split(",")):
        with _pool(count) as pool:
            for name in options.steps.split(","):
                step = STEPS[name](count, FASTER if options.quick else 1.0)
                key = f"{name} on {count}"
                results[key] = _compared(step, pool, options)
                _report(key, step, results[key])
    conclude("emulated", _figures(results), _targets(results), options)


def _options() -> argparse.Namespace:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--lanes", help="how many, several by commas")
    parser.add_argument("--steps", help="some of them, by name")
    parser.add_argument("--plans", help="only these beside the modes; names are parted by ;")
    options = parser.parse_args()
    options.lanes = options.lanes or ("16" if options.quick else "16,64,128")
    options.steps = options.steps or ("ppo_7b" if options.quick else ",".join(STEPS))
    return options


@contextmanager
def _pool(count: int) -> Iterator[LanePool]:
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    try:
        with closing(LanePool(lanes_of(count), lanes_per_process=-(-count // PROCESSES))) as pool:
            yield pool
    finally:
        ray.shutdown()


def _compared(step: Step, pool: LanePool, options: argparse.Namespace) -> dict[str, Record]:
    step = _with_overheads(step, pool)
    records = {}
    for name, plan in _plans(step, options).items():
        plan = sized(plan, step.graph, step.profile, step.items)
        records[name] = record = Record(plan, _predicted(step, plan))
        _measure(step, record, pool, 1 if options.quick else MEASURED)
        print(f"  {name}: {record.predicted:.2f} s predicted, {record.mean:.2f} s", flush=True)
    return records


def _with_overheads(step: Step, pool: LanePool) -> Step:
    """The step with a profile that knows what a call costs beside its stage on these lanes."""
    plan = build_plan(FIXED[0], step.graph, step.lanes, step.items)
    evidence = Evidence(step.graph)
    with launch(step.make_flow(), items_per_step=step.items, plan=plan, lanes=pool) as run:
        evidence.add(plan, run.steps(step.batch(PROFILED + n) for n in range(2)), warm=False)
    learned = fitted(evidence, step.profile)
    profile = replace(
        step.profile,
        dispatch=learned.dispatch,
        event_overhead=learned.event_overhead,
        links=learned.links,
    )
    costs = (profile.dispatch, profile.event_overhead)
    print(f"{step.name} on {len(step.lanes)}: beside a call {1e3 * costs[0]:.2f} ms, of an event "
          f"{1e6 * costs[1]:.0f} us", flush=True)  # fmt: skip
    return replace(step, profile=profile)


def _plans(step: Step, options: argparse.Namespace) -> dict[str, Plan]:
    """The fixed modes that fit, the planner's choice, and the others."""
    graph = step.graph
    plans = {}
    for mode in FIXED:
        try:
            plans[mode] = build_plan(mode, graph, step.lanes, step.items)
        except UserError as error:
            print(f"  {mode}: {error}")
    decision = choose(graph, step.profile, step.lanes, step.items)
    chosen = decision.chosen.plan
    print(f"{step.name} on {len(step.lanes)}: chose {chosen.mode} in "
          f"{decision.seconds_to_decide:.1f} s", flush=True)  # fmt: skip
    plans[AUTO] = chosen
    others = by_hand(graph, step.lanes, step.items)
    missing = max(RANDOM, OTHERS - len(others))
    others |= at_random(graph, step.lanes, step.items, missing)
    if options.plans is not None:
        others = {name: plan for name, plan in others.items() if name in options.plans.split(";")}
    elif options.quick:
        others = dict(list(others.items())[:2])
    return plans | others


def _predicted(step: Step, plan: Plan) -> float:
    """The mean of the very steps that are measured; their draws are numbered from 0."""
    found = simulate(step.graph, plan, step.profile, step.items, steps=MEASURED, seed=SEED)
    return float(found.seconds)


def _measure(step: Step, record: Record, pool: LanePool, count: int) -> None:
    batches = [step.batch(number) for number in range(-1, count)]
    with launch(step.make_flow(), items_per_step=step.items, plan=record.plan, lanes=pool) as run:
        before = _clocks(pool)
        for number, _ in enumerate(run.steps(iter(batches))):
            now = _clocks(pool)
            if number:
                spent = [after - start for after, start in zip(now, before, strict=True)]
                record.seconds.append(spent[0])
                record.control.append(spent[1])
                record.lanes.append(spent[2])
            before = now


def _clocks(pool: LanePool) -> tuple[float, float, float]:
    """Seconds of the wall, of this thread, and of the processes of the lanes."""
    processes = {address.process_id for address in pool.addresses.values()}
    fields = [Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split() for one in processes]
    ticks = sum(int(user) + int(system) for *_, user, system in (some[:13] for some in fields))
    return time.perf_counter(), time.thread_time(), ticks / os.sysconf("SC_CLK_TCK")


def _report(name: str, step: Step, records: Mapping[str, Record]) -> None:
    best = min(record.mean for record in records.values())
    print(f"{name} lanes, emulated: one second stands for {step.scale:g} s of the paper's hardware")
    table(
        [name, "s/step", "over best", "predicted", "error", "control s", "share", "lanes' s"],
        [
            [plan, one.mean, one.mean / best, one.predicted, one.error,
             statistics.mean(one.control), one.control_share, statistics.mean(one.lanes)]
            for plan, one in records.items()
        ],
    )  # fmt: skip
    print(flush=True)


def _figures(results: Mapping[str, Mapping[str, Record]]) -> dict[str, Any]:
    return {
        name: {
            "seconds_per_step": {plan: one.mean for plan, one in records.items()},
            "predicted_seconds": {plan: one.predicted for plan, one in records.items()},
            "control_seconds_per_step": {
                plan: statistics.mean(one.control) for plan, one in records.items()
            },
            "lanes_cpu_seconds_per_step": {
                plan: statistics.mean(one.lanes) for plan, one in records.items()
            },
            "auto_over_best_of_all": records[AUTO].mean / _best(records),
            "best_fixed_over_auto": _best_fixed(records) / records[AUTO].mean,
            **_hybrid_gains(name, records),
        }
        for name, records in results.items()
    }


def _hybrid_gains(name: str, records: Mapping[str, Record]) -> dict[str, Any]:
    """The other fixed modes' seconds over the hybrid's, beside the published ratios."""
    published = HYBRID_GAINS.get(name.split(maxsplit=1)[0])
    if published is None or not {"hybrid", *published} <= set(records):
        return {}
    hybrid = records["hybrid"].mean
    found = {mode: records[mode].mean / hybrid for mode in published}
    return {"hybrid_gains": found, "published_hybrid_gains": published}


def _targets(results: Mapping[str, Mapping[str, Record]]) -> list[Target]:
    targets = []
    gains = 0
    for name, records in results.items():
        mine = records[AUTO].mean
        what = f"{name}: auto over the best of all {len(records)} plans"
        targets.append(Target(what, mine / _best(records), 1.03, at_most=True))
        gains += _best_fixed(records) / mine >= 1.15
        errors = [one.error for one in records.values()]
        worst = max(errors, key=abs)
        what = f"{name}: worst error of a prediction"
        targets.append(Target(what, abs(worst), 0.05, at_most=True))
        if gained := _hybrid_gains(name, records):
            what = f"{name}: the faster of the other fixed modes over the hybrid, 1.67 as published"
            targets.append(Target(what, min(gained["hybrid_gains"].values()), 1.0))
        if name.endswith(" 128"):
            what = f"{name}: the control plane's share of a step under auto"
            targets.append(Target(what, records[AUTO].control_share, 0.05, at_most=True))
    below = [one.error < 0 for records in results.values() for one in records.values()]
    share = min(sum(below), len(below) - sum(below)) / len(below)
    targets.append(Target("share of predictions with the rarer sign", share, 0.1))
    if len(results) > 2:
        targets.append(Target("steps where auto gains 15 % over the best mode", float(gains), 2.0))
    return targets


def _best(records: Mapping[str, Record]) -> float:
    return min(record.mean for record in records.values())


def _best_fixed(records: Mapping[str, Record]) -> float:
    return min(records[mode].mean for mode in FIXED if mode in records)


if __name__ == "__main__":
    main()
