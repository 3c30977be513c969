"""The rules that a best plan obeys whatever the numbers."""

from __future__ import annotations

import dataclasses
import math
from random import Random

import pytest

from m2flow.plan.profile import Piecewise
from m2flow.plan.search import problem
from m2flow.plan.search.menus import chunk_sizes
from tests.plan.search.cases import chain, seconds
from tests.plan.search.random_cases import SHAPES, draw


@pytest.mark.parametrize("seed", range(25))
def test_more_of_anything_is_never_slower(seed: int) -> None:
    stated = draw(5000 + seed, tuple(s for s in SHAPES if len(SHAPES[s]) < 5), most_lanes=7)
    before = seconds(stated)
    more = tuple(count + 1 for count in stated.lanes)
    assert seconds(dataclasses.replace(stated, lanes=more)) <= before * (1 + 1e-9)
    if stated.memory[0] is not None:
        roomy = tuple(2 * size for size in stated.memory if size is not None)
        assert seconds(dataclasses.replace(stated, memory=roomy)) <= before * (1 + 1e-9)
    name = stated.graph.nodes[seed % len(stated.graph.nodes)].name
    entry = stated.profile.stages[name]
    faster = dataclasses.replace(
        entry,
        costs=tuple(
            dataclasses.replace(
                lay, seconds=Piecewise(tuple((x, 0.7 * y) for x, y in lay.seconds.points))
            )
            for lay in entry.costs
        ),
    )
    profile = dataclasses.replace(stated.profile, stages={**stated.profile.stages, name: faster})
    assert seconds(dataclasses.replace(stated, profile=profile)) <= before * (1 + 1e-9)


def test_more_lanes_are_never_slower_where_not_every_number_is_tried() -> None:
    before = math.inf
    for lanes in (5, 8, 9, 12, 13, 31, 32, 33, 64):
        stated = chain(Random(3), lanes, 64, limited=lanes > 8)
        stated = dataclasses.replace(stated, chunks=(64, 16, 4), memory=(100,))
        now = seconds(stated)
        assert now <= before * (1 + 1e-9)
        before = now


@pytest.mark.parametrize("seed", range(10))
def test_names_change_nothing(seed: int) -> None:
    stated = draw(6000 + seed)
    old = [*stated.profile.stages, *stated.profile.workers]
    shuffled = [f"z{n}" for n in range(len(old))]
    Random(seed).shuffle(shuffled)
    new = dict(zip(old, shuffled, strict=True))
    graph = dataclasses.replace(
        stated.graph,
        nodes=tuple(
            dataclasses.replace(node, name=new[node.name], worker=new[node.worker])
            for node in stated.graph.nodes
        ),
        weight_edges=tuple(
            dataclasses.replace(edge, source=new[edge.source], target=new[edge.target])
            for edge in stated.graph.weight_edges
        ),
    )
    profile = dataclasses.replace(
        stated.profile,
        stages={new[name]: entry for name, entry in stated.profile.stages.items()},
        workers={new[name]: entry for name, entry in stated.profile.workers.items()},
        publish=tuple(
            dataclasses.replace(entry, source=new[entry.source], target=new[entry.target])
            for entry in stated.profile.publish
        ),
    )
    memory = {kind: size for kind, size in zip(stated.kinds, stated.memory, strict=True) if size}
    again = problem(
        graph,
        profile,
        dict(zip(stated.kinds, stated.lanes, strict=True)),
        int(stated.num_items),
        stated.limits,
        memory,
        calls=stated.calls,
    )
    again = dataclasses.replace(again, chunks=stated.chunks)
    assert seconds(again) == pytest.approx(seconds(stated), rel=1e-9)


@pytest.mark.parametrize("seed", [1, 4, 5, 6])
def test_more_lanes_are_never_slower_from_one_way_of_searching_to_the_next(seed: int) -> None:
    """Up to FINE lanes all is tried, then grids, then what coarse searches lead to."""
    stated = draw(seed, ("chain2", "chain3", "fork3", "diamond", "chain4"))
    sizes = chunk_sizes(stated.graph, 48, 64)
    stated = dataclasses.replace(stated, num_items=48, chunks=sizes)
    before = math.inf
    for lanes in (7, 8, 9, 16, 24, 63, 64, 65, 128, 129, 200, 512, 1500):
        now = seconds(dataclasses.replace(stated, lanes=(lanes,)))
        assert now <= before * (1 + 1e-9), lanes
        before = now
