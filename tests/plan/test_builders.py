"""The fixed modes: their plans are valid, place workers as promised and do all the work."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.engine.plan import Plan
from m2flow.errors import PlanError, UserError
from m2flow.flow import Flow, FlowGraph, StageNode
from m2flow.flow.worker import Layout
from m2flow.plan import (
    LaneSpec,
    StagePlan,
    build_plan,
    companion,
    describe_plan,
    to_json,
    validate,
    with_memory,
)
from m2flow.plan.builders import BUILDERS, first_that_divides, placed
from m2flow.plan.chunks import ITEMS_IN_TIME, call_items
from m2flow.plan.file import from_json
from m2flow.simulation.driver import Simulation
from tests.engine.random_cases import SeededCosts
from tests.plan.machines import lanes_on
from tests.plan.small_graphs import EVALUATE, GRAPHS, GRPO, TALKING, WATCHED, Model

FSDP2 = Layout("fsdp2", 2)


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
    st.sampled_from(["grpo", "embodied", "sampling", "playing", "watched"]),
    st.sampled_from(sorted(BUILDERS)),
    st.integers(2, 5),
    st.integers(1, 20).map(lambda half: 2 * half),
)
def test_every_mode_is_valid(name: str, mode: str, count: int, num_items: int) -> None:
    graph = GRAPHS[name]
    plan = build_plan(mode, graph, cpu_lanes(count), num_items)
    validate(plan, graph, num_items)
    assert plan.mode == mode
    assert from_json(Plan, to_json(plan), "plan") == plan
    assert set(plan.placements) == set(placed(graph)) >= set(graph.workers)
    lines = describe_plan(plan, graph, num_items)
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
        "learner.train": StagePlan(8),  # mini-batches of 16 samples in two pieces
    }
    loops = build_plan("disaggregated", GRAPHS["embodied"], cpu_lanes(2), 8)
    assert loops.placements["policy"].lanes == (0,)
    assert loops.placements["learner"].lanes == (1,)
    # The environment stands beside its policy, so that the loop goes round there.
    assert loops.placements["world"] == loops.placements["policy"]
    assert loops.stages["world.move"] == loops.stages["policy.act"] == StagePlan(8)


def test_hybrid_parts_the_rollout_and_trains_everywhere() -> None:
    plan = build_plan("hybrid", GRPO, cpu_lanes(3), 8)
    lanes = {worker: spot.lanes for worker, spot in plan.placements.items()}
    assert lanes == {"gen": (0, 1), "score": (2,), "normalise": (2,), "learner": (0, 1, 2)}
    assert plan.order == ()  # what comes first in the flow comes first
    assert plan.stages == {
        "gen.generate": StagePlan(4),  # 8 items over two lanes
        "score": StagePlan(8),  # 32 samples in four pieces
        "normalise": StagePlan(2),  # 8 groups in four pieces
        "learner.train": StagePlan(6),  # mini-batches of 16 samples over three lanes
    }


@pytest.mark.parametrize("name", ["embodied", "playing"])
def test_hybrid_lets_two_groups_of_a_loop_ping_pong(name: str) -> None:
    plan = build_plan("hybrid", GRAPHS[name], cpu_lanes(3), 8)
    assert plan.placements["policy"].lanes == (0, 1)
    assert plan.placements["world"].lanes == (2,)
    assert plan.stages["policy.act"] == StagePlan(2)  # a group of four over two lanes
    assert plan.stages["world.move"] == StagePlan(4)
    if name == "embodied":
        assert plan.placements["learner"].lanes == (0, 1, 2)


def test_groups_of_a_loop_are_on_both_lanes_at_once() -> None:
    """Under a virtual clock: a loop of eight turns takes half the time, and a turn to fill."""

    class Turns(SeededCosts):
        def seconds_of(self, node: StageNode, num_items: int) -> float:
            return float(num_items)

        def leaves(self, node: StageNode, step: int, item: int) -> bool:
            self.visits[0, step, item] += 1
            return self.visits[0, step, item] == 16

    def seconds(mode: str, count: int) -> float:
        graph = GRAPHS["playing"]
        plan = build_plan(mode, graph, cpu_lanes(count), 8)
        costs = Turns(graph, 0)
        spans = Simulation(graph, plan, costs).run(8, 1).spans
        return max(span.end for span in spans if span.name in ("world.move", "policy.act"))

    alone, apart = seconds("collocated", 1), seconds("hybrid", 2)
    assert alone == 128  # eight items, sixteen calls each
    assert apart == 64 + 4


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


@pytest.mark.parametrize(
    ("graph", "count", "reason"),
    [
        (GRPO, 1, "needs two lanes"),
        (GRAPHS["scoring"], 2, "needs a stage that generates on a worker that is not trained"),
        (TALKING, 2, "needs an environment, a verifier or a function beside the generation"),
    ],
)
def test_hybrid_refuses_what_it_cannot_split(graph: FlowGraph, count: int, reason: str) -> None:
    with pytest.raises(UserError, match=rf"mode: hybrid {reason}.*--mode collocated"):
        build_plan("hybrid", graph, cpu_lanes(count), 8)


def test_disaggregated_needs_work_beside_the_generation() -> None:
    class Alone(Flow):
        gen: Model

        def step(self, items: Any) -> Any:
            return self.gen.generate(items)

    with pytest.raises(UserError, match=r"needs work beside the generation.*--mode collocated"):
        build_plan("disaggregated", Alone(gen=Model()).trace(), cpu_lanes(2), 8)


# --- gangs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "replicas"),
    [
        ("collocated", ((0, 1), (2, 3))),
        ("hybrid", ((0, 1), (2, 3))),
        ("disaggregated", ((2, 3),)),
    ],
)
@pytest.mark.parametrize("gen", [1, 2])
def test_gangs_are_neighbouring_lanes(
    mode: str, replicas: tuple[tuple[int, ...], ...], gen: int
) -> None:
    plan = build_plan(
        mode, GRPO, cpu_lanes(4), 8, layouts={"learner": FSDP2, "gen": Layout(f"tp{gen}", gen)}
    )
    validate(plan, GRPO, 8)
    assert plan.placements["learner"].replicas == replicas
    assert all(len(gang) == gen for gang in plan.placements["gen"].replicas)
    if mode == "collocated":
        assert plan.stages["learner.train"] == StagePlan(8)  # 16 samples for two gangs


def test_one_process_has_no_gangs() -> None:
    assert build_plan(
        "eager", GRPO, cpu_lanes(4), 8, layouts={"learner": Layout("fsdp3", 3)}
    ) == build_plan("eager", GRPO, cpu_lanes(4), 8)


@pytest.mark.parametrize(
    ("layouts", "reason"),
    [
        (
            {"learner": FSDP2},
            r"layouts\.learner: .* 3 lanes cannot be divided.*\(got 'fsdp2'\).* 3",
        ),
        ({"learner": Layout("no", 0)}, r"layouts\.learner: needs at least one lane \(got 'no'\)"),
        ({"lerner": FSDP2}, r"layouts\.lerner: is no worker; did you mean 'learner'"),
        (
            {"learner": Layout("tp3", 3, (("key-value heads", 8, 3),))},
            r"layouts\.learner: is not possible: 8 key-value heads cannot be divided by 3",
        ),
    ],
)
def test_gangs_that_cannot_be(layouts: dict[str, Layout], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        build_plan("collocated", GRPO, cpu_lanes(3), 8, layouts=layouts)


def test_a_layout_that_does_not_divide_gives_way_to_the_next_of_its_worker() -> None:
    build = partial(build_plan, "collocated", GRPO, cpu_lanes(6), 12, ())
    four, six = Layout("fsdp4", 4), Layout("fsdp6", 6)
    plan = first_that_divides(build, {"learner": (four, six, FSDP2), "gen": (four, FSDP2)})
    layouts = {worker: spot.layout for worker, spot in plan.placements.items()}
    assert (layouts["learner"], layouts["gen"]) == ("fsdp6", "fsdp2")
    with pytest.raises(UserError, match=r"layouts\.gen: .*\(got 'fsdp4'\)"):
        first_that_divides(build, {"learner": (four, six), "gen": (four, Layout("fsdp5", 5))})
    with pytest.raises(UserError, match="mode: is not a mode"):
        first_that_divides(partial(build_plan, "none", GRPO, cpu_lanes(6), 12, ()), {"gen": (six,)})


# --- several machines, memory ---------------------------------------------------------------------


def test_eager_stays_on_this_machine_and_adds_its_limits_up() -> None:
    lanes = with_memory(lanes_on("2xcpu:2", cores=(0, 1, 2, 3)), 100)
    (lane,) = build_plan("eager", GRPO, lanes, 8).lanes
    assert lane == LaneSpec(0, cores=(0, 2, 1, 3), memory_bytes=200)
    mixed = (*lanes[:1], LaneSpec(1, cores=(1,)))
    assert build_plan("eager", GRPO, mixed, 8).lanes[0].memory_bytes is None


def test_eager_takes_one_accelerator_and_its_limit() -> None:
    lanes = lanes_on("gpu:2", (0, 1), 2, (80, 80))
    (lane,) = build_plan("eager", GRPO, lanes, 8).lanes
    assert lane == LaneSpec(0, "gpu", (0, 1), gpu=0, memory_bytes=72)


def test_explain_names_machines_limits_and_processes() -> None:
    lanes = with_memory(lanes_on("2xcpu:1", cores=(0,)), 1000)
    plan = build_plan("collocated", GRPO, lanes, 8, isolated={"score"})
    lines = describe_plan(plan, GRPO, 8)
    assert "lane 1 (node 1, cores [0], at most 1 KB): gen, normalise, learner" in lines[2]
    assert "lane 3 (node 1, cores [0], at most 1 KB, a process of its own): score" in lines[4]


# --- other methods of the flow --------------------------------------------------------------------


def test_a_worker_that_only_evaluates_is_placed_and_takes_weights() -> None:
    graph, beside = GRAPHS["watched"], WATCHED.trace("evaluate")
    plan = build_plan("disaggregated", graph, cpu_lanes(2), 8)
    assert plan.placements["judge"].lanes == plan.placements["gen"].lanes == (0,)
    assert companion(plan, beside, 4).placements == plan.placements
    spans = Simulation(graph, plan, SeededCosts(graph, 1)).run(8, 2).spans
    assert [(span.lane, span.kind) for span in spans if span.name == "judge"] == [
        (0, "publish")
    ] * 2


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


def test_no_call_of_a_large_evaluation_has_all_of_its_items() -> None:
    """9,740 answers were scored in one call, which had no time for the test cases of them all."""
    plan = build_plan("eager", GRPO, cpu_lanes(1), 8)
    whole = companion(plan, EVALUATE, 8).stages
    cut = companion(plan, EVALUATE, 9740).stages
    for node in EVALUATE.nodes:
        most = call_items(node, cut[node.name], 9740)
        alone = node.streaming or node.loop is not None
        assert most == 9740 * node.fanout if alone else most <= ITEMS_IN_TIME, node.name
        assert call_items(node, whole[node.name], 8) == 8 * node.fanout
    assert any(not node.streaming for node in EVALUATE.nodes)


def test_companion_puts_what_the_steps_do_not_use_on_the_first_lane() -> None:
    plan = build_plan("disaggregated", GRPO, cpu_lanes(2), 8)
    graph = GRAPHS["scoring"]
    beside = companion(plan, graph, 6)
    assert beside.placements["world"].lanes == (0,)
    assert beside.placements["score"] == plan.placements["score"]
    assert beside.placements["learner"] == plan.placements["learner"]
    reserved = [replace(lane, reserved_for="learner") for lane in plan.lanes]
    with pytest.raises(PlanError, match="lanes: leaves no lane for world"):
        companion(replace(plan, lanes=tuple(reserved)), graph, 6)
