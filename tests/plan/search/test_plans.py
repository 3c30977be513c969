"""What the plans of a search look like: frontiers, prices, engine plans, splits of lanes, kinds."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from m2flow.engine.plan import LaneSpec
from m2flow.errors import UserError
from m2flow.plan import validate
from m2flow.plan.profile import (
    Piecewise,
    Profile,
    StageCost,
    StageProfile,
    WorkerCost,
)
from m2flow.plan.search import (
    Leaf,
    Limits,
    Problem,
    Spatial,
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
        worker: (WorkerCost(1, Bytes(60), Seconds(50.0), Seconds(50.0)),)
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
    workers = {worker: (WorkerCost(1, Bytes(60)),) for worker in ("w0", "x")}
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
        tuple(StageCost(1, line(*price), kind=kind) for kind, price in prices.items()),
        Bytes(1000),
    )


def kinds_used(stated: Problem) -> dict[str, str]:
    """For each stage the kind of lane the best plan gives it."""
    (found,) = search(stated)
    used = {}
    for leaf in leaves(found.tree):
        assert isinstance(leaf, Leaf)
        node = stated.tasks[leaf.task].nodes[0]
        used[node.name] = stated.profile.stage(node.name).costs[leaf.layout].kind
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


def on_gangs(sizes: tuple[int, ...], state: int, each: float = 1.0) -> tuple[StageProfile, tuple]:
    """A stage by lanes of a replica, and its worker's state, so many bytes over all of these."""
    layouts = tuple(
        StageCost(
            size,
            line(1.0, each / size),
            max_running=3,
            working=Piecewise(((1, 8.0 / size),)),
            kind="gpu",
        )
        for size in sizes
    )
    states = tuple(WorkerCost(size, Bytes(state // size), kind="gpu") for size in sizes)
    return StageProfile(layouts), states


def machines_of(lanes: int, each: int) -> tuple[LaneSpec, ...]:
    """Lanes of 100 bytes on machines."""
    return tuple(LaneSpec(n, "gpu", memory_bytes=100, node=n // each) for n in range(lanes))


def test_a_model_that_no_lane_holds_generates_on_gangs() -> None:
    graph = build("chain2", (Source, Plain))
    generating, states = on_gangs((1, 2, 4), 160)
    scoring, none = on_gangs((1,), 0)
    profile = Profile({"w0.work": generating, "w1.work": scoring}, {"w0": states, "w1": none})
    stated = problem(graph, profile, machines_of(8, 8), 16)
    (found,) = search(stated)
    plan = to_plan(stated, found, machines_of(8, 8))
    validate(plan, graph, 16)
    spot = plan.placements["w0"]
    gangs = {len(gang) for gang in spot.replicas}
    assert gangs in ({2}, {4})
    (size,) = gangs
    items = plan.stages["w0.work"].chunk
    assert items == -(-16 // len(spot.replicas))
    assert plan.stages["w0.work"].max_running == 3
    assert spot.state_bytes == 160 // size
    assert spot.working_bytes == -(-8 * items // size)
    with pytest.raises(UserError, match="at least 2 gpu"):
        search(problem(graph, profile, machines_of(1, 8), 16))


def test_gangs_stand_on_one_machine_each() -> None:
    """Behind three lanes of the first stage the gangs of the others would stand on two each."""
    graph = build("chain3", (Source, Plain, Plain))
    stages, workers = {}, {}
    for n, (sizes, each) in enumerate((((1,), 0.05), ((4,), 2.0), ((8,), 2.0))):
        entry, workers[f"w{n}"] = on_gangs(sizes, 90 * sizes[0], each)
        stages[f"w{n}.work"] = replace(
            entry, costs=tuple(replace(one, max_running=None) for one in entry.costs)
        )
    lanes = machines_of(24, 8)
    stated = problem(graph, Profile(stages, workers), lanes, 96, Limits(lanes_per_node=8))
    single, four, eight = Leaf(0, 0, 3), Leaf(1, 0, 2), Leaf(2, 0, 1)
    tree = Spatial(single, Spatial(four, eight, (8,), (8,)), (3,), (16,))
    (found,) = search(stated)
    spots = to_plan(stated, replace(found, tree=tree), lanes).placements
    machines = {lane.id: lane.node for lane in lanes}
    for spot in spots.values():
        assert all(len({machines[lane] for lane in gang}) == 1 for gang in spot.replicas)
    assert len({lane for spot in spots.values() for lane in spot.lanes}) == 3 + 8 + 8


def test_a_gang_that_fits_on_no_machine_stands_on_several() -> None:
    graph = build("one", (Plain,))
    entry, states = on_gangs((8,), 80)
    lanes = machines_of(8, 4)
    stated = problem(graph, Profile({"w0.work": entry}, {"w0": states}), lanes, 8)
    (found,) = search(stated)
    assert to_plan(stated, found, lanes).placements["w0"].replicas == (tuple(range(8)),)
