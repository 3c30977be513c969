"""Items that are there when a step begins, because they were made when it was run before.

The launcher holds them, as it holds the step's source. Units of which all outputs are there need
not be done, and neither do units upstream that nobody reads any more. A unit of which some outputs
are there is done for the others: a streaming stage is told which.
"""

from __future__ import annotations

from m2flow.engine.ledger import DONE
from m2flow.engine.messages import LAUNCHER, Recalled
from m2flow.engine.steps import StepState

Arrival = tuple[int, list[int], Recalled]
"""A stream, the stages that read its items from outside, and the items."""


def recall(state: StepState, recalled: Recalled) -> Arrival:
    """Enter items into the books of a step to which nothing has come yet."""
    node = state.graph.nodes[recalled.node]
    lag = state.step - recalled.version
    assert lag >= 0, f"items of {node.name} are of a version that is still to come"
    members: tuple[int, ...] = (node.index,)
    if node.loop is None:
        state.directory.add(node.index, recalled.items, LAUNCHER)
        units = _whole_units(state, recalled)
    else:
        members, units = state.graph.loops[node.loop].members, list(recalled.items)
        loop = state.loops[node.loop]
        state.directory.put(node.index, units, LAUNCHER)
        loop.came_from.update(dict.fromkeys(units, node.index))
        loop.left += len(units)
    for member in members:
        state.ledgers[member].skip(units)
    if units:
        items = len(units) * state.ledgers[node.index].unit_items
        state.staleness[lag] = state.staleness.get(lag, 0) + items
    readers = [other.index for other in state.graph.nodes if members[-1] in other.inputs]
    return members[-1], [reader for reader in readers if reader not in members], recalled


def _whole_units(state: StepState, recalled: Recalled) -> list[int]:
    """Units of a stage of which all outputs are recalled; the other outputs are noted."""
    node = state.graph.nodes[recalled.node]
    ledger = state.ledgers[node.index]
    size = ledger.unit_items * node.expands
    counts: dict[int, int] = {}
    before = state.recalled.get(node.index, ())
    items = (*before, *recalled.items)
    for item in items:
        counts[item // size] = counts.get(item // size, 0) + 1
    state.recalled[node.index] = tuple(item for item in items if counts[item // size] < size)
    return sorted(unit for unit, count in counts.items() if count == size)


def skip_unneeded(state: StepState) -> None:
    """Skip units whose outputs nobody will read, because what is made of them is recalled."""
    graph = state.graph
    for node in reversed(graph.nodes):
        readers = state.readers(node.index)
        if node.loop is not None or node.accumulates or node.index in graph.output_nodes:
            continue
        if not readers:
            continue
        ledger = state.ledgers[node.index]
        size = ledger.unit_items * node.expands
        units = [
            unit
            for unit in range(ledger.num_units)
            if ledger.status(unit) != DONE
            and all(
                reader.has_read(item)
                for reader in readers
                for item in range(unit * size, (unit + 1) * size)
            )
        ]
        ledger.skip(units)
