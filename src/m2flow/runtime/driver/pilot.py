"""`Pilot`: chooses a run's plan by a profile, watches it, and goes over to another if that pays."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.flow.graph import FlowGraph
from m2flow.flow.worker import Layout
from m2flow.plan.builders import DEFAULT_LAYOUTS
from m2flow.plan.choose import Limits, choose
from m2flow.plan.prediction import Candidate
from m2flow.plan.profile import Profile
from m2flow.plan.units import Seconds
from m2flow.plan.watching import Measured, Watch, pays
from m2flow.runtime.driver.runner import StepResult

NEGLIGIBLE_SECONDS = Seconds(0.05)
"""The pause in which no worker moves."""


class Movers(Protocol):
    """What a run says of going over to another plan."""

    load_seconds: float

    def movers(self, plan: Plan) -> tuple[str, ...]: ...
    def movable(self, worker: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Change:
    """Another plan that a run has gone over to.

    Attributes:
        before: number of the first step under it.
        drift: measured over predicted seconds of a step that led to it.
        was, becomes: seconds of a step before, and as they are predicted from now on.
        moved: workers that stand elsewhere now.
        pause: seconds for which no step could run.
    """

    before: int
    drift: float
    was: Seconds
    becomes: Seconds
    moved: tuple[str, ...]
    pause: Seconds


class Pilot:
    """The planner beside a run.

    Args:
        graph, profile, lanes, num_items, max_staleness, isolated, limits, layouts: as for `choose`.
        num_steps: of the whole run; None where nobody knows: it is then taken to be half done.
        deadline_seconds: longest that a call may take, whatever the plan.

    Attributes:
        decision: the last one.
        watch: of the plan that runs.
        changes: plans that the run has gone over to.
    """

    def __init__(
        self,
        graph: FlowGraph,
        profile: Profile,
        lanes: Sequence[LaneSpec],
        num_items: int,
        *,
        max_staleness: int = 0,
        isolated: Collection[str] = (),
        limits: Limits | None = None,
        layouts: Mapping[str, Layout] = DEFAULT_LAYOUTS,
        num_steps: int | None = None,
        deadline_seconds: float | None = None,
    ) -> None:
        self._deadline_seconds = deadline_seconds
        self._graph, self._lanes, self._num_items = graph, lanes, num_items
        self._max_staleness, self._isolated = max_staleness, isolated
        self._limits, self._layouts, self._num_steps = limits, layouts, num_steps
        self._seconds: list[float] = []
        self._done, self._last_end = 0, 0.0
        self.changes: list[Change] = []
        self._decide(profile)

    def _decide(self, profile: Profile, running: Sequence[Plan] = ()) -> None:
        self.profile = profile
        self.decision = choose(
            self._graph,
            profile,
            self._lanes,
            self._num_items,
            max_staleness=self._max_staleness,
            isolated=self._isolated,
            limits=self._limits,
            layouts=self._layouts,
            beside=running,
        )
        self.watch = Watch(self.decision.chosen)

    @property
    def plan(self) -> Plan:
        """The plan to run."""
        return self.as_run(self.watch.candidate.plan)

    def as_run(self, plan: Plan) -> Plan:
        """A plan with what the run asks of every plan."""
        if self._deadline_seconds is None:
            return plan
        return replace(plan, deadline_seconds=self._deadline_seconds)

    def note(self, result: StepResult) -> None:
        """Take a step in."""
        end = result.started + result.seconds
        seconds = min(result.seconds, end - self._last_end)  # steps may overlap
        self._done, self._last_end = result.step + 1, end
        self._seconds.append(seconds)
        self.watch.note(Measured(seconds, result.stage_seconds()))

    @property
    def wants_to_look(self) -> bool:
        """Whether a drift has lasted long enough to ask the planner again."""
        return self.watch.drift() is not None

    def proposal(self, run: Movers) -> Candidate | None:
        """Another plan to go over to, if there is one that repays the pause.

        To be asked when `wants_to_look`, and no step is in flight. Whatever comes of it, what has
        drifted is expected from now on.
        """
        running = self.watch.candidate.plan
        seen = self._seconds[-(self.watch.patience) :]
        profile = self.watch.corrected(self.profile)
        self._decide(profile, [running])
        ranked = (self.decision.chosen, *self.decision.others)
        now = next(one for one in ranked if _same(one.plan, running))
        measured = Seconds(statistics.median(seen))
        off = measured / now.prediction.seconds  # what the correction does not explain
        self.watch = Watch(now)
        for one in ranked:
            moved = run.movers(one.plan)
            if not all(run.movable(worker) for worker in moved):
                continue
            pause = Seconds(run.load_seconds) if moved else NEGLIGIBLE_SECONDS
            then = Seconds(one.prediction.seconds * off)
            return one if pays(measured, then, pause, self._steps_left) else None
        return None

    @property
    def _steps_left(self) -> int:
        return self._done if self._num_steps is None else self._num_steps - self._done

    def gone_over(
        self, candidate: Candidate, drift: float, moved: tuple[str, ...], pause: float
    ) -> Change:
        """Say that the run has gone over to a proposal."""
        was = Seconds(statistics.median(self._seconds[-self.watch.patience :]))
        self.watch = Watch(candidate)
        change = Change(self._done, drift, was, candidate.prediction.seconds, moved, Seconds(pause))
        self.changes.append(change)
        return change


def _same(one: Plan, other: Plan) -> bool:
    return (one.placements, one.stages, one.edges, one.order, one.max_staleness) == (
        other.placements,
        other.stages,
        other.edges,
        other.order,
        other.max_staleness,
    )
