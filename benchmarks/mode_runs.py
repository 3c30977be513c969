"""Runs from their first second on: `auto` as a user's run has it, and a trial of each fixed mode.

`try3` is what a person would do without a planner: three real steps under each fixed mode, then the
fastest one for the rest. Its trial steps count, since they train as any others do; so do the pauses
in which the workers of the next mode are brought up. `auto` is mode "auto" of a run: nothing is
measured before the run, whatever it does to find a plan is part of its seconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from mode_records import FIXED, Record
from workloads import Workload

from m2flow.engine.plan import Plan
from m2flow.runtime.driver.launch import Auto, launch
from m2flow.runtime.driver.pool import LanePool

TRIALS = 3
WHOLE = 60
"""Steps of a run whose length the two are compared on."""


@dataclass(frozen=True)
class Started:
    """A run that has found its plan.

    Attributes:
        plan: under which it goes on.
        steps: that it has taken so far.
        seconds: since it was launched, on lanes that were up.
    """

    plan: Plan
    steps: int
    seconds: float

    def whole(self, seconds_per_step: float) -> float:
        """Seconds of WHOLE steps, where each further one takes so long."""
        return self.seconds + (WHOLE - self.steps) * seconds_per_step


def run_auto(workload: Workload, pool: LanePool, steps: int) -> Started:
    """The first steps of a run in mode "auto"."""
    start = time.perf_counter()
    auto = Auto(max_staleness=workload.max_staleness, num_steps=WHOLE)
    with launch(
        workload.make_flow(), items_per_step=workload.items, mode="auto", lanes=pool, auto=auto
    ) as run:
        for _ in run.steps(workload.batch(step) for step in range(steps)):
            pass
        return Started(run.plan, steps, time.perf_counter() - start)


def try_each(workload: Workload, pool: LanePool, records: Mapping[str, Record]) -> Started:
    """Three steps of each fixed mode; the plan whose last two steps were fastest."""
    start = time.perf_counter()
    found: dict[str, float] = {}
    for number, mode in enumerate(FIXED):
        plan = records[mode].plan
        first = number * TRIALS
        batches = (workload.batch(step) for step in range(first, first + TRIALS))
        with launch(
            workload.make_flow(), items_per_step=workload.items, plan=plan, lanes=pool
        ) as run:
            ends = [time.perf_counter() for _ in run.steps(batches)]
        found[mode] = ends[-1] - ends[0]
    best = min(found, key=found.__getitem__)
    took = time.perf_counter() - start
    return Started(records[best].plan, TRIALS * len(FIXED), took)
