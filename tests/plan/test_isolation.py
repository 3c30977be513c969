"""Workers that ask for a process of their own get lanes of their own, under every mode."""

from __future__ import annotations

from dataclasses import replace

import pytest

from m2flow.flow.worker import Isolation
from m2flow.plan import (
    LaneSpec,
    Placement,
    Plan,
    build_plan,
    companion,
    isolated_workers,
    validate,
)
from m2flow.plan.builders import BUILDERS
from m2flow.plan.isolation import isolate
from tests.plan.small_graphs import GRAPHS, GRPO, Grpo, Model, Trainer

LANES = tuple(LaneSpec(n, cores=(n,), memory_bytes=50, node=n // 2) for n in range(4))


def test_a_flow_says_who_is_isolated() -> None:
    flow = Grpo(gen=Model(), learner=Trainer())
    assert isolated_workers(flow) == frozenset()
    flow.gen.isolation = Isolation()
    assert isolated_workers(flow) == {"gen"}


@pytest.mark.parametrize("name", ["grpo", "embodied", "playing"])
@pytest.mark.parametrize("mode", sorted(BUILDERS))
def test_every_mode_gives_them_lanes_beside_those_they_would_stand_on(name: str, mode: str) -> None:
    graph = GRAPHS[name]
    plain = build_plan(mode, graph, LANES, 8)
    worker = "score" if name == "grpo" else "world"
    plan = build_plan(mode, graph, LANES, 8, isolated={worker, "stranger"})
    validate(plan, graph, 8, {worker})
    if mode == "eager":
        assert plan == plain
        return
    assert plan.lanes[:4] == plain.lanes
    assert plan.stages == plain.stages
    added = {lane.id: lane for lane in plan.lanes[4:]}
    before, after = plain.placements[worker], plan.placements[worker]
    assert len(after.replicas) == len(before.replicas)
    assert set(after.lanes) == set(added)
    for old, new in zip(before.lanes, after.lanes, strict=True):
        assert added[new] == replace(LANES[old], id=new, reserved_for=worker)
    others = {w: spot for w, spot in plan.placements.items() if w != worker}
    assert others == {w: spot for w, spot in plain.placements.items() if w != worker}


def test_two_isolated_workers_share_no_lane_and_gangs_stay_together() -> None:
    plan = Plan(
        "custom",
        LANES,
        {"gen": Placement(((0,), (1,))), "learner": Placement(((2, 3), (0, 1)), 7, 1)},
    )
    apart = isolate(plan, ["learner", "gen"])
    assert [lane.reserved_for for lane in apart.lanes[4:]] == ["gen"] * 2 + ["learner"] * 4
    assert apart.placements["gen"] == Placement(((4,), (5,)))
    assert apart.placements["learner"] == Placement(((6, 7), (8, 9)), 7, 1)
    assert [lane.node for lane in apart.lanes[6:]] == [1, 1, 0, 0]


def test_who_stands_on_reserved_lanes_already_stays() -> None:
    plan = build_plan("collocated", GRPO, LANES, 8, isolated={"score"})
    assert isolate(plan, {"score"}) == plan


def test_lanes_that_are_alike_get_a_reserved_one_each() -> None:
    """Lanes without cores differ in their number only, and so do those reserved beside them."""
    alike = tuple(LaneSpec(n) for n in range(3))
    spot = Placement(((0,), (1,), (2,)))
    once = isolate(Plan("custom", alike, {"score": spot}), {"score"})
    again = isolate(replace(once, placements={"score": spot}), {"score"})
    assert again == once
    assert again.placements["score"].replicas == ((3,), (4,), (5,))

    partly = replace(once, placements={"score": Placement(((0,), (3,)))})
    assert isolate(partly, {"score"}).placements["score"].replicas == ((4,), (3,))

    fewer = replace(once, lanes=once.lanes[:4], placements={"score": spot})
    assert isolate(fewer, {"score"}) == once


def test_beside_the_steps() -> None:
    """What only another method uses avoids reserved lanes, or gets one."""
    plan = build_plan("disaggregated", GRPO, LANES, 8, isolated={"gen"})
    plan = replace(plan, lanes=(plan.lanes[-1], *plan.lanes[:-1]))
    graph = GRAPHS["scoring"]
    assert companion(plan, graph, 4).placements["world"].lanes == (0,)
    beside = companion(plan, graph, 4, {"gen", "world"})
    assert beside.placements["gen"] == plan.placements["gen"]
    (lane,) = beside.placements["world"].lanes
    assert beside.lanes[-1] == replace(LANES[0], id=lane, reserved_for="world")
    assert lane not in {other.id for other in plan.lanes}
