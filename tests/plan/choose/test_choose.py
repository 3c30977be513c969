"""The choice against brute force, fixed modes, random plans and its own in finer calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from random import Random
from typing import Any

import pytest

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.errors import UserError
from m2flow.flow import loop
from m2flow.plan import build_plan
from m2flow.plan.choose import EFFORT, MODES, check_fits, choose
from m2flow.plan.choose.draft import Draft, draft_of, obstacle, to_plan
from m2flow.plan.choose.judge import Judge, sized
from m2flow.plan.choose.moves import moves
from m2flow.plan.choose.structures import starts
from m2flow.plan.profile import (
    ByReplicas,
    Piecewise,
    Profile,
    Quantiles,
    StageCost,
    StageProfile,
    WorkerCost,
)
from m2flow.plan.simulate import simulate
from m2flow.plan.units import Bytes
from tests.engine.toy_flows import graph_of
from tests.plan.choose.oracle import Oracle
from tests.plan.random_cases import SHAPES, Case, draw, lanes_of
from tests.plan.small_graphs import GRPO

SMALL = tuple(shape for shape in SHAPES if len(SHAPES[shape]) <= 3)
PROBLEMS = 60
CASES = 500


def but_the_first_slow(cases: Sequence[int]) -> list[Any]:
    """Cases of a test, all but the first marked as slow."""
    return [cases[0], *(pytest.param(case, marks=pytest.mark.slow) for case in cases[1:])]


def seconds(case: Case, plan: Plan, steps: int = 3) -> float:
    return float(simulate(case.graph, plan, case.profile, case.num_items, steps=steps).seconds)


# --- against brute force --------------------------------------------------------------------------


def gap(seed: int) -> float:
    """How much longer the chosen plan takes than the best of all, as a share."""
    case = draw(seed, SMALL, most_lanes=3)
    try:
        chosen = choose(case.graph, case.profile, case.lanes, case.num_items).chosen
    except UserError:
        assert Oracle(case.problem, best=math.inf, most=2000).run(0.002) == math.inf
        return 0.0
    mine = seconds(case, chosen.plan, 1)
    oracle = Oracle(case.problem, best=mine * (1 + 1e-9), most=2000)
    return mine / oracle.run(0.002) - 1


@pytest.mark.parametrize("cases", [4, pytest.param(10, marks=pytest.mark.slow)])
def test_nearly_as_good_as_brute_force(cases: int) -> None:
    gaps = [gap(seed) for seed in range(cases)]
    assert sum(gaps) / len(gaps) <= 0.01
    assert max(gaps) <= 0.07


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nearly_as_good_as_brute_force_in_all_cases() -> None:
    gaps = [gap(seed) for seed in range(CASES)]
    assert sum(gaps) / len(gaps) <= 0.01


# --- against plans that are at hand ---------------------------------------------------------------


@pytest.mark.parametrize("first", but_the_first_slow(range(0, PROBLEMS, 10)))
def test_no_fixed_mode_random_plan_or_finer_plan_is_much_faster(first: int) -> None:
    for seed in range(first, first + 10):
        case = draw(10_000 + seed, most_lanes=8)
        problem = case.problem
        try:
            chosen = choose(case.graph, case.profile, case.lanes, case.num_items)
        except UserError:
            continue
        mine = seconds(case, chosen.chosen.plan)
        judge = Judge(case.graph, case.profile, case.num_items)
        for mode in MODES:
            fixed = of_mode(case, mode)
            found = judge.candidate(fixed, mode, 3) if fixed else None
            assert found is None or mine <= found.prediction.seconds * 1.01, (seed, mode)
        drafts = [*at_random(case, seed), *finer(case, chosen.chosen.plan)]
        for draft in drafts:
            if obstacle(problem, draft) is None:
                found = judge.candidate(to_plan(problem, draft), "other", 3)
                assert found is None or mine <= found.prediction.seconds * 1.05, seed


def of_mode(case: Case, mode: str) -> Plan | None:
    try:
        plan = build_plan(mode, case.graph, case.lanes, case.num_items)
    except UserError:
        return None
    return sized(plan, case.graph, case.profile, case.num_items)


def at_random(case: Case, seed: int) -> list[Draft]:
    """A few drafts, each some changes away from one of the starts."""
    rng, problem = Random(seed), case.problem
    found = []
    for draft in rng.sample(pool := list(starts(problem)), min(4, len(pool))):
        for _ in range(3):
            draft = rng.choice(list(moves(problem, draft)))
        found.append(draft)
    return found


def finer(case: Case, plan: Plan) -> list[Draft]:
    """The plan with the calls of one stage, or of all, half as large."""
    draft = draft_of(case.problem, plan)
    if draft is None:
        return []
    halves = [
        draft.with_calls(n, 2 * pieces, draft.running[n]) for n, pieces in enumerate(draft.pieces)
    ]
    return [*halves, replace(draft, pieces=tuple(2 * pieces for pieces in draft.pieces))]


@pytest.mark.parametrize("seed", [*but_the_first_slow((0, 1, 2)), *range(3, 8)])
def test_more_lanes_give_no_slower_plan(seed: int) -> None:
    case, before = draw(20_000 + seed, most_lanes=2), float("inf")
    for count in range(1, 6):
        lanes = tuple(LaneSpec(n, case.lanes[0].kind) for n in range(count))
        try:
            chosen = choose(case.graph, case.profile, lanes, case.num_items).chosen
        except UserError:  # two kinds are wanted, or more lanes for a replica
            continue
        now = float(chosen.prediction.seconds)
        assert now <= before * 1.011, (count, now, before)
        before = min(before, now)


# --- what it promises beside ----------------------------------------------------------------------


def waiting(items: int = 16, sequence: float = 0.05) -> Profile:
    """Stages that wait: a call takes as long whoever else is at work; long tails of lengths."""

    def cost(first: float, each: float) -> StageCost:
        return StageCost(1, Piecewise(((1.0, first + each), (256.0, first + 256 * each))))

    rounds = Piecewise(((1.0, 0.01), (8.0, 0.012), (64.0, 0.04)))
    generate = replace(cost(0.1, 0.01), round=rounds, admit=Piecewise(((1.0, 0.01),)))
    lengths = Quantiles((4.0, 8.0, 10.0, 14.0, 40.0))
    return Profile(
        {
            "gen.generate": StageProfile((generate,), Bytes(10), lengths),
            "score": StageProfile((cost(0.001, 0.001),), Bytes(10)),
            "normalise": StageProfile((cost(0.001, 0.0),), Bytes(10)),
            "learner.train": StageProfile(
                (replace(cost(sequence, 0.01), finish=ByReplicas(((1.0, 0.02), (8.0, 0.05)))),)
            ),
        }
    )


def test_the_choice_does_not_depend_on_the_speed_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lanes = lanes_of({"cpu": 4})
    quick = choose(GRPO, waiting(), lanes, 16)
    clock = iter(range(0, 10**9, 1000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    slow = choose(GRPO, waiting(), lanes, 16)
    assert (slow.chosen, slow.num_simulated) == (quick.chosen, quick.num_simulated)
    assert slow.num_simulated <= EFFORT + 40


def test_a_step_longer_than_the_deadline_of_plans_is_planned() -> None:
    """Candidates were simulated under the deadline that real calls have, and the choice ended in
    RunFailed."""
    profile = waiting()
    slow = {name: stage.times(20_000.0) for name, stage in profile.stages.items()}
    found = choose(GRPO, replace(profile, stages=slow), lanes_of({"cpu": 2}), 16)
    assert found.chosen.prediction.seconds > Plan("", (), {}).deadline_seconds
    assert found.chosen.plan.deadline_seconds == Plan("", (), {}).deadline_seconds


def test_what_is_ruled_out_is_told_with_the_reason() -> None:
    case = draw(1, ("chain2",), most_lanes=1)
    workers = {worker: (WorkerCost(1, Bytes(60)),) for worker in case.graph.workers}
    profile = replace(case.profile, workers=workers)
    edges = case.graph.weight_edges
    lanes = lanes_of({"cpu": 2}, memory=100)
    found = choose(case.graph, profile, lanes, case.num_items)
    assert edges
    assert "fit" in found.ruled_out["collocated"]
    assert all(found.ruled_out.values())


def test_nothing_fits_says_why() -> None:
    case = draw(1, ("chain2",), most_lanes=1)
    workers = {worker: (WorkerCost(1, Bytes(160)),) for worker in case.graph.workers}
    profile = replace(case.profile, workers=workers)
    lanes = lanes_of({"cpu": 2}, memory=100)
    for ask in (choose, check_fits):
        with pytest.raises(UserError, match=r"no plan keeps the limits of these lanes.*fit"):
            ask(case.graph, profile, lanes, case.num_items)


def test_a_layout_that_has_room_for_one_item_alone_gives_way_to_another() -> None:
    """The faster layout was taken, whose calls, as small as they are made, have no room."""
    profile = waiting()
    (train,) = profile.stage("learner.train").costs
    fast = replace(
        train, lanes=2, working=Piecewise(((1, 30.0), (2, 60.0), (256, 60.0))), layout="fast"
    )
    small = replace(fast, working=Piecewise(((1, 20.0), (2, 40.0), (256, 40.0))), layout="small")
    small = replace(small, seconds=Piecewise(((1.0, 0.2), (256.0, 6.0))))
    profile.stages["learner.train"] = StageProfile((fast, small))
    workers = {"learner": tuple(WorkerCost(2, Bytes(50), layout=x) for x in ("fast", "small"))}
    lanes = lanes_of({"cpu": 2}, memory=100)
    chosen = choose(GRPO, replace(profile, workers=workers), lanes, 256).chosen.plan
    assert chosen.placements["learner"].layout == "small"


def test_smaller_calls_are_tried_where_all_stages_share_lanes() -> None:
    """Only stages on other lanes than the ones before were tried in smaller calls."""
    case = Case(GRPO, waiting(), lanes_of({"cpu": 8}), 64)
    plan = of_mode(case, "collocated")
    draft = draft_of(case.problem, plan) if plan else None
    assert draft
    near = [one for one in moves(case.problem, draft) if one.spots == draft.spots]
    train = GRPO.node("learner.train").index
    assert any(one.pieces[train] > draft.pieces[train] for one in near)
    found = choose(*case[:4]).chosen
    assert found.prediction.seconds <= seconds(case, to_plan(case.problem, draft)) * 1.001


def test_generation_that_is_fed_is_found() -> None:
    """Calls that hold few prompts and are fed share the long answers out."""
    found = choose(GRPO, waiting(), lanes_of({"cpu": 8}), 64)
    best = found.chosen.prediction.seconds
    for limit in (1, 2, 4):
        problem = Case(GRPO, waiting(), lanes_of({"cpu": 8}), 64).problem
        for draft in islice(starts(problem), 40):
            fed = draft.with_calls(0, 1.0, limit)
            one = simulate(GRPO, to_plan(problem, fed), waiting(), 64, steps=3)
            assert best <= one.seconds * 1.05, (limit, fed)


def test_structures_are_simulated_where_a_step_has_many_events() -> None:
    """A step of 1,500 events on 16 lanes was planned by 9 simulations, of fixed modes mostly, and
    plans 12 % faster were missed."""
    found = choose(GRPO, waiting(), lanes_of({"cpu": 16}), 128, effort=40)
    assert found.chosen.prediction.num_events > 1000
    assert 16 < found.num_simulated <= 49


def test_the_shortlist_holds_different_plans_within_the_error() -> None:
    found = choose(GRPO, waiting(), lanes_of({"cpu": 4}), 16)
    short = found.shortlist(0.2, at_most=3)
    assert short[0] is found.chosen
    assert 1 <= len(short) <= 3
    assert all(
        one.prediction.seconds <= found.chosen.prediction.seconds * 1.2 * 1.01 for one in short
    )
    assert found.shortlist(0.0, at_most=1) == (found.chosen,)


# --- groups that take turns on a lane -------------------------------------------------------------


@pytest.mark.parametrize(("elsewhere", "at_most"), [(1.0, 0.8), (0.0, 1.0)])
def test_a_loop_on_one_lane_is_dealt_into_groups_where_a_stage_passes_elsewhere(
    elsewhere: float, at_most: float
) -> None:
    graph = graph_of(lambda a, b, x: loop(a.score, b.pause)(x), "a", "b")
    linear = Piecewise(((1.0, 1.0), (8.0, 8.0)))
    profile = Profile(
        {
            "a.score": StageProfile((StageCost(1, linear),), turns=Quantiles((20.0,) * 2)),
            "b.pause": StageProfile((StageCost(1, linear, elsewhere=elsewhere),)),
        }
    )
    lanes = (LaneSpec(0),)
    whole = simulate(graph, build_plan("collocated", graph, lanes, 8), profile, 8).seconds
    chosen = choose(graph, profile, lanes, 8).chosen
    assert chosen.prediction.seconds <= at_most * whole
    assert (chosen.plan.mode == "collocated") == (not elsewhere)
    again = simulate(graph, chosen.plan, profile, 8).seconds
    assert again == pytest.approx(chosen.prediction.seconds)


def test_groups_are_tried_where_no_fixed_mode_has_a_price() -> None:
    """A loop on the accelerator and a stage on cores: groups were among the last changes tried, as
    calls of half the items take more than half as long."""
    graph = graph_of(lambda a, b, c, x: c.score(loop(a.score, b.pause)(x)), "a", "b", "c")
    turn = StageCost(1, Piecewise(((1.0, 0.5), (8.0, 0.5))), kind="gpu")
    pause = Piecewise(((1.0, 1.5), (4.0, 1.5), (8.0, 2.0)))
    profile = Profile(
        {
            "a.score": StageProfile((turn,), turns=Quantiles((20.0,) * 2)),
            "b.pause": StageProfile((replace(turn, seconds=pause, elsewhere=0.9),)),
            "c.score": StageProfile((StageCost(1, Piecewise(((1.0, 4.0), (8.0, 32.0)))),)),
        }
    )
    lanes = (LaneSpec(0, "gpu", gpu=0), *(LaneSpec(n) for n in range(1, 8)))
    chosen = choose(graph, profile, lanes, 8, effort=24).chosen
    assert chosen.prediction.seconds <= 0.85 * (20 * (0.5 + 2.0)) + 8.0


def test_workers_with_hardly_any_work_do_not_multiply_structures() -> None:
    """Five functions on cores beside accelerators were dealt out in every way: 50,000 drafts."""

    def chain(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, x: Any) -> Any:
        for worker in (a, b, c, d, e, f, g):
            x = worker.score(x)
        return x

    graph = graph_of(chain, *"abcdefg")
    long, short = (Piecewise(((1.0, s), (8.0, 8 * s))) for s in (10.0, 1e-3))
    heavy = StageProfile((StageCost(1, long, kind="gpu"),))
    light = StageProfile(tuple(StageCost(1, short, kind=kind) for kind in ("cpu", "gpu")))
    stages = {f"{worker}.score": heavy if worker in "ab" else light for worker in "abcdefg"}
    lanes = (*(LaneSpec(n, "gpu", gpu=n) for n in range(4)), *(LaneSpec(n) for n in range(4, 12)))
    case = Case(graph, Profile(stages), lanes, 8)
    assert sum(1 for _ in starts(case.problem)) < 100
