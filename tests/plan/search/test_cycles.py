"""Cycles whose members stand apart: the search's price against the simulation of the drawn plan."""

from __future__ import annotations

import pytest

from m2flow.engine.plan import LaneSpec
from m2flow.plan.profile import Piecewise, Profile, StageCost, StageProfile
from m2flow.plan.search import Found, Leaf, Problem, Spatial, Split, evaluate, problem, to_plan
from m2flow.plan.simulate import simulate
from m2flow.plan.units import Seconds
from tests.plan.search.cases import line
from tests.plan.search.random_cases import Plain, build

LANES = tuple(LaneSpec(n) for n in range(9))


def two_members(first: tuple[float, float], second: tuple[float, float], items: int) -> Problem:
    """A cycle of four turns, by each member's seconds for an item and for one more; what follows
    it is free."""
    free = StageProfile((StageCost(1, Piecewise(((1, 0.0), (64, 0.0)))),))
    stages = {
        "w0.work": StageProfile((StageCost(1, line(*first)),)),
        "x.work": StageProfile((StageCost(1, line(*second)),)),
        "w1.work": free,
    }
    return problem(build("cycle", (Plain,) * 2), Profile(stages), {"cpu": len(LANES)}, items)


def apart(
    stated: Problem, replicas: tuple[int, int], groups: int
) -> tuple[float, float, list[int]]:
    """Seconds of the search and of the simulation, and the chunks of the members."""
    tree = Spatial(Split(0, (0, 0), replicas, groups), Leaf(1, 0, 1), (sum(replicas),), (1,))
    cost = evaluate(stated, tree)
    found = Found(0, tree, Seconds(cost.cost.first), cost.first, Seconds(0.0), cost.cost)
    plan = to_plan(stated, found, LANES)
    seconds = simulate(stated.graph, plan, stated.profile, int(stated.num_items), steps=1).seconds
    chunks = [plan.stages[name].chunk or 0 for name in ("w0.work", "x.work")]
    return cost.cost.first, float(seconds), chunks


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("first", "second", "replicas", "items"),
    [
        ((1, 1), (1, 1), (4, 4), 32),
        ((1, 0.1), (1, 0.1), (4, 4), 32),
        ((1, 1), (3, 3), (4, 4), 48),
        ((1, 1), (3, 3), (2, 6), 48),
        ((3, 1), (1, 2), (6, 2), 48),
    ],
)
def test_even_shares_take_what_they_take_in_the_simulation(
    first: tuple[float, float],
    second: tuple[float, float],
    replicas: tuple[int, int],
    items: int,
    groups: int,
) -> None:
    """The groups begin one after the other, and each waits for the slower member from then on."""
    searched, simulated, _ = apart(two_members(first, second, items), replicas, groups)
    assert searched == pytest.approx(simulated)


@pytest.mark.parametrize("price", [(1, 1), (1, 0.1)])
@pytest.mark.parametrize(
    ("replicas", "groups", "chunks"),
    [
        ((2, 6), 1, [16, 4]),
        ((5, 3), 1, [4, 8]),
        ((2, 6), 2, [8, 2]),
        ((3, 5), 2, [4, 4]),
        ((1, 7), 2, [16, 2]),
    ],
)
def test_a_rest_of_a_group_does_not_wait_for_the_next_turn(
    price: tuple[float, float], replicas: tuple[int, int], groups: int, chunks: list[int]
) -> None:
    """Of 32 items three replicas take 11 in a call, and 10 would be left, with no 11th to come."""
    searched, simulated, drawn = apart(two_members(price, price, 32), replicas, groups)
    assert drawn == chunks
    assert 0.75 * searched < simulated < 1.35 * searched


def test_calls_stay_large_where_nothing_divides_a_group() -> None:
    assert apart(two_members((1, 1), (1, 1), 31), (5, 3), 1)[2] == [7, 11]
