"""`Runner`: feeds steps into engines, has their commands carried out, and gives results back.

The loop is the same whatever carries the commands out (one process, Ray): it knows no placement
and no payload. Every wait has a deadline, because the engine is told the time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from m2flow.engine.core import Engine
from m2flow.engine.messages import (
    AbortCall,
    CallFinished,
    Command,
    CompleteStep,
    DropFolded,
    Event,
    ExportWeights,
    FailRun,
    InstallWeights,
    MoveFailed,
    Recalled,
    RunFinish,
    StepSubmitted,
    Tick,
)
from m2flow.engine.plan import Plan
from m2flow.engine.residency import Residency
from m2flow.engine.spans import Span
from m2flow.engine.steps import check_items
from m2flow.errors import CannotHeal, RunFailed, UserError
from m2flow.flow.batch import Batch
from m2flow.flow.graph import SOURCE, FlowGraph
from m2flow.runtime.driver.journal import Kept, joined, nothing_kept
from m2flow.runtime.lane.reports import Published, Report, item_lengths

AWAY_SECONDS = 5.0
"""If nobody has asked for the lanes' reports for so long, their silence is not judged at once."""


class Carrier(Protocol):
    """Carries out commands on lanes."""

    def submit(self, flow: str, step: int, batch: Batch, recalled: Mapping[int, Batch]) -> None:
        """Make a step's source items readable for the lanes, and by stage what is recalled."""
        ...

    def carry_out(self, flow: str, command: Command) -> None:
        """Start a command, without waiting for it."""
        ...

    def wait(self, seconds: float) -> list[Report]:
        """Return the reports that have come; wait for the first, but no longer than `seconds`."""
        ...

    def collect(self, flow: str, command: CompleteStep) -> Future[Batch]:
        """The items that a step returned, as soon as they are here; `wait` returns then."""
        ...

    def take_back(
        self, flow: str, steps: Iterable[int], calls: Iterable[AbortCall], seconds: float
    ) -> None:
        """Stop calls, wait until all lanes are quiet, and let go of what steps have made."""
        ...

    def drop(self, flow: str, step: int) -> None:
        """What a step returned was read: its payloads may go."""
        ...


@dataclass(slots=True)
class StepResult:
    """A step that is done.

    Attributes:
        step: its number.
        output: the items that the flow's method returned, in order of item.
        metrics: what the `finish` of its accumulating stages returned: the mean over mini-batches.
            Names that several stages use are told apart: `worker/name`, or `worker.method/name`
            where they are stages of one worker.
        spans: what the lanes did for it, and between it and the step before.
        started: when it was submitted or, if that was later, when the step before it ended; in
            seconds of the clock of the spans.
        seconds: from `started` to its end, so that the seconds of steps that overlap add up to the
            time that the run takes; by a clock that nobody sets.
        version: version of the weights after it.
        staleness: mean version lag of the items that ran on published weights, or None.
        published: for each worker that publishes its weights, the bytes and the seconds that this
            took after the step, over all lanes.
        recalled: rollouts that were there already, when the step was run again.
        notes: what people should know.
    """

    step: int
    output: Batch
    metrics: dict[str, float]
    spans: list[Span]
    started: float
    seconds: float
    version: int
    staleness: float | None
    published: dict[str, Published] = field(default_factory=dict)
    recalled: int = 0
    notes: tuple[str, ...] = ()

    def stage_seconds(self) -> dict[str, float]:
        """Stage name to seconds of lanes spent in it."""
        totals: dict[str, float] = {}
        for span in self.spans:
            if span.kind in ("call", "finish"):
                totals[span.name] = totals.get(span.name, 0.0) + span.seconds
        return totals


@dataclass(slots=True)
class _Open:
    batch: Batch
    begun: float
    metrics: dict[int, list[Mapping[str, float]]] = field(default_factory=dict)
    published: dict[str, Published] = field(default_factory=dict)
    recalled: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, more: Published) -> None:
        so_far = self.published.get(more.source, Published(more.source, 0, 0.0))
        self.published[more.source] = Published(
            more.source, so_far.num_bytes + more.num_bytes, so_far.seconds + more.seconds
        )


class Runner:
    """Runs steps of one traced method under one plan.

    Args:
        name: the method's name.
        graph, plan: what to run and how.
        carrier: carries out the commands.
        first_step: number of the first step.
        residency: shared by the runners of one run; see `Engine`.
        clock: seconds, by which deadlines are judged and steps are measured; it never goes back.
        recall: what need not be made in a step, by the step's number and its source items.
        heal: whether the carrier may bring lanes back while a step goes on.
        heed: called between two events while steps are waited for; what it raises leaves them open.

    Attributes:
        untold: what people are told with the next result.
    """

    def __init__(
        self,
        name: str,
        graph: FlowGraph,
        plan: Plan,
        carrier: Carrier,
        first_step: int = 0,
        residency: Residency | None = None,
        clock: Callable[[], float] = time.monotonic,
        recall: Callable[[int, int], Sequence[Kept]] = nothing_kept,
        *,
        heal: bool = False,
        heed: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.graph, self.plan, self.carrier = name, graph, plan, carrier
        self.engine = Engine(graph, plan, first_step, residency, heal=heal)
        self.next_step = first_step
        self._clock, self._attended = clock, clock()
        self._recall, self._heed, self.untold = recall, heed, list[str]()
        self._open: dict[int, _Open] = {}
        self._spans: list[Span] = []
        self._last_end: float | None = None
        self._begun: float | None = None
        self._sources: dict[str, set[int]] = {}  # by metric, the stages that have given it
        self._broken = False  # waiting for the lanes has ended with an exception
        self._astray = False  # a worker is neither here nor there
        self._learnt = first_step - 1  # the newest step that workers have learnt something from
        self._collecting: deque[tuple[StepResult, Future[Batch]]] = deque()

    def run(self, batches: Iterable[Batch]) -> Iterator[StepResult]:
        """Run one step for each batch of source items, in order.

        As many steps are in flight as the plan's staleness allows; results come in order of step.

        Raises:
            RunFailed: the run stopped, now or before; the first cause is chained.
            UserError: a stage was wrong; or a batch, once the results of the steps before it have
                been taken, and further steps can be run; or steps of an earlier call are still in
                flight, because their results have not been taken.
        """
        if self.stopped:
            raise RunFailed("the run has stopped already; launch the flow again")
        if self.busy:
            raise UserError(
                "steps of an earlier call are still in flight",
                key=self.name,
                value=sorted([*self._open, *(result.step for result, _ in self._collecting)]),
                hint="take all of its results before you start another one",
            )
        source: Iterator[Batch] | None = iter(batches)
        refused: UserError | None = None
        while True:
            while source is not None and len(self._open) <= self.plan.max_staleness:
                try:
                    batch = next(source, None)
                except UserError as error:  # told once the steps before it have ended
                    source, refused = None, error
                    continue
                if batch is None:
                    source = None
                    continue
                try:
                    self._submit(batch)
                except _Refused as error:
                    source, refused = None, error.cause
            if not self.busy:
                if refused is not None:
                    raise refused
                return
            while not self._collecting or not self._collecting[0][1].done():
                self._heed()
                self.advance()
            yield self._take_result()

    def note(self, what: str | None) -> None:
        """Have people told with the next result, if there is anything to tell."""
        self.untold += [what] if what else []

    @property
    def busy(self) -> bool:
        """Whether steps are in flight, or results have not been taken."""
        return bool(self._open or self._collecting)

    @property
    def stopped(self) -> bool:
        """Whether no step can be run any more, since one has failed."""
        return self.engine.failed or (self._broken and self.busy)

    @property
    def num_open(self) -> int:
        """Steps in flight that have not ended."""
        return len(self._open)

    @property
    def is_between_steps(self) -> bool:
        """Whether no stage has work left in a step that was begun, and all that goes on is that
        weights are on their way."""
        engine = self.engine
        return not any(state.open_nodes for state in engine.steps.values()) and all(
            isinstance(call.command, ExportWeights | InstallWeights)
            for call in engine.calls.values()
        )

    @property
    def first_open(self) -> tuple[int, float | None]:
        """The oldest step whose result was not taken, or else the next one, and since when."""
        if self._collecting:
            return self._collecting[0][0].step, self._collecting[0][0].started
        for step, opened in self._open.items():
            return step, time.time() - (self._clock() - self._begin_of(opened))
        return self.next_step, None

    @property
    def unlearnt(self) -> bool:
        """Whether no worker has learnt since the last result was taken."""
        return not (self._astray or self._collecting) and self._learnt < self.first_open[0]

    def go_on(self, begun: float | None, spans: Iterable[Span]) -> None:
        """The next step is one that an earlier runner has begun.

        Args:
            begun: when it has, in seconds since the epoch; None if it had not.
            spans: what has happened since.
        """
        now = self._clock()
        self._begun = None if begun is None else now - max(0.0, time.time() - begun)
        self._last_end, self._spans = None, list(spans)

    def step(self, batch: Batch) -> StepResult:
        """Run a single step to its end."""
        return next(self.run([batch]))

    def take_back(self, seconds: float | None = None) -> list[Batch] | None:
        """Stop the steps in flight as if none of them had begun.

        Args:
            seconds: longest that lanes may take to stop; None for the deadline of a call.

        Returns:
            Their batches, in order of step; None if they cannot be taken again: a worker has learnt
            from one of their mini-batches, or is neither here nor there.

        Raises:
            RunFailed: a lane is not quiet in time, or was lost.
        """
        if not self.unlearnt:
            return None
        calls = [
            AbortCall(number, call.command.lanes) for number, call in self.engine.calls.items()
        ]
        seconds = self.plan.deadline_seconds if seconds is None else seconds
        self.carrier.take_back(self.name, self._open, calls, seconds)
        batches = [opened.batch for opened in self._open.values()]
        self.next_step -= len(batches)
        self._open, self._spans, self._broken = {}, [], False
        return batches

    def _submit(self, batch: Batch) -> None:
        """Begin a step.

        Raises:
            _Refused: the batch cannot be run; nothing has changed.
        """
        batch = Batch(batch.columns)  # items are named by their position in the step
        step = self.next_step
        try:
            if not len(batch):
                raise UserError("a step needs at least one item", key=f"step {step}")
            lengths = item_lengths(self.graph, SOURCE, batch)
            check_items(self.graph, len(batch))
        except UserError as error:
            raise _Refused(error) from error
        kept = self._recall(step, len(batch))
        self.carrier.submit(self.name, step, batch, joined(kept))
        self.next_step += 1
        self._open[step] = _Open(batch, self._clock() if self._begun is None else self._begun)
        self._open[step].recalled = sum(len(one.batch) for one in kept)
        self._begun = None
        self._handle(Tick(self._clock(), judge=False))
        self._handle(StepSubmitted(step, len(batch), lengths, self._recalled(kept)))

    def _recalled(self, kept: Sequence[Kept]) -> tuple[Recalled, ...]:
        return tuple(
            Recalled(
                one.node, one.version, one.batch.ids, item_lengths(self.graph, one.node, one.batch)
            )
            for one in kept
        )

    def advance(self) -> None:
        """Hear what the lanes have to say, and judge their silence.

        Lanes that were not listened to for long may have reported meanwhile: they are judged the
        next time.
        """
        begin = self._clock()
        attentive = begin - self._attended < AWAY_SECONDS
        self._broken = True
        reports = self.carrier.wait(seconds=1.0)
        self._broken = False
        self._attended = now = self._clock()
        for report in reports:
            self._spans += report.spans
            told = report.metrics is not None or report.published is not None or report.note
            if self._open and told:
                step = next(iter(self._open)) if len(self._open) == 1 else self._step_of(report)
                if report.metrics is not None:
                    self._note_metrics(step, report)
                if report.published is not None:
                    self._open[step].add(report.published)
                if report.note:
                    self._open[step].notes.append(report.note)
            elif report.note:
                self.untold.append(report.note)
            self._astray |= isinstance(report.event, MoveFailed)
        news = [report.event for report in reports if report.event is not None]
        self._handle(Tick(now, judge=False), *news, Tick(now, judge=attentive))

    def _step_of(self, report: Report) -> int:
        call = getattr(report.event, "call", None)
        return self.engine.calls[call].step if call in self.engine.calls else min(self._open)

    def _note_metrics(self, step: int, report: Report) -> None:
        """Keep what a `finish` gave; that of a call which counts no more counts for nothing."""
        assert isinstance(report.event, CallFinished) and report.metrics is not None
        call = self.engine.calls.get(report.event.call)
        if call is None:
            return
        assert isinstance(call.command, RunFinish)
        self._open[step].metrics.setdefault(call.command.node, []).append(report.metrics)
        for name in report.metrics:
            self._sources.setdefault(name, set()).add(call.command.node)

    def _metrics_of(self, opened: _Open) -> dict[str, float]:
        """The mean of each metric over a stage's mini-batches, by a name that is its alone."""
        return {
            self._told_apart(name, node): value
            for node, rows in opened.metrics.items()
            for name, value in _mean(rows).items()
        }

    def _told_apart(self, name: str, node: int) -> str:
        nodes = [self.graph.nodes[index] for index in self._sources[name]]
        if len(nodes) == 1:
            return name
        here = self.graph.nodes[node]
        alone = sum(one.worker == here.worker for one in nodes) == 1
        return f"{here.worker if alone else here.name}/{name}"

    def _handle(self, *events: Event) -> None:
        for command in self.engine.handle(*events):
            match command:
                case CompleteStep():
                    self._complete(command)
                case FailRun(message=message, cause=cause):
                    if isinstance(cause, UserError):
                        raise cause
                    raise RunFailed(message) from cause
                case AbortCall() | DropFolded():
                    raise CannotHeal(f"a lane was lost in the middle of what others do: {command}")
                case _:
                    match command:
                        case RunFinish(step=step):
                            self._learnt = max(self._learnt, step)
                        case InstallWeights(version=version):
                            self._learnt = max(self._learnt, version - 1)
                    self.carrier.carry_out(self.name, command)

    def _complete(self, command: CompleteStep) -> None:
        """A step is done; its output comes while the lanes go on."""
        opened, now = self._open.pop(command.step), self._clock()
        self._astray = bool(self._open) and self._astray
        seconds, self._last_end = now - self._begin_of(opened), now
        items = sum(command.staleness.values())
        lag = sum(lag * count for lag, count in command.staleness.items())
        spans, self._spans = self._spans, []
        result = StepResult(
            step=command.step,
            output=Batch({}),
            metrics=self._metrics_of(opened),
            spans=spans,
            started=time.time() - seconds,
            seconds=seconds,
            version=command.version,
            staleness=lag / items if items else None,
            published=opened.published,
            recalled=opened.recalled,
            notes=(*self.untold, *opened.notes),
        )
        self.untold = []
        self._collecting.append((result, self.carrier.collect(self.name, command)))

    def _begin_of(self, opened: _Open) -> float:
        """When a step was submitted or, if that was later, when the step before it ended."""
        return opened.begun if self._last_end is None else max(opened.begun, self._last_end)

    def _take_result(self) -> StepResult:
        result, output = self._collecting.popleft()
        try:
            result.output = output.result()
        except UserError:
            raise
        except Exception as error:
            reports = self.carrier.wait(seconds=0.0)  # a lane that was lost is the first cause
            self._handle(*(report.event for report in reports if report.event is not None))
            kind = CannotHeal if self.engine.has_lost else RunFailed  # it may be back, with nothing
            raise kind(f"the output of step {result.step} cannot be read") from error
        self.carrier.drop(self.name, result.step)
        return result


class _Refused(Exception):
    """A batch that no step was begun for."""

    def __init__(self, cause: UserError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _mean(rows: list[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row)
    values = {name: [row[name] for row in rows if name in row] for name in names}
    return {name: sum(some) / len(some) for name, some in values.items()}
