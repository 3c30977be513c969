"""`Run`: a flow on its lanes, step by step, and from one plan to another between two steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Self, TypeVar

import psutil

from m2flow.errors import CannotHeal, PlanError, RunFailed, UserError
from m2flow.flow.batch import Batch
from m2flow.flow.worker import Worker
from m2flow.runtime.driver.methods import STEP, Methods, Plans
from m2flow.runtime.driver.recovery import BACK, LOST, LaneLoss, LaneReturn, Recovery, SavedStates
from m2flow.runtime.driver.runner import StepResult
from m2flow.runtime.driver.standing import FlowOnLanes
from m2flow.runtime.lane.exhausted import is_exhaustion

if TYPE_CHECKING:  # a run in one process does without Ray
    from m2flow.runtime.driver.pilot import Pilot
    from m2flow.runtime.driver.pool import LanePool
    from m2flow.runtime.driver.snapshots import SnapshotOnItsWay
    from m2flow.runtime.driver.supervision import Supervision
    from m2flow.runtime.lane.orders import MethodResult

T = TypeVar("T")


class Run(FlowOnLanes):
    """A flow on its lanes. Made by `launch`; use it as a context manager, or call `close`.

    Attributes:
        plan: the plan of the steps.
        graph: their graph.
        load_seconds: how long it took to bring the workers up.
        pilot: who has chosen the plan and watches it; None where the plan was given.
        may_heal: asked when lanes are lost; where it says no, they end the run.
        heed: called between two events while steps are waited for; what it raises leaves them open.
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
            load_seconds=load_seconds,
            load_deadline_seconds=load_deadline_seconds,
            supervision=supervision,
            losses=losses,
        )
        self.pilot, self._owns_pool = pilot, owns_pool
        self._recovery = self._new_recovery(first_step, snapshot_every)
        self._pending_snapshot: SnapshotOnItsWay | None = None
        self._again: list[Batch] = []
        self._exhausted = False
        gc.freeze()  # what is there stays: to go through all of torch would stop the control loop

    # --- steps ------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> StepResult:
        """Run one step to its end."""
        return next(iter(self.steps([batch])))

    def steps(self, batches: Iterable[Batch]) -> Iterator[StepResult]:
        """Run a step for each batch; several are in flight where the plan allows staleness.

        Raises:
            RunFailed: the run stopped; the first cause is chained.
            UserError: a stage or a batch was wrong.
        """
        source = iter(batches)
        self._recovery.forget_open()
        while True:
            runner, again, self._again = self._runners[STEP], self._again, []
            source = chain(again, source)
            try:
                for result in self._watched(runner.run(self._until_a_pause(source))):
                    yield result
                    if runner is not self._runners[STEP]:
                        break  # a lane was lost while nobody asked for steps
            except RunFailed as error:
                self._explain(error)
                self._again = self._taken_back(error)
                continue
            if runner is not self._runners[STEP] or self._lasting(self._between_steps):
                continue
            if self._exhausted and not self._again:  # or a lane was lost before what was to be done
                return

    def _explain(self, error: RunFailed) -> None:
        """Add what lanes are doing to a failure that is a stall."""
        if self._pool is not None:
            from m2flow.runtime.driver.stalled import explain

            explain(error, self._pool)

    def _until_a_pause(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Batches, until something is to be done between two steps for which the next one waits."""
        self._exhausted = False
        while not ((self.pilot and self.pilot.wants_to_look) or self._lanes_come_back):
            self._look_for_snapshot()  # the one of the step before, or there would be none now
            if self._recovery.is_due:
                if not self._saves_at_once:
                    self._recovery.pause()
                    return
                self._begin_snapshot()
            batch = next(batches, None)
            if batch is None:
                self._exhausted = True
                return
            self._recovery.feed(self._methods.checked(batch))
            yield batch

    def _between_steps(self) -> bool:
        """Take lanes in, look at the plan, or begin a snapshot; False if nothing was to be done."""
        if self._lanes_come_back:
            self._take_in()
        elif self.pilot is not None and self.pilot.wants_to_look:
            self._look(self.pilot)
        elif self._recovery.is_due:
            self._begin_snapshot()
        else:
            return False
        return True

    def _watched(self, results: Iterator[StepResult]) -> Iterator[StepResult]:
        for result in results:
            disturbed = any(span.name in (LOST, BACK) for span in result.spans)
            if self.pilot is not None and not disturbed and not result.recalled:
                self.pilot.note(result, self.plan)
            self._recovery.gave(result.step)
            if self._supervision is not None:
                self._supervision.step_is_over()
            self._look_for_snapshot()
            if self._recovery.is_due and self._saves_at_once:
                self._begin_snapshot()  # beside what is done with the result
            yield result

    def _look(self, pilot: Pilot) -> None:
        """Have the pilot look again, and go over to the plan that it wants next."""
        plan = pilot.next_plan(self)
        if plan is not pilot.plan:
            done = self.replan(plan)
            pilot.gone_over(plan, done.moved, done.seconds)
        else:  # what is expected of the same plan may have changed
            self.plan = replace(self.plan, predicted_seconds=plan.predicted_seconds)

    def _taken_back(self, error: RunFailed) -> list[Batch]:
        """Bring lanes back that were lost, or go over to another plan where this one has failed for
        want of memory or time.

        Returns:
            The batches of the steps that are to be taken again.

        Raises:
            RunFailed: `error`, if it is neither, or the steps cannot be taken again.
        """
        if self._goes_back(error):
            return self._lanes_back(error)
        if (
            self.pilot is None
            or not self._can_discard
            or not _wants_memory_or_time(error.__cause__)
        ):
            raise error
        self._settle()
        plan = self.pilot.instead(str(error).splitlines()[0], self)
        batches = None if plan is None else self._runners[STEP].take_back()
        if plan is None or batches is None:
            raise error
        self._discard()
        done = self.replan(plan)
        self.pilot.gone_over(plan, done.moved, done.seconds)
        self._recovery.forget_open()
        return batches

    @property
    def _can_discard(self) -> bool:
        """Whether learners can drop what they have folded in, so that a step can be taken again."""
        learners = {node.worker for node in self.graph.nodes if node.accumulates}
        return learners <= self._workers.keys() and all(
            type(self._workers[worker]).discard is not Worker.discard for worker in learners
        )

    def _discard(self) -> None:
        for name, worker in sorted(self._workers.items()):
            if type(worker).discard is not Worker.discard:
                self.worker_call_everywhere(name, "discard")

    def give_up(self, seconds: float) -> bool:
        """Stop what is in flight, so that workers are as they were when the last result was given.

        Args:
            seconds: longest that lanes may take to stop.

        Returns:
            False if that cannot be: a worker has learnt since, or cannot drop what it was given.

        Raises:
            RunFailed: a lane does not stop in time.
        """
        runners = [runner for runner in self._runners.values() if runner.busy]
        if not (self._can_discard and all(runner.unlearnt for runner in runners)):
            return False
        for runner in runners:
            runner.take_back(seconds)
        self._discard()
        return True

    def run_method(self, name: str, batch: Batch) -> StepResult:
        """Run another traced method of the flow, such as "evaluate", between steps.

        Raises:
            UserError: steps are in flight, whose results have not been taken.
        """
        if self._runners[STEP].busy:
            raise UserError(
                "steps are in flight", key=name, hint="take all results of `steps` before"
            )
        return self._lasting(lambda: self._runners[name].step(batch))

    # --- beside the steps -------------------------------------------------------------------------

    def worker_call(self, worker: str, method: str, *args: Any) -> Any:
        """Call a method of a worker that is no stage (such as `save`), on its first lane.

        Under a limit of memory the worker is brought in before.

        Raises:
            UserError: there is a limit, and steps are in flight, whose results have not been taken.
        """

        def call() -> Any:
            self._bring((worker,), method, self._placements[worker].lanes[:1])
            return self._carrier.worker_call(worker, method, *args)

        return self._lasting(call)

    def worker_call_everywhere(self, worker: str, method: str, *args: Any) -> list[Any]:
        """Call a method of a worker on all of its lanes; the answers in order of rank.

        Otherwise as `worker_call`.
        """

        def call() -> list[Any]:
            self._bring((worker,), method, self._placements[worker].lanes)
            answers: list[Any] = self._carrier.worker_call_everywhere(worker, method, *args)
            return answers

        return self._lasting(call)

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

    def _new_recovery(self, first_step: int, snapshot_every: int | None) -> Recovery:
        spots = self._placements.items()
        unsaved = [name for name, _ in spots if not self.movable(name)]
        num_bytes = sum(
            spot.state_bytes * len(spot.replicas[0]) for name, spot in spots if self._saves(name)
        )
        free = psutil.virtual_memory().available
        heals = self._supervision is not None and self._supervision.heals
        return Recovery(first_step, unsaved, num_bytes, free, heals, snapshot_every)

    @property
    def _saves_at_once(self) -> bool:
        """Whether the states to be saved are resident, and between two steps.

        The result of the step before may still be on its way here.
        """
        limited = any(
            self._residency.limited(lane) for gang in self._savers().values() for lane in gang
        )
        return not limited and not self._runners[STEP].num_open

    def _savers(self, without: Collection[int] = ()) -> dict[str, tuple[int, ...]]:
        """Workers whose states a snapshot holds, and the lanes of the replica that saves: the first
        one with none of the lanes `without`, or no lanes if there is none."""
        return {
            name: next((gang for gang in spot.replicas if not {*gang} & {*without}), ())
            for name, spot in self._placements.items()
            if self._saves(name)
        }

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
        except (RunFailed, PeerLost):  # of the lane that was lost its carrier hears
            self._recovery.give_up()
        except (OSError, MemoryError) as error:
            self._recovery.give_up(f"a snapshot has failed: {error}")
        else:
            self._recovery.keep(states, coming.seconds)

    def _settle(self) -> None:
        super()._settle()
        while self._pending_snapshot is not None and self._recovery.can_keep:
            self._look_for_snapshot()
            if self._pending_snapshot is not None:
                self._active.advance()

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
        back; nobody else has anything to do with it."""
        if self._mender is None or self._pool is None or not self._pool.lost or cannot_heal(error):
            return False
        self._active.advance()
        return self._mender.busy and not self._active.engine.failed

    def _goes_back(self, error: RunFailed) -> bool:
        """Whether the run may go back to its last snapshot: lanes were lost, and not all that they
        held can be had otherwise."""
        if self._pool is None or not self._recovery.heals or not self.may_heal():
            return False
        from m2flow.runtime.driver import moving

        return cannot_heal(error) or bool(moving.lost_lanes(self._pool, error))

    def _lanes_back(self, error: RunFailed) -> list[Batch]:
        """Start lanes again that were lost, or do without them; go back to the last snapshot, and
        take the steps since then again.

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
            busy = moving.stopped(self._pool, self._carrier, self._runners)
            self._without_coming_snapshot()
            if not heard:
                self._save_what_is_left(busy)
            lost = self._pool.lost.items() or [
                (one.lane, (one.reason, one.at)) for one in self._losses[-1:]
            ]
            heard |= {(lane, at): why for lane, (why, at) in lost}
            self._supervision.count(error)
            snapshot = self._recovery.back_to(error)
            done, others = self._recovery.since_snapshot()
            try:
                self._go_back(snapshot, busy)
                losses = [(lane, why, at) for (lane, at), why in heard.items()]
                new = self._supervision.losses(losses, self.plan, len(done))
                for _ in self._runners[STEP].run(done):
                    pass
            except RunFailed as again:
                error = again
                continue
            self._recovery.forget_open()
            self._losses += new
            self._runners[STEP].go_on(begun, [loss.span() for loss in new])
            return others
        raise error

    def _without_coming_snapshot(self) -> None:
        """Keep the snapshot that is on its way if it is here, and do without it if not."""
        self._look_for_snapshot()
        if self._pending_snapshot is not None:
            self._pending_snapshot.drop()
            self._pending_snapshot = None
            self._recovery.give_up()

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
        if not (recovery.is_behind and between and savers and all(savers.values())):
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

    def _go_back(self, snapshot: SavedStates, busy: Collection[int]) -> None:
        """Bring all workers up as they were at a snapshot, on the lanes that there are to be.

        Args:
            snapshot: what to go back to.
            busy: lanes that have not stopped in time, which are started again as well.
        """
        from m2flow.runtime.driver.carrier import RayCarrier

        pool, supervision, kept = self._pool, self._supervision, self.plan
        assert pool is not None
        assert supervision is not None
        supervision.bring_back(busy)
        plans = self._plans
        try:
            if (remade := supervision.remade(plans.everything)) is not None:
                plans = self._methods.planned(remade)
            next_steps = {name: runner.first_open[0] for name, runner in self._runners.items()}
            carrier = RayCarrier(
                pool,
                self._methods.graphs,
                plans.everything,
                self._workers,
                plans.by_method,
                snapshot.step,
                load_seconds=self._load_deadline,
                states=snapshot.states,
            )
            plans = plans.sized(self._state_bytes | carrier.state_bytes, self._methods.graphs)
        except PlanError as why:  # it was made here
            raise RunFailed(f"no plan for the lanes that are left: {why}") from why
        self._take_up(plans, carrier, next_steps | {STEP: snapshot.step})
        if remade is None:
            self.plan = kept
        elif self.pilot is not None:
            self.pilot.gone_over(remade, (), 0.0, lanes=True)
        if snapshot.states:
            self._publish_to(tuple(self._placements), snapshot.step)

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
        begun = time.time()
        back = self._supervision.take_in()
        try:
            plan = self._supervision.remade(self._plans.everything)
        except RunFailed:  # they are too few for a plan, and stay idle
            return
        if plan is None:
            return
        done = self.replan(plan)
        if self.pilot is not None:
            self.pilot.gone_over(plan, done.moved, done.seconds, lanes=True)
        new = self._supervision.returns(back, self.plan, begun)
        self._recovery.returns += new
        self._runners[STEP].go_on(begun, [one.span() for one in new])

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the lanes, and the Ray cluster, if they were started for this run."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        gc.unfreeze()
        self._carrier.close()
        if self._pool is not None and self._owns_pool:
            self._pool.__exit__(*error)


def cannot_heal(error: RunFailed) -> bool:
    """Whether a step has failed because what was lost could not be made again."""
    return isinstance(error, CannotHeal) or isinstance(error.__cause__, CannotHeal)


def _wants_memory_or_time(cause: BaseException | None) -> bool:
    """Whether a failure may be the plan's fault: another plan needs less memory, or less time."""
    return isinstance(cause, TimeoutError) or (cause is not None and is_exhaustion(cause))
