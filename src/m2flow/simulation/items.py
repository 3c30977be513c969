"""Where the items of a simulated run are, and how many of a stage there are at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from m2flow.engine.messages import Inputs
from m2flow.flow.graph import SOURCE, FlowGraph, StageNode
from m2flow.simulation.run import SimulatedRun
from m2flow.simulation.timing import Transfer

LAUNCHER = -1
"""Where source items lie; they come along with the command."""


class VirtualItems:
    """The items that have been made and not released.

    Args:
        graph: of the steps.
        record: learns how often items are worked on, and the most that there are of each stage.
    """

    def __init__(self, graph: FlowGraph, record: SimulatedRun) -> None:
        self._record = record
        self._there: dict[tuple[int, int], dict[int, int]] = {}  # item to the lane that holds it
        nodes = len(graph.nodes)
        self._held = dict.fromkeys(range(SOURCE, nodes), 0)

    def submit(self, step: int, num_items: int) -> None:
        """Source items of a step are there."""
        self._there[step, SOURCE] = dict.fromkeys(range(num_items), LAUNCHER)
        self._held[SOURCE] += num_items

    def work_on(self, node: StageNode, step: int, items: Sequence[int]) -> None:
        """A call has begun that makes outputs of these: they count from now on."""
        for item in items:
            key = (node.index, step, item)
            self._record.worked_on[key] = self._record.worked_on.get(key, 0) + 1
        if node.loop is None:
            self._held[node.index] += len(items) * node.expands
            peak = self._record.peak_items.get(node.index, 0)
            self._record.peak_items[node.index] = max(peak, self._held[node.index])

    def put(self, step: int, producer: int, items: Iterable[int], lane: int) -> None:
        """Outputs of a stage lie on a lane."""
        self._there.setdefault((step, producer), {}).update(dict.fromkeys(items, lane))

    def release(self, step: int, producer: int, items: Sequence[int]) -> None:
        """Nobody will read these."""
        there = self._there[step, producer]
        for item in items:
            there.pop(item, None)
        self._held[producer] -= len(items)

    def forget(self, step: int) -> None:
        """A step is complete: what is left of it goes."""
        for key in [key for key in self._there if key[0] == step]:
            self._held[key[1]] -= len(self._there.pop(key))

    def read(self, step: int, inputs: Inputs) -> list[int]:
        """The items of a call; every one must be there on every input."""
        streams = []
        for parts in inputs:
            for part in parts:
                there = self._there.get((step, part.producer), {})
                missing = [item for item in part.items if item not in there]
                assert not missing, f"items {missing} of {part.producer} are not there"
            streams.append(sorted(item for part in parts for item in part.items))
        assert all(items == streams[0] for items in streams), "inputs are not aligned"
        return streams[0]

    def transfers(
        self, node: StageNode, step: int, lane: int, inputs: Inputs
    ) -> Iterator[Transfer]:
        """What has to be brought to a lane before it can read, one lane after the other."""
        for part in (part for parts in inputs for part in parts if part.producer != SOURCE):
            holders = self._there[step, part.producer]
            elsewhere: dict[int, list[int]] = {}
            for item in part.items:
                if holders[item] != lane:
                    elsewhere.setdefault(holders[item], []).append(item)
            for source, some in elsewhere.items():
                yield Transfer(node, step, part.producer, source, lane, some)
