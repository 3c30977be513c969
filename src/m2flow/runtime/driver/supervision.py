"""`Supervision`: has the lanes of a run up, gives up those that cannot be, and takes them in again.

A lane that is lost is started again. Where that cannot be done, since its machine is gone, it was
started again as often as it may be, or its process has not come up in time, the run ends; or, if it
is elastic, the lane is given up, and the plan is made anew for the others. Between steps an elastic
run looks now and then whether a lane that was given up can be had again. Its process starts beside
the steps, and nobody waits for it.

Knows no workers and no steps: `Run` loads what the plan says.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from m2flow.engine.plan import Plan
from m2flow.errors import RunFailed, UserError
from m2flow.runtime.driver.elastic import ElasticPlan
from m2flow.runtime.driver.pool import LanePool
from m2flow.runtime.driver.recovery import LaneLoss, LaneReturn

LOOK_SECONDS = 20.0
"""How often an elastic run looks whether lanes that it has given up can be had again."""

LASTING_STEPS = 10
"""After so many steps with a lane that was started again, that start no longer counts."""

NO_MACHINE = "its machine is gone"

REFUSED = "it had come back"


class Supervision:
    """Of the lanes of one run.

    Args:
        pool: the lanes.
        restarts: how often each lane may be started again with fewer than `LASTING_STEPS` steps in
            between. One whose machine was gone costs none.
        elastic: makes the plan for other lanes; None where a lane that cannot be started again ends
            the run.
        clock: seconds.
    """

    def __init__(
        self,
        pool: LanePool,
        restarts: int,
        elastic: ElasticPlan | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._most, self._elastic, self._clock = pool, restarts, elastic, clock
        self._begun: Counter[int] = Counter()
        self._steps: Counter[int] = Counter()  # since a lane was last started again
        self._coming: set[int] = set()
        self._ended: set[int] = set()  # for the sake of others, and not up again
        self._first: dict[int, str] = {}
        self._given_up: dict[int, str] = {}
        self._refused: set[int] = set()
        self._planned = () if elastic is None else elastic.lanes
        self._next_look = 0.0

    @property
    def heals(self) -> bool:
        """Whether a run can go on after the loss of a lane at all."""
        return self._pool.can_restart and (self._most > 0 or self._elastic is not None)

    # --- lanes that are lost ----------------------------------------------------------------------

    def may_begin(self, lane: int, reason: str) -> bool:
        """Count a start of a lane that is lost, if it may be started again."""
        self._first.setdefault(lane, reason)
        self._coming.discard(lane)
        self._steps[lane] = 0
        gone = not self._pool.is_here(lane) and self._pool.processes.without_machine([lane])
        if gone or self._begun[lane] >= self._most:
            return False
        self._begun[lane] += 1
        self._coming.add(lane)
        return True

    def is_back(self, lane: int) -> None:
        """A lane whose start was counted is up, with its workers."""
        self._coming.discard(lane)

    def step_is_over(self) -> None:
        """Forget the starts of lanes that have lasted for `LASTING_STEPS` steps since."""
        there = {lane.id for lane in self._pool.lanes} - self._pool.lost.keys() - self._coming
        for lane in there & self._first.keys():
            self._steps[lane] += 1
            if self._steps[lane] >= LASTING_STEPS:
                del self._first[lane], self._begun[lane], self._steps[lane]

    def count(self, error: RunFailed) -> None:
        """Count the lanes that are lost; those that may not be started again are given up.

        Args:
            error: how the loss was heard of.

        Raises:
            RunFailed: a lane was lost again and again, or its machine is gone, and the run is not
                elastic; or none is left.
        """
        lost = dict(self._pool.lost)
        elsewhere = [lane for lane in lost if not self._pool.is_here(lane)]
        gone = self._pool.processes.without_machine(elsewhere) if elsewhere else ()
        hopeless = dict.fromkeys(self._refused & lost.keys(), REFUSED)
        hopeless |= dict.fromkeys(gone, NO_MACHINE)
        self._refused.clear()
        for lane, (reason, _) in lost.items():
            self._first.setdefault(lane, reason)
            self._steps[lane] = 0
            if lane in hopeless and self._elastic is None:
                raise RunFailed(
                    f"lane {lane} was lost: {self._first[lane]}\nthe machine of lane {lane} is gone"
                ) from error
            if lane in hopeless or lane in self._coming | self._ended:
                continue
            if self._begun[lane] < self._most:
                self._begun[lane] += 1
                continue
            hopeless[lane] = self._used_up()
            if self._elastic is None:
                raise RunFailed(
                    f"lane {lane} was lost: {self._first[lane]}\n{hopeless[lane]}, and lost again: "
                    f"{error}"
                ) from error
        self._coming.clear()
        self._give_up(hopeless, error)

    def _used_up(self) -> str:
        if not self._most:
            return "it is not to be started again (`lane_restarts: 0`)"
        return (
            f"it was started again {self._most} times, which is the most (`lane_restarts`) with "
            f"fewer than {LASTING_STEPS} steps in between"
        )

    def bring_back(self, busy: Collection[int]) -> None:
        """Start lanes that are lost again, and busy ones; all of them, if they have process groups.

        Raises:
            RunFailed: they do not come up, and the run is not elastic or none is left.
            UserError: there is no room for them, and the run is not elastic.
        """
        pool, again = self._pool, set(busy)
        while down := self._down() | again:
            lost, again = pool.lost.keys() - self._ended, set()
            try:
                pool.restart(down)
                self._ended.clear()
            except (RunFailed, UserError) as error:
                gone: set[int] = set()
                if self._elastic is not None:  # others may be started without them
                    gone = pool.processes.without_machine(down)
                culprits = gone or lost or down
                self._ended |= down - culprits
                if self._elastic is None or not culprits <= pool.lost.keys():
                    raise
                self._give_up(dict.fromkeys(culprits, str(error).splitlines()[0]), error)

    def _down(self) -> set[int]:
        """Lanes that are to be started again."""
        pool = self._pool
        if pool.world and (pool.lost or pool.world != pool.all_positions):
            return {lane.id for lane in pool.lanes}
        return set(pool.lost)

    def _give_up(self, lanes: Mapping[int, str], error: Exception) -> None:
        """Go on without lanes, each with the reason.

        Raises:
            RunFailed: no lane is left.
        """
        if not lanes:
            return
        self._given_up |= lanes
        for lane in self._pool.processes.without_machine(lanes):
            self._without_machine(lane)
        self._pool.give_up(lanes.keys())
        self._next_look = self._clock() + LOOK_SECONDS
        if not self._pool.lanes:
            (lane, why), *_ = lanes.items()
            raise RunFailed(
                f"lane {lane} was lost: {self._first.get(lane, error)}\n{why}; no lane is left, so "
                "the run cannot go on; `--resume` goes on from the last checkpoint"
            ) from error

    def _without_machine(self, lane: int) -> None:
        """A lane was given up because its machine is gone: no start of it counts."""
        if self._given_up[lane] != NO_MACHINE:
            self._given_up[lane] = NO_MACHINE
            self._begun[lane] = max(0, self._begun[lane] - 1)

    def losses(
        self, lost: Iterable[tuple[int, str, float]], plan: Plan, steps: int
    ) -> list[LaneLoss]:
        """An account of lanes that were lost, now that all workers are up again.

        Args:
            lost: lane, reason, and when that was noticed.
            plan: that the run goes on with.
            steps: that are taken again.
        """
        now, missing = time.time(), self._pool.missing
        return [
            LaneLoss(
                lane,
                why,
                at,
                now - at,
                steps,
                given_up=self._given_up[lane],
                left=self._left(plan),
            )
            if lane in missing
            else LaneLoss(lane, why, at, now - at, steps)
            for lane, why, at in lost
        ]

    def _left(self, plan: Plan) -> str:
        """On what a run goes on, in words."""
        free = [lane for lane in self._pool.lanes if lane.reserved_for is None]
        words = f"{plan.mode} on {len(free)} lane" + "s" * (len(free) > 1)
        wanted = None if self._elastic is None else self._elastic.mode
        if wanted is None or wanted == plan.mode:
            return words
        return f"{words} (too few for {wanted})"

    # --- lanes that come back ---------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether to `take_in` lanes; called between steps, it waits for nothing."""
        pool = self._pool
        missing = pool.missing.keys() & self._given_up.keys()  # and not in an earlier run
        if self._elastic is None or not missing:
            return False
        if self._clock() >= self._next_look:
            self._next_look = self._clock() + LOOK_SECONDS
            for lane in pool.processes.without_machine(missing):
                self._without_machine(lane)
            for lane in missing.difference(pool.processes.awaited):
                free = self._given_up[lane] == NO_MACHINE
                if (free or self._begun[lane] < self._most) and pool.call_back(lane):
                    self._begun[lane] += not free
                    self._given_up[lane] = "it has not come up since"
        return pool.processes.has_news

    def take_in(self) -> dict[int, float]:
        """Have lanes again that have come up; since when each was lost."""
        return {lane: at for lane, (_, at) in self._pool.take_in().items()}

    def refuse(self, lanes: Collection[int], reason: str) -> None:
        """End lanes that were taken in, since no plan can be loaded with them.

        Raises:
            RunFailed: a process has not ended in time.
        """
        self._refused |= set(lanes)
        for lane in lanes:
            self._pool.end(lane, reason)
        self._pool.await_ends(lanes)

    def returns(self, back: Mapping[int, float], plan: Plan, begun: float) -> list[LaneReturn]:
        """An account of lanes that were taken in, now that workers are up on them.

        Args:
            back: what `take_in` has given.
            plan: that the run goes on with.
            begun: when the run has paused for it, in seconds since the epoch.
        """
        seconds, left = time.time() - begun, self._left(plan)
        return [LaneReturn(lane, at, begun, seconds, left) for lane, at in back.items()]

    # --- the plan ---------------------------------------------------------------------------------

    def remade(self, plan: Plan) -> Plan | None:
        """The plan of a step for the lanes that there are; None where `plan` is for these, and
        the last one that was made too.

        Raises:
            RunFailed: there is none.
        """
        if self._elastic is None:
            return None
        present = {lane.id for lane in self._pool.lanes}
        lanes = tuple(lane for lane in self._elastic.lanes if lane.id in present)
        there = {lane.id for lane in lanes} == {lane.id for lane in plan.lanes}
        if there and lanes == self._planned:
            return None
        try:
            made = self._elastic.plan(lanes)
        except UserError as error:
            missing = [
                f"lane {lane} was lost: {why}; {self._given_up[lane]}"
                for lane, (why, _) in self._pool.missing.items()
                if lane in self._given_up
            ]
            ids = ", ".join(str(lane.id) for lane in lanes)
            missing.append(f"no plan for the lanes that are left ({ids}): {error}")
            raise RunFailed("\n".join(missing)) from error
        self._planned = lanes
        return made
