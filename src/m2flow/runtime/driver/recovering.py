"""`FlowThatRecovers`: a flow on its lanes that goes back to its last snapshot where lanes are lost.

Snapshots are begun between two steps and come in beside the next ones; `Recovery` has the books.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from m2flow.engine.plan import Plan
from m2flow.errors import CannotHeal, NoPlanStands, NotLoaded, RunFailed, UserError
from m2flow.flow.batch import Batch
from m2flow.flow.worker import Worker
from m2flow.plan.machine import usable_memory
from m2flow.runtime.driver.methods import STEP, Methods, Plans, check_lanes
from m2flow.runtime.driver.recovery import LaneLoss, LaneReturn, Recovery, SavedStates
from m2flow.runtime.driver.standing import FlowOnLanes, Replanned, cause_of, not_loaded
from m2flow.runtime.lane.exhausted import is_exhaustion

if TYPE_CHECKING:  # a run in one process does without Ray
    from m2flow.runtime.driver.pilot import Pilot
    from m2flow.runtime.driver.pool import LanePool
    from m2flow.runtime.driver.snapshots import SnapshotOnItsWay
    from m2flow.runtime.driver.supervision import Supervision
    from m2flow.runtime.lane.orders import MethodResult

T = TypeVar("T")


class FlowThatRecovers(FlowOnLanes):
    """The workers of a run, with snapshots of those that learn.

    Args:
        pilot: is told of plans for other lanes; None where the plan was given.
        snapshot_every: steps from one snapshot to the next at most; None for no limit.
        others: as `FlowOnLanes` has them.
    """

    def __init__(
        self,
        methods: Methods,
        plans: Plans,
        workers: Mapping[str, Worker],
        carrier: Any,
        first_step: int,
        *,
        pool: LanePool | None = None,
        owns_pool: bool = False,
        load_seconds: float = 0.0,
        load_deadline_seconds: float = 0.0,
        pilot: Pilot | None = None,
        supervision: Supervision | None = None,
        losses: Sequence[LaneLoss] = (),
        snapshot_every: int | None = None,
    ) -> None:
        super().__init__(
            methods,
            plans,
            workers,
            carrier,
            first_step,
            pool=pool,
            owns_pool=owns_pool,
            load_seconds=load_seconds,
            load_deadline_seconds=load_deadline_seconds,
            supervision=supervision,
            losses=losses,
        )
        self.pilot = pilot
        self._recovery = self._new_recovery(first_step, snapshot_every)
        self._runners[STEP].note(self._recovery.warning)
        self._pending_snapshot: SnapshotOnItsWay | None = None
        self._again: list[Batch] = []

    # --- snapshots --------------------------------------------------------------------------------

    def _new_recovery(self, first_step: int, snapshot_every: int | None) -> Recovery:
        spots = self._placements.items()
        unsaved = [name for name, _ in spots if not self.movable(name)]
        sizes = {
            name: spot.state_bytes * len(spot.replicas[0])
            for name, spot in spots
            if self._saves(name)
        }
        # Each lane elsewhere is sent one of its own, and there is one more while it is packed.
        away = {name: self._lanes_away(name) for name in sizes}
        sent = sum(size * (away[name] + 1) for name, size in sizes.items() if away[name])
        free, _ = usable_memory()
        heals = self._supervision is not None and self._supervision.heals
        return Recovery(
            first_step,
            unsaved,
            sum(sizes.values()),
            free,
            heals,
            snapshot_every,
            sent_bytes=sent,
        )

    def _lanes_away(self, worker: str) -> int:
        """How many lanes of a worker are on other machines than the launcher."""
        pool, lanes = self._pool, self._placements[worker].lanes
        return 0 if pool is None else sum(not pool.is_here(lane) for lane in lanes)

    def _savers(self, without: Collection[int] = ()) -> dict[str, tuple[int, ...]]:
        """Workers whose states a snapshot holds, and the lanes of the replica that saves: the first
        one with none of the lanes `without`, or no lanes if there is none."""
        return {
            name: next((gang for gang in spot.replicas if not {*gang} & {*without}), ())
            for name, spot in self._placements.items()
            if self._saves(name)
        }

    @property
    def _saves_at_once(self) -> bool:
        """Whether the states to be saved are resident, and between two steps.

        The weights and the result of the step before may still be on their way.
        """
        return self._runners[STEP].is_between_steps and not any(
            self._residency.limited(lane) for gang in self._savers().values() for lane in gang
        )

    def _between_events(self) -> None:
        """Have workers save as soon as they have done a step, while its weights go out and its
        result comes: a lane that is lost after the result was told has nothing to take again.
        Steps that overlap leave no such time."""
        super()._between_events()
        step = self._runners[STEP]
        if step.num_open and step.is_between_steps and not self.plan.max_staleness:
            self._look_for_snapshot()  # the one before, or there would be none now
            if self._recovery.is_due(step.next_step) and self._saves_at_once:
                self._begin_snapshot()

    def _begin_snapshot(self) -> None:
        """Have workers save their states, and go on meanwhile."""
        from m2flow.runtime.driver.snapshots import SnapshotOnItsWay

        assert self._pool is not None
        self._pending_snapshot = SnapshotOnItsWay(
            self._pool,
            self._savers(),
            self._bring,
            self.plan.deadline_seconds,
        )
        self._recovery.begin(self._runners[STEP].next_step)

    def _look_for_snapshot(self) -> None:
        """Keep the snapshot that is on its way, if it is here."""
        from m2flow.runtime.transport.peering import PeerLost

        coming = self._pending_snapshot
        if coming is None or not self._recovery.can_keep or not coming.is_over:
            return
        self._pending_snapshot = None
        try:
            states = coming.states()
        except (RunFailed, PeerLost, TimeoutError):
            # Of a lane that was lost its carrier hears. One that is late may have saved in time and
            # nobody has listened: another snapshot is taken.
            self._recovery.give_up()
        except Exception as error:
            if not (isinstance(error, OSError) or is_exhaustion(error)):
                raise
            self._recovery.give_up(f"the last one has failed: {error}")
            self._runners[STEP].note(self._recovery.warning)
        else:
            self._recovery.keep(states, coming.seconds)

    def _without_coming_snapshot(self) -> None:
        """Keep the snapshot that is on its way if it is here, and do without it if not."""
        self._look_for_snapshot()
        if self._pending_snapshot is not None:
            self._pending_snapshot.drop()
            self._pending_snapshot = None
            self._recovery.give_up()

    def _settle(self) -> None:
        super()._settle()
        while self._pending_snapshot is not None and self._recovery.can_keep:
            self._look_for_snapshot()
            if self._pending_snapshot is not None:
                self._active.advance()

    # --- lanes that are lost ----------------------------------------------------------------------

    @property
    def losses(self) -> tuple[LaneLoss, ...]:
        """The lanes that were lost, and are back or given up, in order of time."""
        return tuple(self._losses)

    @property
    def returns(self) -> tuple[LaneReturn, ...]:
        """The lanes that were given up and are back, in order of time."""
        return tuple(self._recovery.returns)

    @property
    def snapshot_seconds(self) -> float:
        """For how long snapshots held lanes up."""
        return self._recovery.snapshot_seconds

    @property
    def missing(self) -> int:
        """How many lanes the run goes without."""
        return 0 if self._pool is None else len(self._pool.missing)

    def _lasting(self, work: Callable[[], T]) -> T:
        """Do something between steps; once more whenever a lane was lost meanwhile."""
        while True:
            try:
                self._settle()
                return work()
            except RunFailed as error:
                failure = error
            try:
                if self._comes_back(failure):
                    continue
            except RunFailed as error:
                failure = error
            if not self._goes_back(failure):
                self._explain(failure)
                raise failure
            self._again += self._lanes_back(failure)

    def _comes_back(self, error: RunFailed) -> bool:
        """Whether what failed beside the steps may be done again, once the lanes that were lost are
        back; nobody else has anything to do with it. Where weights were on their way to workers
        that were moved, nobody knows which of them have come."""
        mender, pool = self._mender, self._pool
        if mender is None or pool is None or not pool.lost or cannot_heal(error):
            return False
        if not self._published:
            return False
        self._active.advance()
        return mender.busy and mender.has_all(pool.lost) and not self._active.engine.failed

    def _goes_back(self, error: RunFailed) -> bool:
        """Whether the run may go back to its last snapshot: lanes were lost, and not all that they
        held can be had otherwise."""
        if self._pool is None or not self._recovery.heals or not self.may_heal():
            return False
        from m2flow.runtime.driver import moving

        return cannot_heal(error) or moving.comes_of_a_loss(self._pool, error)

    def _lanes_back(self, error: RunFailed, instead: Plan | None = None) -> list[Batch]:
        """Start lanes again that were lost, or do without them; go back to the last snapshot, and
        take the steps since then again.

        Args:
            error: how it was heard of.
            instead: the plan to go on under, unless the lanes are others now.

        Returns:
            The batches of the steps whose results were not given, which are left to be taken.

        Raises:
            RunFailed: there is no way back.
        """
        assert self._supervision is not None
        assert self._pool is not None
        from m2flow.runtime.driver import moving

        _, begun = self._runners[STEP].first_open
        heard: dict[tuple[int, float], str] = {}
        while self._goes_back(error):
            self._pool.hasten_restart()
            if isinstance(error, NoPlanStands):  # they may wait, or be left with half of one
                busy = {lane.id for lane in self._pool.lanes} - self._pool.lost.keys()
            else:
                busy = moving.stopped(self._pool, self._carrier, self._runners)
            self._without_coming_snapshot()
            if not heard:
                self._save_what_is_left(busy)
            before = () if isinstance(error, NoPlanStands) else self._losses[-1:]
            lost = self._pool.lost.items() or [(one.lane, (one.reason, one.at)) for one in before]
            heard |= {(lane, at): why for lane, (why, at) in lost}
            self._supervision.count(error)
            snapshot = self._recovery.back_to(error)
            done, others = self._recovery.since_snapshot()
            try:
                self._go_back(snapshot, busy, instead)
                instead = None
                losses = [(lane, why, at) for (lane, at), why in heard.items()]
                new = self._supervision.losses(losses, self.plan, len(done))
                for _ in self._runners[STEP].run(done):
                    pass
            except NoPlanStands as again:  # the plan cannot be loaded
                error, instead = again, None if self.pilot is None else self.pilot.another()
                if instead is None:
                    raise RunFailed(str(again)) from again.__cause__
                continue
            except RunFailed as again:
                error = again
                continue
            self._recovery.forget_open()
            self._losses += new
            self._runners[STEP].go_on(begun, [loss.span() for loss in new])
            return others
        raise error

    def _save_what_is_left(self, busy: Collection[int]) -> None:
        """Go back no further than to what replicas that are left hold, if that is a state between
        two steps. Nobody waits for them longer than the steps since the snapshot took.

        Args:
            busy: lanes that have not stopped in time.
        """
        from m2flow.runtime.driver import moving
        from m2flow.runtime.driver.pool import QUIET_SECONDS
        from m2flow.runtime.driver.snapshots import SnapshotOnItsWay

        pool, recovery, step = self._pool, self._recovery, self._runners[STEP]
        assert pool is not None
        between = step.unlearnt and step.first_open[0] == recovery.given and self._can_discard
        savers = self._savers(without={*pool.lost, *busy})
        there = self._stands and bool(savers) and all(savers.values())
        if not (recovery.is_behind and between and there):
            return
        lanes = {lane for gang in savers.values() for lane in gang}
        seconds = min(QUIET_SECONDS, recovery.seconds_since)
        if moving.stop(pool, self._carrier, self._runners, lanes, seconds):
            return
        dropped: list[Future[MethodResult]] = []

        def bring(workers: Sequence[str], _: str, lanes: Sequence[int]) -> None:
            self._bring_idle(workers, lanes)
            for worker in workers:
                dropped.extend(moving.discard_later(pool, worker, lanes))

        saved = SnapshotOnItsWay(pool, savers, bring, self.plan.deadline_seconds)
        while not saved.is_over:
            pool.receive(0.1)
        try:
            states = saved.states()
            if not any(answer.result(timeout=0).raised for answer in dropped):
                recovery.take_over(states)
        except Exception:  # noqa: BLE001 - whatever it is, there is the last snapshot
            return

    @property
    def _can_discard(self) -> bool:
        """Whether learners can drop what they have folded in, so that a step can be taken again."""
        learners = {node.worker for node in self.graph.nodes if node.accumulates}
        return learners <= self._workers.keys() and all(
            type(self._workers[worker]).discard is not Worker.discard for worker in learners
        )

    def _go_back(self, snapshot: SavedStates, busy: Collection[int], instead: Plan | None) -> None:
        """Bring all workers up as they were at a snapshot, on the lanes that there are to be.

        Args:
            snapshot: what to go back to.
            busy: lanes that have not stopped in time, which are started again as well.
            instead: as of `_lanes_back`.

        Raises:
            NoPlanStands: workers could not be brought up under the plan, which a pilot rules out.
            RunFailed: a lane was lost, or there is no plan for the lanes that are left.
        """
        pool, supervision, kept = self._pool, self._supervision, self.plan
        assert pool is not None
        assert supervision is not None
        supervision.bring_back(busy)
        plans = self._plans
        try:
            remade = supervision.remade(plans.everything)
            if (other := remade or instead) is not None:
                plans = self._methods.planned(other)
                check_lanes(plans.everything, pool)
        except UserError as why:  # it was made here
            raise RunFailed(f"no plan for the lanes that are left: {why}") from why
        self._stands = False  # until all lanes have gone back
        next_steps = {name: runner.first_open[0] for name, runner in self._runners.items()}
        next_steps[STEP] = snapshot.step
        refused = self._refusal(plans, next_steps, states=snapshot.states)
        if refused is not None:
            reason = not_loaded(other or kept, refused)
            if self.pilot is not None:
                self.pilot.refuse(other or self.pilot.plan, reason.splitlines()[0])
            raise NoPlanStands(reason) from cause_of(refused)
        if other is None:
            self.plan = kept
        elif self.pilot is not None:
            self.pilot.gone_over(other, (), 0.0, lanes=remade is not None)
        if self.pilot is not None:
            self.pilot.begins_with_none_in_flight(cold=True)
        if snapshot.states:
            self._publish_to(tuple(self._placements), snapshot.step)

    def _explain(self, error: RunFailed) -> None:
        """Add what lanes are doing to a failure that is a stall."""
        if self._pool is not None:
            from m2flow.runtime.driver.stalled import explain

            explain(error, self._pool)

    def replan(self, plan: Plan) -> Replanned:
        """Go on under another plan; where none is loaded then, go back to the last snapshot, under
        the plan before or, if that has failed as well, one that has not.

        A plan that cannot be loaded the pilot rules out.
        """
        pilot = self.pilot
        try:
            return super().replan(plan)
        except (NotLoaded, NoPlanStands) as error:
            if pilot is not None:
                pilot.refuse(plan, str(error).splitlines()[0])
            if isinstance(error, NotLoaded) or not self._goes_back(error):
                raise
            instead = None
            if pilot is not None and pilot.has_failed:  # the plan before as well
                instead = pilot.another(self)
                if instead is None:
                    raise RunFailed(str(error)) from error.__cause__
            self._again += self._lanes_back(error, instead)
            raise NotLoaded(str(error)) from error.__cause__

    # --- lanes that are there again ---------------------------------------------------------------

    @property
    def _lanes_come_back(self) -> bool:
        """Whether lanes that were given up may be there again."""
        return (
            self._supervision is not None
            and self._recovery.saves
            and self.may_heal()
            and self._supervision.has_news
        )

    def _take_in(self) -> None:
        """Go on with lanes that have come back, under a plan for all that there are."""
        assert self._supervision is not None
        assert self._pool is not None
        begun = time.time()
        back = self._supervision.take_in()
        try:
            plan = self._supervision.remade(self._plans.everything)
            if plan is None:
                return
            check_lanes(self._methods.planned(plan).everything, self._pool)
        except (RunFailed, UserError):  # they are too few for a plan, and stay idle
            return
        try:
            done = self._replanned(plan, falls_back=False)
        except (NotLoaded, NoPlanStands) as error:
            why = str(error).splitlines()[0]
            if self.pilot is not None:
                self.pilot.refuse(plan, why)
            self._supervision.refuse(back, why)
            raise NoPlanStands(str(error)) from error.__cause__
        if self.pilot is not None:
            self.pilot.gone_over(plan, done.moved, done.seconds, lanes=True)
        new = self._supervision.returns(back, self.plan, begun)
        self._recovery.returns += new
        self._runners[STEP].go_on(begun, [one.span() for one in new])


def cannot_heal(error: RunFailed) -> bool:
    """Whether a step has failed because what was lost could not be made again."""
    return isinstance(error, CannotHeal) or isinstance(error.__cause__, CannotHeal)
