"""`LaneExecutor`: carries out a lane's orders, one after the other, on one thread.

While a streaming call runs, the orders that have come in are looked at between the pieces that it
hands on, so that it can be fed, or withdrawn. Payloads for other lanes are handed out by the
payload server's threads, which read the same store.
"""

from __future__ import annotations

import gc
import importlib
import pickle
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ray import cloudpickle

from m2flow.engine.calls import call_name
from m2flow.engine.messages import (
    LAUNCHER,
    AbortCall,
    CallAborted,
    CallCommand,
    CallFailed,
    ExportWeights,
    FeedCall,
    InstallWeights,
    ItemsProduced,
    MoveFailed,
    MoveState,
    RunCall,
    RunFinish,
)
from m2flow.engine.spans import Span
from m2flow.errors import ProcessEnded, RunFailed
from m2flow.flow.batch import Batch
from m2flow.flow.graph import FlowGraph
from m2flow.flow.progress import heard_by
from m2flow.runtime.lane.context import LaneContext
from m2flow.runtime.lane.exchange import Exchange, ItemsKey
from m2flow.runtime.lane.exhausted import name_residents
from m2flow.runtime.lane.host import LaneHost, share_of
from m2flow.runtime.lane.journal import JournalPlace, JournalWriter
from m2flow.runtime.lane.loading import Loader, close_workers, reclaim_memory, save
from m2flow.runtime.lane.orders import (
    CallMethod,
    Close,
    DropStep,
    Execute,
    FromLane,
    GaugeMemory,
    GoesOn,
    Introduce,
    KeepRollouts,
    Load,
    Loaded,
    Loading,
    MethodResult,
    Order,
    Prepare,
    Probe,
    Reports,
    Save,
    SaveSeconds,
    from_bytes,
    to_bytes,
)
from m2flow.runtime.lane.reports import NO_FACTS, Published, Report
from m2flow.runtime.lane.state.memory import MemoryGauge
from m2flow.runtime.transport.lines import Line
from m2flow.runtime.weights.exports import Export

PEER_PATIENCE = 1.5
"""A lane waits for another one so many times as long as the launcher waits for a call: the launcher
knows who waits for whom, and is to speak first."""

SILENCE_SECONDS = 2.0
"""Longest that a call in pieces, or one that says it goes on, is without a word to the launcher."""


class _Withdrawn(Exception):
    """The call at hand was withdrawn."""


class _Unread(Exception):
    """What a call is to read could not be brought here; the cause says why."""


class LaneExecutor:
    """The lane's side of its control line.

    Args:
        lane: the lane's number.
        line: to the launcher.
        exchange: brings payloads here and hands them out.
        context: tells workers where they are, and with whom.
    """

    def __init__(self, lane: int, line: Line, exchange: Exchange, context: LaneContext) -> None:
        self.lane, self._context = lane, context
        self._line, self._exchange = line, exchange
        self._orders: deque[Order] = deque()
        self._unsaid: list[Report] = []
        self._stuck: dict[str, BaseException] = {}
        self._host = LaneHost(lane, {}, {})
        self._loader = Loader(context, exchange, lambda *begun: self._say(Loading(*begun)))
        self._load_failed = False
        self._deadline_seconds = 600.0
        self._heard = 0.0  # when the launcher was last told something, or a call has begun
        self._gauge: MemoryGauge | None = None
        self._journal: JournalWriter | None = None

    def run(self) -> None:
        """Carry out orders until `Close` comes, or the launcher is gone (LineClosed)."""
        while True:
            match self._next_order():
                case Execute() as order:
                    self._execute(order)
                case DropStep(flow=flow, step=step):
                    self._host.store.drop_step(flow, step)
                case CallMethod(number=number) as order:
                    self._answer(number, partial(self._called, order))
                case Load() as order:
                    self._load(order)
                case Save(number=number) as order:
                    self._answer(number, partial(self._saved, order))
                case Probe(number=number, peers=peers):
                    self._answer(number, partial(self._exchange.measure, peers))
                case KeepRollouts(place=place):
                    self._keep_rollouts(place)
                case GaugeMemory(on=on):
                    self._gauge = MemoryGauge(self._context.device) if on else None
                case Prepare(modules=modules):
                    for module in modules:
                        importlib.import_module(module)
                case Introduce(peers=peers):
                    self._exchange.introduce(peers)
                case Close():
                    self._close_workers()
                    if self._journal is not None:
                        self._journal.close()
                    return

    def _next_order(self) -> Order:
        """Wait for the next order; what is not said yet is said before."""
        if self._orders:
            return self._orders.popleft()
        if self._unsaid and not self._line.waiting():
            self._report([])
        order: Order = from_bytes(self._line.receive())
        return order

    def _say(self, message: FromLane) -> None:
        self._line.send(to_bytes(message))

    def _report(self, reports: Sequence[Report], exports: Sequence[Export] = ()) -> None:
        """Say what was done; with it goes what could wait until there was more to say."""
        self._heard = time.monotonic()
        said, self._unsaid = [*self._unsaid, *reports], []
        self._say(Reports(said, tuple(exports)))

    # --- workers ----------------------------------------------------------------------------------

    def _load(self, order: Load) -> None:
        state_bytes: dict[str, int] = {}
        raised, keep = None, order.keep or ()
        leftovers = self._load_failed or bool(self._host.workers.keys() - set(keep))
        try:
            gc.unfreeze()
            self._close_workers(keep)
            if leftovers:  # what is not collected now stays for good once it is frozen
                reclaim_memory()
            self._deadline_seconds = PEER_PATIENCE * order.deadline_seconds
            self._host = self._loader.load(order, self._host, state_bytes)
            gc.freeze()  # libraries and workers: to go through them takes 0.1 s
        except BaseException as error:
            raised = cloudpickle.dumps(self._portable(error))
        self._load_failed = raised is not None
        self._say(Loaded(order.number, state_bytes, raised, time.time()))

    def _keep_rollouts(self, place: JournalPlace) -> None:
        """Keep rollouts in a journal, until other workers are loaded; one that was kept goes on."""
        if self._journal is None or self._journal.place != place:
            if self._journal is not None:
                self._journal.close()
            self._journal = JournalWriter(place)
        self._host.keep_rollouts(self._journal)

    def _close_workers(self, keep: Sequence[str] = ()) -> None:
        """Close the workers that are here, but for some."""
        self._stuck = {}
        self._exchange.drop_weights()
        self._host = close_workers(self._host, keep)

    def _answer(self, number: int, work: Callable[[], Any]) -> None:
        """Do something that is no call of the engine; say what it gave, or raised."""
        self._heard = time.monotonic()
        try:
            with heard_by(partial(self._answer_goes_on, number)):
                answer = MethodResult(number, cloudpickle.dumps(work()))
        except BaseException as error:
            answer = MethodResult(number, cloudpickle.dumps(self._portable(error)), raised=True)
        self._say(answer)

    def _answer_goes_on(self, number: int) -> None:
        """Give a sign of life of what is about to be answered, if one is due."""
        if self._silent:
            self._heard = time.monotonic()
            self._say(GoesOn(number))

    def _called(self, order: CallMethod) -> Any:
        self._check_in_place([order.worker])
        method = getattr(self._host.workers[order.worker], order.method)
        return method(*pickle.loads(order.arguments))

    def _saved(self, order: Save) -> SaveSeconds:
        start = time.perf_counter()
        self._check_in_place([order.worker])
        save(order, self._host, self._exchange)
        seconds = time.perf_counter() - start
        return SaveSeconds(seconds, seconds if self._has_more_to_do() else 0.0)

    def _has_more_to_do(self) -> bool:
        """Whether an order has come that takes time; those before it are carried out.

        No more than that one is taken from the line: what comes for a call is looked for there.
        """
        while not self._orders and self._line.waiting():
            order: Order = from_bytes(self._line.receive())
            if isinstance(order, DropStep):
                self._host.store.drop_step(order.flow, order.step)
            else:
                self._orders.append(order)
        return bool(self._orders)

    # --- commands ---------------------------------------------------------------------------------

    def _execute(self, order: Execute) -> None:
        self._release(order)
        match order.command:
            case FeedCall(call=call):  # it has ended, and leaves the items to the engine
                try:
                    self._feed(order)
                except BaseException as error:
                    self._report([Report(CallFailed(call, self.lane, self._portable(error)))])
            case AbortCall(call=call):  # it has ended already, and its last word is on its way
                self._report([Report(CallAborted(call, self.lane))])
            case MoveState():
                self._move(order.command)
            case RunCall() as command:
                self._answering(order, command, self._call)
            case RunFinish() as command:
                self._answering(order, command, self._finish)
            case ExportWeights() as command:
                self._answering(order, command, self._export)
            case InstallWeights() as command:
                self._answering(order, command, self._install)

    def _release(self, order: Execute) -> None:
        for released in order.released:
            some = released.flow, released.step, released.producer, released.items
            self._host.store.release(*some)

    def _answering(self, order: Execute, command: Any, carry_out: Callable[..., None]) -> None:
        """Carry out a call; what it raises is reported as its failure."""
        try:
            self._check_in_place(_workers_of(self._host.graphs[order.flow], command))
            if self._gauge is not None:
                self._gauge.begin()
            self._heard = time.monotonic()
            with heard_by(partial(self._goes_on, command.call)):
                carry_out(order, command)
        except _Withdrawn:
            self._report([Report(CallAborted(command.call, self.lane))])
        except BaseException as error:
            graph, host = self._host.graphs[order.flow], self._host
            begun = not isinstance(error, _Unread)
            cause = error if begun else error.__cause__ or error
            name_residents(cause, self.lane, call_name(graph, command), host.workers, host.away)
            failed = CallFailed(command.call, self.lane, self._portable(cause), begun=begun)
            self._report([Report(failed)])
        finally:
            if self._gauge is not None:
                self._gauge.end()

    @property
    def _silent(self) -> bool:
        """Whether the launcher has heard nothing for so long that a sign of life is due."""
        return time.monotonic() - self._heard > SILENCE_SECONDS

    def _goes_on(self, call: int) -> None:
        """Give a sign of life of a call that says it makes progress, if one is due."""
        if self._silent:
            self._report([Report(ItemsProduced(call, self.lane, ()))])

    def _call(self, order: Execute, command: RunCall) -> None:
        """Run a stage. A piece is reported when it is finished, if anybody can use it by then."""
        try:
            reports = self._fetch(order)
        except BaseException as error:
            raise _Unread from error
        start, num_bytes = time.time(), 0
        for piece in self._host.call(order.flow, command):
            if piece is not None:
                num_bytes += piece.num_bytes
                reports.append(Report(piece))
            silent = self._silent
            if silent and not reports:
                reports.append(Report(ItemsProduced(command.call, self.lane, ())))
            if reports and (order.in_pieces or silent):
                self._report(reports)
                reports = []
            self._look_for_orders(command.call)
        reports.append(self._finished(order, command, start, facts={"bytes": num_bytes}))
        self._report(reports)

    def _look_for_orders(self, call: int) -> None:
        """Take in what has come while a call runs; it is fed, or withdrawn, at once.

        Raises:
            _Withdrawn: the call is to stop.
            Exception: what it was to be fed with could not be brought here.
        """
        while self._line.waiting():
            order: Order = from_bytes(self._line.receive())
            match order:
                case Execute(command=FeedCall(call=number)) if number == call:
                    self._release(order)
                    self._feed(order)
                case Introduce(peers=peers):  # what feeds the call may be there
                    self._exchange.introduce(peers)
                case Execute(command=AbortCall(call=number)) if number == call:
                    raise _Withdrawn
                case _:
                    self._orders.append(order)

    def _feed(self, order: Execute) -> None:
        """Hand more items to a streaming call, if it goes on."""
        assert isinstance(order.command, FeedCall)
        reports = self._fetch(order)
        self._host.feed(order.flow, order.command)
        if reports:
            self._report(reports)

    def _finish(self, order: Execute, command: RunFinish) -> None:
        """Run the `finish` of an accumulating stage; the first lane gives the metrics."""
        start = time.time()
        metrics = self._host.finish(order.flow, command)
        first = command.lanes[0] == self.lane
        finished = self._finished(order, command, start, metrics if first else None)
        self._report([finished])

    def _export(self, order: Execute, command: ExportWeights) -> None:
        """Lay a worker's weights out for other lanes."""
        start = time.time()
        out, sends = self._exchange.weights_out, order.sends
        assert out is not None and sends is not None, "an export for nobody"
        weights, _ = self._host.weights_of(command.source)
        export = out.lay_out(command.source, command.version, weights, sends.oldest)
        published = Published(command.source, export.num_bytes, time.time() - start)
        finished = self._finished(order, command, start, published=published)
        self._report([finished], (export,))

    def _install(self, order: Execute, command: InstallWeights) -> None:
        """Install weights: those laid out elsewhere, or those of the source worker here."""
        start = time.time()
        target = self._host.workers[command.target]
        if command.local:
            weights, num_bytes = self._host.weights_of(command.source)
        else:
            weights, num_bytes = self._exchange.weights_in.collect(
                command.source, (command.target, target), order.exports, self._deadline_seconds
            )
        try:
            target.install(weights, command.version)
        except Exception as error:  # a UserError is shown as it is, without the call's name
            error.add_note(f"{command.target} was to install {command.source}'s weights")
            raise
        self._host.versions[command.target] = command.version
        published = Published(command.source, num_bytes, time.time() - start)
        finished = self._finished(order, command, start, published=published)
        self._report([finished])

    # --- context switches -------------------------------------------------------------------------

    def _move(self, command: MoveState) -> None:
        """Offload or onload a worker."""
        try:
            self._check_in_place([command.worker])
            report = self._host.move(command)
        except BaseException as error:
            self._stuck[command.worker] = error
            failed = MoveFailed(self.lane, command.worker, command.what, self._portable(error))
            self._report([Report(failed)])
        else:
            self._unsaid.append(report)  # nobody waits for it

    def _check_in_place(self, workers: Sequence[str]) -> None:
        """Refuse to touch workers whose last move has failed.

        Raises:
            Exception: what the move of one of them raised.
        """
        for worker in workers:
            if worker in self._stuck:
                raise self._stuck[worker]

    # --- payloads and reports ---------------------------------------------------------------------

    def _fetch(self, order: Execute) -> list[Report]:
        """Bring the payloads that a call reads to this lane."""
        command, start = order.command, time.time()
        assert isinstance(command, RunCall | FeedCall)
        worker = self._host.workers.get(self._host.graphs[order.flow].nodes[command.node].worker)
        collective = worker is not None and worker.collective
        num_items = num_bytes = fetched = 0
        producers = set()
        share = share_of(command, self.lane, collective=collective)
        sources = iter(order.sources)
        for part in (part for parts in share for part in parts if part.items):
            if part.lane == self.lane:
                continue
            if part.lane == LAUNCHER:
                batches: Sequence[Batch] = (self._exchange.unwrap(next(sources)),)
            else:
                key = ItemsKey(order.flow, command.step, part.producer, part.items)
                batches = self._exchange.ask_alike(part.lane, key, self._deadline_seconds)
                producers.add(part.producer)
                fetched += 1
                num_items += len(part.items)
                num_bytes += sum(batch.nbytes for batch in batches)
            for batch in batches:
                self._host.store.put(order.flow, command.step, part.producer, batch)
        if not num_items:
            return []
        nodes = self._host.graphs[order.flow].nodes
        facts = {
            "step": command.step,
            "items": num_items,
            "bytes": num_bytes,
            "parts": fetched,
            "made_by": [nodes[n].name for n in sorted(producers)],
        }
        return [Report(None, (Span(self.lane, "items", "transfer", start, time.time(), facts),))]

    def _finished(
        self,
        order: Execute,
        command: CallCommand,
        start: float,
        metrics: Mapping[str, float] | None = None,
        published: Published | None = None,
        facts: Mapping[str, object] = NO_FACTS,
    ) -> Report:
        if self._gauge is not None:
            facts = {**facts, "working_bytes": self._taken(order, command, self._gauge.risen())}
        return self._host.finished(order.flow, command, start, metrics, published, facts)

    def _taken(self, order: Execute, command: CallCommand, risen: int | None) -> int | None:
        """What a call takes beside states: here, and in processes of its worker."""
        if risen is None or not isinstance(command, RunCall):
            return risen
        name = self._host.graphs[order.flow].nodes[command.node].worker
        worker = self._host.workers.get(name)  # none of a pure function
        return risen if worker is None else risen + worker.beside_bytes()

    def _portable(self, error: BaseException) -> BaseException:
        """The error as it was raised, with this lane's traceback as a note."""
        trace = "".join(traceback.format_exception(error))
        try:
            cloudpickle.loads(cloudpickle.dumps(error))
        except Exception:  # an exception of a library that cannot be pickled: keep its words
            error = RunFailed(f"{type(error).__name__}: {error}")
        if isinstance(error, ProcessEnded):
            error.lane = self.lane
        error.add_note(f"On lane {self.lane}:\n{trace}")
        return error


def _workers_of(graph: FlowGraph, command: CallCommand) -> list[str]:
    """The workers whose state a call needs."""
    match command:
        case RunCall(node=index, fused=fused):
            loop = graph.nodes[index].loop
            members = graph.loops[loop].members if fused and loop is not None else (index,)
            return [graph.nodes[member].worker for member in members]
        case RunFinish(node=index):
            return [graph.nodes[index].worker]
        case ExportWeights(source=source):
            return [source]
        case InstallWeights(source=source, target=target, local=local):
            return [source, target] if local else [target]
