"""Runs under a virtual clock in which lanes, machines and launchers are lost, drawn from a seed.

A schedule is a random case (`tests/engine/random_cases.py`) that is run as `launch` runs it: by the
real `Run`, `Runner`, `Engine`, `RayCarrier`, `LanePool`, `Mender`, `Supervision`, `Recovery`, and
snapshots and journal, on lanes that are played (`virtual_lanes.py`). It goes on until all steps are
done, whatever is lost, or ends with the reason that the run states, which must be true. A launcher
that is lost goes on from the last checkpoint that the disk had, with the rollouts that it had.

Asserted are: results in order of step, each once, with each item once, also across going back;
what lanes themselves look at (`virtual_lanes.py`): every item folded in once into a state that has
learnt exactly what was before, versions that never go back, staleness, memory; and that nobody
waits for ever.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from m2flow.engine.plan import LaneSpec, Placement, Plan
from m2flow.errors import RunFailed
from m2flow.flow import SOURCE, Worker
from m2flow.runtime.driver.processes import START_TRIES
from m2flow.runtime.driver.runner import StepResult
from tests.engine.random_cases import Case
from tests.runtime.virtual_pool import CrashedRun, VirtualJournal, launched, virtual_time
from tests.runtime.virtual_world import Faults, LauncherLost, World

DEADLINE_SECONDS = 1e5
"""Of a call in virtual time; no call takes as long."""

SCHEDULES = (
    Faults(twice=0.3, late=0.1, slow=0.3),
    Faults(twice=0.3, late=0.1, lose=0.01),
    Faults(twice=0.3, lose=0.05, most=6),
    Faults(late=0.2, lose=0.02, half_open=0.8, disk=10.0),
    Faults(lose=0.02, machine=0.6, elastic=True, stillborn=0.1),
    Faults(launcher=0.01, disk=10.0),
    Faults(
        twice=0.2, late=0.1, lose=0.02, half_open=0.3, machine=0.1, launcher=0.002, slow=0.3,
        disk=5.0, stillborn=0.1, full=0.05,
    ),
)  # fmt: skip
"""What may go wrong in many schedules."""


class Stateful(Worker):
    """A worker whose state can be moved."""

    collective = True

    def save(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def discard(self) -> None: ...


class Stateless(Worker):
    """A worker that is as it is loaded, or that does not say how it is saved."""

    collective = True


class FewerLanes:
    """The plan of an elastic run: each worker on single lanes of those that it had, or on one."""

    mode = None

    def __init__(self, plan: Plan) -> None:
        self.lanes, self._plan = plan.lanes, plan

    def plan(self, lanes: tuple[LaneSpec, ...]) -> Plan:
        there = [lane.id for lane in lanes]

        def moved(spot: Placement) -> Placement:
            left = [lane for lane in spot.lanes if lane in there] or there[:1]
            return replace(spot, replicas=tuple((lane,) for lane in left))

        spots = self._plan.placements.items()
        unlimited = tuple(replace(lane, memory_bytes=None) for lane in lanes)
        return replace(
            self._plan, lanes=unlimited, placements={name: moved(spot) for name, spot in spots}
        )


def _on_machines(plan: Plan, dice: random.Random) -> Plan:
    """A plan that the runtime takes: gangs of one size, lanes here and on other machines."""

    def even(spot: Placement) -> Placement:
        size, lanes = len(spot.replicas[0]), spot.lanes
        gangs = [lanes[k : k + size] for k in range(0, len(lanes) - size + 1, size)]
        return replace(spot, replicas=tuple(gangs))

    first, each = dice.choice(((0, 8), (0, 2), (1, 1), (1, 2)))
    return replace(
        plan,
        lanes=tuple(replace(lane, node=first + lane.id // each) for lane in plan.lanes),
        placements={name: even(spot) for name, spot in plan.placements.items()},
        deadline_seconds=DEADLINE_SECONDS,
    )


class CrashSchedule:
    """One schedule.

    Args:
        case: the flow, the plan, and how many items and steps.
        faults: what goes wrong.
        seed: draws when, and how long everything takes.

    Attributes:
        steps: that were run, those among them that were run again.
        world: in which it is played.
    """

    def __init__(self, case: Case, faults: Faults, seed: int) -> None:
        dice = random.Random(seed)
        self.case, self.dice, self.steps = case, dice, 0
        plan = _on_machines(case.plan, dice)
        self._elastic = FewerLanes(plan) if faults.elastic else None
        self._plan = plan if self._elastic is None else self._elastic.plan(plan.lanes)
        self._restarts = dice.choice((1, 3, 8, 8))
        self._kept = 0
        learn = {node.worker for node in case.graph.nodes if node.accumulates}
        learn |= {edge.source for edge in case.graph.weight_edges}
        names = dict.fromkeys(x.worker for x in case.graph.nodes if not x.is_function)
        self._workers: dict[str, Worker] = {
            name: Stateful() if dice.random() < (0.95 if name in learn else 0.1) else Stateless()
            for name in names
        }
        self._unsaved = any(isinstance(self._workers.get(name), Stateless) for name in learn)
        self.world = World(case.graph, self._plan, case.num_items, faults, dice)

    def run(self) -> str | None:
        """Play it; why the run has ended before all was done, or None."""
        with virtual_time(self.world):
            while True:
                try:
                    return self._launch()
                except LauncherLost:
                    self.world.begin_anew()
                except RunFailed as error:
                    return self._reason(error)

    def _launch(self) -> None:
        """Run all steps after the last checkpoint that is kept."""
        world, last = self.world, self.case.num_steps
        step = world.first_step = self._kept
        run = launched(
            world, self._plan.lanes, self._plan, self._workers, step, self._restarts, self._elastic
        )
        journal = VirtualJournal(world)
        run.keep_rollouts(journal)
        while step < last:
            until = self.dice.randint(step + 1, last)
            for result in run.steps(self._batches(range(step, until))):
                self._check(result, step)
                step += 1
            assert step == until, f"{step} steps are done of {until}"
            self._save(run, step, journal)

    def _batches(self, steps: Iterable[int]) -> Any:
        items = range(self.case.num_items)
        return (self.world.batch(SOURCE, step, items) for step in steps)

    def _check(self, result: StepResult, step: int) -> None:
        """A result is that of the step whose turn it is, with every item once."""
        self.steps += 1
        output = self.case.graph.nodes[self.case.graph.output]
        assert (result.step, result.version) == (step, step + 1)
        total = self.case.num_items * output.fanout * output.expands
        assert result.output.ids == tuple(range(total)), "items of the result"
        assert 0 <= (result.staleness or 0) <= self._plan.max_staleness

    def _save(self, run: CrashedRun, step: int, journal: VirtualJournal) -> None:
        """Begin a checkpoint, which counts once the disk has it."""
        for name, worker in self._workers.items():
            if isinstance(worker, Stateful) and name in run._placements:
                for learnt in run.worker_call_everywhere(name, "learnt"):
                    wanted = self.world.as_loaded(name).learnt
                    graph, since = self.case.graph, step - self.world.first_step
                    for index in wanted:
                        wanted[index] += since * graph.nodes[index].minibatches
                    assert learnt == wanted, f"{name} has learnt {learnt}, and not {wanted}"

        def keep() -> None:
            self._kept = max(self._kept, step)
            journal.forget_before(self._kept)

        self.world.after(self.world.disk_seconds(), keep)

    def _reason(self, error: RunFailed) -> str:
        """Why a run has ended, if it says so and it is true.

        Raises:
            RunFailed: it is not.
        """
        text, world = str(error), self.world

        def named(words: str) -> list[int]:
            return [int(lane) for lane in re.findall(words.format(r"(\d+)"), text)[:1]]

        tries = [world.failed_starts[lane] for lane in named("lane {} has not come up in")]
        reasons: dict[str, list[object]] = {
            "no lane is left": [self._elastic, *map(self._may_be_given_up, world.nodes)],
            "there is no snapshot of what was learnt": [self._unsaved or world.without_room],
            "which is the most (`lane_restarts`)": [
                *map(self._is_used_up, named("lane {} was lost"))
            ],
            "the machine of lane": [
                not self._elastic,
                *map(world.is_gone, named("machine of lane {}")),
            ],
            "come up in": [max(tries or world.failed_starts.values(), default=0) >= START_TRIES],
        }
        for words, true in reasons.items():
            if words in text:
                if not all(true):
                    break
                return words
        raise error

    def _is_used_up(self, lane: int) -> bool:
        """Whether a lane was started again as often as it may be."""
        return self.world.struck_since(lane) > self._restarts

    def _may_be_given_up(self, lane: int) -> bool:
        """Whether there was a reason for an elastic run to go on without a lane."""
        world = self.world
        return world.was_gone(lane) or world.failed_starts[lane] > 0 or self._is_used_up(lane)


def shortest(case: Case, faults: Faults, seed: int, tries: int = 50) -> tuple[Faults, int]:
    """Shrink a schedule that breaks a promise: Hypothesis sees the seed alone of what goes wrong.

    Args:
        case, faults, seed: of the schedule.
        tries: seeds from `seed` on, under which each smaller set of faults is tried.

    Returns:
        faults of the fewest kinds, with the fewest lanes lost, under which one is still broken, and
        a seed that shows it.
    """

    def broken(some: Faults) -> int | None:
        for one in range(seed, seed + tries):
            try:
                CrashSchedule(case, some, one).run()
            except Exception:  # noqa: BLE001 - whatever breaks
                return one
        return None

    found, nothing = seed, Faults()
    for kind in (field.name for field in fields(Faults) if field.name != "most"):
        fewer = replace(faults, **{kind: getattr(nothing, kind)})
        if (one := broken(fewer)) is not None:
            faults, found = fewer, one
    for most in range(1, faults.most):
        fewer = replace(faults, most=most)
        if (one := broken(fewer)) is not None:
            return fewer, one
    return faults, found
