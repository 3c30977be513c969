"""`Auto`: how a run comes to the best plan by itself: measure, search, simulate, choose, watch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from m2flow.engine.plan import LaneSpec
from m2flow.errors import UserError
from m2flow.flow.batch import Batch
from m2flow.flow.flow import Flow
from m2flow.flow.worker import Layout
from m2flow.plan.profile import Profile
from m2flow.runtime.driver.methods import STEP, Methods

if TYPE_CHECKING:
    from m2flow.runtime.driver.pilot import Pilot
    from m2flow.runtime.driver.pool import LanePool


@dataclass(frozen=True)
class Auto:
    """What mode "auto" is to go by.

    Attributes:
        sample: batches as the steps will have them, on which the stages are measured. The workers
            that are measured are copies: the run begins with what the flow's own workers load.
        profile: one that was measured before, instead of a sample.
        max_staleness: how many steps generation may run ahead of training; a budget.
        num_steps: of the whole run, by which a new plan must repay its pause; None if unknown.
        budget_seconds: longest that measuring may take.
        deadline_seconds: longest that a call may take, whatever the plan; None for the default.
    """

    sample: Sequence[Batch] = ()
    profile: Profile | None = None
    max_staleness: int = 0
    num_steps: int | None = None
    budget_seconds: float = 60.0
    deadline_seconds: float | None = None

    def pilot(
        self,
        flow: Flow,
        methods: Methods,
        lanes: tuple[LanePool, bool],
        specs: Sequence[LaneSpec],
        layouts: Mapping[str, Layout],
    ) -> Pilot:
        """Choose a plan.

        Raises:
            UserError: there is neither a profile nor anything to measure the stages on.
        """
        from m2flow.runtime.driver.pilot import Pilot

        profile = self.profile
        if profile is None:
            if not self.sample:
                raise UserError(
                    "auto measures the stages, and needs batches for it",
                    key="auto.sample",
                    expected="batches as the steps will have them",
                    hint="give `auto=Auto(sample=[batch, ...])`, or a profile",
                )
            from m2flow.runtime.profiling import profile_flow

            profile = profile_flow(
                lambda: copy.deepcopy(flow),
                self.sample,
                lanes=lanes[0],
                budget_seconds=self.budget_seconds,
            )
        return Pilot(
            methods.graphs[STEP],
            profile,
            _with_reserved(specs, lanes[0]),
            methods.num_items[STEP],
            max_staleness=self.max_staleness,
            isolated=methods.isolated,
            layouts=layouts,
            num_steps=self.num_steps,
            deadline_seconds=self.deadline_seconds,
        )


AUTO = Auto()


def _with_reserved(specs: Sequence[LaneSpec], pool: LanePool) -> tuple[LaneSpec, ...]:
    """The lanes that are planned for, and those of the pool that are reserved for a worker."""
    known = {lane.id for lane in specs}
    return (*specs, *(x for x in pool.lanes if x.reserved_for is not None and x.id not in known))
