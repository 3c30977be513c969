"""`validate`: a plan that fits passes, and each thing that does not fit is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from m2flow.engine.plan import LONGEST_DEADLINE
from m2flow.errors import PlanError
from m2flow.flow import Flow, stage
from m2flow.flow.graph import WeightEdge
from m2flow.flow.worker import ONE_LANE, Layout
from m2flow.plan import EdgePlan, LaneSpec, Placement, Plan, StagePlan, validate
from m2flow.plan.validate import check_equal_gangs, check_executable
from m2flow.runtime.lane.executor import PEER_PATIENCE
from tests.plan.small_graphs import GRAPHS, GRPO

ONE, TWO = Placement(((0,),)), Placement(((0,), (1,)))
GANG = Placement(((0, 1),))
PLACED = {"gen": TWO, "score": ONE, "normalise": ONE, "learner": GANG}
GOOD = Plan(
    "custom",
    (LaneSpec(0, cores=(0, 1)), LaneSpec(1, cores=(2,))),
    PLACED,
    stages={"gen.generate": StagePlan(3, 8), "score": StagePlan(1)},
    edges={"gen.generate->score": EdgePlan(4, 100), "score->normalise": EdgePlan(4)},
    order=("learner.train", "gen.generate"),
    max_staleness=1,
)


def placed(**placements: Placement) -> dict[str, Any]:
    return {"placements": {**PLACED, **placements}}


def edge(name: str, *limits: int | None) -> dict[str, Any]:
    return {"edges": {name: EdgePlan(*limits)}}


def lanes(*specs: LaneSpec) -> dict[str, Any]:
    return {"lanes": specs}


def test_a_plan_that_fits() -> None:
    validate(GOOD, GRPO, 8)
    validate(replace(GOOD, lanes=(LaneSpec(0), LaneSpec(1))), GRPO, 8)
    validate(replace(GOOD, **placed(gen=GANG)), GRPO, 8)


REFUSALS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no lanes": (lanes(), ("lanes: ", "at least one lane")),
    "lane twice": (lanes(LaneSpec(1), LaneSpec(1)), ("lanes: names a lane twice (got 1)",)),
    "cores overlap": (
        lanes(LaneSpec(0, cores=(0, 3)), LaneSpec(1, cores=(3,))),
        ("lanes: ", "lanes [0, 1] overlap on core 3"),
    ),
    "gpus overlap": (
        lanes(LaneSpec(0, "gpu", gpu=2), LaneSpec(1, "gpu", gpu=2)),
        ("lanes: ", "lanes [0, 1] overlap on gpu 2"),
    ),
    "a gpu of a negative number": (
        lanes(LaneSpec(0), LaneSpec(1, "gpu", gpu=-1)),
        ("lanes: lane 1 is on an accelerator of a negative number (got -1)",),
    ),
    "worker without a place": (
        {"placements": {k: v for k, v in PLACED.items() if k != "score"}},
        ("placements.score: ", "has no placement"),
    ),
    "unknown worker": (
        placed(learnr=ONE),
        ("placements.learnr: ", "not in the flow", "did you mean 'learner'?"),
    ),
    "unknown stage": (
        {"stages": {"gen.generat": StagePlan()}},
        ("stages.gen.generat: ", "not in the flow", "did you mean 'gen.generate'?"),
    ),
    "unknown edge": (
        edge("score->normalize"),
        ("edges.score->normalize: ", "did you mean 'score->normalise'?"),
    ),
    "edge from the source": (edge("source->gen.generate", 9), ("edges.source->gen.generate: ",)),
    "unknown stage in the order": (
        {"order": ("learner.trane",)},
        ("order.learner.trane: ", "did you mean 'learner.train'?"),
    ),
    "no replica": (placed(score=Placement(())), ("placements.score: ", "at least one replica")),
    "empty gang": (
        placed(score=Placement(((0,), ()))),
        ("placements.score: ", "at least one lane"),
    ),
    "unknown lane": (
        placed(score=Placement(((7,),))),
        ("placements.score: ", "lane that the plan does not have (got 7)"),
    ),
    "twice on a lane": (
        placed(score=Placement(((0,), (0,)))),
        ("placements.score: ", "stands twice on the same lane"),
    ),
    "twice in a gang": (
        placed(score=Placement(((1, 1),))),
        ("placements.score: ", "stands twice on the same lane"),
    ),
    "memory": (
        lanes(LaneSpec(0, memory_bytes=10), LaneSpec(1))
        | placed(learner=Placement(((0, 1),), state_bytes=11)),
        ("placements.learner: ", "not fit on lane 0 (got 11)", "at most 10 bytes"),
    ),
    "memory and what a call takes": (
        lanes(LaneSpec(0, memory_bytes=10), LaneSpec(1))
        | placed(learner=Placement(((0, 1),), state_bytes=8, working_bytes=5)),
        (
            "placements.learner: its state of 8 bytes and the 5 bytes that a call takes",
            "do not fit on lane 0 (got 13)",
            "at most 10 bytes",
        ),
    ),
    "memory of both ends of a weight edge": (
        lanes(LaneSpec(0), LaneSpec(1, memory_bytes=10))
        | placed(learner=Placement(GANG.replicas, 6), gen=Placement(TWO.replicas, 7)),
        (
            "placements.gen: its state does not fit on lane 1 beside learner's, whose weights it",
            "(got 13)",
        ),
    ),
    "reserved for another": (
        lanes(LaneSpec(0), LaneSpec(1, reserved_for="score")),
        ("placements.gen: ", "stands on lane 1, which is reserved for score"),
    ),
    "reserved for a stranger": (
        lanes(LaneSpec(0), LaneSpec(1), LaneSpec(2, reserved_for="scorer")),
        ("lanes: ", "lane 2 is reserved for a worker with no placement", "did you mean 'score'?"),
    ),
    "a machine of a negative number": (
        lanes(LaneSpec(0), LaneSpec(1, node=-1)),
        ("lanes: ", "negative number (got -1)"),
    ),
    "no chunk": (
        {"stages": {"score": StagePlan(chunk=0)}},
        ("stages.score.chunk: ", "at least 1 (got 0)"),
    ),
    "none running": (
        {"stages": {"gen.generate": StagePlan(max_running=-1)}},
        ("stages.gen.generate.max_running: ", "at least 1 (got -1)"),
    ),
    "no items": (edge("score->normalise", 0), ("max_items: ", "at least 1 (got 0)")),
    "no bytes": (edge("score->normalise", None, 0), ("max_bytes: ", "at least 1 (got 0)")),
    "less than a group": (
        edge("score->normalise", 3),
        ("edges.score->normalise.max_items: ", "(got 3)", "at least 4"),
    ),
    "less than an expansion": (
        edge("gen.generate->score", 3),
        ("edges.gen.generate->score.max_items: ", "at least 4"),
    ),
    "staleness": ({"max_staleness": -1}, ("max_staleness: ", "not be negative (got -1)")),
    "deadline": ({"deadline_seconds": 0.0}, ("deadline_seconds: ", "must be positive (got 0.0)")),
}


@pytest.mark.parametrize(("change", "parts"), REFUSALS.values(), ids=REFUSALS)
def test_refused(change: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as error:
        validate(replace(GOOD, **change), GRPO, 8)
    for part in parts:
        assert part in str(error.value)


def test_cores_of_other_machines_and_of_reserved_lanes_may_be_the_same() -> None:
    one, apart = LaneSpec(0, "gpu", (0, 1), 0), LaneSpec(1, "gpu", (0, 1), 0, node=1)
    validate(replace(GOOD, lanes=(one, apart)), GRPO, 8)
    own = LaneSpec(2, "gpu", (0, 1), 0, reserved_for="score")
    spots = {**PLACED, "score": Placement(((2,),))}
    plan = replace(GOOD, lanes=(one, apart, own), placements=spots)
    validate(plan, GRPO, 8, {"score"})
    validate(replace(plan, lanes=(*plan.lanes, replace(own, id=3))), GRPO, 8)
    with pytest.raises(PlanError, match=r"lanes \[0, 3\] overlap on core 0"):
        validate(replace(plan, lanes=(*plan.lanes, replace(one, id=3))), GRPO, 8)


def test_an_isolated_worker_needs_lanes_of_its_own() -> None:
    with pytest.raises(PlanError, match=r"placements\.score: .*process of its own, and lane 0"):
        validate(GOOD, GRPO, 8, isolated={"score"})
    alone = Plan("eager", (LaneSpec(0),), dict.fromkeys(GRPO.workers, ONE))
    validate(alone, GRPO, 8, isolated={"score"})


def test_a_target_that_only_evaluates_is_legal_and_must_be_placed() -> None:
    graph = GRAPHS["watched"]
    plan = Plan("custom", (LaneSpec(0),), dict.fromkeys(graph.workers, ONE))
    with pytest.raises(PlanError, match=r"placements\.judge: has no placement"):
        validate(plan, graph, 8)
    validate(replace(plan, placements={**plan.placements, "judge": ONE}), graph, 8)


def test_a_worker_that_never_trains_has_nothing_to_publish() -> None:
    edge = WeightEdge("score", "gen")
    graph = replace(GRPO, weight_edges=(WeightEdge("critic", "gen"), edge))
    with pytest.raises(PlanError, match=r"critic: publishes its weights to gen, but no stage"):
        validate(GOOD, graph, 8)


def test_memory_of_other_lanes_does_not_count() -> None:
    limits = (LaneSpec(0), LaneSpec(1, memory_bytes=10))
    spots = {**PLACED, "score": Placement(((0,),), state_bytes=11)}
    validate(replace(GOOD, lanes=limits, placements=spots), GRPO, 8)


def test_mini_batches_must_be_of_one_size() -> None:
    graph = GRAPHS["embodied"]
    plan = Plan("custom", (LaneSpec(0),), dict.fromkeys(graph.workers, ONE))
    validate(plan, graph, 6)
    with pytest.raises(PlanError, match=r"learner\.train: cannot cut 7 items .* 2 mini-batches"):
        validate(plan, graph, 7)


def test_a_streaming_function_cannot_stand_on_a_gang() -> None:
    @stage(streaming=True)
    def split(items: Any) -> Any:
        yield items

    class Splitting(Flow):
        def step(self, items: Any) -> Any:
            return split(items)

    graph = Splitting().trace()
    plan = Plan("custom", (LaneSpec(0), LaneSpec(1)), {"split": GANG})
    with pytest.raises(PlanError, match=r"placements\.split: is a streaming function.*single lane"):
        validate(plan, graph, 8)


def test_a_sticky_worker_cannot_be_a_gang_and_a_step_must_fit_its_edge() -> None:
    graph = GRAPHS["embodied"]
    plan = Plan("custom", (LaneSpec(0), LaneSpec(1)), dict.fromkeys(graph.workers, ONE))
    validate(plan, graph, 8)
    with pytest.raises(PlanError, match=r"placements\.policy: is sticky"):
        validate(replace(plan, placements={**plan.placements, "policy": GANG}), graph, 8)
    narrow = replace(plan, edges={"policy.act->whiten": EdgePlan(6)})
    validate(narrow, graph, 6)
    with pytest.raises(PlanError, match=r"edges\.policy\.act->whiten.*at least 8"):
        validate(narrow, graph, 8)


def test_a_layout_must_be_declared_and_possible() -> None:
    odd = Layout("tp2", 2, (("heads", 7, 2),))
    declared = {"learner": [ONE_LANE, Layout("fsdp2", 2), odd]}

    def check(layout: str) -> None:
        validate(replace(GOOD, **placed(learner=replace(GANG, layout=layout))), GRPO, 8,
                 layouts=declared)  # fmt: skip

    check("fsdp2")
    with pytest.raises(PlanError, match=r"placements\.learner\.layout: is no layout .*'fsdp2'"):
        check("fsdp3")
    with pytest.raises(PlanError, match=r"learner\.layout: 7 heads cannot be divided by 2"):
        check("tp2")
    validate(replace(GOOD, **placed(gen=replace(TWO, layout="x"))), GRPO, 8, layouts=declared)


def test_replicas_have_as_many_lanes_as_their_layout() -> None:
    declared = {"learner": [ONE_LANE, Layout("fsdp2", 2), Layout("fsdp4", 4)]}
    for spot, layout, said in ((GANG, "fsdp4", "of 4 lanes"), (TWO, "fsdp2", "of 2 lanes")):
        plan = replace(GOOD, **placed(learner=replace(spot, layout=layout)))
        with pytest.raises(PlanError, match=rf"placements\.learner\.replicas: .*{said}"):
            validate(plan, GRPO, 8, layouts=declared)
    node = next(one for one in GRPO.nodes if one.worker == "learner")
    check_equal_gangs(node, GANG)
    with pytest.raises(PlanError, match="gangs of unequal size"):
        check_equal_gangs(node, Placement(((0, 1), (2,))))


@pytest.mark.parametrize("replicas", [((0, 1),), ((1,), (0, 2))], ids=["gang", "unequal"])
def test_a_gang_has_as_many_lanes_as_a_layout_that_can_be(
    replicas: tuple[tuple[int, ...], ...],
) -> None:
    """A layout that the plan does not name passed on any gang: a worker drew other tokens there."""
    lanes = tuple(LaneSpec(n) for n in range(3))
    plan = replace(GOOD, lanes=lanes, **placed(gen=Placement(replicas)))

    def check(*layouts: Layout, any_gang: tuple[str, ...] = ()) -> None:
        declared = {"gen": [ONE_LANE, *layouts], "learner": [ONE_LANE, Layout("fsdp2", 2)]}
        validate(plan, GRPO, 8, layouts=declared, any_gang=any_gang)

    check(Layout("tp2", 2))
    check(Layout("tp3", 3), any_gang=("gen",))
    refused = r"placements\.gen\.replicas: the worker has no layout of 2 lanes .*of 1 lane$"
    with pytest.raises(PlanError, match=refused):
        check()
    odd = Layout("tp2", 2, (("heads", 7, 2),))
    with pytest.raises(PlanError, match=r"gen\.replicas: 7 heads cannot be .*of 1 or 3 lanes$"):
        check(odd, Layout("tp3", 3))
    check(odd, Layout("cp2", 2))


@pytest.mark.parametrize(
    ("lane", "error"),
    [
        (LaneSpec(1, "gpu"), "lane 1 of kind gpu names no accelerator; expected"),
        (LaneSpec(1, "h100"), "lane 1 of kind h100 names no accelerator; expected"),
        (LaneSpec(1, gpu=0), "lane 1 of kind cpu names accelerator 0; expected"),
        (LaneSpec(1), None),
        (LaneSpec(1, "gpu", gpu=0), None),
        (LaneSpec(1, "h100", gpu=0), None),
    ],
)
def test_a_lane_that_runs_names_an_accelerator_where_its_kind_is_of_one(
    lane: LaneSpec, error: str | None
) -> None:
    """One of kind `gpu` without `gpu` ran on the CPU; one with `gpu` of kind `cpu` did on CUDA."""
    plan = replace(GOOD, lanes=(LaneSpec(0), lane))
    validate(plan, GRPO, 8)  # it can be priced for a cluster
    if error is None:
        check_executable(plan)
        return
    with pytest.raises(PlanError, match=f"lanes: {error}"):
        check_executable(plan)


def test_a_deadline_is_one_that_timers_hold() -> None:
    """A wait for a socket counts milliseconds in 32 bits: of 50 days it made half a second."""
    assert 1000 * PEER_PATIENCE * LONGEST_DEADLINE < 2**31
    check_executable(replace(GOOD, deadline_seconds=LONGEST_DEADLINE))
    for seconds in (1.001 * LONGEST_DEADLINE, 1e15, float("inf")):
        with pytest.raises(PlanError, match=r"deadline_seconds: is too long .*at most 1,000,000"):
            check_executable(replace(GOOD, deadline_seconds=seconds))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_predicted_is_a_time(seconds: float) -> None:
    with pytest.raises(PlanError, match="predicted_seconds: must be positive"):
        validate(replace(GOOD, predicted_seconds=seconds), GRPO, 8)


@pytest.mark.parametrize("name", ["state_bytes", "working_bytes"])
def test_sizes_are_not_negative(name: str) -> None:
    spot = replace(GANG, **{name: -1})
    with pytest.raises(PlanError, match=rf"placements\.learner\.{name}: must not be negative"):
        validate(replace(GOOD, **placed(learner=spot)), GRPO, 8)
