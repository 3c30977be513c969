"""Plans of random flows: the builders fit them, files keep them, and `describe_plan` names them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2flow.engine.plan import EdgePlan, Plan
from m2flow.errors import PlanError, UserError
from m2flow.flow import SOURCE, FlowGraph, StageNode
from m2flow.plan import (
    build_plan,
    companion,
    describe_plan,
    parse_lanes,
    to_json,
    validate,
)
from m2flow.plan.builders import BUILDERS
from m2flow.plan.file import from_json
from tests.engine.audit import audit
from tests.engine.random_cases import Case, flows, plans, unit_items
from tests.plan.machines import lanes_on

ITEMS = 6
GRAPHS = flows(ITEMS, max_calls=5)
some = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@given(GRAPHS, st.sampled_from(sorted(BUILDERS)), st.integers(1, 4), st.integers(0, 999))
@some
def test_the_fixed_modes_fit_and_carry_out_any_flow(
    graph: FlowGraph, mode: str, count: int, seed: int
) -> None:
    lanes = lanes_on(f"cpu:{count}", cores=range(count))
    try:  # drawn calls may take longer than calls of a run may
        plan = replace(build_plan(mode, graph, lanes, ITEMS), deadline_seconds=1e9)
    except UserError as error:
        assert mode in ("disaggregated", "hybrid")
        assert "needs" in str(error)  # noqa: PT017 - some flows cannot be parted
        return
    audit(Case(graph, plan, ITEMS, 2, seed))
    lines = describe_plan(plan, graph, ITEMS)
    for node in graph.nodes:
        assert sum(line.startswith(f"  {node.name} ") for line in lines) == 1


@given(st.data(), GRAPHS)
@some
def test_any_plan_survives_its_file(data: Any, graph: FlowGraph) -> None:
    plan = data.draw(plans(graph, ITEMS))
    assert from_json(Plan, to_json(plan), "plan") == plan
    lines = describe_plan(plan, graph, ITEMS)
    assert len(lines) == 1 + len(plan.lanes) + len(graph.nodes) + len(plan.edges)


@given(st.data(), GRAPHS, flows(4, max_calls=4))
@some
def test_another_flow_runs_on_the_lanes_of_a_plan(
    data: Any, graph: FlowGraph, other: FlowGraph
) -> None:
    plan = replace(data.draw(plans(graph, ITEMS)), lanes=())
    lanes = lanes_on("cpu:4", cores=range(4))
    shared = {  # what has the same name need not be able to work in the same way
        worker: spot
        for worker, spot in plan.placements.items()
        if worker not in other.workers or all(len(gang) == 1 for gang in spot.replicas)
    }
    plan = replace(plan, lanes=lanes, placements=shared)
    beside = companion(plan, other, 4)
    placements = {worker: beside.placements[worker] for worker in other.workers}
    audit(Case(other, replace(beside, placements=placements), 4, 1, 7))


# --- limits of edges: what `validate` accepts must be able to end -------------------------------


def comes_to_an_end(graph: FlowGraph, limits: dict[tuple[int, int], int], num_items: int) -> bool:
    """Do whatever can be done, item by item, until nothing more can: is everything done then?

    There are lanes without number here and calls of one unit; a loop is left after one turn.
    """
    done: dict[int, set[int]] = {node.index: set() for node in graph.nodes}
    finished = dict.fromkeys(done, 0)

    def total(node: StageNode) -> int:
        return num_items * node.fanout

    def complete(node: StageNode) -> bool:
        windows = finished[node.index] if node.has_finish else node.minibatches
        return len(done[node.index]) == total(node) and windows == node.minibatches

    def before(node: StageNode) -> list[StageNode]:
        return [other for other in graph.nodes[: node.index] if other.worker == node.worker]

    def low(index: int) -> int:
        return next(n for n in range(total(graph.nodes[index]) + 1) if n not in done[index])

    def may_do(node: StageNode, unit: range) -> bool:
        earlier = before(node)
        if node.accumulates and not node.has_finish and not all(map(complete, earlier)):
            return False
        if not all(complete(other) for other in earlier if other.accumulates):
            return False
        window = unit.start // (total(node) // node.minibatches)
        if window and node.has_finish and finished[node.index] < window:
            return False
        size = total(node) // node.minibatches
        if window and not set(range(window * size)) <= done[node.index]:
            return False
        for made_by in node.inputs:
            maker = graph.nodes[made_by]
            if made_by != SOURCE and not {i // maker.expands for i in unit} <= done[made_by]:
                return False
        last = unit.stop * node.expands
        return all(
            last <= low(consumer) + limit
            for (producer, consumer), limit in limits.items()
            if producer == node.index
        )

    progress = True
    while progress:
        progress = False
        for node in graph.nodes:
            size = unit_items(node, num_items)
            for start in range(0, total(node), size):
                unit = range(start, start + size)
                if start not in done[node.index] and may_do(node, unit):
                    done[node.index].update(unit)
                    progress = True
            window = total(node) // node.minibatches * (finished[node.index] + 1)
            if node.has_finish and finished[node.index] < node.minibatches:
                reads = [other for other in before(node) if not other.accumulates]
                if set(range(window)) <= done[node.index] and all(map(complete, reads)):
                    finished[node.index] += 1
                    progress = True
    return all(map(complete, graph.nodes))


@given(st.data(), flows(4, max_calls=6))
@settings(some, max_examples=120)
def test_limits_are_refused_where_the_run_could_not_end(data: Any, graph: FlowGraph) -> None:
    """Never one that could not end; and few that could, as the test after this one says."""
    limits = {}
    for producer, consumer in graph.edges:
        inner = graph.nodes[consumer].loop is not None and producer >= consumer
        same = producer != SOURCE and graph.nodes[producer].loop == graph.nodes[consumer].loop
        looped = same and graph.nodes[consumer].loop is not None
        if producer != SOURCE and not inner and not looped and data.draw(st.booleans()):
            items = 4 * graph.nodes[consumer].fanout
            limits[producer, consumer] = data.draw(st.integers(1, items))
    edges = {graph.edge_name(*edge): EdgePlan(limit) for edge, limit in limits.items()}
    plan = replace(build_plan("eager", graph, parse_lanes("cpu:1"), 4), edges=edges)
    ends = comes_to_an_end(graph, limits, 4)
    try:
        validate(plan, graph, 4)
    except PlanError:
        return
    assert ends


def test_limits_that_are_refused_are_those_that_must_be() -> None:
    """The usual step of reinforcement: only the edge behind the log-probabilities must be wide."""
    from m2flow.flow import Flow, Worker, stage

    class Model(Worker):
        @stage(streaming=True, expands=4)
        def generate(self, b: Any) -> Any: ...

        @stage
        def logprobs(self, b: Any) -> Any: ...

        @stage(accumulates=True, minibatches=2)
        def train(self, b: Any) -> Any: ...

        @train.finish
        def train_finish(self) -> dict[str, float]: ...

    @stage(unit="group")
    def advantage(b: Any) -> Any: ...

    class Grpo(Flow):
        actor: Model
        learner: Model

        def step(self, x: Any) -> Any:
            return self.learner.train(self.learner.logprobs(advantage(self.actor.generate(x))))

    graph = Grpo(actor=Model(), learner=Model()).trace()
    plan = build_plan("eager", graph, parse_lanes("cpu:1"), 4)
    least = {
        "actor.generate->advantage": 4,
        "advantage->learner.logprobs": 4,
        "learner.logprobs->learner.train": 16,
    }
    for name, needed in least.items():
        edges = {other: EdgePlan(limit) for other, limit in least.items()}
        validate(replace(plan, edges=edges), graph, 4)
        edges[name] = EdgePlan(needed - 1)
        with pytest.raises(
            PlanError, match=rf"edges\.{name}\.max_items: .*expected at least {needed}"
        ):
            validate(replace(plan, edges=edges), graph, 4)
