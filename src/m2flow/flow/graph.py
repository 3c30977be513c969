"""`FlowGraph`: what tracing a flow gives; plain data that planner and engine work on.

A node is one stage call of the step. Items are counted by integers: an expanding stage turns item
i into items i*n ... i*n + n-1, so that every node knows how many items it will see (`fanout` for
each source item) and which of them form a group, before anything runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from m2flow.errors import FlowError
from m2flow.flow.stage import Stage, Unit
from m2flow.flow.trace import CallRecord, LoopSpec, Recording, Stream

SOURCE = -1
"""Stands for the step's input wherever a node index stands for the stage that makes a stream."""


@dataclass(frozen=True, slots=True)
class StageNode:
    """One stage call.

    Attributes:
        index: position in `FlowGraph.nodes`, which is a topological order.
        name: `worker.method` or the function's name; unique in the graph.
        worker: the worker it runs on; for a pure function, the function's name.
        method: attribute of the worker, or "" for a pure function.
        inputs: for each input stream the node that makes it, or SOURCE.
        fanout: items it receives for each source item.
        group_size: items that descend from one item of the nearest expanding stage upstream.
        loop: index in `FlowGraph.loops`, or None.
        waits: whether its lane may do other work while a call goes on.
        options: keyword arguments of the call, constant over the run.
        length: the input column that says how long an item takes, or None.
        by_arrival: whether mini-batches are made of items as they arrive, and not by their index.
    """

    index: int
    name: str
    worker: str
    method: str
    inputs: tuple[int, ...]
    unit: Unit
    streaming: bool
    accumulates: bool
    has_finish: bool
    sticky: bool
    expands: int
    minibatches: int
    fanout: int
    group_size: int
    loop: int | None
    options: Mapping[str, Any]
    length: str | None = None
    waits: bool = False
    by_arrival: bool = False

    @property
    def is_function(self) -> bool:
        return not self.method

    def unit_items(self, num_items: int) -> int:
        """Items of one unit, where a step brings the stage so many items."""
        return {"item": 1, "group": self.group_size, "step": num_items}[self.unit]


@dataclass(frozen=True, slots=True)
class WeightEdge:
    """`target` runs on weights that `source` trains."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class FlowGraph:
    """Stages, edges, cycles and weight edges of one traced method of a flow.

    Attributes:
        name: name of the flow class and the method traced.
        nodes: in topological order (a loop's members stand together).
        output: the node whose items the step returns.
        functions: the pure functions among the stages, by node name.
    """

    name: str
    nodes: tuple[StageNode, ...]
    loops: tuple[LoopSpec, ...]
    weight_edges: tuple[WeightEdge, ...]
    output: int
    functions: Mapping[str, Stage]

    def node(self, name: str) -> StageNode:
        return next(node for node in self.nodes if node.name == name)

    @property
    def workers(self) -> tuple[str, ...]:
        """Workers (pure functions included), in the order the nodes name them first."""
        return tuple(dict.fromkeys(node.worker for node in self.nodes))

    @property
    def output_nodes(self) -> tuple[int, ...]:
        """Stages whose outputs the step returns: one, or the members of the loop it ends with."""
        loop = self.nodes[self.output].loop
        return (self.output,) if loop is None else self.loops[loop].members

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """(producer, consumer) pairs, SOURCE included, a loop's way back included."""
        forward = [(made_by, node.index) for node in self.nodes for made_by in node.inputs]
        back = [(loop.members[-1], loop.members[0]) for loop in self.loops]
        return tuple(forward + back)

    def loop_name(self, loop: int) -> str:
        """A loop in words, by its stages."""
        return f"loop({', '.join(self.nodes[index].name for index in self.loops[loop].members)})"

    def length_column(self, producer: int) -> str | None:
        """The column that says how long a stage's (or SOURCE's) items take where they are read.

        Where several readers declare one, the first of them in the order of the flow is heard.
        """
        return next(
            (node.length for node in self.nodes if node.length and producer in node.inputs), None
        )

    def edge_name(self, producer: int, consumer: int) -> str:
        """`producer->consumer`, as plan files write it."""
        first = "source" if producer == SOURCE else self.nodes[producer].name
        return f"{first}->{self.nodes[consumer].name}"

    def between(self, producer: int, consumer: int) -> tuple[int, ...]:
        """Stages on any way from one stage to another: without the first, with the last."""
        found = {producer}
        for node in self.nodes:  # in topological order
            if node.index > producer and not found.isdisjoint(node.inputs):
                found.add(node.index)
        wanted = {consumer}
        for node in reversed(self.nodes[: consumer + 1]):
            if node.index in wanted:
                wanted.update(node.inputs)
        return tuple(sorted((found & wanted) - {producer}))

    def describe(self) -> list[str]:
        """One line for each node, for people."""
        lines = []
        for node in self.nodes:
            sources = ", ".join(
                "source" if made_by == SOURCE else self.nodes[made_by].name
                for made_by in node.inputs
            )
            traits = [f"unit={node.unit}"] if node.unit != "item" else []
            traits += [
                name
                for name in ("streaming", "accumulates", "sticky", "waits", "by_arrival")
                if getattr(node, name)
            ]
            traits += [f"expands={node.expands}"] if node.expands > 1 else []
            traits += [f"minibatches={node.minibatches}"] if node.minibatches > 1 else []
            traits += [f"length={node.length}"] if node.length else []
            traits += [f"loop {node.loop}"] if node.loop is not None else []
            lines.append(
                f"{node.name} <- {sources}" + (f"  [{', '.join(traits)}]" if traits else "")
            )
        lines += [f"{edge.source} => {edge.target}  [weights]" for edge in self.weight_edges]
        return lines


def build_graph(trace: Recording, output: Stream, method: str) -> FlowGraph:
    """Turn a trace into a validated graph.

    Raises:
        FlowError: the graph makes no sense; names the stage and the reason.
    """
    if output.trace is not trace:
        raise FlowError("returned a Stream of another flow", key=method)
    if not trace.calls:
        raise FlowError("calls no stage on its items", key=f"{trace.flow_name}.{method}")
    if output.producer is None:
        raise FlowError(
            "returns the items that it was given",
            key=f"{trace.flow_name}.{method}",
            hint="return what a stage makes of them, such as `return self.learner.train(items)`",
        )
    names = _unique_names(trace)
    chains: dict[int, tuple[int, ...]] = {SOURCE: ()}
    nodes: list[StageNode] = []
    for index, call in enumerate(trace.calls):
        node, chain = _node(trace, index, call, names[index], chains)
        chains[index] = chain
        nodes.append(node)
    graph = FlowGraph(
        name=f"{trace.flow_name}.{method}",
        nodes=tuple(nodes),
        loops=tuple(trace.loops),
        weight_edges=tuple(WeightEdge(*edge) for edge in trace.weight_edges),
        output=output.producer,
        functions={
            names[index]: call.stage.stage
            for index, call in enumerate(trace.calls)
            if call.stage.owner is None
        },
    )
    _check_uses(graph)
    _check_reached(graph)
    _check_published(graph)
    return graph


def _unique_names(trace: Recording) -> list[str]:
    seen: dict[str, int] = {}
    names = []
    for call in trace.calls:
        label = trace.label(call.stage)
        seen[label] = seen.get(label, 0) + 1
        names.append(label if seen[label] == 1 else f"{label}#{seen[label]}")
    return names


def _node(
    trace: Recording, index: int, call: CallRecord, name: str, chains: dict[int, tuple[int, ...]]
) -> tuple[StageNode, tuple[int, ...]]:
    """The node of one call, and the chain of expansions that its output has behind it."""
    spec, owner = call.stage.spec, call.stage.owner
    inputs = tuple(SOURCE if made_by is None else made_by for made_by in call.inputs)
    chain = chains[inputs[0]]
    if any(chains[made_by] != chain for made_by in inputs):
        counts = [_product(chains[made_by]) for made_by in inputs]
        raise FlowError(
            f"its inputs count different items ({counts} for each item of the step)",
            key=name,
            hint="join streams before, or after, both have been expanded in the same way",
        )
    if len(set(inputs)) != len(inputs):
        raise FlowError("takes the same stream twice", key=name, hint="pass it once")
    if spec.unit == "group" and not chain:
        raise FlowError(
            "works on groups, but no stage upstream expands items into groups",
            key=name,
            hint="declare expands=n on the stage that makes several items of one",
        )
    if spec.sticky and owner is None:
        raise FlowError(
            "is sticky but has no state for an item to return to",
            key=name,
            hint="make it a method of a Worker",
        )
    if spec.accumulates and owner is None:
        raise FlowError(
            "folds items into state, and a function has none",
            key=name,
            hint="make it a method of a Worker",
        )
    if spec.waits and owner is None:
        raise FlowError(
            "waits for something of its own, and a function has nothing",
            key=name,
            hint="make it a method of a Worker",
        )
    if owner is None and name in trace.worker_names.values():
        raise FlowError("is a function with the name of a worker", key=name, hint="rename one")
    expands = call.stage.resolve(spec.expands, call.options, "expands")
    node = StageNode(
        index=index,
        name=name,
        worker=name if owner is None else trace.worker_name(owner),
        method="" if owner is None else spec.name,
        inputs=inputs,
        unit=spec.unit,
        streaming=spec.streaming,
        accumulates=spec.accumulates,
        has_finish=call.stage.stage.finish_function is not None,
        sticky=spec.sticky,
        expands=expands,
        minibatches=call.stage.resolve(spec.minibatches, call.options, "minibatches"),
        by_arrival=call.stage.resolve_truth(spec.by_arrival, call.options, "by_arrival"),
        fanout=_product(chain),
        group_size=chain[-1] if chain else 1,
        loop=call.loop,
        options=dict(call.options),
        length=spec.length,
        waits=spec.waits,
    )
    # Declared, not counted: what makes sense with n items of one makes sense with one.
    return node, (*chain, expands) if spec.expands != 1 else chain


def _product(factors: tuple[int, ...]) -> int:
    product = 1
    for factor in factors:
        product *= factor
    return product


def _check_uses(graph: FlowGraph) -> None:
    """Streams that may be used once only, and state that may be folded into once only."""
    folded: dict[tuple[str, str], str] = {}
    for node in graph.nodes:
        consumers = [other.name for other in graph.nodes if node.index in other.inputs]
        exits = node.loop is not None and node.index == graph.loops[node.loop].members[-1]
        inner = [c for c in consumers if node.loop is not None and graph.node(c).loop == node.loop]
        outer = [c for c in consumers if c not in inner]
        if node.sticky and len(outer) > 1:
            raise FlowError(
                f"its stream is used twice, by {' and '.join(outer)}, but its items are bound to "
                "the lane that holds their state",
                key=node.name,
            )
        if inner and outer and not exits:
            raise FlowError(
                f"stands inside a loop, so {outer[0]} cannot use its stream",
                key=node.name,
                hint="use the stream that the loop returns",
            )
        if node.accumulates:
            key = (node.worker, node.method)
            if key in folded:
                raise FlowError(
                    f"folds into the same state as {folded[key]} within one step", key=node.name
                )
            folded[key] = node.name


def _check_reached(graph: FlowGraph) -> None:
    """Every stage must lead to the step's output or to state that outlives the step."""
    useful = {graph.output} | {node.index for node in graph.nodes if node.accumulates}
    pending = list(useful)
    edges = graph.edges
    while pending:
        index = pending.pop()
        for producer, consumer in edges:
            if consumer == index and producer != SOURCE and producer not in useful:
                useful.add(producer)
                pending.append(producer)
    for node in graph.nodes:
        if node.index not in useful:
            raise FlowError(
                "its result reaches neither the output of the step nor a stage that accumulates",
                key=node.name,
                hint="pass its stream on, return it, or leave the call out",
            )


def _check_published(graph: FlowGraph) -> None:
    """Weights travel over one edge: whether what a worker hands on were its own weights or those
    that it has just been sent would depend on the plan."""
    sources = {edge.source: edge.target for edge in graph.weight_edges}
    for edge in graph.weight_edges:
        if edge.target in sources:
            raise FlowError(
                f"runs on the weights of {edge.source}, and publishes weights to "
                f"{sources[edge.target]}",
                key=edge.target,
                hint=f"publish from {edge.source} to each worker that runs on its weights",
            )
