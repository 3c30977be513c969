"""`StepState`: everything the engine knows about one step in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from m2flow.engine.directory import Directory, Homes
from m2flow.engine.ledger import StageLedger
from m2flow.engine.loops import LoopLedger, LoopState, sticky_member
from m2flow.engine.messages import Inputs, Part
from m2flow.errors import PlanError
from m2flow.flow.graph import SOURCE, FlowGraph, StageNode


class StepState:
    """Ledgers of all stages in one step, and where its payloads are.

    Args:
        graph: the flow.
        step: the step's number.
        num_items: source items of the step.
        fused: numbers of the loops that run fused.

    Attributes:
        directory: which lanes hold what.
        ledgers: by stage.
        loops: by loop.
        open_nodes: stages that are not complete.
        active_calls: calls of this step in progress.
        installs: weight installs that this step's publish still waits for.
        finishing: stages whose `finish` has been asked for.
        settled: workers that have done the step and whose weights are on their way.
        staleness: version lag to the number of items leased with it.
        homes: for each worker (fanout, item) to the lane that holds the state of a sticky item.
        recalled: by stage the outputs that are recalled while others of their unit are not.

    Raises:
        PlanError: the number of items cannot be cut into a stage's mini-batches.
    """

    def __init__(
        self, graph: FlowGraph, step: int, num_items: int, fused: frozenset[int] = frozenset()
    ) -> None:
        check_items(graph, num_items)
        self.graph, self.step, self.num_items = graph, step, num_items
        self.directory = Directory(graph, num_items)
        self._looped = [
            any(stream != SOURCE and graph.nodes[stream].loop is not None for stream in node.inputs)
            or node.loop is not None
            for node in graph.nodes
        ]
        self.open_nodes = len(graph.nodes)
        self.active_calls = 0
        self.installs = 0
        self.finishing: set[int] = set()
        self.settled: set[str] = set()
        self.staleness: dict[int, int] = {}
        self.recalled: dict[int, tuple[int, ...]] = {}
        self.homes: dict[str, dict[tuple[int, int], int]] = {w: {} for w in graph.workers}
        firsts = [graph.nodes[loop.members[0]] for loop in graph.loops]
        self.loops = [
            LoopState(first, num_items * first.fanout, fused=number in fused)
            for number, first in enumerate(firsts)
        ]
        self.ledgers = [self._ledger(node) for node in graph.nodes]
        self._open_of_worker = {
            worker: sum(node.worker == worker for node in graph.nodes) for worker in graph.workers
        }
        self._readers = {
            stream: [self.ledgers[node.index] for node in graph.nodes if stream in node.inputs]
            for stream in range(SOURCE, len(graph.nodes))
        }
        self._reads = [
            [(x, [one for one in self._readers[x] if one.node is not node]) for x in node.inputs]
            for node in graph.nodes
        ]

    def _ledger(self, node: StageNode) -> StageLedger:
        total = self.num_items * node.fanout
        binding: StageNode | None = node if node.sticky else None
        loop = None if node.loop is None else self.loops[node.loop]
        if loop is not None and loop.fused:  # the first member leases for all of them
            assert node.loop is not None
            binding = sticky_member(self.graph, node.loop)
        owner = binding or node
        homes = Homes(self.homes[owner.worker], _fanouts(self.graph, owner))
        sticky = binding is not None
        place = self._place(node)
        if loop is None:
            return StageLedger(node, total, place, homes, sticky=sticky)
        return LoopLedger(node, total, place, homes, loop, sticky=sticky)

    def _place(self, node: StageNode) -> Callable[[int], int]:
        """What tells a stage's ledger which lane holds an item of the stage's last input."""
        stream = node.inputs[-1]
        if not (loops := self._loops_behind(node, stream)):
            return self.directory.homes(stream)
        return lambda item: self.directory.home(_maker(loops, stream, item), item)

    # --- completeness -------------------------------------------------------------------------

    def node_done(self, node: StageNode) -> None:
        """Count a stage as complete."""
        self.open_nodes -= 1
        self._open_of_worker[node.worker] -= 1

    def node_reopened(self, node: StageNode) -> None:
        """A stage that was complete is to do some of its items again."""
        self.open_nodes += 1
        self._open_of_worker[node.worker] += 1
        self.settled.discard(node.worker)

    def worker_done(self, worker: str) -> bool:
        """Whether all stages of a worker are complete."""
        return not self._open_of_worker.get(worker)

    # --- payloads -----------------------------------------------------------------------------

    def inputs(
        self, node: StageNode, ledger: StageLedger, units: Sequence[int], lane: int
    ) -> Inputs:
        """Where a lane reads the items of units, for each input stream."""
        items = tuple(ledger.items_of(units))
        if not self._looped[node.index]:
            parts = self.directory.parts
            return tuple([tuple(parts(stream, items, lane)) for stream in node.inputs])
        return tuple(
            tuple(
                part
                for producer, some in self._made_by(node, stream, items)
                for part in self.directory.parts(producer, some, lane)
            )
            for stream in node.inputs
        )

    def maker(self, node: StageNode, stream: int, item: int) -> int:
        """Who made an item of a stream: its stage, or for a loop the member it came from."""
        return _maker(self._loops_behind(node, stream), stream, item)

    def _made_by(
        self, node: StageNode, stream: int, items: Sequence[int]
    ) -> list[tuple[int, Sequence[int]]]:
        """(producer, items) of a stream."""
        if not self._looped[node.index]:
            return [(stream, items)]
        by_producer: dict[int, list[int]] = {}
        loops = self._loops_behind(node, stream)
        for item in items:
            by_producer.setdefault(_maker(loops, stream, item), []).append(item)
        return list(by_producer.items())

    def _loops_behind(self, node: StageNode, stream: int) -> list[LoopState]:
        """The loop that the stage stands in, and another one whose items it takes in."""
        made_in = None if stream == SOURCE else self.graph.nodes[stream].loop
        if node.loop is None and made_in is None:
            return []
        loops = dict.fromkeys((node.loop, made_in))
        return [self.loops[loop] for loop in loops if loop is not None]

    def consumed(
        self, node: StageNode, items: Sequence[int], lanes: Sequence[int]
    ) -> list[tuple[int, Sequence[int]]]:
        """Lanes have read these items for `node`, whose ledger says so.

        Returns:
            (producer, items) that no stage will read any more.
        """
        free: list[tuple[int, Sequence[int]]] = []
        for stream, others in self._reads[node.index]:
            last: Sequence[int] = items
            if stream == self.graph.output:
                last = ()
            elif others:
                last = [i for i in items if all(other.has_read(i) for other in others)]
            if last:
                free += self._made_by(node, stream, last)
            if len(last) < len(items):
                kept = sorted(set(items).difference(last)) if last else items
                for producer, some in self._made_by(node, stream, kept):
                    self.directory.copied(producer, some, lanes)
        return free

    def moved_on(
        self, node: StageNode, items: Sequence[int], lanes: Sequence[int]
    ) -> list[tuple[int, Sequence[int]]]:
        """A loop's member has made these items: (producer, items) of what they were before."""
        assert node.loop is not None
        came_from = self.loops[node.loop].came_from
        entering = [item for item in items if item not in came_from]
        free = self.consumed(node, entering, lanes) if entering else []
        earlier: dict[int, list[int]] = {}
        for item in items:
            if (before := came_from.get(item)) is not None:
                earlier.setdefault(before, []).append(item)
        return [*free, *earlier.items()]

    def output(self) -> tuple[Part, ...]:
        """Where the items lie that the step returns."""
        return tuple(
            part
            for producer in self.graph.output_nodes
            for part in self.directory.parts(
                producer,
                [
                    item
                    for item in range(self.directory.size(producer))
                    if self.directory.holds(producer, item)
                ],
                reader=SOURCE,
            )
        )

    def readers(self, stream: int) -> list[StageLedger]:
        """Ledgers of the stages that read a stream."""
        return self._readers[stream]


def _maker(loops: Sequence[LoopState], stream: int, item: int) -> int:
    """The member that an item came from in the first of some loops that know it, or the stream."""
    for loop in loops:
        if (producer := loop.came_from.get(item)) is not None:
            return producer
    return stream


def check_items(graph: FlowGraph, num_items: int) -> None:
    """Refuse a step that cannot be cut into a stage's mini-batches.

    Raises:
        PlanError: names the stage.
    """
    for node in graph.nodes:
        total = num_items * node.fanout
        units = total // node.unit_items(total)
        if units % node.minibatches:
            raise PlanError(
                f"cannot cut {units} {node.unit}s of a step into {node.minibatches} mini-batches "
                "of the same size",
                key=node.name,
                hint="change the items of a step or `minibatches`",
            )


def _fanouts(graph: FlowGraph, node: StageNode) -> list[int]:
    """Spaces in which the state of a sticky stage's items may be known: its own one first."""
    upstream = [
        other.fanout
        for other in graph.nodes
        if node.sticky and other.sticky and other.worker == node.worker
        if graph.between(other.index, node.index)
    ]
    return list(dict.fromkeys([node.fanout, *upstream]))
