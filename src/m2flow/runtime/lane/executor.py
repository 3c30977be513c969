"""`LaneExecutor`: carries out a lane's orders, one after the other, on one thread.

While a streaming call runs, the orders that have come in are looked at between the pieces that it
hands on, so that it can be fed. Early onloads run on a thread of their own
beside the call; whoever needs the worker waits for them. Payloads for other lanes are handed out by
the payload server's threads, which read the same store.
"""

from __future__ import annotations

import importlib
import pickle
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray import cloudpickle

from m2flow.engine.messages import (
    CallFailed,
    CallFinished,
    ExportWeights,
    FeedCall,
    InstallWeights,
    LaneCommand,
    MoveFailed,
    MoveState,
    RunCall,
    RunFinish,
)
from m2flow.engine.spans import Span
from m2flow.errors import RunFailed
from m2flow.flow.batch import Batch
from m2flow.flow.graph import FlowGraph
from m2flow.flow.worker import Worker
from m2flow.runtime.driver.inline import NO_FACTS, call_span
from m2flow.runtime.driver.moving import files_of, write_files
from m2flow.runtime.driver.runner import Published, Report
from m2flow.runtime.lane.exchange import Exchange
from m2flow.runtime.lane.host import LaneHost
from m2flow.runtime.lane.orders import (
    STATES,
    Answer,
    Ask,
    Close,
    Do,
    DropStep,
    Fetch,
    GaugeMemory,
    Load,
    Loaded,
    Order,
    Prepare,
    Probe,
    Release,
    Said,
    Save,
    UseLinks,
    from_bytes,
    to_bytes,
)
from m2flow.runtime.lane.standing import Standing
from m2flow.runtime.lane.state.gauge import MemoryGauge
from m2flow.runtime.transport.lines import Line


class LaneExecutor:
    """The lane's side of its control line.

    Args:
        lane: the lane's number.
        line: to the launcher.
        exchange: brings payloads here and hands them out.
        standing: tells workers where they stand, and with whom.
    """

    def __init__(self, lane: int, line: Line, exchange: Exchange, standing: Standing) -> None:
        self.lane, self._standing = lane, standing
        self._line, self._exchange = line, exchange
        self._sending = threading.Lock()
        self._orders: deque[Order] = deque()
        self._moves: dict[str, threading.Thread] = {}
        self._stuck: dict[str, BaseException] = {}
        self._host = LaneHost(lane, {}, {})
        self._deadline_seconds = 600.0
        self._limited = False
        self._gauge: MemoryGauge | None = None

    def run(self) -> None:
        """Carry out orders until `Close` comes, or the launcher is gone (LineClosed)."""
        while True:
            order = self._orders.popleft() if self._orders else from_bytes(self._line.receive())
            match order:
                case Do():
                    self._do(order)
                case Release():
                    self._host.store.release(order.flow, order.step, order.producer, order.items)
                case DropStep():
                    self._host.store.drop_step(order.flow, order.step)
                case Ask():
                    self._answer(order)
                case Load():
                    self._load(order)
                case Save():
                    self._save(order)
                case Probe():
                    self._say(
                        Answer(order.number, pickle.dumps(self._exchange.measure(order.peers)))
                    )
                case UseLinks():
                    self._exchange.use(order.table)
                case GaugeMemory():
                    self._gauge = MemoryGauge(self._standing.device) if order.on else None
                case Prepare():
                    for module in order.modules:
                        importlib.import_module(module)
                case Close():
                    self._close_workers()
                    return

    def _say(self, message: Loaded | Answer | Said) -> None:
        frame = to_bytes(message)
        with self._sending:
            self._line.send(frame)

    # --- workers ----------------------------------------------------------------------------------

    def _load(self, order: Load) -> None:
        """Bring up the workers; under a memory limit one at a time, each put away again.

        Workers that the order keeps stay as they are, and so do the payloads here.
        """
        state_bytes: dict[str, int] = {}
        try:
            store = None if order.keep is None else self._host.store
            workers = self._close_workers(order.keep or ())
            limited, self._limited = self._limited, order.memory_bytes is not None
            if limited != self._limited:  # under a limit everybody is away at the start
                for worker in workers.values():
                    (worker.offload if self._limited else worker.onload)()
            self._deadline_seconds = order.deadline_seconds
            self._standing.meet(order)
            agree = self._standing.agreements(order.placed)
            graphs = pickle.loads(order.graphs)
            self._host = LaneHost(self.lane, graphs, workers, store=store, agree=agree)
            self._exchange.serve(self._host.store)
            for name, placed in order.placed.items():
                if name in workers:
                    continue
                worker = pickle.loads(placed.worker)
                worker.load(self._standing.place(placed, order.version))
                if placed.state is not None:
                    self._restore(worker, placed.state)
                workers[name] = worker
                state_bytes[name] = worker.state_bytes()
                if order.memory_bytes is not None:
                    worker.offload()
        except BaseException as error:
            raised = cloudpickle.dumps(self._portable(error))
            self._say(Loaded(order.number, state_bytes, raised))
            return
        self._say(Loaded(order.number, state_bytes))

    def _save(self, order: Save) -> None:
        """Keep what a worker saves; its other lanes may have to take part."""
        try:
            self._await_moves([order.worker])
            files = files_of(self._host.workers[order.worker])
            self._host.store.put("", STATES, order.producer, Batch({"files": [files]}))
        except BaseException as error:
            raised = cloudpickle.dumps(self._portable(error))
            self._say(Answer(order.number, raised, raised=True))
            return
        self._say(Answer(order.number, pickle.dumps(None)))

    def _restore(self, worker: Worker, fetch: Fetch) -> None:
        if fetch.lane == self.lane:
            wanted = [(fetch.producer, fetch.items)]
            batch = self._host.store.gather("", fetch.step, wanted)
        else:
            batch = self._exchange.bring("", fetch, self._deadline_seconds)
        write_files(batch["files"][0], worker)

    def _close_workers(self, keep: Sequence[str] = ()) -> dict[str, Worker]:
        """Close the workers that are here, but for some; those."""
        for thread in self._moves.values():
            thread.join(self._deadline_seconds)
        self._moves, self._stuck = {}, {}
        kept = {name: one for name, one in self._host.workers.items() if name in keep}
        for name, worker in self._host.workers.items():
            if name not in kept:
                worker.close()
        self._host = LaneHost(self.lane, {}, {})
        self._exchange.drop_weights()
        return kept

    def _answer(self, order: Ask) -> None:
        try:
            self._await_moves([order.worker])
            method = getattr(self._host.workers[order.worker], order.method)
            value = cloudpickle.dumps(method(*pickle.loads(order.arguments)))
        except BaseException as error:
            raised = cloudpickle.dumps(self._portable(error))
            self._say(Answer(order.number, raised, raised=True))
            return
        self._say(Answer(order.number, value))

    # --- commands ---------------------------------------------------------------------------------

    def _do(self, order: Do) -> None:
        match order.command:
            case FeedCall():
                self._feed(order)
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

    def _answering(self, order: Do, command: Any, carry_out: Callable[[Do, Any], None]) -> None:
        """Carry out a call; what it raises is reported as its failure."""
        for producer, items in order.released:
            self._host.store.release(order.flow, command.step, producer, items)
        try:
            self._await_moves(_workers_of(self._host.graphs[order.flow], command))
            if order.early is not None:
                self._move(order.early)
            if self._gauge is not None:
                self._await_moves(list(self._moves))
                self._gauge.begin()
            carry_out(order, command)
        except BaseException as error:
            failed = CallFailed(command.call, self.lane, self._portable(error))
            self._say(Said(order.flow, [Report(failed)]))

    def _call(self, order: Do, command: RunCall) -> None:
        """Run a stage. A piece is reported when it is finished, if anybody can use it by then."""
        reports = self._fetch(order)
        start, worked, num_bytes = time.time(), time.process_time(), 0
        for piece in self._host.call(order.flow, command):
            if piece is not None:
                num_bytes += piece.num_bytes
                reports.append(Report(piece.event(command.call)))
            if order.in_pieces and reports:
                self._say(Said(order.flow, reports))
                reports = []
            self._look_for_orders()
        facts = {"bytes": num_bytes, "cpu_seconds": time.process_time() - worked}
        reports.append(self._finished(order, command, start, facts=facts))
        self._say(Said(order.flow, reports))

    def _look_for_orders(self) -> None:
        """Take in what has come while a call runs; feeding happens at once."""
        while self._line.waiting():
            order: Order = from_bytes(self._line.receive())
            match order:
                case Do(command=FeedCall()):
                    self._do(order)
                case _:
                    self._orders.append(order)

    def _feed(self, order: Do) -> None:
        """Hand more items to a streaming call; one that has ended leaves them to the engine."""
        assert isinstance(order.command, FeedCall)
        try:
            reports = self._fetch(order)
            self._host.feed(order.flow, order.command)
        except BaseException as error:
            failed = CallFailed(order.command.call, self.lane, self._portable(error))
            reports = [Report(failed)]
        if reports:
            self._say(Said(order.flow, reports))

    def _finish(self, order: Do, command: RunFinish) -> None:
        """Run the `finish` of an accumulating stage; the first lane gives the metrics."""
        start = time.time()
        metrics = self._host.finish(order.flow, command)
        first = command.lanes[0] == self.lane
        self._say(
            Said(order.flow, [self._finished(order, command, start, metrics if first else None)])
        )

    def _export(self, order: Do, command: ExportWeights) -> None:
        """Lay a worker's weights out for other lanes."""
        start = time.time()
        out, sends = self._exchange.weights_out, order.sends
        assert out is not None and sends is not None, "an export for nobody"
        weights = self._host.workers[command.source].weights()
        group = self._broadcast_group(command.source, sends.group) if sends.group else None
        exports = out.lay_out(command.source, command.version, weights, sends, group)
        num_bytes = sum(export.num_bytes for export in exports)
        published = Published(command.source, num_bytes, time.time() - start)
        finished = self._finished(order, command, start, published=published)
        self._say(Said(order.flow, [finished], exports))

    def _install(self, order: Do, command: InstallWeights) -> None:
        """Install weights: those laid out elsewhere, or those of the source worker here."""
        start = time.time()
        target = self._host.workers[command.target]
        if command.local:
            weights: Mapping[str, Any] = self._host.workers[command.source].weights()
            num_bytes = sum(getattr(tensor, "nbytes", 0) for tensor in weights.values())
        else:
            weights, num_bytes = self._exchange.weights_in.collect(
                command.source,
                (command.target, target),
                command.version,
                order.exports,
                self._deadline_seconds,
                self._broadcast_group,
            )
        try:
            self._host.install(command.source, command.target, command.version, weights)
        except Exception as error:  # a UserError is shown as it is, without the call's name
            error.add_note(f"{command.target} was to install {command.source}'s weights")
            raise
        published = Published(command.source, num_bytes, time.time() - start)
        finished = self._finished(order, command, start, published=published)
        self._say(Said(order.flow, [finished]))

    def _broadcast_group(self, source: str, lanes: tuple[int, ...]) -> Any:
        return self._standing.groups.group(lanes, f"broadcast of {source}")

    # --- context switches -------------------------------------------------------------------------

    def _move(self, command: MoveState) -> None:
        """Offload or onload a worker; early ones run beside the call at hand."""
        if not command.early:
            self._await_moves([command.worker])
            self._move_now(command)
            return
        thread = threading.Thread(target=self._move_now, args=(command,), daemon=True)
        self._moves[command.worker] = thread
        thread.start()

    def _move_now(self, command: MoveState) -> None:
        start = time.time()
        try:
            self._host.move(command)
        except BaseException as error:
            self._stuck[command.worker] = error
            failed = MoveFailed(self.lane, command.worker, command.what, self._portable(error))
            self._say(Said("", [Report(failed)]))
            return
        name = f"{command.what} {command.worker}"
        facts = {"worker": command.worker, "what": command.what, "early": command.early}
        span = Span(self.lane, name, "switch", start, time.time(), facts)
        self._say(Said("", [Report(None, (span,))]))

    def _await_moves(self, workers: Sequence[str]) -> None:
        """Wait until early moves of these workers are done.

        Raises:
            Exception: what the last move of one of them raised: its state is not to be touched.
        """
        for worker in workers:
            thread = self._moves.pop(worker, None)
            if thread is not None:
                thread.join(self._deadline_seconds)
                if thread.is_alive():
                    raise RunFailed(f"{worker} has not been onloaded within its deadline")
            if worker in self._stuck:
                raise self._stuck[worker]

    # --- payloads and reports ---------------------------------------------------------------------

    def _fetch(self, order: Do) -> list[Report]:
        """Bring an order's payloads to this lane."""
        if not order.fetches:
            return []
        start = time.time()
        items = num_bytes = 0
        for fetch in order.fetches:
            batch = self._exchange.bring(order.flow, fetch, self._deadline_seconds)
            self._host.store.put(order.flow, fetch.step, fetch.producer, batch)
            if fetch.lane is not None:
                items += len(fetch.items)
                num_bytes += batch.nbytes
        if not items:
            return []
        producers = {fetch.producer for fetch in order.fetches if fetch.lane is not None}
        nodes = self._host.graphs[order.flow].nodes
        facts = {
            "step": order.fetches[0].step,
            "items": items,
            "bytes": num_bytes,
            "made_by": [nodes[n].name for n in sorted(producers)],
        }
        return [Report(None, (Span(self.lane, "items", "transfer", start, time.time(), facts),))]

    def _finished(
        self,
        order: Do,
        command: RunCall | RunFinish | ExportWeights | InstallWeights,
        start: float,
        metrics: Mapping[str, float] | None = None,
        published: Published | None = None,
        facts: Mapping[str, object] = NO_FACTS,
    ) -> Report:
        graph = self._host.graphs[order.flow]
        facts = {**self._host.take_facts(command.call), **facts}
        if self._gauge is not None:
            facts = {**facts, "working_bytes": self._gauge.risen()}
        spans = self._host.take_spans() or (
            call_span(graph, command, self.lane, start, time.time(), facts),
        )
        return Report(CallFinished(command.call, self.lane), spans, metrics, published)

    def _portable(self, error: BaseException) -> BaseException:
        """The error as it was raised, with this lane's traceback as a note."""
        trace = "".join(traceback.format_exception(error))
        try:
            cloudpickle.loads(cloudpickle.dumps(error))
        except Exception:  # an exception of a library that cannot be pickled: keep its words
            error = RunFailed(f"{type(error).__name__}: {error}")
        error.add_note(f"On lane {self.lane}:\n{trace}")
        return error


def _workers_of(graph: FlowGraph, command: LaneCommand) -> list[str]:
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
    return []
