"""Which items each call takes, predicted by a slow model of the rules for chains of stages."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.engine.messages import RunCall
from m2flow.engine.plan import LaneSpec, Placement, Plan, StagePlan
from m2flow.flow import Flow, FlowGraph, StageNode, Worker
from m2flow.flow.stage import Stage, StageSpec
from tests.engine.audit import simulate
from tests.engine.random_cases import Case, SeededCosts
from tests.engine.toy_flows import items_of

Started = tuple[int, int, tuple[int, ...]]
"""Stage, lane and items of a call."""


class DistinctCosts(SeededCosts):
    """No two calls end at the same moment; asked for in the order in which calls start."""

    def __init__(self, graph: FlowGraph, seed: int) -> None:
        super().__init__(graph, seed)
        self._dice = random.Random(seed)

    def seconds_of(self, node: StageNode, num_items: int) -> float:
        return 1.0 + self._dice.random()


class Chain(Case):
    """A case whose stages stand in a row."""

    def costs(self) -> SeededCosts:
        return DistinctCosts(self.graph, self.seed)


@dataclass
class Row:
    """What the model knows of one stage: items that wait, by the lane that made them."""

    chunk: int
    replicas: list[int]
    waiting: dict[int, list[int]] = field(default_factory=dict)
    busy: int = 0
    done: int = 0


def predict(chain: Chain) -> list[Started]:
    """The calls of one step, in the order in which they start."""
    nodes, plan, total = chain.graph.nodes, chain.plan, chain.num_items
    rows = []
    for node in nodes:
        replicas = [gang[0] for gang in plan.placements[node.worker].replicas]
        rows.append(Row(plan.stages[node.name].chunk or total, replicas))
    rows[0].waiting = {-1: list(range(total))}
    preference = sorted(range(len(rows)), key=lambda n: plan.order.index(nodes[n].name))
    costs, idle, started = chain.costs(), {lane.id for lane in plan.lanes}, []
    running: list[tuple[float, Started]] = []

    def start(now: float) -> None:
        for stage in preference:
            row = rows[stage]
            for lane in row.replicas:
                ready = sum(len(items) for items in row.waiting.values())
                last = ready + row.busy + row.done == total
                if lane not in idle or not ready or (ready < row.chunk and not last):
                    continue
                wanted, taken = min(ready, row.chunk), []
                for place in [lane, -1, *row.waiting]:  # its own, the source's, then the others'
                    heap = row.waiting.get(place, [])
                    while heap and len(taken) < wanted:
                        taken.append(heap.pop(heap.index(min(heap))))
                row.waiting = {place: heap for place, heap in row.waiting.items() if heap}
                row.busy += len(taken)
                idle.remove(lane)
                call = (stage, lane, tuple(sorted(taken)))
                started.append(call)
                running.append((now + costs.seconds_of(nodes[stage], len(taken)), call))

    start(0.0)
    while running:
        now, (stage, lane, items) = event = min(running)
        running.remove(event)
        if stage + 1 < len(rows):
            rows[stage + 1].waiting.setdefault(lane, []).extend(items)
        rows[stage].busy -= len(items)
        rows[stage].done += len(items)
        idle.add(lane)
        start(now)
    return started


def chain_graph(length: int) -> FlowGraph:
    def nothing(self: Any, b: Any) -> Any:
        return b

    stages = {f"s{n}": Stage(nothing, StageSpec(f"s{n}")) for n in range(length)}
    workers = {f"w{n}": type("W", (Worker,), {f"s{n}": stages[f"s{n}"]})() for n in range(length)}

    def step(self: Flow, x: Any) -> Any:
        for n in range(length):
            x = getattr(workers[f"w{n}"], f"s{n}")(x)
        return x

    body = {"__annotations__": dict.fromkeys(workers, Worker), "step": step}
    return type("Row", (Flow,), body)(**workers).trace()


@st.composite
def chains(draw: Any) -> Chain:
    graph = chain_graph(draw(st.integers(1, 4)))
    num_items, num_lanes = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    placements, stages = {}, {}
    for node in graph.nodes:
        lanes = draw(st.permutations(range(num_lanes)))[: draw(st.integers(1, num_lanes))]
        placements[node.worker] = Placement(tuple((lane,) for lane in lanes))
        stages[node.name] = StagePlan(draw(st.one_of(st.none(), st.integers(1, num_items))))
    order = tuple(draw(st.permutations([node.name for node in graph.nodes])))
    lanes = tuple(LaneSpec(n) for n in range(num_lanes))
    plan = Plan("custom", lanes, placements, stages, order=order, deadline_seconds=1e9)
    return Chain(graph, plan, num_items, 1, draw(st.integers(0, 2**20)))


@given(chains())
@settings(max_examples=300, deadline=None)
def test_calls_are_those_that_the_rules_say(chain: Chain) -> None:
    calls = [
        (command.node, command.lanes[0], items_of(command))
        for _, commands in simulate(chain)[2]
        for command in commands
        if isinstance(command, RunCall)
    ]
    assert calls == predict(chain)
