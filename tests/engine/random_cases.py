"""Random flows, plans and costs: what the tests of the control plane are run on.

A flow is drawn as a list of calls on the streams there are so far, and traced like any other, so
tracing and graph building are under test as well. Every plan that is drawn is one that `validate`
must accept. Costs come from a seed, and so does the order of simultaneous events.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from m2flow.engine.messages import ExportWeights, InstallWeights, RunFinish
from m2flow.engine.plan import EdgePlan, LaneSpec, Placement, Plan, StagePlan
from m2flow.errors import PlanError
from m2flow.flow import SOURCE, Flow, FlowGraph, StageNode, Worker, loop
from m2flow.flow.stage import Stage, StageSpec
from m2flow.plan import validate
from m2flow.simulation.timing import Admitted, Timing

Draw = Callable[[st.SearchStrategy[Any]], Any]

MAX_ITEMS = 96
"""The most items that a stage of a random flow sees in a step."""


@dataclass(repr=False)
class Case:
    """One random run: a graph, a plan that fits it, and seeded costs."""

    graph: FlowGraph
    plan: Plan
    num_items: int
    num_steps: int
    seed: int

    def costs(self) -> SeededCosts:
        return SeededCosts(self.graph, self.seed)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # what Hypothesis prints
        printer.text(repr(self))

    def __repr__(self) -> str:
        lines = "\n  ".join(self.graph.describe())
        return (
            f"Case(num_items={self.num_items}, num_steps={self.num_steps}, seed={self.seed}, "
            f"plan={self.plan},\n  {lines}\n  output={self.graph.output} loops={self.graph.loops})"
        )


class SeededCosts(Timing):
    """Times drawn from a seed; some are zero, some the same, and a few are very long.

    Attributes:
        worked_on: (stage, step, item) to how often a call was made for the item.
        visits: (loop, step, item) to how many members of the loop have worked on the item.
    """

    def __init__(self, graph: FlowGraph, seed: int) -> None:
        self.graph, self.seed = graph, seed
        self.visits: Counter[tuple[int, int, int]] = Counter()
        self.worked_on: Counter[tuple[int, int, int]] = Counter()

    def _draw(self, *key: object) -> random.Random:
        return random.Random(f"{self.seed} {key}")

    def _seconds(self, *key: object) -> float:
        dice = self._draw(*key)
        return dice.choice((0.0, 1.0, 1.0, dice.random(), dice.random() * 3, 20.0))

    def seconds_of(self, node: StageNode, num_items: int) -> float:
        """A call on so many items."""
        return self._seconds("call", node.name) + num_items * self._seconds("each", node.name)

    def call(
        self, node: StageNode, step: int, lanes: Sequence[int], shares: Sequence[Sequence[int]]
    ) -> float:
        self.worked_on.update((node.index, step, item) for items in shares for item in items)
        return max(self.seconds_of(node, len(items)) for items in shares)

    def admit(self, node: StageNode, step: int, lane: int, items: Sequence[int]) -> Admitted:
        self.worked_on.update((node.index, step, item) for item in items)
        outputs = [item * node.expands + k for item in items for k in range(node.expands)]
        return Admitted(0.0, [self._seconds("item", node.name, step, x) for x in outputs])

    def finish(self, node: StageNode, command: RunFinish) -> float:
        return self._seconds("finish", node.name)

    def publish(self, command: ExportWeights | InstallWeights, lane: int) -> float:
        target = command.target if isinstance(command, InstallWeights) else None
        return self._seconds("publish", command.source, target)

    def move(self, worker: str, what: str, lane: int) -> float:
        return self._seconds("move", worker, what)

    def said_length(self, producer: int, step: int, item: int) -> float:
        """Few lengths, so that many are the same."""
        return float(self._draw("length", producer, step, item).randint(0, 4))

    def item_bytes(self, node: StageNode) -> int:
        return self._draw("bytes", node.name).randint(0, 9)

    def planned_visits(self, index: int, step: int, item: int) -> int:
        """How many members work on an item before it leaves its loop."""
        spec = self.graph.loops[index]
        dice = self._draw("visits", index, step, item)
        longest = 3 * len(spec.members) if spec.until else len(spec.members) * 99
        visits = dice.randint(1, longest)
        return min(visits, len(spec.members) * (spec.max_turns or 99))

    def leaves(self, node: StageNode, step: int, item: int) -> bool:
        assert node.loop is not None
        self.visits[node.loop, step, item] += 1
        planned = self.planned_visits(node.loop, step, item)
        asked = bool(self.graph.loops[node.loop].until)
        return asked and self.visits[node.loop, step, item] == planned


# --- flows ------------------------------------------------------------------------------------


@dataclass
class _Stream:
    """A stream of the flow being drawn: which call makes it, and what stands behind it."""

    call: int | None
    chain: tuple[int, ...]
    sticky: bool = False
    used: bool = False


@dataclass
class _Call:
    """A stage call, or a whole loop, of the flow being drawn."""

    inputs: list[int]
    specs: list[StageSpec]
    workers: list[str | None]
    finish: bool = False
    until: str | None = None
    max_turns: int | None = None


@dataclass
class _Sketch:
    """A flow as it is being drawn."""

    draw: Draw
    num_items: int
    streams: list[_Stream] = field(default_factory=lambda: [_Stream(None, ())])
    calls: list[_Call] = field(default_factory=list)
    workers: int = 0

    def flag(self, chance: float = 0.5) -> bool:
        return bool(self.draw(st.integers(0, 99)) < 100 * chance)

    def items(self, chain: tuple[int, ...]) -> int:
        product = self.num_items
        for factor in chain:
            product *= factor
        return product

    def worker(self, may_be_function: bool = True) -> str | None:
        """A worker for a stage: one that is there, a new one, or none (a pure function)."""
        chosen = self.draw(st.integers(-1 if may_be_function else 0, self.workers))
        if chosen < 0:
            return None
        self.workers = max(self.workers, chosen + 1)
        return f"w{chosen}"

    def pick(self, allowed: list[int]) -> int:
        return int(self.draw(st.sampled_from(allowed)))

    def free_streams(self) -> list[int]:
        """Streams that one more stage may read (a sticky one is read once)."""
        return [n for n, s in enumerate(self.streams) if not (s.sticky and s.used)]

    def add(self, call: _Call, stream: _Stream) -> None:
        for index in call.inputs:
            self.streams[index].used = True
        self.calls.append(call)
        self.streams.append(stream)

    def method(self) -> str:
        return f"s{len(self.calls)}"


def _add_stage(sketch: _Sketch) -> None:
    first = sketch.pick(sketch.free_streams())
    chain = sketch.streams[first].chain
    inputs = [first]
    if sketch.flag(0.4):  # a join of streams that count the same items
        others = [
            n for n in sketch.free_streams() if n != first and sketch.streams[n].chain == chain
        ]
        inputs += others[: sketch.draw(st.integers(0, 2))]
    name, items = sketch.method(), sketch.items(chain)
    kind = sketch.draw(
        st.sampled_from(["plain", "plain", "expand", "stream", "stream", "group", "step", "fold"])
    )
    spec, finish = StageSpec(name), False
    worker = sketch.worker(may_be_function=kind != "fold")
    if kind == "fold":
        unit = sketch.draw(st.sampled_from(["item", "item", "group"])) if chain else "item"
        units = items // (chain[-1] if unit == "group" else 1)
        minibatches = sketch.draw(st.sampled_from([n for n in range(1, 7) if units % n == 0]))
        by_arrival = (units + len(sketch.calls)) % 3 == 0
        spec = StageSpec(
            name, unit, accumulates=True, minibatches=minibatches, by_arrival=by_arrival
        )
        finish = sketch.flag(0.8)
    elif kind == "group" and chain:
        spec = StageSpec(name, "group")
    elif kind == "step":
        spec = StageSpec(name, "step")
    elif kind in ("expand", "stream"):
        n = sketch.draw(st.integers(1, 4)) if kind == "expand" or sketch.flag() else 1
        n = n if items * n <= MAX_ITEMS else 1
        spec = StageSpec(name, streaming=kind == "stream", expands=n)
        chain = (*chain, n) if n > 1 else chain
    sticky = spec.unit == "item" and sketch.flag(0.15)
    if sticky:
        spec = replace(spec, sticky=True)
        worker = worker or sketch.worker(may_be_function=False)
    if sketch.flag(0.25):
        spec = replace(spec, length="length")
    sketch.add(_Call(inputs, [spec], [worker], finish), _Stream(len(sketch.calls), chain, sticky))


def _add_loop(sketch: _Sketch) -> None:
    entry = sketch.pick(sketch.free_streams())
    chain = sketch.streams[entry].chain
    if sketch.items(chain) > 24:
        return
    members = sketch.draw(st.integers(1, 3))
    specs, workers = [], []
    for n in range(members):
        sticky = sketch.flag(0.3)
        specs.append(StageSpec(f"{sketch.method()}m{n}", sticky=sticky))
        workers.append(sketch.worker(may_be_function=not sticky))
    max_turns = sketch.draw(st.one_of(st.none(), st.integers(1, 3)))
    until = "done" if max_turns is None or sketch.flag(0.7) else ""
    call = _Call([entry], specs, workers, until=until, max_turns=max_turns)
    sketch.add(call, _Stream(len(sketch.calls), chain, specs[-1].sticky))


def _add_sinks(sketch: _Sketch) -> None:
    """Fold every stream that nobody reads, but the last, so that no stage is dead."""
    for index, stream in enumerate(sketch.streams[1:-1], start=1):
        if not stream.used:
            spec = StageSpec(sketch.method(), accumulates=True)
            call = _Call(
                [index], [spec], [sketch.worker(may_be_function=False)], finish=sketch.flag()
            )
            sketch.add(call, _Stream(len(sketch.calls), stream.chain))


def _stage(spec: StageSpec, finish: bool) -> Stage:
    def function(*args: Any, **options: Any) -> Any:
        raise AssertionError("a simulated stage is never called")

    function.__name__ = spec.name
    made = Stage(function, spec)
    if finish:
        made.finish(lambda *_: {})
    return made


def _build(sketch: _Sketch, output: int, weight_edges: list[tuple[str, str]]) -> FlowGraph:
    """Write the sketch as a Flow class, and trace it."""
    stages = {
        spec.name: (_stage(spec, call.finish), worker)
        for call in sketch.calls
        for spec, worker in zip(call.specs, call.workers, strict=True)
    }
    names = dict.fromkeys(worker for _, worker in stages.values() if worker)
    workers = {
        name: type(
            name.upper(),
            (Worker,),
            {m: made for m, (made, owner) in stages.items() if owner == name},
        )()
        for name in names
    }

    def bound(name: str) -> Any:
        made, owner = stages[name]
        return getattr(workers[owner], name) if owner else made

    def step(self: Flow, items: Any) -> Any:
        streams = [items]
        for call in sketch.calls:
            inputs = [streams[index] for index in call.inputs]
            made = [bound(spec.name) for spec in call.specs]
            if call.until is not None:
                made = [loop(*made, until=call.until, max_turns=call.max_turns)]
            streams.append(made[0](*inputs))
        return streams[output]

    def sync(self: Flow) -> None:
        for source, target in weight_edges:
            workers[source].publish(workers[target])

    body = {"__annotations__": dict.fromkeys(workers, Worker), "step": step, "sync": sync}
    return type("Drawn", (Flow,), body)(**workers).trace()


@st.composite
def flows(draw: Draw, num_items: int, max_calls: int = 7) -> FlowGraph:
    """Chains, forks, joins, expansions, groups, streams, folds, loops and weight edges."""
    sketch = _Sketch(draw, num_items)
    for _ in range(draw(st.integers(1, max_calls))):
        if sketch.flag(0.2):
            _add_loop(sketch)
        else:
            _add_stage(sketch)
    if not sketch.calls:
        _add_stage(sketch)
    output = len(sketch.streams) - 1
    _add_sinks(sketch)
    names = sorted({w for call in sketch.calls for w in call.workers if w})
    pairs = [(a, b) for a in names for b in names if a != b]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=2, unique=True)) if pairs else []
    targets = {target for _, target in edges}
    return _build(sketch, output, [edge for edge in edges if edge[0] not in targets])


# --- plans ------------------------------------------------------------------------------------


def unit_items(node: StageNode, num_items: int) -> int:
    return {"item": 1, "group": node.group_size, "step": num_items * node.fanout}[node.unit]


def inside_a_loop(graph: FlowGraph, producer: int, consumer: int) -> bool:
    loops = {graph.nodes[producer].loop, graph.nodes[consumer].loop}
    return len(loops) == 1 and None not in loops


def _fitting(graph: FlowGraph, plan: Plan, num_items: int) -> Plan:
    """The plan without the limits in items that `validate` finds too small."""
    while True:
        try:
            validate(plan, graph, num_items)
        except PlanError as error:
            name = str(error.key).removeprefix("edges.").removesuffix(".max_items")
            edges = {**plan.edges, name: replace(plan.edges[name], max_items=None)}
            plan = replace(plan, edges=edges)
        else:
            return plan


def _gangs(draw: Draw, lanes: list[int], may_gang: bool) -> tuple[tuple[int, ...], ...]:
    order = draw(st.permutations(lanes))[: draw(st.integers(1, len(lanes)))]
    gangs: list[tuple[int, ...]] = []
    while order:
        size = draw(st.integers(1, len(order))) if may_gang else 1
        gangs.append(tuple(order[:size]))
        order = order[size:]
    return tuple(gangs)


@st.composite
def plans(draw: Draw, graph: FlowGraph, num_items: int, max_lanes: int = 4) -> Plan:
    """Any plan that fits the graph: placements, gangs, chunks, limits, memory and staleness."""
    lanes = list(range(draw(st.integers(1, max_lanes))))
    placements = {}
    for worker in graph.workers:
        nodes = [node for node in graph.nodes if node.worker == worker]
        single = [node.sticky or (node.streaming and node.is_function) for node in nodes]
        gangs = _gangs(draw, lanes, not any(single))
        state, working = draw(st.integers(0, 4)), draw(st.sampled_from([0, 0, 1, 3]))
        placements[worker] = Placement(gangs, state, working)
    for spec in graph.loops:
        if draw(st.booleans()):  # or no loop would stand on single lanes as a whole
            gangs = _gangs(draw, lanes, may_gang=False)
            for index in spec.members:
                worker = graph.nodes[index].worker
                placements[worker] = replace(placements[worker], replicas=gangs)
    stages = {}
    for node in graph.nodes:
        units = num_items * node.fanout // unit_items(node, num_items)
        stages[node.name] = StagePlan(
            draw(st.one_of(st.none(), st.integers(1, units))),
            draw(st.one_of(st.none(), st.integers(1, 6))) if node.streaming else None,
        )
    edges = {}
    for producer, consumer in graph.edges:
        if producer == SOURCE or inside_a_loop(graph, producer, consumer):
            continue
        if draw(st.integers(0, 2)):
            continue
        items = num_items * graph.nodes[consumer].fanout
        edges[graph.edge_name(producer, consumer)] = EdgePlan(
            draw(st.one_of(st.none(), st.integers(1, items + 1))),
            draw(st.one_of(st.none(), st.integers(1, 30))),
        )
    names = draw(st.permutations([node.name for node in graph.nodes]))
    plan = Plan(
        "custom",
        tuple(LaneSpec(n, memory_bytes=_memory(draw, graph, placements, n)) for n in lanes),
        placements,
        stages,
        edges,
        order=tuple(names[: draw(st.integers(0, len(names)))]),
        max_staleness=draw(st.integers(0, 3)),
        deadline_seconds=1e6,
        fuse_loops=draw(st.integers(0, 3)) > 0,
    )
    return _fitting(graph, plan, num_items)


def _memory(
    draw: Draw, graph: FlowGraph, placements: dict[str, Placement], lane: int
) -> int | None:
    """None, or a limit that every command of the lane can just, or easily, keep."""
    here = {w: spot.state_bytes for w, spot in placements.items() if lane in spot.lanes}
    pairs = [
        here[edge.source] + here[edge.target]
        for edge in graph.weight_edges
        if edge.source in here and edge.target in here
    ]
    alone = [
        spot.state_bytes + spot.working_bytes for spot in placements.values() if lane in spot.lanes
    ]
    least = max([*alone, *pairs], default=0)
    return draw(st.one_of(st.none(), st.integers(least, least + 6)))


@st.composite
def cases(draw: Draw, max_calls: int = 7, max_steps: int = 4) -> Case:
    """Random runs."""
    num_items = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    graph = draw(flows(num_items, max_calls))
    plan = draw(plans(graph, num_items))
    return Case(
        graph, plan, num_items, draw(st.integers(1, max_steps)), draw(st.integers(0, 2**32 - 1))
    )
