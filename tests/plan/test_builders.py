"""The fixed modes: their plans are valid, place workers as promised and do all the work."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.errors import UserError
from m2flow.flow import FlowGraph, StageNode
from m2flow.plan import (
    BUILDERS,
    LaneSpec,
    StagePlan,
    build_plan,
    companion,
    explain,
    from_json,
    to_json,
    validate,
)
from tests.plan.small_graphs import EVALUATE, GRAPHS, GRPO


def cpu_lanes(count: int) -> tuple[LaneSpec, ...]:
    return tuple(LaneSpec(n, cores=(2 * n, 2 * n + 1)) for n in range(count))


def window(node: StageNode, num_items: int) -> int:
    """Units of one mini-batch."""
    items = num_items * node.fanout
    if node.unit == "step":
        return 1
    return items // (node.group_size if node.unit == "group" else 1) // node.minibatches


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    st.sampled_from(["grpo", "embodied", "sampling"]),
    st.sampled_from(sorted(BUILDERS)),
    st.integers(2, 5),
    st.integers(1, 20).map(lambda half: 2 * half),
)
def test_every_mode_is_valid(name: str, mode: str, count: int, num_items: int) -> None:
    graph = GRAPHS[name]
    plan = build_plan(mode, graph, cpu_lanes(count), num_items)
    validate(plan, graph, num_items)
    assert plan.mode == mode
    assert from_json(to_json(plan)) == plan
    assert set(plan.placements) == set(graph.workers)
    lines = explain(plan, graph, num_items)
    assert mode in lines[0]
    for node in graph.nodes:
        assert sum(line.strip().startswith(f"{node.name} ") for line in lines) == 1
    for lane in plan.lanes:
        assert any(f"lane {lane.id} " in line for line in lines)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.sampled_from(sorted(GRAPHS)), st.integers(1, 5), st.integers(2, 40))
def test_collocated_gives_each_lane_one_call(name: str, count: int, num_items: int) -> None:
    graph = GRAPHS[name]
    plan = build_plan("collocated", graph, cpu_lanes(count), num_items)
    for node in graph.nodes:
        replicas = plan.placements[node.worker].replicas
        assert replicas == tuple((n,) for n in range(count))
        chunk, units = plan.stages[node.name].chunk, window(node, num_items)
        assert chunk is not None
        assert -(-units // chunk) <= count
        assert chunk == 1 or (chunk - 1) * count < units


def test_eager_is_one_lane_with_all_cores_and_whole_calls() -> None:
    plan = build_plan("eager", GRPO, cpu_lanes(3), 8)
    assert plan.lanes == (LaneSpec(0, cores=(0, 1, 2, 3, 4, 5)),)
    assert {spot.replicas for spot in plan.placements.values()} == {((0,),)}
    assert plan.stages == {}


def test_disaggregated_parts_rollout_from_training() -> None:
    plan = build_plan("disaggregated", GRPO, cpu_lanes(3), 8)
    lanes = {worker: spot.lanes for worker, spot in plan.placements.items()}
    assert lanes == {"gen": (0, 1), "score": (2,), "normalise": (2,), "learner": (2,)}
    assert plan.order == ("learner.train", "normalise", "score", "gen.generate")
    assert plan.stages == {
        "gen.generate": StagePlan(4),  # 8 items over two lanes
        "score": StagePlan(8),  # 32 samples in four pieces
        "normalise": StagePlan(2),  # 8 groups in four pieces
        "learner.train": StagePlan(4),  # mini-batches of 16 samples in four pieces
    }
    loops = build_plan("disaggregated", GRAPHS["embodied"], cpu_lanes(2), 8)
    assert loops.placements["policy"].lanes == (0,)
    assert loops.placements["learner"].lanes == (1,)


def test_disaggregated_without_weight_edges_parts_what_generates() -> None:
    plan = build_plan("disaggregated", GRAPHS["sampling"], cpu_lanes(2), 8)
    assert {w: spot.lanes for w, spot in plan.placements.items()} == {"gen": (0,), "score": (1,)}


@pytest.mark.parametrize(
    ("graph", "count", "reason"),
    [(GRPO, 1, "needs two lanes"), (GRAPHS["scoring"], 2, "needs a stage that generates")],
)
def test_disaggregated_refuses_what_it_cannot_part(
    graph: FlowGraph, count: int, reason: str
) -> None:
    with pytest.raises(UserError, match=rf"mode: disaggregated {reason}.*--mode collocated"):
        build_plan("disaggregated", graph, cpu_lanes(count), 8)


def test_unknown_mode_suggests() -> None:
    with pytest.raises(UserError, match=r"mode: is not a mode.*did you mean 'collocated'\?"):
        build_plan("colocated", GRPO, cpu_lanes(1), 8)


@pytest.mark.parametrize("mode", sorted(BUILDERS))
def test_companion_keeps_workers_where_they_stand(mode: str) -> None:
    plan = build_plan(mode, GRPO, cpu_lanes(3), 8)
    beside = companion(plan, EVALUATE, 6)
    assert beside.placements == plan.placements
    assert beside.lanes == plan.lanes
    assert set(beside.stages) == {node.name for node in EVALUATE.nodes}
    assert (beside.edges, beside.order, beside.max_staleness) == ({}, (), 0)
    assert beside.mode == f"{mode} (Grpo.evaluate)"


def test_companion_puts_what_the_steps_do_not_use_on_the_first_lane() -> None:
    plan = build_plan("disaggregated", GRPO, cpu_lanes(2), 8)
    graph = GRAPHS["scoring"]
    beside = companion(plan, graph, 6)
    assert beside.placements["world"].lanes == (0,)
    assert beside.placements["score"] == plan.placements["score"]
    assert beside.placements["learner"] == plan.placements["learner"]
