"""`StepState`: everything the engine knows about one step in flight."""

from __future__ import annotations

from collections.abc import Sequence

from m2flow.engine.fusing import sticky_member
from m2flow.engine.homes import Homes
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
        fused: numbers of the loops that run fused.

    Attributes:
        open_nodes: stages that are not complete.
        active_calls: calls of this step in progress.
        installs: weight installs that this step's publish still waits for.
        finishing: stages whose `finish` has been asked for.
        settled: workers that have done the step and whose weights are on their way.
        staleness: version lag to the number of items leased with it.

    Raises:
        UserError: the number of items cannot be cut into a stage's mini-batches.
    """

    def __init__(
        self, graph: FlowGraph, step: int, num_items: int, fused: frozenset[int] = frozenset()
    ) -> None:
        self.graph, self.step, self.num_items = graph, step, num_items
        self.open_nodes = len(graph.nodes)
        self.active_calls = 0
        self.installs = 0
        self.finishing: set[int] = set()
        self.settled: set[str] = set()
        self.staleness: dict[int, int] = {}
        self._lanes_of_items: dict[str, dict[tuple[int, int], int]] = {w: {} for w in graph.workers}
        self.loops = [
            LoopState(num_items * graph.nodes[loop.members[0]].fanout, fused=number in fused)
            for number, loop in enumerate(graph.loops)
        ]
        self.ledgers = [self._ledger(node) for node in graph.nodes]
        self._open_of_worker = {
            worker: sum(node.worker == worker for node in graph.nodes) for worker in graph.workers
        }
        self._readers = _readers(graph)
        self._reads_left: dict[tuple[int, int], int] = {}

    def _ledger(self, node: StageNode) -> StageLedger:
        total = self.num_items * node.fanout
        binding: StageNode | None = node if node.sticky else None
        loop = None if node.loop is None else self.loops[node.loop]
        if loop is not None and loop.fused:  # the first member leases for all of them
            assert node.loop is not None
            binding = sticky_member(self.graph, node.loop)
        owner = binding or node
        homes = Homes(self._lanes_of_items[owner.worker], _fanouts(self.graph, owner))
        sticky = binding is not None
        ledger = (
            StageLedger(node, total, homes, sticky=sticky)
            if loop is None
            else LoopLedger(node, total, homes, loop, sticky=sticky)
        )
        if ledger.num_units % node.minibatches:
            raise UserError(
                f"cannot cut {ledger.num_units} {node.unit}s of a step into "
                f"{node.minibatches} mini-batches of the same size",
                key=node.name,
                hint="change the items of a step or `minibatches`",
            )
        return ledger

    def node_done(self, node: StageNode) -> None:
        """Count a stage as complete."""
        self.open_nodes -= 1
        self._open_of_worker[node.worker] -= 1

    def worker_done(self, worker: str) -> bool:
        """Whether all stages of a worker are complete."""
        return not self._open_of_worker.get(worker)

    def inputs(self, node: StageNode, ledger: StageLedger, units: Sequence[int]) -> Inputs:
        """Where a call on these units reads its items, for each input stream."""
        items = tuple(ledger.items_of(units))
        return tuple(self._parts(node, stream, items) for stream in node.inputs)

    def _parts(self, node: StageNode, stream: int, items: tuple[int, ...]) -> tuple[Part, ...]:
        """Who made the items of a stream: its stage, or for a loop the members they came from."""
        loops = self._loops_behind(node, stream)
        if not loops:
            return (Part(stream, items),)
        by_producer: dict[int, list[int]] = {}
        for item in items:
            made_by = (loop.came_from[item] for loop in loops if item in loop.came_from)
            by_producer.setdefault(next(made_by, stream), []).append(item)
        return tuple(Part(producer, tuple(some)) for producer, some in by_producer.items())

    def _loops_behind(self, node: StageNode, stream: int) -> list[LoopState]:
        """The loop that the stage stands in, and another one whose items it takes in."""
        made_in = None if stream == SOURCE else self.graph.nodes[stream].loop
        loops = dict.fromkeys((node.loop, made_in))
        return [self.loops[loop] for loop in loops if loop is not None]

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


def _fanouts(graph: FlowGraph, node: StageNode) -> list[int]:
    """Spaces in which the state of a sticky stage's items may be known: its own one first."""
    upstream = [
        other.fanout
        for other in graph.nodes
        if node.sticky and other.sticky and other.worker == node.worker
        if graph.between(other.index, node.index)
    ]
    return list(dict.fromkeys([node.fanout, *upstream]))


def _readers(graph: FlowGraph) -> dict[int, int]:
    """For each stream how many stages read it; the step's output has one reader more."""
    readers = dict.fromkeys(range(SOURCE, len(graph.nodes)), 0)
    for node in graph.nodes:
        for stream in node.inputs:
            readers[stream] += 1
    readers[graph.output] += 1
    return readers
