"""Which layouts are searched together: those between which publishing costs and fits the same."""

from __future__ import annotations

from itertools import product

import pytest

from m2flow.plan.profile import (
    Profile,
    PublishCost,
    StageCost,
    StageProfile,
    WorkerCost,
)
from m2flow.plan.search import Problem, problem
from m2flow.plan.search.weights import fit_together, priced_layouts, seconds_of
from m2flow.plan.units import Bytes, Seconds
from tests.plan.search.cases import line
from tests.plan.search.random_cases import Plain, Source, build, draw


def combinations(stated: Problem) -> list[dict[str, tuple[int, int]]]:
    """Each layout of the workers of weight edges, as often as a search has it."""
    ends = {worker for edge in stated.weight_edges for worker in (edge.source, edge.target)}
    found = []
    for allowed in priced_layouts(stated):
        menus = [allowed.get(worker, stated.worker_layouts(worker)) for worker in sorted(ends)]
        found += [dict(zip(sorted(ends), choice, strict=True)) for choice in product(*menus)]
    return found


def publishing(sizes: tuple[int, ...], prices: tuple[PublishCost, ...], state: int) -> Problem:
    """A trainer that publishes to a generator, each with replicas of several sizes."""
    graph = build("chain2", (Source, Plain))
    layouts = tuple(StageCost(size, line(1.0, 1.0 / size), kind="gpu") for size in sizes)
    states = tuple(WorkerCost(size, Bytes(state // size), kind="gpu") for size in sizes)
    stages = {name: StageProfile(layouts) for name in ("w0.work", "w1.work")}
    profile = Profile(stages, {"w0": states, "w1": states}, prices)
    return problem(graph, profile, {"gpu": 8}, 8, memory={"gpu": 100})


def price(seconds: float, target_lanes: int | None = None) -> PublishCost:
    return PublishCost("w1", "w0", "node", Seconds(seconds), None, target_lanes)


def test_prices_by_the_lanes_of_the_target_are_as_many_searches() -> None:
    prices = (price(4.0, 1), price(2.0, 2), price(1.0, 4))
    assert len(list(priced_layouts(publishing((1, 2, 4), prices, 0)))) == 3
    assert list(priced_layouts(publishing((1, 2, 4), (price(1.0),), 0))) == [{}]


def test_states_that_do_not_fit_beside_each_other_are_searched_apart() -> None:
    """Of 120 bytes on lanes of 100, two halves do not fit, a half and a quarter do."""
    stated = publishing((2, 4), (price(1.0),), 120)
    assert len(list(priced_layouts(stated))) == 4


@pytest.mark.parametrize("seed", range(60))
def test_every_combination_is_in_one_search_at_one_price(seed: int) -> None:
    stated = draw(8000 + seed, ("chain2", "chain3", "diamond"))
    found = combinations(stated)
    ends = sorted({worker for e in stated.weight_edges for worker in (e.source, e.target)})
    every = product(*(stated.worker_layouts(worker) for worker in ends))
    assert sorted(tuple(one[worker] for worker in ends) for one in found) == sorted(every)
    for allowed in priced_layouts(stated):
        for edge in stated.weight_edges:
            menus = [
                allowed.get(worker, stated.worker_layouts(worker))
                for worker in (edge.source, edge.target)
            ]
            seen = set()
            for mine, theirs in product(*menus):
                layouts = {edge.source: mine, edge.target: theirs}
                prices = [seconds_of(stated, edge, place, layouts) for place in ("same", "node")]
                seen.add((*prices, fit_together(stated, edge, layouts)))
            assert len(seen) == 1
