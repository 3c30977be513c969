"""What parts take at least, and at most in a plan that is of interest: never wrong, and close."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from m2flow.plan.profile import Profile, StageProfile
from m2flow.plan.search import problem, search
from m2flow.plan.search.area import Area, least_works
from m2flow.plan.search.cuts import Cuts
from m2flow.plan.search.floors import Floors
from m2flow.plan.search.leaf_states import LeafStates
from m2flow.plan.search.menus import counts
from m2flow.plan.search.problem import Problem
from m2flow.plan.search.solve import Scope, Solver
from m2flow.plan.search.weights import least_seconds, priced_layouts
from tests.plan.search.cases import priced
from tests.plan.search.random_cases import Plain, build, draw

SHAPES = ("one", "chain2", "chain3", "fork3", "diamond", "cycle")


def bounds(leaves: LeafStates, most: float) -> tuple[Area, Floors]:
    stated = leaves.problem
    chunks = tuple(int(size) for size in stated.chunks)
    works = [leaves.least_works(n, chunks) for n in range(len(stated.tasks))]
    area = Area(stated.lanes, works, most)
    return area, Floors(leaves, chunks, area, Cuts(stated, counts))


@pytest.mark.parametrize("seed", range(24))
def test_no_state_of_a_part_takes_less(seed: int) -> None:
    stated = draw(4000 + seed, SHAPES, two_kinds=seed % 2 == 0, most_lanes=4)
    step, looked_at = int(stated.num_items), 0
    for given in priced_layouts(stated):
        leaves = LeafStates(stated, given)
        solver = Solver(leaves, Scope(tuple(int(size) for size in stated.chunks)))
        best = solver.best()
        if best is not None and len(stated.weight_edges) > 0:
            assert best[0].publishing >= least_seconds(stated, leaves.layouts) * (1 - 1e-9)
        _, floors = bounds(leaves, 1e9)
        for (part, lanes, round_size, chunk, _), front in solver._fronts.items():
            least = floors.seconds(part, lanes, round_size, chunk)
            for cost, _ in front:
                looked_at += 1
                seconds = cost.first + (round_size // chunk - 1) * cost.period
                assert least <= seconds * step / round_size * (1 + 1e-9)
    assert looked_at


def two_kinds() -> Problem:
    """Two stages that each do eight times as well on a kind of their own, on 4 lanes of each."""
    graph = build("chain2", (Plain,) * 2)
    quick, slow = priced(1, 1), priced(8, 8)
    mixed = [
        replace(quick, costs=(
            replace(one.costs[0], kind="one"), replace(other.costs[0], kind="other"))
        )
        for one, other in ((quick, slow), (slow, quick))
    ]  # fmt: skip
    profile = Profile({"w0.work": mixed[0], "w1.work": mixed[1]})
    return problem(graph, profile, {"one": 4, "other": 4}, 32)


def test_what_one_kind_is_good_for_is_no_room_on_the_other() -> None:
    """By lanes alone a stage would have all the seconds that the other one leaves on its kind."""
    stated = two_kinds()
    (leaves,) = (LeafStates(stated, given) for given in priced_layouts(stated))
    best = float(search(stated)[0].seconds)
    area, _ = bounds(leaves, best)
    work = min(sum(one) for one in leaves.least_works(1, (32,)))
    alike = (best * 8 - work) / 4
    assert area.most_seconds(0b01, (0, 4)) < alike / 3
    assert area.least_seconds(0b11, (4, 4)) <= best
    assert math.isinf(area.least_seconds(0b01, (0, 0)))


def test_a_stage_that_only_one_kind_can_run_needs_its_lanes() -> None:
    works = [((4.0, 0.0),), ((2.0, 0.0), (0.0, 2.0))]
    area = Area((2, 6), works, 3.0)
    assert area.most_seconds(0b10, (2, 0)) == pytest.approx((2 * 3 - 4) / 2)
    assert area.least_seconds(0b01, (2, 6)) == pytest.approx(2.0)
    assert Area((2, 6), works, math.inf).least_seconds(0b01, (1, 0)) == 0.0


def test_least_works() -> None:
    every = [(3.0, 1.0), (1.0, 3.0), (3.0, 3.0), (1.0, 3.0), (0.5, 9.0)]
    assert least_works(every) == ((0.5, 9.0), (1.0, 3.0), (3.0, 1.0))


def test_far_fewer_parts_are_looked_at_with_the_same_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chain on eight lanes of each of two kinds, with and without what is known beforehand."""
    stages = {
        f"w{n}.work": StageProfile(
            tuple(
                replace(priced(1, each).costs[0], kind=kind)
                for kind, each in (("one", one), ("other", other))
            )
        )
        for n, (one, other) in enumerate(((0.5, 0.4), (0.1, 0.2), (0.6, 4.0), (0.2, 0.2)))
    }
    graph = build("chain4", (Plain,) * 4)
    stated = problem(graph, Profile(stages), {"one": 8, "other": 8}, 64)
    (given,) = priced_layouts(stated)
    scope = Scope(tuple(int(size) for size in stated.chunks))
    best = float(search(stated)[0].seconds)

    def looked_at() -> int:
        solver = Solver(LeafStates(stated, given), scope, best)
        found = solver.best()
        assert found is not None
        assert found[0].first == pytest.approx(best)
        return len(solver._fronts)

    few = looked_at()
    monkeypatch.setattr(Floors, "seconds", lambda *asked: 0.0)
    assert few < looked_at() / 3
