"""`Run`: a flow on its lanes, step by step, and from one plan to another between two steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from m2flow.errors import NoPlanStands, NotLoaded, RunFailed, Stalled, UserError, suggestion
from m2flow.flow.batch import Batch
from m2flow.flow.worker import Worker
from m2flow.runtime.driver.methods import STEP, check_batch
from m2flow.runtime.driver.recovering import FlowThatRecovers
from m2flow.runtime.driver.recovery import BACK, LOST
from m2flow.runtime.driver.runner import StepResult
from m2flow.runtime.lane.exhausted import is_exhaustion

if TYPE_CHECKING:  # the planner is imported where a plan is chosen
    from m2flow.engine.plan import Plan
    from m2flow.runtime.driver.pilot import Pilot


_END = Batch({})
"""Stands for the end of the batches."""


class Run(FlowThatRecovers):
    """A flow on its lanes. Made by `launch`; use it as a context manager, or call `close`.

    Attributes:
        plan: the plan of the steps.
        graph: their graph.
        load_seconds: how long it took to bring the workers up.
        pilot: who has chosen the plan and watches it; None where the plan was given.
        may_heal: asked when lanes are lost; where it says no, they end the run.
        heed: called between two events while steps are waited for; what it raises leaves them open.
    """

    _exhausted = False  # whether there are no further batches

    # --- steps ------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> StepResult:
        """Run one step to its end."""
        return next(iter(self.steps([batch])))

    def steps(self, batches: Iterable[Batch]) -> Iterator[StepResult]:
        """Run a step for each batch; several are in flight where the plan allows staleness.

        Raises:
            RunFailed: the run stopped; the first cause is chained.
            UserError: a stage or a batch was wrong, or the run has ended.
        """
        if not self._runners[STEP].stopped:  # which says more
            self._check_here()
        if isinstance(batches, Batch):
            raise UserError("is one Batch", key="batches", hint="run.step(batch) runs one step")
        source = iter(batches)
        self._recovery.forget_open()
        while True:
            runner, again, self._again = self._runners[STEP], self._again, []
            source = chain(again, source) if again else source
            if self.pilot is not None:
                self.pilot.begins_with_none_in_flight()
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

    def _until_a_pause(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Batches, until something is to be done between two steps for which the next one waits."""
        self._exhausted = False
        self._recovery.pause_is_over()
        while not ((self.pilot and self.pilot.wants_to_look) or self._lanes_come_back):
            self._check_here()  # another run may have been launched since the step before
            self._look_for_snapshot()  # the one of the step before, or there would be none now
            if self._recovery.is_due():
                if not self._saves_at_once:
                    self._recovery.pause()
                    return
                self._begin_snapshot()
            batch = next(batches, _END)
            if batch is _END:
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
        elif self._recovery.is_due():
            self._begin_snapshot()
        else:
            return False
        return True

    def _watched(self, results: Iterator[StepResult]) -> Iterator[StepResult]:
        for result in results:
            disturbed = any(span.name in (LOST, BACK) for span in result.spans)
            disturbed |= self._mender is not None and self._mender.busy  # a lane was missing
            if self.pilot is not None and not disturbed and not result.recalled:
                self.pilot.note(result, self.plan)
            self._recovery.gave(result.step)
            if self._supervision is not None:
                self._supervision.step_is_over()
            self._look_for_snapshot()
            yield result

    def _look(self, pilot: Pilot) -> None:
        """Have the pilot look again, and go over to the plan that it wants next."""
        plan = pilot.next_plan(self)
        if plan is not pilot.plan:
            self._go_over(pilot, plan)
        else:  # what is expected of the same plan may have changed
            self.plan = replace(self.plan, predicted_seconds=plan.predicted_seconds)

    def _go_over(self, pilot: Pilot, plan: Plan) -> bool:
        """Go over to the plan that the pilot wants; whether the run stands under one that has not
        failed, which is another one where that cannot be loaded."""
        try:
            done = self.replan(plan)
        except NotLoaded as error:
            self._runners[STEP].note(str(error).splitlines()[0])
            return not pilot.has_failed
        pilot.gone_over(plan, done.moved, done.seconds)
        return True

    def _taken_back(self, error: RunFailed) -> list[Batch]:
        """Bring lanes back that were lost, or go over to another plan where this one has failed for
        want of memory or time.

        Returns:
            The batches of the steps that are to be taken again.

        Raises:
            RunFailed: `error`, if it is neither, or the steps cannot be taken again.
        """
        while True:
            if self._goes_back(error):
                pilot = self.pilot
                instead = pilot.another(self) if pilot is not None and pilot.has_failed else None
                try:
                    return self._lanes_back(error, instead)
                except RunFailed as again:
                    if not (self._stands and _wants_memory_or_time(again.__cause__)):
                        raise
                    error = again
            try:
                return self._under_another_plan(error)
            except RunFailed as failed:
                if failed is error or not self._goes_back(failed):
                    raise
                error = failed

    def _under_another_plan(self, error: RunFailed) -> list[Batch]:
        """Stop the steps in flight, of which one has failed, and go over to another plan.

        Returns, raises: as `_taken_back`; and
            NoPlanStands: lanes of a process group wait for the one that has failed, or the steps
                are those since a snapshot, taken again.
        """
        step = self._runners[STEP]
        if self.pilot is None or not self._can_discard or not step.unlearnt:
            raise error
        if not _wants_memory_or_time(error.__cause__):
            raise error
        self._settle()
        plan = self.pilot.instead(str(error).splitlines()[0], self)
        if plan is None:
            raise error
        if step.first_open[0] != self._recovery.given:
            raise NoPlanStands(str(error)) from error.__cause__
        batches = self._stopped(error)
        self._discard()
        while not self._go_over(self.pilot, plan):
            plan = self.pilot.another(self)
            if plan is None:
                raise error
        self._recovery.forget_open()
        return batches

    def _stopped(self, error: RunFailed) -> list[Batch]:
        """Stop the steps in flight; their batches."""
        from m2flow.runtime.driver.pool import QUIET_SECONDS

        assert self._pool is not None
        try:
            batches = self._runners[STEP].take_back(QUIET_SECONDS if self._pool.world else None)
        except RunFailed as failed:
            if isinstance(failed.__cause__, Stalled):
                raise NoPlanStands(str(error)) from error.__cause__
            raise
        assert batches is not None, "it has learnt since"
        return batches

    def _discard(self) -> None:
        for name, worker in sorted(self._workers.items()):
            if type(worker).discard is not Worker.discard:
                self.worker_call_everywhere(name, "discard")

    def give_up(self, step: int, seconds: float) -> bool:
        """Stop what is in flight, so that workers are as they were before a step.

        Args:
            step: its number: the results of all steps before it have been taken.
            seconds: longest that lanes may take to stop.

        Returns:
            False if that cannot be: a worker has learnt from the step, or cannot drop what it was
            given, or earlier steps are taken again since a lane was lost.

        Raises:
            RunFailed: a lane does not stop in time.
        """
        runners = [runner for runner in self._runners.values() if runner.busy]
        if self._runners[STEP].first_open[0] != step:
            return False
        if not (self._can_discard and all(runner.unlearnt for runner in runners)):
            return False
        for runner in runners:
            runner.take_back(seconds)
        self._discard()
        return True

    def run_method(self, name: str, batch: Batch) -> StepResult:
        """Run another traced method of the flow, such as "evaluate", between steps.

        Raises:
            UserError: `launch` was not told of the method; the batch is none; the run has ended; or
                steps are in flight, whose results have not been taken.
        """
        self._check_here()
        check_batch(batch)
        if name not in self._runners:
            raise UserError(
                "is no method that was launched",
                key=name,
                hint=f"{suggestion(name, self._runners)} (`launch(also=...)` names further ones)",
            )
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
            UserError: there is no such worker; the run has ended; or there is a limit, and steps
                are in flight, whose results have not been taken.
        """
        self._check_worker(worker)

        def call() -> Any:
            self._bring((worker,), method, self._placements[worker].lanes[:1])
            return self._carrier.worker_call(worker, method, *args)

        return self._lasting(call)

    def worker_call_everywhere(self, worker: str, method: str, *args: Any) -> list[Any]:
        """Call a method of a worker on all of its lanes; the answers in order of rank.

        Otherwise as `worker_call`.
        """
        self._check_worker(worker)

        def call() -> list[Any]:
            self._bring((worker,), method, self._placements[worker].lanes)
            answers: list[Any] = self._carrier.worker_call_everywhere(worker, method, *args)
            return answers

        return self._lasting(call)

    def _check_worker(self, worker: str) -> None:
        self._check_here()
        if worker not in self._workers:
            hint = suggestion(worker, self._workers)
            raise UserError("is no worker of this run", key=worker, hint=hint)


def _wants_memory_or_time(cause: BaseException | None) -> bool:
    """Whether a failure may be the plan's fault: another plan needs less memory, or less time."""
    return isinstance(cause, TimeoutError) or (cause is not None and is_exhaustion(cause))
