"""What must be on a lane at one moment, and sizes that become known later."""

from __future__ import annotations

from m2flow.plan import LaneSpec, Placement, Plan, with_sizes
from m2flow.plan.memory import needs
from tests.plan.small_graphs import GRPO

SPOTS = {
    "gen": Placement(((0,), (1,)), 5),
    "score": Placement(((0,),)),
    "normalise": Placement(((0,),)),
    "learner": Placement(((1, 2),), 7, 2),
}
PLAN = Plan("custom", (LaneSpec(0), LaneSpec(1), LaneSpec(2)), SPOTS)


def test_each_alone_and_both_ends_of_a_weight_edge_where_they_meet() -> None:
    found = {(need.lane, need.workers): need.num_bytes for need in needs(PLAN, GRPO)}
    assert found == {
        (0, ("gen",)): 5,
        (1, ("gen",)): 5,
        (0, ("score",)): 0,
        (0, ("normalise",)): 0,
        (1, ("learner",)): 9,
        (2, ("learner",)): 9,
        (1, ("learner", "gen")): 12,
    }


def test_sizes_that_are_known_replace_those_of_the_plan() -> None:
    plan = with_sizes(PLAN, {"gen": 11, "stranger": 3}, {"learner": 4})
    assert plan.placements["gen"] == Placement(((0,), (1,)), 11)
    assert plan.placements["learner"] == Placement(((1, 2),), 7, 4)
    assert plan.placements["score"] == SPOTS["score"]
