"""Which stages of a flow make rollouts: what takes most of a step, and can be kept for later.

A stage, or a loop, makes rollouts if it runs on published weights and reads nothing that another
such one has made. What it gives follows from its items, their seeds and the weights' version, so
that it need not be made again for a step that is run again. Where a stage further down is sticky
its worker may hold what an item needs there beside the item itself: then nothing can be kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from m2flow.flow.batch import Batch
from m2flow.flow.graph import SOURCE, FlowGraph


@dataclass(frozen=True, slots=True)
class RolloutStage:
    """A stage or a loop that makes rollouts.

    Attributes:
        node: the stage, or the first member of the loop.
        members: the stage, or the members of the loop.
        name: of the node, unique in the graph.
        worker: whose version of weights counts.
    """

    node: int
    members: tuple[int, ...]
    name: str
    worker: str


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Items that a stage or loop has given.

    Attributes:
        step: of which step.
        stage: `RolloutStage.name`.
        version: of the weights that made them.
        batch: the items.
    """

    step: int
    stage: str
    version: int
    batch: Batch


def rollout_stages(graph: FlowGraph) -> tuple[RolloutStage, ...]:
    """The stages and loops of a flow that make rollouts, in the order of the flow."""
    targets = {edge.target for edge in graph.weight_edges}
    found: list[RolloutStage] = []
    made_of_rollouts: set[int] = set()
    for node in graph.nodes:
        members = (node.index,) if node.loop is None else graph.loops[node.loop].members
        if node.index != members[0]:
            continue
        workers = [graph.nodes[member].worker for member in members]
        worker = next((one for one in workers if one in targets), None)
        upstream = {stream for stream in node.inputs if stream != SOURCE}
        if upstream & made_of_rollouts:
            made_of_rollouts.update(members)
        elif worker is not None and not node.accumulates:
            made_of_rollouts.update(members)
            if not _stick_downstream(graph, members):
                found.append(RolloutStage(node.index, members, node.name, worker))
    return tuple(found)


def _stick_downstream(graph: FlowGraph, members: tuple[int, ...]) -> bool:
    """Whether a sticky stage reads, at any remove, what these members make."""
    return any(
        node.sticky and graph.between(members[-1], node.index)
        for node in graph.nodes
        if node.index > members[-1]
    )
