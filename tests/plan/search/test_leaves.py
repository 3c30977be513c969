"""What a leaf costs, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from m2flow.plan.profile import Piecewise, Profile, StageCost, StageProfile, WorkerCost
from m2flow.plan.search import Fused, Leaf, Problem, Split, problem
from m2flow.plan.search.leaves import leaf_cost
from m2flow.plan.units import Bytes, Seconds
from tests.plan.search.cases import priced
from tests.plan.search.random_cases import Learner, Plain, Source, build


def dispatched(stated: Problem, seconds: float) -> Problem:
    """The same with so many seconds for each call."""
    return replace(stated, profile=replace(stated.profile, dispatch=Seconds(seconds)))


def test_each_call_is_dispatched() -> None:
    graph = build("chain2", (Plain,) * 2)
    stages = {"w0.work": priced(1.0, 0.5), "w1.work": priced(1.0, 0.5)}
    stated = dispatched(problem(graph, Profile(stages), {"cpu": 4}, 16), 0.1)
    one, four = Leaf(0, 0, replicas=2, calls=1), Leaf(0, 0, replicas=2, calls=4)
    # 8 items of 16 for a replica: 1 + 7 / 2 at once, or 4 calls of 2 items.
    assert leaf_cost(stated, one, 16, 16).first == pytest.approx(4.5 + 0.1)
    assert leaf_cost(stated, four, 16, 16).first == pytest.approx(4 * (1.5 + 0.1))


def test_a_finish_is_dispatched_once_for_each_mini_batch() -> None:
    graph = build("one", (Learner,))
    entry = StageProfile((StageCost(1, Piecewise(((1, 1.0), (64, 64.0))), finish=None),))
    stated = problem(graph, Profile({"w0.work": entry}), {"cpu": 1}, 8)
    leaf, mine = Leaf(0, 0, 1), dispatched(stated, 0.1)
    # Two mini-batches of four, each a call and a finish.
    assert leaf_cost(mine, leaf, 8, 8).first == pytest.approx(8 + 2 * 0.1 + 2 * 0.1)
    # A chunk of two is half of one: a call, and half of what a finish takes.
    assert leaf_cost(mine, leaf, 8, 2).first == pytest.approx(2 + 0.1 + 0.05)


def test_a_stream_is_dispatched_once() -> None:
    graph = build("chain2", (Source, Plain))
    done = Piecewise(((0, 0), (0.5, 0.25), (1, 1)))
    entry = StageProfile((StageCost(1, Piecewise(((1, 1.0), (8, 8.0))), done=done),))
    stages = {"w0.work": entry, "w1.work": priced(1.0, 1.0)}
    stated = problem(graph, Profile(stages), {"cpu": 2}, 8)
    before = leaf_cost(stated, Leaf(0, 0, 1), 8, 4)
    after = leaf_cost(dispatched(stated, 0.3), Leaf(0, 0, 1), 8, 4)
    # The first half is out after a quarter of the 8 s, the second at their end.
    assert (before.first, before.period) == (2.0, 6.0)
    assert after.first == pytest.approx(2.3)
    assert after.period == before.period


def test_every_turn_of_a_cycle_is_dispatched() -> None:
    graph = build("cycle", (Plain,) * 2)
    stages = {name: priced(1.0, 1.0) for name in ("w0.work", "x.work", "w1.work")}
    stated = problem(graph, Profile(stages), {"cpu": 4}, 8)
    mine = dispatched(stated, 0.1)
    fused, split = Fused(0, (0, 0), 2), Split(0, (0, 0), (2, 2), 2)
    # Four turns of two members; apart, two groups take each member in turn, the second one
    # after the first.
    assert leaf_cost(mine, fused, 8, 8).first == pytest.approx(4 * 2 * (4 + 0.1))
    assert leaf_cost(mine, split, 8, 8).first == pytest.approx(4 * 2 * (2 + 0.1) + (2 + 0.1))


def test_a_stream_on_gangs_has_its_items_by_replica_and_its_bytes_by_lane() -> None:
    graph = build("chain2", (Source, Plain))
    layout = StageCost(4, Piecewise(((1, 1.0), (8, 8.0))), working=Piecewise(((1, 5.0), (8, 40.0))))
    stages = {"w0.work": StageProfile((layout,)), "w1.work": priced(1.0, 1.0)}
    workers = {"w0": (WorkerCost(4, Bytes(25), Seconds(1.0), Seconds(2.0)),)}
    stated = problem(graph, Profile(stages, workers), {"cpu": 8}, 16, memory={"cpu": 128})
    leaf = leaf_cost(stated, Leaf(0, 0, 2), 16, 16)
    assert leaf.first == 8.0  # eight items for each of two replicas
    assert (leaf.resident, leaf.peak) == (25 / 128, 65 / 128)
    assert leaf.swap == 3.0
    assert leaf.states == 8 * 25
