"""Where no plan keeps the limits: what would."""

from __future__ import annotations

from dataclasses import replace

import pytest

from m2flow.errors import UserError
from m2flow.plan.profile import Profile, StageCost, StageProfile, WorkerCost
from m2flow.plan.search import Limits, Problem, candidates, problem, search
from m2flow.plan.units import Bytes, Seconds
from tests.plan.search.cases import line
from tests.plan.search.random_cases import Plain, build, draw


def gangs(sizes: tuple[int, ...], lanes: int, state: int, stages: int = 3) -> Problem:
    """Stages whose states take so many bytes over all lanes of a replica, on lanes of 100."""
    graph = build(f"chain{stages}", (Plain,) * stages)
    layouts = tuple(StageCost(size, line(1.0, 1.0 / size), kind="gpu") for size in sizes)
    states = tuple(
        WorkerCost(size, Bytes(state // size), Seconds(1.0), Seconds(1.0), "gpu") for size in sizes
    )
    entries = {f"w{n}.work": StageProfile(layouts) for n in range(stages)}
    workers = {f"w{n}": states for n in range(stages)}
    return problem(graph, Profile(entries, workers), {"gpu": lanes}, 8, memory={"gpu": 100})


def with_sharding(lanes: int) -> Problem:
    """Two models, one of which publishes to the other: in halves each fits on lanes of its own, but
    not beside the other, where the new weights would come while the old ones are there."""
    graph = build("chain2", (Plain,) * 2)
    layouts = tuple(StageCost(size, line(1.0, 1.0), kind="gpu") for size in (1, 2))
    stages = {"w0.work": StageProfile(layouts), "w1.work": StageProfile(layouts)}
    states = (WorkerCost(1, Bytes(160), kind="gpu"), WorkerCost(2, Bytes(80), kind="gpu"))
    profile = Profile(stages, {"w0": states, "w1": states})
    return problem(graph, profile, {"gpu": lanes}, 8, memory={"gpu": 100})


def test_says_how_many_lanes_would_do() -> None:
    with pytest.raises(UserError, match=r"no plan keeps the limits.*at least 4 gpu") as refused:
        search(with_sharding(2))
    assert len(str(refused.value).splitlines()) == 1
    assert search(with_sharding(4))
    with pytest.raises(UserError, match="at least 4 gpu"):
        search(with_sharding(3))


def test_candidates_say_the_same() -> None:
    with pytest.raises(UserError, match="at least 4 gpu"):
        candidates(with_sharding(2))


def test_says_which_state_fits_on_no_number_of_lanes() -> None:
    with pytest.raises(UserError, match="the state of 'w0' takes more than a lane has"):
        search(gangs((1,), 2, 160))
    assert search(gangs((1, 2), 4, 160))


def test_says_the_smallest_replica_where_that_is_missing() -> None:
    with pytest.raises(UserError, match="at least 4 gpu"):
        gangs((4,), 2, 160)
    with pytest.raises(UserError, match=r"w0.work: has no layout.*lanes of kind gpu"):
        problem(
            build("one", (Plain,)),
            Profile({"w0.work": StageProfile((StageCost(1, line(1, 1), kind="gpu"),))}),
            {"tpu": 4},
            8,
        )


def test_a_step_of_nothing_is_refused() -> None:
    stated = draw(3)
    with pytest.raises(UserError, match="needs a lane and an item"):
        problem(stated.graph, stated.profile, {"cpu": 0}, 8)
    with pytest.raises(UserError, match="needs a lane and an item"):
        problem(stated.graph, stated.profile, {"cpu": 2}, 0)


def test_cores_bound_a_plan_too() -> None:
    graph = build("one", (Plain,))
    layout = StageCost(1, line(1, 1), cores=4.0)
    profile = Profile({"w0.work": StageProfile((layout,))})
    assert search(problem(graph, profile, {"cpu": 4}, 8, Limits(cores=8.0)))
    with pytest.raises(UserError, match="no plan keeps the limits"):
        search(problem(graph, profile, {"cpu": 4}, 8, Limits(cores=2.0)))


def test_a_tight_limit_on_many_lanes_still_finds_a_plan() -> None:
    """Where the quickest states of each part do not fit together, leaner ones are looked at."""
    stated = gangs((1, 2, 4), 32, 120)
    roomy = search(replace(stated, limits=Limits(cores=None)))[0]
    tight = search(replace(stated, limits=Limits(host_bytes=Bytes(3000))))[0]
    assert tight.cost.host <= 3000
    assert tight.seconds >= roomy.seconds
