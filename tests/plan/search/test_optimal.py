"""The search against brute force over all plan trees, and against one number for each part."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest

from m2flow.plan.search import scalar_recursion
from tests.plan.search.cases import chain, seconds
from tests.plan.search.oracle import brute_force
from tests.plan.search.random_cases import SHAPES, draw

CASES = 500
SMALL = ("one", "chain2", "chain3", "fork3", "cycle", "cycle3")


def check(seed: int) -> None:
    stated = draw(seed)
    mine, best = seconds(stated), brute_force(stated)
    assert mine == best or mine == pytest.approx(best, rel=1e-6), f"seed {seed}"


@pytest.mark.parametrize("first", range(60, 120, 10))
def test_as_good_as_brute_force(first: int) -> None:
    for seed in range(first, first + 10):
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, CASES, 10))
def test_as_good_as_brute_force_in_all_cases(first: int) -> None:
    for seed in range(first, first + 10):
        check(seed)


def test_the_cases_have_every_shape_and_lane_count() -> None:
    shapes, lanes, limited, kinds, gangs = set(), set(), 0, 0, 0
    for seed in range(CASES):
        stated = draw(seed)
        edges = tuple((p, c) for p, c in stated.graph.edges if p >= 0)
        shapes.add(edges)
        lanes.add(sum(stated.lanes))
        limited += stated.memory[0] is not None
        kinds += len(stated.kinds) > 1
        streams = [node for node in stated.graph.nodes if node.streaming]
        gangs += any(layout.lanes > 1 for n in streams for _, layout, _ in stated.layouts(n))
    assert lanes >= set(range(1, 9))
    assert len(shapes) >= len(SHAPES)
    assert limited > 100
    assert kinds > 10
    assert gangs > 50


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_two_kinds_of_lanes_as_good_as_brute_force(first: int) -> None:
    """Stages that may stand on either kind beside those that need one of them."""
    for seed in range(first, first + 10):
        stated = draw(9000 + seed, SMALL, two_kinds=True)
        mine, best = seconds(stated), brute_force(stated)
        assert mine == best or mine == pytest.approx(best, rel=1e-6), f"seed {seed}"


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_is_found_just_where_there_is_none(seed: int) -> None:
    """On lanes with less memory than the states may take."""
    stated = draw(7000 + seed, SMALL, most_lanes=3)
    tight = dataclasses.replace(stated, memory=tuple(40 + 2 * seed for _ in stated.kinds))
    mine, best = seconds(tight), brute_force(tight)
    assert mine == best or mine == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_overlapping_steps_as_good_as_brute_force(seed: int) -> None:
    stated = draw(1000 + seed, SMALL, most_lanes=4)
    assert seconds(stated, 1) == pytest.approx(brute_force(stated, 2), rel=1e-6)


def test_one_number_for_each_part_loses_on_random_chains() -> None:
    """The scalar recursion of the paper keeps the fastest plan of a part, which is not always the
    best part of a pipeline (RLinf, arXiv 2509.15965)."""
    losses = []
    for seed in range(40):
        stated = chain(Random(seed), Random(seed).randint(4, 8), 8, limited=True)
        losses.append(scalar_recursion(stated) / seconds(stated) - 1)
    assert min(losses) >= -1e-9
    assert sum(loss > 1e-6 for loss in losses) >= 0.31 * len(losses)
    assert sum(losses) / len(losses) > 0.005
    assert max(losses) > 0.09
