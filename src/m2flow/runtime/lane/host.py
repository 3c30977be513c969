"""`LaneHost`: what stands on one lane, and how a command of the engine is carried out there.

It holds the lane's workers and payloads, calls stages, and checks what they return: the number of
items, their names, and the length of every column (by `Batch` itself). It knows nothing of
placement, of other lanes or of Ray, so the inline driver and the Ray lanes share it.
"""

from __future__ import annotations

import inspect
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from m2flow.engine.loops import unjudged
from m2flow.engine.messages import (
    CallCommand,
    CallFinished,
    FeedCall,
    Inputs,
    ItemsProduced,
    MoveState,
    Part,
    RunCall,
    RunFinish,
)
from m2flow.engine.spans import Span, ids_text
from m2flow.errors import UserError
from m2flow.flow.batch import Batch, Column, Ragged
from m2flow.flow.graph import FlowGraph, StageNode
from m2flow.flow.rollouts import Rollouts, RolloutStage, rollout_stages
from m2flow.flow.worker import Worker
from m2flow.runtime.lane.journal import JournalWriter
from m2flow.runtime.lane.marks import entered, leaving
from m2flow.runtime.lane.reports import (
    NO_FACTS,
    Published,
    Report,
    call_span,
    item_lengths,
)
from m2flow.runtime.lane.store import Store
from m2flow.runtime.lane.streams import Agree, StageStream, alone

NOTHING_TAKEN: Mapping[str, object] = MappingProxyType({"items": 0, "ids": ""})
"""What the spans of a streaming call say on lanes of its gang beside the first."""


class LaneHost:
    """Workers and payloads of one lane.

    Args:
        lane: the lane's number.
        graphs: the traced methods of the flow that may run here, by name.
        workers: the workers placed here; `load` has been called.
        clock: seconds; all lanes of a machine share it.
        store: payloads that are here already; None for none.
        agree: by worker, for those on gangs: how its lanes agree on what has come to a streaming
            call.
    """

    def __init__(
        self,
        lane: int,
        graphs: Mapping[str, FlowGraph],
        workers: Mapping[str, Worker],
        clock: Callable[[], float] = time.time,
        store: Store | None = None,
        agree: Mapping[str, Agree] = MappingProxyType({}),
    ) -> None:
        self.lane, self.graphs, self.workers, self.clock = lane, graphs, workers, clock
        self.store = Store() if store is None else store
        self.away = set[str]()
        """Workers whose state was put away."""
        self.copies: dict[str, list[Any]] = {}
        """By worker, the memory of the last copies of its state that were asked for."""
        self._agree = agree
        self._turns: dict[int, list[Span]] = {}
        self._streams: dict[int, StageStream] = {}
        self._logs: dict[int, Mapping[str, object]] = {}
        self.versions: dict[str, int] = {}
        """Of the weights that workers run on, by worker."""
        self._journal: JournalWriter | None = None
        self._rollouts: dict[int, RolloutStage] = {}

    def keep_rollouts(self, journal: JournalWriter) -> None:
        """Have rollouts kept on disk as they are finished."""
        self._journal = journal
        graph = self.graphs.get(journal.place.flow)
        stages = () if graph is None else rollout_stages(graph)
        self._rollouts = {member: stage for stage in stages for member in stage.members}

    def _keep_for_later(self, flow: str, step: int, node: StageNode, items: Batch) -> None:
        """Have finished items kept on disk, if they are rollouts."""
        stage = self._rollouts.get(node.index)
        if stage is None or self._journal is None or flow != self._journal.place.flow:
            return
        version = self.versions.get(stage.worker)
        if version is not None and len(items):
            self._journal.add(Rollouts(step, stage.name, version, items))

    def call(self, flow: str, command: RunCall) -> Iterator[ItemsProduced | None]:
        """Run a stage on this lane's share of a call; gives what is finished, as it is.

        Of a streaming stage and of a fused loop also None where it has stopped for a moment to hear
        if anything has come. Of a stream on a gang its first lane hands the items on.
        """
        node = self.graphs[flow].nodes[command.node]
        worker = self.workers.get(node.worker)
        share = share_of(command, self.lane, collective=worker is not None and worker.collective)
        if not share:
            return iter(())
        if command.fused:
            return self._run_loop(flow, command, node, share[0])
        if node.loop is not None:
            if share != command.inputs[command.lanes.index(self.lane)]:
                self._run(flow, node, [self._gather(flow, command.step, share)[0].select([])])
                return iter(())
            return self._go_around(flow, command, node, share[0])
        if node.streaming:
            stage = partial(self._function(flow, node), **node.options)
            without = frozenset(command.without)
            if without and self._takes_without(flow, node):
                stage = partial(stage, without=without)
            agree = self._agree.get(node.worker, alone)
            stream = StageStream(node, stage, self.clock, agree, without)
            self._streams[command.call] = stream
            stream.feed(self._gather(flow, command.step, share))  # more may come from now on
            return self._stream(flow, command, node)
        batches = self._gather(flow, command.step, share)
        if share != command.inputs[command.lanes.index(self.lane)]:
            self._run(flow, node, [batch.select([]) for batch in batches])
            return iter(())
        output = self._run(flow, node, batches)
        return iter((self._keep(flow, command, node, _named(node, batches[0], output)),))

    def _run(self, flow: str, node: StageNode, batches: Sequence[Batch]) -> object:
        """Call a stage; what it says of a column or a setting gets the stage's name."""
        try:
            return self._function(flow, node)(*batches, **node.options)
        except UserError as error:
            raise UserError(str(error), key=node.name) from error

    def _run_waiting(
        self, flow: str, node: StageNode, batch: Batch
    ) -> Generator[None, None, tuple[object, float | None]]:
        """Call a stage that may wait; the lane may do other work at each None.

        Returns:
            what the stage returned; and of one that has waited the seconds in which this thread
            was at work on it.
        """
        running: Iterator[None] | None = None
        busy = None
        while True:
            begun = time.thread_time()
            try:
                running = running or self._function(flow, node).begin(batch, **node.options)
                next(running)
            except StopIteration as end:
                spent = time.thread_time() - begun
                return end.value, None if busy is None else busy + spent
            except UserError as error:
                raise UserError(str(error), key=node.name) from error
            busy = (busy or 0.0) + time.thread_time() - begun
            yield None

    def _go_around(
        self, flow: str, command: RunCall, node: StageNode, parts: Sequence[Part]
    ) -> Iterator[ItemsProduced]:
        """Work on items of a loop, those with the same columns together: they differ by turn."""
        wanted = [(part.producer, part.items) for part in parts]
        for batch in self.store.gather_alike(flow, command.step, wanted):
            output = self._run(flow, node, [batch])
            made = entered(self.graphs[flow], node, batch, _named(node, batch, output))
            yield self._keep(flow, command, node, made)

    def _run_loop(
        self, flow: str, command: RunCall, first: StageNode, parts: Sequence[Part]
    ) -> Iterator[ItemsProduced | None]:
        """Send items around a loop that stands here until each has left; only those are kept.

        Groups of them take turns where a stage waits. None once in each turn of a group.
        """
        wanted = [(part.producer, part.items) for part in parts]
        for batch in self.store.gather_alike(flow, command.step, wanted):
            count = -(-len(batch) // (command.group or len(batch) or 1))
            groups = deque(
                self._send_around(flow, command, first, batch.take(batch.ids[n::count]), count)
                for n in range(count)
            )
            while groups:
                for piece in groups[0]:
                    yield piece
                    if piece is None:  # the next group's turn
                        groups.rotate(-1)
                        break
                else:
                    groups.popleft()

    def _send_around(
        self, flow: str, command: RunCall, first: StageNode, batch: Batch, groups: int
    ) -> Iterator[ItemsProduced | None]:
        """Send one group of items around a loop; None where others may have their turn."""
        graph = self.graphs[flow]
        assert first.loop is not None
        spec = graph.loops[first.loop]
        members = [graph.nodes[index] for index in spec.members]
        turn, judged = 0, False
        while len(batch):
            turn, paused = turn + 1, False
            for node in members:
                batch, waited = yield from self._turn(flow, command, node, batch, groups)
                paused |= waited
                judged |= spec.until in batch
                last = node is members[-1] and turn == spec.max_turns
                gone = batch.ids if last else leaving(batch, spec.until)
                if gone:
                    left = batch.take(gone)
                    self.store.put(flow, command.step, first.index, left)
                    self._keep_for_later(flow, command.step, first, left)
                    lengths = item_lengths(graph, first.index, left)
                    yield ItemsProduced(
                        command.call, self.lane, left.ids, left.nbytes, left.ids, lengths
                    )
                    left_ids = set(gone)
                    batch = batch.take(item for item in batch.ids if item not in left_ids)
                if not len(batch):
                    break
            if not judged and spec.max_turns is None:
                raise unjudged(graph, first.loop)
            if not paused:
                yield None

    def _turn(
        self, flow: str, command: RunCall, node: StageNode, batch: Batch, groups: int
    ) -> Generator[None, None, tuple[Batch, bool]]:
        """One member's part of a turn of a fused loop, with a span of its own; None as it waits.

        Returns:
            what it made of the items, and whether it has waited.
        """
        start, waited, graph = self.clock(), False, self.graphs[flow]
        facts = {"step": command.step, "items": len(batch), "ids": ids_text(batch.ids)}
        if node.waits:
            output, busy = yield from self._run_waiting(flow, node, batch)
            waited = busy is not None
            elapsed = self.clock() - start
            facts |= {"groups": groups, "busy": elapsed if busy is None else busy}
        else:
            output = self._run(flow, node, [batch])
        span = Span(self.lane, node.name, "call", start, self.clock(), facts)
        self._turns.setdefault(command.call, []).append(span)
        return entered(graph, node, batch, _without_graph(_named(node, batch, output))), waited

    def finished(
        self,
        flow: str,
        command: CallCommand,
        start: float,
        metrics: Mapping[str, float] | None = None,
        published: Published | None = None,
        facts: Mapping[str, object] = NO_FACTS,
    ) -> Report:
        """Report the end of a call: with a span of its own, or those of a fused loop's members."""
        facts = {**self._logs.pop(command.call, {}), **facts}
        spans = tuple(self._turns.pop(command.call, ()))
        if not spans:
            span = call_span(self.graphs[flow], command, self.lane, start, self.clock(), facts)
            spans = (span,)
        notes = []
        if isinstance(command, RunFinish):
            worker = self.workers.get(self.graphs[flow].nodes[command.node].worker)
            notes = [] if worker is None else [worker.take_note()]
        if self._journal is not None:
            notes.append(self._journal.take_trouble())
        note = "; ".join(filter(None, notes))
        return Report(CallFinished(command.call, self.lane), spans, metrics, published, note)

    def _gather(self, flow: str, step: int, inputs: Inputs) -> list[Batch]:
        return [
            joined_exits(
                self.graphs[flow],
                {part.producer for part in parts},
                lambda parts=parts: self.store.gather(  # type: ignore[misc]
                    flow, step, [(part.producer, part.items) for part in parts]
                ),
            )
            for parts in inputs
        ]

    def _function(self, flow: str, node: StageNode) -> Any:
        if node.is_function:
            return self.graphs[flow].functions[node.name].function
        return getattr(self.workers[node.worker], node.method)

    def _takes_without(self, flow: str, node: StageNode) -> bool:
        """Whether a stage can be told by `without` which of its outputs are there already."""
        kind = (
            self.graphs[flow].functions[node.name]
            if node.is_function
            else getattr(type(self.workers[node.worker]), node.method)
        )
        return "without" in inspect.signature(kind.function).parameters

    def _stream(
        self, flow: str, command: RunCall, node: StageNode
    ) -> Iterator[ItemsProduced | None]:
        stream, first = self._streams[command.call], command.lanes[0] == self.lane
        try:
            for piece in stream.run():
                if piece is None or not first:
                    yield None
                else:
                    yield self._keep(flow, command, node, piece)
        finally:
            del self._streams[command.call]
            self._logs[command.call] = stream.log.facts() if first else NOTHING_TAKEN

    def feed(self, flow: str, command: FeedCall) -> bool:
        """Hand more items to a streaming call; False if it has ended already."""
        stream = self._streams.get(command.call)
        if stream is None:
            return False
        inputs = command.inputs[command.lanes.index(self.lane)]
        stream.feed(self._gather(flow, command.step, inputs))
        return True

    def _keep(self, flow: str, command: RunCall, node: StageNode, output: Batch) -> ItemsProduced:
        """Keep items that a call has made; what the engine is told of them."""
        output = _without_graph(output)
        self.store.put(flow, command.step, node.index, output)
        graph = self.graphs[flow]
        lengths = item_lengths(graph, node.index, output)
        if node.loop is None:
            self._keep_for_later(flow, command.step, node, output)
            return ItemsProduced(
                command.call, self.lane, output.ids, output.nbytes, lengths=lengths
            )
        until = graph.loops[node.loop].until
        gone = leaving(output, until)
        if gone and self._rollouts:
            self._keep_for_later(flow, command.step, node, output.take(gone))
        return ItemsProduced(
            command.call, self.lane, output.ids, output.nbytes, gone, lengths, until in output
        )

    def finish(self, flow: str, command: RunFinish) -> dict[str, float]:
        """Run the `finish` of an accumulating stage, or what a subclass has in place of it; the
        metrics it returns.

        Raises:
            UserError: it returns something else than metrics.
        """
        node = self.graphs[flow].nodes[command.node]
        worker = self.workers[node.worker]
        finish = getattr(type(worker), node.method).finish_function
        name = finish.__name__
        if any(vars(one).get(name) is finish for one in type(worker).__mro__):
            finish = getattr(type(worker), name)
        return _metrics(node, finish(worker))

    def move(self, command: MoveState) -> Report:
        """Offload or onload a worker."""
        start, worker = self.clock(), self.workers.get(command.worker)
        if worker is not None:  # a pure function has no state
            getattr(worker, command.what)()
            if command.what == "offload":
                self.away.add(command.worker)
            else:
                self.away.discard(command.worker)
        facts = {"worker": command.worker, "what": command.what}
        name = f"{command.what} {command.worker}"
        return Report(None, (Span(self.lane, name, "switch", start, self.clock(), facts),))

    def weights_of(self, source: str) -> tuple[Mapping[str, Any], int]:
        """The weights of a worker that stands here, and their bytes.

        Raises:
            UserError: they are no tensors by name.
        """
        from m2flow.runtime.weights.manifest import check_weights  # torch comes along

        weights = self.workers[source].weights()
        check_weights(source, weights)
        return weights, sum(getattr(tensor, "nbytes", 0) for tensor in weights.values())


def share_of(command: RunCall | FeedCall, lane: int, *, collective: bool) -> Inputs:
    """What a lane reads for its part of a call; nothing, if it has no part in it.

    A gang may have more lanes than there are items. Where its lanes communicate in a call, those
    with an empty share take part all the same, and read one item to know the columns.
    """
    share = command.inputs[command.lanes.index(lane)]
    if any(part.items for part in share[0]):
        return share
    if not collective:
        return ()
    return tuple(
        tuple(replace(part, items=part.items[:1]) for part in parts if part.items)[:1]
        for parts in command.inputs[0]
    )


def joined_exits(graph: FlowGraph, producers: Collection[int], join: Callable[[], Batch]) -> Batch:
    """Join payloads of several stages or calls; where they are unlike each other, name the stages.

    Raises:
        UserError: they do not have the same columns.
    """
    try:
        return join()
    except UserError as error:
        made_by = [graph.nodes[producer] for producer in sorted(producers) if producer >= 0]
        if not made_by:
            raise
        names = " and ".join(node.name for node in made_by)
        if error.key is not None:
            raise UserError(str(error), key=names) from error
        loop = next((node.loop for node in made_by if node.loop is not None), None)
        if loop is None:
            raise UserError(
                "has given items with different columns in different calls",
                key=names,
                value=error.value,
                hint="give every item the same columns: which items share a call is the plan's",
            ) from error
        raise UserError(
            "its items leave at different stages, or on different turns, with different columns",
            key=graph.loop_name(loop),
            value=error.value,
            hint="give every item the same columns before it enters the loop",
        ) from error


def _metrics(node: StageNode, found: object) -> dict[str, float]:
    """What a stage's `finish` has returned, each as a number.

    Raises:
        UserError: it is no mapping of names to numbers.
    """
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise UserError(
            "its finish returned no metrics",
            key=node.name,
            value=type(found).__name__,
            expected="a mapping of names to numbers, or None",
        )
    metrics = {}
    for name, value in found.items():
        try:
            metrics[name] = float("no text" if isinstance(value, str) else value)
        except (TypeError, ValueError, RuntimeError):  # the last of a tensor of several
            raise UserError(
                f"its finish returned a metric {name!r} that is no number",
                key=node.name,
                value=value,
                expected="a number",
            ) from None
    return metrics


def _without_graph(batch: Batch) -> Batch:
    """The items as another lane gets them: no gradient flows back to the stage that made them."""
    detached: dict[str, Column] = {}
    for name, column in batch.columns.items():
        values = column.values if isinstance(column, Ragged) else column
        if getattr(values, "requires_grad", False):  # a parameter too, which has no `grad_fn`
            values = values.detach()
            ragged = isinstance(column, Ragged)
            detached[name] = Ragged(values, column.lengths) if ragged else values
    return Batch({**batch.columns, **detached}, batch.ids) if detached else batch


def _named(node: StageNode, given: Batch, output: object) -> Batch:
    """Check what a stage returned, and give its rows the names of the items they are."""
    if output is None and node.accumulates:
        return given
    if not isinstance(output, Batch):
        raise UserError(
            "must return a Batch",
            key=node.name,
            value=type(output).__name__,
            hint="build one with batch.with_columns(...)",
        )
    n = node.expands
    if n == 1 and output.ids == given.ids:
        return output
    expected = [item * n + k for item in given.ids for k in range(n)]
    if len(output) != len(expected):
        raise UserError(
            "returned the wrong number of items",
            key=node.name,
            value=len(output),
            expected=f"{len(expected)}, {n} for each of the {len(given)} it was given",
        )
    if sorted(output.ids) == sorted(expected):
        return output
    if output.ids != tuple(range(len(output))):
        unknown = sorted(set(output.ids) - set(expected))
        twice = sorted(item for item, times in Counter(output.ids).items() if times > 1)
        raise UserError(
            f"returned items {'it was not given' if unknown else 'twice'}",
            key=node.name,
            value=(unknown or twice)[:8],
            hint="keep the ids: make outputs with Batch.repeat, select and take",
        )
    return Batch(output.columns, expected)
