"""Embodied steps on two lanes of one core each: `auto` against the fixed modes, and groups.

1. On a fast and on a slow simulator (`workloads/embodied.py`): every fixed mode, and what mode
   "auto" settled on, take the same steps in turn, block by block, with a twin of one mode as the
   noise floor. Rule, floor and report are those of `modes.py`.
2. Where policy and environments stand on lanes of their own: one group of environments, which
   leaves one lane waiting for the other, against two and four that take turns. Once where both
   take about as long, once where the environments take ten times as long. What the planner
   predicts from a profile is told beside what was measured, and was predicted before. Compared
   are the seconds of the rollout: from the first turn to the end of the last one. The same in this
   process, where the policy has one core, as it were an accelerator, and acts for one group while
   the environments of another step in a process, on the core beside.
3. Seconds that it takes to save the environments of a lane, to end their processes, and to carry
   on in new ones, and the memory that it gives back: of tables, which save their state, of
   pendulums, whose episodes are replayed, and, where Meta-World is installed, of arms that are
   drawn, whose renderers end with them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
import torch
from harness import Target, arguments, conclude, table
from mode_records import verdict
from modes import PROFILED, SIMULATED, Result, compared, figures, report, targets
from workloads import LANES, Workload
from workloads import embodied as workloads

from m2flow.engine.plan import Placement, Plan
from m2flow.environments import make_environments
from m2flow.plan import build_plan
from m2flow.plan.choose.judge import sized
from m2flow.plan.chunks import cut
from m2flow.plan.profile import Profile
from m2flow.plan.profile.evidence import Evidence
from m2flow.plan.profile.learning import fitted
from m2flow.plan.simulate import simulate
from m2flow.runtime.driver.launch import launch
from m2flow.runtime.driver.pool import LanePool
from m2flow.runtime.driver.run import Run

COUNTS = (1, 2, 4)
"""Groups of environments."""

TWIN = "1 group again"
STEPS = 4
"""Steps of a block that count; one before them does not."""

MOVED = 8
"""Environments that step aside."""

PLAYED = 100
"""Steps of the episodes in them; of a replayed environment these are taken again."""


@dataclass
class Grouped:
    """A number of groups on a workload.

    Attributes:
        plan: policy on one lane, environments on the other, or all on one.
        predicted: seconds of a step.
        steps, rollouts: measured seconds of steps, and of what of them is the loop.
    """

    plan: Plan
    predicted: float = 0.0
    steps: list[float] = field(default_factory=list)
    rollouts: list[float] = field(default_factory=list)


def main() -> None:
    options = _options()
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    results: dict[str, Result] = {}
    groups: dict[str, dict[str, Grouped]] = {}
    with tempfile.TemporaryDirectory() as cold:
        os.environ["M2FLOW_CACHE"] = cold  # what was learnt on another day is not to help
        ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR")
        try:
            for make in workloads.WORKLOADS:
                if make.__name__ in options.workloads:
                    results[make.__name__] = compared(make(), options)
                    report(make.__name__, results[make.__name__])
            for make in (*workloads.GROUPED, *workloads.GROUPED_ON_ONE_LANE):
                if make.__name__ in options.workloads:
                    groups[make.__name__] = _grouped(make(), options)
                    _report_groups(make.__name__, groups[make.__name__])
        finally:
            ray.shutdown()
    moved: dict[str, dict[str, float]] = {}
    for name in ASIDE:
        moved[name] = _moved(name, 2 if options.quick else 10)
        rows = [list(row) for row in moved[name].items()]
        table([f"{MOVED} of {name} in 2 processes, {PLAYED} steps in", "median"], rows)
    found = figures(results) | {name: _of_groups(some) for name, some in groups.items()}
    conclude(
        "embodied",
        {**found, "stepping_aside": moved},
        [*targets(results), *_group_targets(groups)],
        options,
    )


def _options() -> argparse.Namespace:
    every = (*workloads.WORKLOADS, *workloads.GROUPED, *workloads.GROUPED_ON_ONE_LANE)
    known = [make.__name__ for make in every]
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--workloads", default=",".join(known), help="some of them, by name")
    parser.add_argument("--blocks", type=int, help="blocks of each plan a round")
    parser.add_argument("--fixed", action="store_true", help="the fixed modes, unpredicted")
    options = parser.parse_args()
    options.workloads = options.workloads.split(",")
    options.rounds = 1 if options.quick else 3
    return options


# --- groups ---------------------------------------------------------------------------------------


def in_groups(workload: Workload, count: int) -> Plan:
    """Policy and training on lane 0, environments on lane 1, which take turns in groups."""
    graph = workload.make_flow().trace()
    plan = build_plan("hybrid", graph, LANES, workload.items)
    lanes = {"simulator": ((1,),), "actor": ((0,),), "learner": ((0,),)}
    placements = {
        worker: Placement(lanes.get(worker, spot.replicas))
        for worker, spot in plan.placements.items()
    }
    stages = {
        node.name: cut(node, workload.items, count if node.loop is not None else 1)
        for node in graph.nodes
    }
    return replace(plan, mode="custom", placements=placements, stages=stages)


def in_groups_on_one_lane(workload: Workload, count: int) -> Plan:
    """All in this process, on one thread; groups take turns while a process steps environments."""
    graph = workload.make_flow().trace()
    plan = build_plan("eager", graph, LANES[:1], workload.items)
    waiting = {n.name: cut(n, workload.items, count) for n in graph.nodes if n.waits}
    return replace(plan, stages=waiting)


def _grouped(workload: Workload, options: argparse.Namespace) -> dict[str, Grouped]:
    from m2flow.runtime.profiling import profile_flow

    alone = workload.name in [make.__name__ for make in workloads.GROUPED_ON_ONE_LANE]
    plan = in_groups_on_one_lane if alone else in_groups
    names = {f"{count} group{'s' * (count > 1)}": count for count in COUNTS}
    found = {name: Grouped(plan(workload, count)) for name, count in names.items()}
    found[TWIN] = Grouped(found["1 group"].plan)
    with nullcontext() if alone else closing(LanePool(LANES)) as pool:
        if pool is None:
            profile = _profiled_here(workload)
        else:
            batches = [workload.batch(PROFILED + step) for step in range(4)]
            budget = 30.0 if options.quick else 90.0
            profile = profile_flow(workload.make_flow, batches, lanes=pool, budget_seconds=budget)
        for one in found.values():
            one.predicted = _predicted(workload, one.plan, profile)
        for block in range(options.blocks or (1 if options.quick else 6)):
            for one in found.values():
                _measure(workload, one, pool, block * (STEPS + 1))
    return found


def _predicted(workload: Workload, plan: Plan, profile: Profile) -> float:
    graph = workload.make_flow().trace()
    plan = sized(plan, graph, profile, workload.items)
    return float(simulate(graph, plan, profile, workload.items, steps=SIMULATED).seconds)


def _profiled_here(workload: Workload) -> Profile:
    """What steps in this process teach, with calls that take all of the rollouts, and parts."""
    graph = workload.make_flow().trace()
    evidence = Evidence(graph)
    for count in COUNTS:
        stages = {n.name: cut(n, workload.items, count) for n in graph.nodes if n.loop is not None}
        plan = replace(in_groups_on_one_lane(workload, 1), stages=stages)
        with _started(workload, plan, None) as run:
            results = list(run.steps(workload.batch(PROFILED + step) for step in range(STEPS)))
            evidence.add(run.plan, results, warm=False)
    return fitted(evidence)


def _started(workload: Workload, plan: Plan, pool: LanePool | None) -> AbstractContextManager[Run]:
    """A run with fresh workers; without a pool in this process, on one thread."""
    flow, where = workload.make_flow(), {"num_threads": 1} if pool is None else {"lanes": pool}
    return launch(flow, items_per_step=workload.items, plan=plan, **where)


def _measure(workload: Workload, one: Grouped, pool: LanePool | None, first: int) -> None:
    """A block of steps with fresh workers."""
    batches = (workload.batch(first + step) for step in range(STEPS + 1))
    with _started(workload, one.plan, pool) as run:
        start = time.perf_counter()
        for number, result in enumerate(run.steps(batches)):
            now = time.perf_counter()
            if number:
                one.steps.append(now - start)
                loop = [span for span in result.spans if span.name in LOOP and span.kind == "call"]
                ends = max(span.end for span in loop)
                one.rollouts.append(ends - min(span.start for span in loop))
            start = now


LOOP = ("actor.act", "simulator.step")


def _floor(groups: Mapping[str, Grouped]) -> float:
    """How far the same plan under two names is apart."""
    one, other = (statistics.median(groups[name].rollouts) for name in ("1 group", TWIN))
    return abs(one / other - 1)


def _of_groups(groups: Mapping[str, Grouped]) -> dict[str, Any]:
    one = statistics.median(groups["1 group"].rollouts)
    predicted = groups["1 group"].predicted
    return {
        "noise_floor": _floor(groups),
        "predicted_milliseconds_a_step": {n: 1e3 * x.predicted for n, x in groups.items()},
        "milliseconds_a_step": {n: 1e3 * statistics.median(x.steps) for n, x in groups.items()},
        "milliseconds_a_rollout": {
            n: 1e3 * statistics.median(x.rollouts) for n, x in groups.items()
        },
        "than_one_group": {
            n: verdict(one / statistics.median(x.rollouts) - 1, _floor(groups))
            for n, x in groups.items()
        },
        "saved_seconds_of_a_step": {
            n: {"predicted": predicted - x.predicted,
                "measured": one - statistics.median(x.rollouts)}
            for n, x in groups.items()
        },
    }  # fmt: skip


def _report_groups(name: str, groups: Mapping[str, Grouped]) -> None:
    found = _of_groups(groups)
    table(
        [name, "rollout ms", "step ms", "predicted ms", "than one group"],
        [
            [
                plan,
                found["milliseconds_a_rollout"][plan],
                found["milliseconds_a_step"][plan],
                found["predicted_milliseconds_a_step"][plan],
                found["than_one_group"][plan],
            ]
            for plan in groups
        ],
    )
    print(f"noise floor, the same plan under two names: {found['noise_floor']:.1%}\n", flush=True)


def _group_targets(groups: Mapping[str, Mapping[str, Grouped]]) -> list[Target]:
    """Two groups win where the two cost alike, gain little where not, and it is predicted."""
    found = []
    for name, some in groups.items():
        one, two = some["1 group"], some["2 groups"]
        gain = statistics.median(one.rollouts) / statistics.median(two.rollouts)
        if name.startswith(workloads.balanced.__name__):
            what = f"{name}: a rollout of one group over one of two"
            found.append(Target(what, gain, 1 + max(0.1, _floor(some))))
        else:
            what = f"{name}: a rollout of one group over one of two"
            found.append(Target(what, gain, 1.15 + _floor(some), at_most=True))
        saved = one.predicted - two.predicted
        really = statistics.median(one.rollouts) - statistics.median(two.rollouts)
        what = f"{name}: what two groups save, predicted less measured, over a rollout of one"
        wrong = abs(saved - really) / statistics.median(one.rollouts)
        found.append(Target(what, wrong, 0.15, at_most=True))
        if name.startswith(workloads.balanced.__name__):  # or nothing could be predicted
            what = f"{name}: the same over what they save"
            found.append(Target(what, abs(saved - really) / abs(really), 0.5, at_most=True))
    return found


# --- stepping aside -------------------------------------------------------------------------------


ASIDE: dict[str, dict[str, Any]] = {
    "table:reach": {"max_episode_steps": 2 * PLAYED},
    "gymnasium:Pendulum-v1": {},
}
"""With their options: time limits above `PLAYED`."""

if importlib.util.find_spec("metaworld") is not None:
    ASIDE["metaworld:reach-v3"] = {"pixels": 128, "max_episode_steps": 2 * PLAYED}


def _moved(name: str, times: int) -> dict[str, float]:
    """Seconds of stepping aside and coming back, and megabytes given back; medians."""
    found: dict[str, list[float]] = {}
    vector = make_environments(name, MOVED, processes=2, **ASIDE[name])
    try:
        vector.reset(None, list(range(MOVED)))
        vector.step(torch.zeros(MOVED, PLAYED, vector.spec.action.size))
        for _ in range(times):
            found.setdefault("megabytes given back", []).append(vector.nbytes / 1e6)
            start = time.perf_counter()
            state = vector.state()
            saved = time.perf_counter()
            vector.close()
            freed = time.perf_counter()
            vector = make_environments(name, MOVED, processes=2, **ASIDE[name])
            made = time.perf_counter()
            vector.restore(state)
            back = time.perf_counter()
            seconds = {"save": saved - start, "free": freed - saved, "make": made - freed,
                       "restore": back - made}  # fmt: skip
            for what, spent in seconds.items():
                found.setdefault(f"milliseconds to {what}", []).append(1e3 * spent)
    finally:
        vector.close()
    return {what: statistics.median(some) for what, some in found.items()}


if __name__ == "__main__":
    main()
