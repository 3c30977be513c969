"""`candidates`: a few plans that differ, the best one first; and what counts as a difference."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from m2flow.engine.plan import LaneSpec
from m2flow.plan import validate
from m2flow.plan.profile import Profile
from m2flow.plan.search import (
    Chunked,
    Leaf,
    Spatial,
    Temporal,
    candidates,
    evaluate,
    problem,
    search,
    to_plan,
)
from m2flow.plan.search.choose import NEAR
from m2flow.plan.search.different import differ, look
from m2flow.plan.search.menus import chunk_sizes
from tests.plan.search.cases import priced
from tests.plan.search.random_cases import Plain, build, draw

SHAPES = ("chain3", "fork3", "diamond", "cycle", "chain4")


@pytest.mark.parametrize("seed", range(12))
def test_the_first_is_the_best_and_the_rest_are_near_and_different(seed: int) -> None:
    stated = draw(8000 + seed, SHAPES)
    found = candidates(stated, keep=5)
    assert found[0] == search(stated)[0]
    assert len(found) <= 5
    assert all(a.seconds <= b.seconds for a, b in itertools.pairwise(found))
    assert found[-1].seconds <= found[0].seconds * (1 + NEAR) * (1 + 1e-9)
    looks = [look(stated, one.tree) for one in found]
    assert all(differ(stated, a, b) for a, b in itertools.combinations(looks, 2))
    lanes = tuple(
        LaneSpec(len(stated.kinds) * n + k, kind, memory_bytes=stated.memory[k])
        for k, kind in enumerate(stated.kinds)
        for n in range(stated.lanes[k])
    )
    for one in found:
        evaluate(stated, one.tree)
        validate(to_plan(stated, one, lanes), stated.graph, int(stated.num_items))


def test_there_is_more_than_one_where_two_ways_are_as_good() -> None:
    several = sum(len(candidates(draw(8100 + seed, SHAPES))) > 1 for seed in range(20))
    assert several >= 10


def test_every_staleness_has_its_best_plan_among_them() -> None:
    gained = 0
    for seed in range(10):
        stated = draw(2000 + seed, ("chain3", "diamond"), most_lanes=8)
        frontier, found = search(stated, 1), candidates(stated, 1, keep=3)
        assert found[0] == frontier[0]
        assert all(best in found for best in frontier)
        assert [one.staleness for one in found] == sorted(one.staleness for one in found)
        gained += len(frontier) > 1
    assert gained > 2


def test_many_lanes() -> None:
    several = 0
    for seed in (8201, 8203, 8206):
        stated = draw(seed, ("chain3", "fork3", "diamond", "chain4"))
        sizes = chunk_sizes(stated.graph, 512, 256)
        stated = replace(stated, num_items=512, chunks=sizes, lanes=(256,))
        found = candidates(stated)
        assert found[0] == search(stated)[0]
        several += len(found) > 1
    assert several


def test_sizes_next_to_each_other_are_no_difference() -> None:
    graph = build("chain2", (Plain,) * 2)
    profile = Profile({"w0.work": priced(1, 1), "w1.work": priced(1, 1)})
    stated = problem(graph, profile, {"cpu": 16}, 64)

    def pair(lanes: int, chunk: int) -> Chunked:
        sides = Leaf(0, 0, lanes), Leaf(1, 0, 16 - lanes)
        return Chunked(Spatial(*sides, (lanes,), (16 - lanes,)), chunk)

    def differs(one: Chunked | Temporal, other: Chunked | Temporal) -> bool:
        return differ(stated, look(stated, one), look(stated, other))

    assert not differs(pair(8, 16), pair(8, 8))
    assert not differs(pair(8, 16), pair(7, 16))
    assert differs(pair(8, 16), pair(8, 4))
    assert differs(pair(8, 16), pair(5, 16))
    assert differs(pair(14, 16), pair(15, 16))  # two lanes for the second stage, or one
    in_turn = Temporal(Leaf(0, 0, 16), Leaf(1, 0, 16))
    assert differs(pair(8, 16), in_turn)
    assert not differs(in_turn, replace(in_turn, switched=True))


def test_nesting_is_no_difference() -> None:
    graph = build("chain3", (Plain,) * 3)
    profile = Profile({f"w{n}.work": priced(1, 1) for n in range(3)})
    stated = problem(graph, profile, {"cpu": 4}, 8)
    a, b, c = (Leaf(n, 0, 4) for n in range(3))
    one, other = Temporal(Temporal(a, b), c), Temporal(a, Temporal(b, c))
    assert not differ(stated, look(stated, one), look(stated, other))


def test_prices_that_are_not_sure_make_ties() -> None:
    graph = build("chain2", (Plain,) * 2)

    def best(error: float) -> list:
        entries = {"w0.work": priced(1, 1, error), "w1.work": priced(1, 1, error)}
        return candidates(problem(graph, Profile(entries), {"cpu": 4}, 32))

    sure, unsure = best(0.0), best(0.1)
    assert sure[0].error == 0
    assert sure[0].seconds < sure[-1].seconds
    assert not sure[0].ties_with(sure[-1])
    # Two stages in turn take half of the step each: 10 % of each, by squares.
    assert unsure[0].error == pytest.approx(0.1 / 2**0.5, rel=0.3)
    assert unsure[0].ties_with(unsure[-1])


def test_chunk_sizes_are_a_chain_of_divisors() -> None:
    graph = draw(1).graph
    for items in (1, 7, 12, 60, 97, 512):
        sizes = chunk_sizes(graph, items, 64)
        assert sizes[0] == items
        assert all(a % b == 0 and a >= 2 * b for a, b in itertools.pairwise(sizes))
