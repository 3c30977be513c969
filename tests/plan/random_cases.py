"""Random small flows with random profiles, from a seed, and what they are planned on."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import NamedTuple

from m2flow.engine.plan import LaneSpec
from m2flow.flow import Flow, FlowGraph, Worker, loop, stage
from m2flow.plan.choose.problem import PlanningProblem
from m2flow.plan.profile import (
    ByReplicas,
    LinkCost,
    Piecewise,
    Profile,
    PublishCost,
    Quantiles,
    StageCost,
    StageProfile,
    WorkerCost,
)
from m2flow.plan.units import Bytes, BytesPerSecond, Seconds


class Plain(Worker):
    """Two stages that some flows run on the same worker."""

    @stage
    def work(self, *items):
        return items[0]

    @stage
    def again(self, *items):
        return items[0]


class Source(Worker):
    @stage(streaming=True, expands=2)
    def work(self, *items):
        yield items[0]


class Learner(Worker):
    @stage
    def again(self, *items):
        return items[0]

    @stage(accumulates=True, minibatches=2)
    def work(self, *items):
        return items[0]

    @work.finish
    def update(self):
        return {}


class Case(NamedTuple):
    """What a plan is chosen for."""

    graph: FlowGraph
    profile: Profile
    lanes: tuple[LaneSpec, ...]
    num_items: int

    @property
    def problem(self) -> PlanningProblem:
        return PlanningProblem(*self)


SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "one": ((),),
    "chain2": ((), (0,)),
    "chain3": ((), (0,), (1,)),
    "fork3": ((), (0,), (0,)),
    "chain4": ((), (0,), (1,), (2,)),
    "diamond": ((), (0,), (0,), (1, 2)),
    "fork4": ((), (0,), (1,), (1,)),
    "chain5": ((), (0,), (1,), (2,), (3,)),
    "diamond5": ((), (0,), (1,), (1,), (2, 3)),
    "kite": ((), (0,), (0,), (1, 2), (3,)),
    "forks5": ((), (0,), (0,), (1,), (2,)),
    "fan5": ((), (0,), (0,), (0,), (1,)),
    "wide": ((), (0,), (0,), (0,), (1, 2, 3)),
    "cycle": ((), (0,)),
    "cycle3": ((), (0,), (1,)),
    "cycle4": ((), (0,), (1,), (1,)),
}
"""For each stage those that it reads from; in a cycle, the first stage stands for two."""


def build(shape: str, kinds: tuple[type[Worker], ...], shared: tuple[int, ...] = ()) -> FlowGraph:
    """A flow of a shape.

    Args:
        shape: one of SHAPES.
        kinds: class of the worker of each stage.
        shared: two stages that one worker runs, or none.
    """
    reads = SHAPES[shape]

    def step(self, items):
        made: list = []
        for n, inputs in enumerate(reads):
            streams = [made[k] for k in inputs] or [items]
            if n == 0 and shape.startswith("cycle"):
                made.append(loop(self.w0.work, self.x.work, until="done", max_turns=4)(*streams))
            elif shared and n == shared[1]:
                made.append(getattr(self, f"w{shared[0]}").again(*streams))
            else:
                made.append(getattr(self, f"w{n}").work(*streams))
        return made[-1]

    def sync(self):
        if len(reads) > 1 and not (shared and len(reads) - 1 in shared):
            getattr(self, f"w{len(reads) - 1}").publish(self.w0)

    workers = {f"w{n}": kind for n, kind in enumerate(kinds) if n not in shared[1:]}
    if shape.startswith("cycle"):
        workers["x"] = Plain
    flow = type("Drawn", (Flow,), {"step": step, "sync": sync, "__annotations__": workers})
    return flow(**{name: kind() for name, kind in workers.items()}).trace()


def curve(rng: Random, items: int, scale: float = 1.0) -> Piecewise:
    """A least price, then a slope, then perhaps another."""
    x, y = 1.0, scale * rng.uniform(0.05, 1.0)
    points = [(x, y)]
    for _ in range(rng.randint(1, 3)):
        more = rng.randint(1, max(2, items // 2))
        x, y = x + more, y + more * scale * rng.choice([0.0, rng.uniform(0.0, 0.5)])
        points.append((x, y))
    last = points[-1]
    return Piecewise((*points, (last[0] + items, last[1] + items * scale * rng.uniform(0.02, 0.3))))


def draw(
    seed: int,
    shapes: tuple[str, ...] = tuple(SHAPES),
    most_lanes: int = 8,
    two_kinds: bool = False,
) -> Case:
    """The case of a seed; `two_kinds` of lanes for sure."""
    rng = Random(seed)
    shape = rng.choice(shapes)
    num = len(SHAPES[shape])
    kinds = [rng.choice([Plain, Plain, Learner]) for _ in range(num)]
    if not shape.startswith("cycle") and rng.random() < 0.5:
        kinds[0] = Source
    kinds = [Plain if k == 0 and kind is Learner else kind for k, kind in enumerate(kinds)]
    ends = [n for n in range(num - 1) if not any(n in inputs for inputs in SHAPES[shape])]
    for n in ends:  # what nobody reads must be trained on
        kinds[n] = Learner
    shared: tuple[int, ...] = ()
    pairs = [pair for pair in itertools.combinations(range(1, num), 2) if not {*pair} & {*ends}]
    if pairs and rng.random() < 0.3:
        shared = rng.choice(pairs)
        kinds[shared[1]] = kinds[shared[0]] = Plain
    graph = build(shape, tuple(kinds), shared)
    small = len(graph.nodes) >= 4
    num_items = rng.choice([2, 4] if small else [2, 4, 8, 12])
    # Brute force has so many trees of five stages on many lanes that these are kept simple.
    counts = {"cpu": rng.randint(1, most_lanes)}
    many = len(graph.nodes) >= 5 and counts["cpu"] > 3
    if not small and (rng.random() < 0.15 or two_kinds):
        counts = {"cpu": rng.randint(1, 3), "gpu": rng.randint(1, 3)}
    limited = rng.random() < 0.5 and not many
    dispatch = Seconds(Random(-seed).choice([0.0, 0.0, 0.03]))
    profile = profile_of(rng, graph, num_items, counts, limited, many)
    per_node = rng.choice([None, 4])
    return Case(
        graph,
        replace(profile, dispatch=dispatch),
        lanes_of(counts, 100 if limited else None, per_node),
        num_items,
    )


def lanes_of(
    counts: Mapping[str, int], memory: int | None = None, per_node: int | None = None
) -> tuple[LaneSpec, ...]:
    """So many lanes of each kind, so many on a machine."""
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    return tuple(
        LaneSpec(n, kind, memory_bytes=memory, node=n // per_node if per_node else 0)
        for n, kind in enumerate(kinds)
    )


def profile_of(
    rng: Random,
    graph: FlowGraph,
    num_items: int,
    counts: dict[str, int],
    limited: bool,
    simple: bool,
) -> Profile:
    """Random prices for a graph."""
    stages, workers = {}, {}
    kinds_of = {w: (rng.choice(sorted(counts)),) for w in graph.workers}
    if len(counts) > 1:
        kinds_of |= {w: tuple(sorted(counts)) for w in graph.workers if rng.random() < 0.5}
    gangs = {
        w: 2 if rng.random() < 0.25 and min(counts.values()) > 1 and not simple else 1
        for w in graph.workers
    }
    for worker in graph.workers:
        own = [node for node in graph.nodes if node.worker == worker]
        if any(node.loop is not None for node in own):
            gangs[worker] = 1
        elif any(node.streaming for node in own) and not simple and min(counts.values()) > 1:
            gangs[worker] = rng.choice([1, 2, 2, 3])
    skips = rng.random() < 0.2 and not simple  # of the draws, so that a seed's case stays the same
    for node in graph.nodes:
        items = num_items * node.fanout
        layouts = [
            StageCost(
                lanes,
                curve(rng, items, rng.choice([0.3, 1.0, 3.0]) / lanes**0.7),
                done=rng.choice([None, Piecewise(((0, 0), (0.5, 0.3), (0.9, 0.6), (1, 1)))])
                if node.streaming
                else None,
                finish=ByReplicas(((1, 0.1), (8, 0.4))) if node.has_finish and not simple else None,
                working=Piecewise(((1, 3.0), (items + 1, 3.0 + rng.uniform(0, 40))))
                if limited
                else None,
                kind=rng.choice([kind, kind]) if skips else kind,
            )
            for kind in kinds_of[node.worker]
            for lanes in dict.fromkeys((1, gangs[node.worker]))
        ]
        turns = None
        if node.loop is not None and rng.random() < 0.7:
            turns = Quantiles(tuple(sorted(float(rng.randint(1, 6)) for _ in range(4))))
        stages[node.name] = StageProfile(tuple(layouts), Bytes(rng.choice([0, 10])), turns=turns)
    for worker in graph.workers:
        size = rng.choice([0, rng.randint(10, 60)])
        workers[worker] = tuple(
            WorkerCost(
                lanes,
                Bytes(size // lanes),
                Seconds(rng.uniform(0, 0.3)),
                Seconds(rng.uniform(0, 0.3)),
                kind,
            )
            for kind in kinds_of[worker]
            for lanes in dict.fromkeys((1, gangs[worker]))
        )
    publish = tuple(
        PublishCost(edge.source, edge.target, place, Seconds(rng.uniform(0, 0.5)), source, target)
        for edge in graph.weight_edges
        for place in ("same", "node", "cluster")
        for source in rng.choice([(None,), (None,) if simple else (1, 2)])
        for target in dict.fromkeys(rng.choice([(None,), (1, gangs[edge.target])]))
    )
    links = {}
    if rng.random() < 0.5:
        links = {
            "node": LinkCost(Seconds(0.01), BytesPerSecond(2000.0)),
            "cluster": LinkCost(Seconds(0.05), BytesPerSecond(500.0)),
        }
    return Profile(stages, workers, publish, links)
