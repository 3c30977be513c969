"""`StepState`: everything the engine knows about one step in flight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from m2flow.engine.ledger import LoopLedger, LoopState, StageLedger
from m2flow.engine.messages import Inputs, Part
from m2flow.errors import UserError
from m2flow.flow.graph import SOURCE, FlowGraph, StageNode


class StepState:
    """Ledgers of all stages in one step, and who still needs which payload.

    Args:
        graph: the flow.
        step: the step's number.
        num_items: source items of the step.

    Attributes:
        open_nodes: stages that are not complete.
        active_calls: calls of this step in progress.
        installs: weight installs that this step's publish still waits for.
        finishing: stages whose `finish` has been asked for.
        staleness: version lag to the number of items leased with it.

    Raises:
        UserError: the number of items cannot be cut into a stage's mini-batches.
    """

    def __init__(self, graph: FlowGraph, step: int, num_items: int) -> None:
        self.graph, self.step, self.num_items = graph, step, num_items
        self.open_nodes = len(graph.nodes)
        self.active_calls = 0
        self.installs = 0
        self.finishing: set[int] = set()
        self.staleness: dict[int, int] = {}
        homes: dict[str, dict[int, int]] = {worker: {} for worker in graph.workers}
        self.loops = [
            LoopState(num_items * graph.nodes[loop.members[0]].fanout) for loop in graph.loops
        ]
        self.ledgers = [self._ledger(node, homes[node.worker]) for node in graph.nodes]
        self._open_of_worker = {
            worker: sum(node.worker == worker for node in graph.nodes) for worker in graph.workers
        }
        self._readers = _readers(graph)
        self._reads_left: dict[tuple[int, int], int] = {}

    def _ledger(self, node: StageNode, homes: dict[int, int]) -> StageLedger:
        total = self.num_items * node.fanout
        ledger = (
            StageLedger(node, total, homes)
            if node.loop is None
            else LoopLedger(node, total, homes, self.loops[node.loop])
        )
        if ledger.num_units % node.minibatches:
            raise UserError(
                f"cannot cut {ledger.num_units} {node.unit}s of a step into "
                f"{node.minibatches} mini-batches of the same size",
                key=node.name,
                hint="change the items of a step or `minibatches`",
            )
        return ledger

    def worker_done(self, worker: str) -> bool:
        """Count one stage of a worker as complete; True if it was the worker's last."""
        self.open_nodes -= 1
        self._open_of_worker[worker] -= 1
        return self._open_of_worker[worker] == 0

    def inputs(self, node: StageNode, ledger: StageLedger, units: Iterable[int]) -> Inputs:
        """Where a call on these units reads its items, for each input stream."""
        items = tuple(item for unit in units for item in ledger.items_of(unit))
        return tuple(self._parts(node, stream, items) for stream in node.inputs)

    def _parts(self, node: StageNode, stream: int, items: tuple[int, ...]) -> tuple[Part, ...]:
        loop = self._loop_behind(node, stream)
        if loop is None:
            return (Part(stream, items),)
        by_producer: dict[int, list[int]] = {}
        for item in items:
            by_producer.setdefault(loop.came_from.get(item, stream), []).append(item)
        return tuple(Part(producer, tuple(some)) for producer, some in by_producer.items())

    def _loop_behind(self, node: StageNode, stream: int) -> LoopState | None:
        """The loop whose members made the items, if it was a loop."""
        loop = node.loop
        if loop is None and stream != SOURCE:
            loop = self.graph.nodes[stream].loop
        return None if loop is None else self.loops[loop]

    def consumed(self, node: StageNode, items: Sequence[int]) -> list[Part]:
        """`node` has read these inputs: the payloads that nobody needs any more."""
        free: list[Part] = []
        for stream in node.inputs:
            readers = self._readers[stream]
            if readers == 1:
                free += self._parts(node, stream, tuple(items))
            elif last := tuple(item for item in items if self._last_read(stream, item, readers)):
                free += self._parts(node, stream, last)
        return free

    def moved_on(self, node: StageNode, items: Sequence[int]) -> list[Part]:
        """A loop's member has made these items: what they were before may go."""
        assert node.loop is not None
        came_from = self.loops[node.loop].came_from
        entering = [item for item in items if item not in came_from]
        earlier = [item for item in items if came_from.get(item, node.index) != node.index]
        free = self._parts(node, SOURCE, tuple(earlier)) if earlier else ()
        return [*self.consumed(node, entering), *free] if entering else list(free)

    def _last_read(self, stream: int, item: int, readers: int) -> bool:
        left = self._reads_left.get((stream, item), readers) - 1
        if left:
            self._reads_left[stream, item] = left
        else:
            self._reads_left.pop((stream, item), None)
        return left == 0


def _readers(graph: FlowGraph) -> dict[int, int]:
    """For each stream how many stages read it; the step's output has one reader more."""
    readers = dict.fromkeys(range(SOURCE, len(graph.nodes)), 0)
    for node in graph.nodes:
        for stream in node.inputs:
            readers[stream] += 1
    readers[graph.output] += 1
    return readers
