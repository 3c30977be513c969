"""`ElasticPlan`: the plan of a run for whatever lanes it has.

It is made as the run's first plan was: by the pilot, or by the builder of the mode. A plan that no
builder has made is somebody's own, and for its lanes only. Knows no processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from string import digits
from typing import TYPE_CHECKING

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.errors import UserError
from m2flow.flow.worker import ONE_LANE, Layout, Worker
from m2flow.plan.builders import build_plan, first_that_divides
from m2flow.plan.choose.judge import shape
from m2flow.plan.memory import with_sizes
from m2flow.runtime.driver.auto import GUESSES
from m2flow.runtime.driver.methods import STEP, Methods, Plans

if TYPE_CHECKING:
    from m2flow.runtime.driver.pilot import Pilot

ANY_LANES = "collocated"
"""The mode that every flow can have on any lanes."""


class ElasticPlan:
    """Makes plans of a run's step.

    Args:
        methods: what the run does.
        plans: that it begins with.
        workers: of the flow; they declare layouts.
        pilot: of mode auto.

    Attributes:
        lanes: that the run begins with.
        mode: of the first plan; None under a pilot, whose plans have many.
    """

    def __init__(
        self, methods: Methods, plans: Plans, workers: Mapping[str, Worker], pilot: Pilot | None
    ) -> None:
        self._methods, self._first, self._pilot = methods, plans.by_method[STEP], pilot
        self._workers, self.lanes = workers, plans.everything.lanes
        self.mode = self._first.mode if pilot is None else None
        self._layouts = self._layouts_of(self._first) if pilot is None else dict(pilot.layouts)

    def plan(self, lanes: tuple[LaneSpec, ...]) -> Plan:
        """The plan for some of the run's lanes: in its mode, or collocated where they are too few.

        Raises:
            UserError: there is none.
        """
        if self._pilot is not None:
            _, layouts = self._built(GUESSES[0], lanes)
            return self._pilot.on_lanes(lanes, layouts)
        if not self._is_of_a_mode():
            raise UserError(
                "is for all of its lanes, and names those that are lost",
                key="plan",
                value=self._first.mode,
                hint="a run under a `mode` can do with fewer, one under a plan file cannot",
            )
        try:
            plan, _ = self._built(self._first.mode, lanes)
        except UserError:
            plan, _ = self._built(ANY_LANES, lanes)
        known = self._first.placements
        working = {name: known[name].working_bytes for name in plan.placements if name in known}
        return replace(
            with_sizes(plan, {}, working),
            max_staleness=self._first.max_staleness,
            deadline_seconds=self._first.deadline_seconds,
        )

    def _is_of_a_mode(self) -> bool:
        """Whether the first plan is what the builder of its mode makes."""
        first = self._first
        built = None
        with suppress(UserError):
            built, _ = self._built(first.mode, self.lanes)
        if built is None:
            return False
        return shape(replace(built, max_staleness=first.max_staleness)) == shape(first)

    def _built(self, mode: str, lanes: tuple[LaneSpec, ...]) -> tuple[Plan, Mapping[str, Layout]]:
        """The plan of a mode, and its layouts: those of the first plan, or smaller ones that divide
        the lanes.

        Raises:
            UserError: the mode does not fit.
        """
        methods = self._methods
        if all(lane.reserved_for is not None for lane in lanes):
            raise UserError("all that are left are reserved for a worker", key="lanes")
        graph, num_items = methods.graphs[STEP], methods.num_items[STEP]

        def build(layouts: Mapping[str, Layout]) -> tuple[Plan, Mapping[str, Layout]]:
            return build_plan(mode, graph, lanes, num_items, methods.isolated, layouts), layouts

        plan, layouts = first_that_divides(
            build, {worker: self._no_larger(worker, lanes) for worker in self._layouts}
        )
        if len(plan.lanes) > len(lanes):
            raise UserError(
                "must have a process of its own, and the one beside a lane is lost",
                key=str(plan.lanes[-1].reserved_for),
            )
        return plan, layouts

    def _no_larger(self, worker: str, lanes: tuple[LaneSpec, ...]) -> Iterator[Layout]:
        """The layout of a worker, then those of ever fewer lanes, of the same sort if possible."""
        layout = self._layouts[worker]
        yield layout
        while layout.lanes > 1:
            known = self._workers[worker].layouts(lanes[0].kind, len(lanes))
            fewer = [one for one in known if one.lanes < layout.lanes and one.obstacle() is None]
            sort = layout.name.rstrip(digits)
            layout = max(
                [ONE_LANE, *fewer],
                key=lambda one: (one.lanes, one.name.rstrip(digits) == sort),
            )
            yield layout

    def _layouts_of(self, plan: Plan) -> dict[str, Layout]:
        """The layouts of a plan's workers, but for those on a lane each."""
        return {
            worker: Layout(spot.layout, len(spot.replicas[0]))
            for worker, spot in plan.placements.items()
            if spot.layout != ONE_LANE.name and worker in self._methods.graphs[STEP].workers
        }
