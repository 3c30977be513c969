"""`LaneHost`: what stands on one lane, and how a command of the engine is carried out there.

It holds the lane's workers and payloads, calls stages, and checks what they return: the number of
items, their names, and the length of every column (by `Batch` itself). It knows nothing of
placement, of other lanes or of Ray, so the inline driver and the Ray lanes share it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from m2flow.engine.messages import FeedCall, Inputs, MoveState, Part, RunCall, RunFinish
from m2flow.engine.store import Store
from m2flow.errors import UserError
from m2flow.flow.batch import Batch
from m2flow.flow.graph import FlowGraph, StageNode
from m2flow.flow.worker import Worker


@dataclass(frozen=True, slots=True)
class Produced:
    """Items that a call has handed on; the payload stays on the lane.

    Attributes:
        items: indices in the item space of the stage's output.
        num_bytes: their size.
        leaving: those that leave their loop.
    """

    items: tuple[int, ...]
    num_bytes: int
    leaving: tuple[int, ...] = ()


class LaneHost:
    """Workers and payloads of one lane.

    Args:
        lane: the lane's number.
        graphs: the traced methods of the flow that may run here, by name.
        workers: the workers placed here; `load` has been called.
        clock: seconds; all lanes of a machine share it.
    """

    def __init__(
        self,
        lane: int,
        graphs: Mapping[str, FlowGraph],
        workers: Mapping[str, Worker],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.lane, self.graphs, self.workers, self.clock = lane, graphs, workers, clock
        self.store = Store()
        self.versions: dict[str, int] = {}
        self._fed: dict[int, deque[Batch]] = {}

    def call(self, flow: str, command: RunCall) -> Iterator[Produced]:
        """Run a stage on this lane's share of a call; gives what is finished, as it is."""
        node = self.graphs[flow].nodes[command.node]
        share = command.inputs[command.lanes.index(self.lane)]
        if not any(part.items for part in share[0]):  # a gang with fewer items than lanes
            return iter(())
        if node.loop is not None:
            return self._go_around(flow, command, node, share[0])
        batches = self._gather(flow, command.step, share)
        if node.streaming:
            self._fed[command.call] = deque()  # it can be fed from now on
            return self._stream(flow, command, node, batches)
        output = self._run(flow, node, batches)
        return iter((self._keep(flow, command.step, node, _named(node, batches[0], output)),))

    def _run(self, flow: str, node: StageNode, batches: Sequence[Batch]) -> object:
        """Call a stage; what it says of a column or a setting gets the stage's name."""
        try:
            return self._function(flow, node)(*batches, **node.options)
        except UserError as error:
            raise UserError(str(error), key=node.name) from error

    def _go_around(
        self, flow: str, command: RunCall, node: StageNode, parts: Sequence[Part]
    ) -> Iterator[Produced]:
        """Work on items of a loop, those with the same columns together: they differ by turn."""
        wanted = [(part.producer, part.items) for part in parts]
        for batch in self.store.gather_alike(flow, command.step, wanted):
            output = self._run(flow, node, [batch])
            yield self._keep(flow, command.step, node, _named(node, batch, output))

    def _gather(self, flow: str, step: int, inputs: Inputs) -> list[Batch]:
        return [
            self.store.gather(flow, step, [(part.producer, part.items) for part in parts])
            for parts in inputs
        ]

    def _function(self, flow: str, node: StageNode) -> Callable[..., Any]:
        if node.is_function:
            return self.graphs[flow].functions[node.name].function
        stage: Callable[..., Any] = getattr(self.workers[node.worker], node.method)
        return stage

    def _stream(
        self, flow: str, command: RunCall, node: StageNode, batches: list[Batch]
    ) -> Iterator[Produced]:
        inbox = self._fed[command.call]
        waiting = _outputs_of(node, batches[0])
        try:
            while True:
                stage = self._function(flow, node)(*batches, **node.options)
                if not isinstance(stage, Generator):
                    raise UserError(
                        "streams, so it must be a generator function that yields Batches",
                        key=node.name,
                        value=type(stage).__name__,
                    )
                fed: Batch | None = None
                while True:
                    try:
                        output = stage.send(fed)
                    except StopIteration:
                        break
                    _check_handed_on(node, output, waiting)
                    waiting.difference_update(output.ids)
                    if len(output):
                        yield self._keep(flow, command.step, node, output)
                    fed = _drain(inbox)
                    if fed is not None:
                        waiting |= _outputs_of(node, fed)
                if waiting:
                    raise UserError(
                        f"ended with {len(waiting)} items not handed on",
                        key=node.name,
                        value=sorted(waiting)[:8],
                    )
                fed = _drain(inbox)
                if fed is None:
                    return
                batches, waiting = [fed], _outputs_of(node, fed)
        finally:
            del self._fed[command.call]

    def feed(self, flow: str, command: FeedCall) -> bool:
        """Hand more items to a streaming call; False if it has ended already."""
        inbox = self._fed.get(command.call)
        if inbox is None:
            return False
        inbox.append(self._gather(flow, command.step, command.inputs)[0])
        return True

    def _keep(self, flow: str, step: int, node: StageNode, output: Batch) -> Produced:
        self.store.put(flow, step, node.index, output)
        leaving: tuple[int, ...] = ()
        if node.loop is not None:
            until = self.graphs[flow].loops[node.loop].until
            if until in output:
                marks = output[until]
                leaving = tuple(i for i, done in zip(output.ids, marks, strict=True) if done)
        return Produced(output.ids, output.nbytes, leaving)

    def finish(self, flow: str, command: RunFinish) -> dict[str, float]:
        """Run the `finish` of an accumulating stage; the metrics it returns."""
        node = self.graphs[flow].nodes[command.node]
        if node.is_function:
            finish = self.graphs[flow].functions[node.name].finish_function
            assert finish is not None
            return dict(finish() or {})
        worker = self.workers[node.worker]
        finish = getattr(type(worker), node.method).finish_function
        return dict(finish(worker) or {})

    def move(self, command: MoveState) -> None:
        """Offload or onload a worker."""
        worker = self.workers.get(command.worker)
        if worker is not None:  # a pure function has no state
            getattr(worker, command.what)()

    def install(self, source: str, target: str, version: int, weights: Mapping[str, Any]) -> None:
        """Install published weights in a worker of this lane."""
        self.workers[target].install(weights, version)
        self.versions[target] = version


def _outputs_of(node: StageNode, batch: Batch) -> set[int]:
    n = node.expands
    return {item * n + k for item in batch.ids for k in range(n)}


def _drain(inbox: deque[Batch]) -> Batch | None:
    batches = []
    while inbox:
        batches.append(inbox.popleft())
    return Batch.concat(batches) if batches else None


def _check_handed_on(node: StageNode, output: object, waiting: set[int]) -> None:
    """Check what a streaming stage yielded against the outputs that are still to come."""
    if not isinstance(output, Batch):
        raise UserError(
            "must yield Batches",
            key=node.name,
            value=type(output).__name__,
            hint="yield an empty one, batch.select([]), to ask for more items",
        )
    unknown = set(output.ids) - waiting
    if unknown or len(set(output.ids)) != len(output):
        raise UserError(
            "handed on items it was not given, or handed on before",
            key=node.name,
            value=sorted(unknown or output.ids)[:8],
            hint="keep the ids: make outputs with Batch.repeat, select and take",
        )


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
        raise UserError(
            "returned items it was not given",
            key=node.name,
            value=sorted(set(output.ids) - set(expected))[:8],
        )
    return Batch(output.columns, expected)
