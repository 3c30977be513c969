"""What the plans of a search look like: frontiers, prices, engine plans, splits of lanes, kinds."""

from __future__ import annotations

import itertools

import pytest

from m2flow.engine.plan import LaneSpec
from m2flow.plan import validate
from m2flow.plan.profile import (
    Profile,
    StageLayout,
    StageProfile,
    WorkerLayout,
)
from m2flow.plan.search import (
    Leaf,
    Problem,
    Split,
    Steps,
    Temporal,
    evaluate,
    problem,
    search,
    to_plan,
)
from m2flow.plan.search.pricing import step_seconds
from m2flow.plan.search.tree import leaves
from m2flow.plan.units import Bytes, Seconds
from tests.plan.search.cases import line, priced
from tests.plan.search.random_cases import Plain, Source, build, draw


def test_staleness_gives_a_frontier() -> None:
    gained = 0
    for seed in range(20):
        stated = draw(2000 + seed, ("chain3", "diamond"), most_lanes=8)
        found = search(stated, 2)
        assert [f.staleness for f in found] == sorted({f.staleness for f in found})
        assert all(a.seconds > b.seconds for a, b in itertools.pairwise(found))
        gained += len(found) > 1
    assert gained > 5


def test_the_price_of_the_tree_is_the_seconds_of_the_answer() -> None:
    for seed in range(40):
        stated = draw(3000 + seed)
        for found in search(stated, 1):
            priced = evaluate(stated, found.tree)
            assert step_seconds(stated, priced.cost) == pytest.approx(found.seconds)
            total = found.terms.total + found.publishing
            assert total == pytest.approx(found.seconds, rel=1e-6)


def test_plans_validate_and_keep_their_memory() -> None:
    kinds_of_trees = set()
    for seed in range(60):
        stated = draw(4000 + seed)
        lanes = tuple(
            LaneSpec(len(stated.kinds) * n + k, kind, memory_bytes=stated.memory[k])
            for k, kind in enumerate(stated.kinds)
            for n in range(stated.lanes[k])
        )
        for found in search(stated, 1):
            plan = to_plan(stated, found, lanes)
            validate(plan, stated.graph, int(stated.num_items))
            assert plan.predicted_seconds == found.seconds
            kinds_of_trees |= {type(found.tree)}
    assert {Temporal, Steps} <= kinds_of_trees


def test_all_lanes_but_one_are_a_split() -> None:
    """States that do not fit together and are slow to move: the quick stage gets a single lane."""
    graph = build("chain2", (Plain,) * 2)
    stages = {"w0.work": priced(1.0, 1.0), "w1.work": priced(0.1, 0.1)}
    workers = {
        worker: (WorkerLayout(1, Bytes(60), Seconds(50.0), Seconds(50.0)),)
        for worker in graph.workers
    }
    profile = Profile(stages, workers)
    stated = problem(graph, profile, {"cpu": 8}, 56, memory={"cpu": 100})
    (found,) = search(stated)
    assert "first_lanes=(7,), second_lanes=(1,)" in repr(found.tree)
    assert found.terms.switching == 0


def test_members_of_a_cycle_may_stand_apart() -> None:
    """States that do not fit on one lane: groups of items ping-pong, the slow member gets more."""
    graph = build("cycle", (Plain,) * 2)
    stages = {
        "w0.work": priced(1.0, 1.0),
        "x.work": priced(0.2, 0.2),
        "w1.work": priced(0.1, 0.0),
    }
    workers = {worker: (WorkerLayout(1, Bytes(60)),) for worker in ("w0", "x")}
    stated = problem(graph, Profile(stages, workers), {"cpu": 8}, 24, memory={"cpu": 100})
    (found,) = search(stated)
    splits = [leaf for leaf in leaves(found.tree) if isinstance(leaf, Split)]
    assert splits
    assert splits[0].replicas[0] > splits[0].replicas[1]
    assert splits[0].groups > 1


def lanes_of(stated: Problem) -> tuple[LaneSpec, ...]:
    """Lanes as a problem has them, numbered kind by kind."""
    kinds = [kind for n, kind in zip(stated.lanes, stated.kinds, strict=True) for _ in range(n)]
    return tuple(LaneSpec(n, kind) for n, kind in enumerate(kinds))


def on_kinds(prices: dict[str, tuple[float, float]]) -> StageProfile:
    """A stage by the price of one item and of each further one, on kinds of lanes."""
    return StageProfile(
        tuple(StageLayout(1, line(*price), kind=kind) for kind, price in prices.items()),
        Bytes(1000),
    )


def kinds_used(stated: Problem) -> dict[str, str]:
    """For each stage the kind of lane the best plan gives it."""
    (found,) = search(stated)
    used = {}
    for leaf in leaves(found.tree):
        assert isinstance(leaf, Leaf)
        node = stated.tasks[leaf.task].nodes[0]
        used[node.name] = stated.profile.stage(node.name).layouts[leaf.layout].kind
    return used


def test_verifiers_stand_on_the_cores_beside_the_accelerators() -> None:
    """The reward is as quick on a core as on a GPU; generation and training are not."""
    graph = build("chain3", (Plain,) * 3)
    stages = {
        "w0.work": on_kinds({"gpu": (0.1, 0.1), "cpu": (5.0, 5.0)}),
        "w1.work": on_kinds({"gpu": (0.1, 0.1), "cpu": (0.1, 0.1)}),
        "w2.work": on_kinds({"gpu": (0.1, 0.1), "cpu": (9.0, 9.0)}),
    }
    stated = problem(graph, Profile(stages), {"gpu": 2, "cpu": 4}, 32)
    assert kinds_used(stated) == {"w0.work": "gpu", "w1.work": "cpu", "w2.work": "gpu"}
    (found,) = search(stated)
    plan = to_plan(stated, found, lanes_of(stated))
    validate(plan, graph, 32)
    kinds = {lane.id: lane.kind for lane in plan.lanes}
    assert {kinds[lane] for lane in plan.placements["w1"].lanes} == {"cpu"}
    assert {kinds[lane] for lane in plan.placements["w0"].lanes} == {"gpu"}


def test_each_of_two_kinds_of_accelerators_does_what_it_is_best_at() -> None:
    """One has the memory bandwidth to generate, the other the arithmetic to train."""
    graph = build("chain2", (Source, Plain))
    stages = {
        "w0.work": on_kinds({"H20": (1.0, 0.2), "H800": (1.0, 0.6)}),
        "w1.work": on_kinds({"H20": (0.2, 0.9), "H800": (0.2, 0.15)}),
    }
    stated = problem(graph, Profile(stages), {"H20": 4, "H800": 4}, 32)
    assert kinds_used(stated) == {"w0.work": "H20", "w1.work": "H800"}
    swapped = {name: stages[other] for name, other in zip(stages, reversed(stages), strict=True)}
    stated = problem(graph, Profile(swapped), {"H20": 4, "H800": 4}, 32)
    assert kinds_used(stated) == {"w0.work": "H800", "w1.work": "H20"}
