"""What going on with begun items takes goes through the engine into spans, and comes back out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.engine.spans import Span
from m2flow.plan.file import profile_from_json, to_json
from m2flow.plan.measured import Evidence, Observed, fit, fit_to, trial_plans
from m2flow.plan.measured.resuming import Resumed, Taken, fit_resume, grown_of, resumed
from m2flow.plan.measured.streams import Rounds
from m2flow.plan.profile import Piecewise, Profile, Quantiles, StageCost, StageProfile
from m2flow.plan.units import Bytes, Seconds
from tests.plan.measured.test_fit import GRPO, KNOWN, observed
from tests.plan.test_switching import GRAPH

ITEMS = 16
GENERATE, WHERE = "generator.generate", ("generator.generate", 1, "cpu")


def line(first: float, each: float) -> Piecewise:
    return Piecewise(((1.0, first + each), (1001.0, first + 1001 * each)))


DRAWING = StageCost(
    1,
    line(1.0, 0.05),
    round=Piecewise(((1, 0.010), (8, 0.012), (64, 0.040))),
    admit=line(0.02, 0.005),
    resume=line(0.03, 0.0005),
)
TAIL = Quantiles((*map(float, range(3, 28)), 40.0, 60.0, 80.0, 120.0, 160.0, 200.0, 240.0, 300.0))
TOLD = Profile(
    {
        GENERATE: StageProfile((DRAWING,), Bytes(100), TAIL),
        "score": StageProfile((StageCost(1, line(0.01, 0.002)),), Bytes(10)),
        "learner.logprobs": StageProfile((StageCost(1, line(0.01, 0.002)),), Bytes(10)),
        "learner.train": StageProfile((StageCost(1, line(0.05, 0.01)),)),
    },
    dispatch=Seconds(0.0005),
)


def lanes(count: int) -> tuple[LaneSpec, ...]:
    return tuple(LaneSpec(number, cores=(number,)) for number in range(count))


def switches(plan: Plan) -> bool:
    return any(one.switch_at is not None for one in plan.stages.values())


def seen(count: int) -> list[Observed]:
    return [observed(GRAPH, plan, TOLD) for plan in trial_plans(GRAPH, lanes(count), ITEMS)]


@pytest.fixture(scope="module", params=[2, 4])
def runs(request: pytest.FixtureRequest) -> list[Observed]:
    return seen(request.param)


# --- the trial ------------------------------------------------------------------------------------


def test_one_trial_has_a_switch_point_where_a_stage_can_have_one() -> None:
    for count, going_on in ((2, 1), (4, 2)):
        (plan,) = filter(switches, trial_plans(GRAPH, lanes(count), ITEMS))
        stage, spot = plan.stages[GENERATE], plan.placements["generator"]
        assert stage.kept(len(spot.replicas)) == going_on
        assert len(spot.replicas) == count
    assert not any(map(switches, trial_plans(GRAPH, lanes(1), ITEMS))), "who would take them up"
    assert not any(map(switches, trial_plans(GRPO, lanes(2), ITEMS))), "it is not resumable"
    alone = trial_plans(GRAPH, lanes(2), ITEMS, isolated=("generator",))
    assert not any(map(switches, alone)), "no other stage stands on its lanes"


# --- the price ------------------------------------------------------------------------------------


def test_the_price_of_going_on_comes_back(runs: list[Observed]) -> None:
    evidence = Evidence(GRAPH)
    for one in runs:
        evidence.add(one)
    (found,) = fit_to(evidence).stage(GENERATE).costs
    assert found.resume
    assert len(evidence.samples.resumed[WHERE]) >= 4
    for units in (20, 100, 250, 600):
        assert DRAWING.resume
        assert found.resume.at(units) == pytest.approx(DRAWING.resume.at(units), rel=0.01)


def test_calls_whose_items_change_lanes_spoil_no_other_curve(runs: list[Observed]) -> None:
    apart = [one for one in runs if not switches(one.plan)]
    assert len(apart) == len(runs) - 1
    (without,), (found,) = (fit(GRAPH, some).stage(GENERATE).costs for some in (apart, runs))
    assert without.resume is None
    assert found.round
    assert without.round
    assert found.admit
    assert without.admit
    for running in (1, 5, 20, 60):
        assert found.round.at(running) == pytest.approx(without.round.at(running), rel=1e-6)
    for items in (1, 4, 16):
        assert found.admit.at(items) == pytest.approx(without.admit.at(items), rel=1e-6)
        assert found.seconds.at(items) == pytest.approx(without.seconds.at(items), rel=1e-6)
    tail = replace(runs[-1], warm=True)
    lengths = fit(GRAPH, [*apart, tail]).stage(GENERATE).lengths
    assert lengths
    assert lengths.largest <= TAIL.largest
    assert sum(len(x) for x in _lengths([tail]).values()) == 4 * ITEMS * 4, "each is told once"


def _lengths(some: Sequence[Observed]) -> dict[str, list[float]]:
    evidence = Evidence(GRAPH)
    for one in some:
        evidence.add(one)
    return evidence.samples.lengths


def test_without_knowing_how_far_items_were_nothing_is_said(runs: list[Observed]) -> None:
    def forgetful(span: Span) -> Span:
        return replace(span, args={k: v for k, v in span.args.items() if k != "given_back"})

    some = [replace(one, spans=tuple(map(forgetful, one.spans))) for one in runs]
    assert fit(GRAPH, some).stage(GENERATE).costs[0].resume is None


def test_files_keep_the_price_and_slower_lanes_scale_it() -> None:
    assert profile_from_json(to_json(TOLD)) == TOLD
    slower = TOLD.stage(GENERATE).times(2.0).costs[0]
    assert slower.resume
    assert DRAWING.resume
    assert slower.resume.at(300) == pytest.approx(2 * DRAWING.resume.at(300))


# --- single calls ---------------------------------------------------------------------------------

ROUNDS = Rounds(Piecewise(((1.0, 0.1), (100.0, 0.1))), Piecewise(((1.0, 0.5), (100.0, 0.5))))
"""A round takes 0.1 s however many are at work, and taking items in 0.5 s."""


def call(items: int, **facts: Any) -> Span:
    taken = [[0.0, f"0-{items - 1}"]] if items else []
    return Span(0, "a.b", "call", 0.0, 9.0, {"items": items, "taken": taken, "step": 0, **facts})


def test_how_far_items_were_is_told_by_the_call_that_gave_them_back() -> None:
    assert grown_of(call(4, given_back=[1.5, "1-3", [10, 10, 4]])) == {1: 10, 2: 10, 3: 4}
    assert grown_of(call(4, given_back=[1.5, "1-3", []])) == {}, "it has no such column"
    assert grown_of(call(4, given_back=[1.5, "1-3"])) == {}, "an older record"
    assert grown_of(call(4)) == {}


def test_what_rounds_do_not_explain_is_the_price() -> None:
    pieces = [[1.0, "0", [5]], [3.0, "9", [22]]]
    span = call(2, resumed=[[1.4, "9"]], pieces=pieces)
    (one,) = resumed(span, 2, 1, 1.0, {9: 10.0})
    units, seconds = one.price(ROUNDS, 1.0)
    assert units == 10
    assert seconds == pytest.approx(3.0 - 1.4 - 12 * 0.1)
    assert list(resumed(span, 2, 1, 1.0, {})) == [], "nobody knows where it comes from"
    only = call(0, resumed=[[0.0, "8-9"]], pieces=[[2.0, "8-9", [17, 20]]])
    (one,) = resumed(only, 0, 1, 1.0, {8: 10.0, 9: 10.0})
    units, seconds = one.price(ROUNDS, 1.0)
    assert units == 20
    assert seconds == pytest.approx(2.0 - 10 * 0.1)


def test_prices_of_several_times_are_told_apart() -> None:
    def one(seconds: float, *units: float) -> Resumed:
        taken = tuple((Taken(far + 10, far),) for far in units)
        others = tuple(item for some in taken for item in some)
        return Resumed(seconds + 1.0, 0.0, 0.0, 0, 0, taken, (), others, 1.0)

    prices = [one(0.3 + 0.01 * x, x) for x in (20.0, 40.0, 60.0)]
    prices.append(one(0.6 + 0.01 * 50, 20.0, 30.0))
    found = fit_resume(prices, ROUNDS, 1.0)
    assert found
    assert found.at(30) == pytest.approx(0.6)
    assert fit_resume(prices[:1], ROUNDS, 1.0) is None
    cheap = fit_resume([one(-0.2, 30.0), one(-0.1, 40.0)], ROUNDS, 1.0)
    assert cheap
    assert cheap.at(40) == 0.0, "rounds were quicker than usual: no price is below nothing"


# --- what else spans of such calls say ------------------------------------------------------------


def with_call(plan: Plan, gauged: bool = False, **facts: Any) -> Observed:
    """A run of GRPO, and one call more of its generator."""
    one = observed(GRPO, plan, KNOWN)
    args = {"items": 8, "step": 0, "call": 999, "taken": [[0.0, "0-7"]], "pieces": [], **facts}
    span = Span(0, "gen.generate", "call", 900.0, 900.001, args)
    return replace(one, gauged=(span,)) if gauged else replace(one, spans=(*one.spans, span))


def test_a_call_that_gave_everything_back_is_no_short_call() -> None:
    plan = trial_plans(GRPO, lanes(2), ITEMS)[0]
    calls = []
    for facts in ({"given_back": [0.001, "0-31", []]}, {"resumed": [[0.0, "40"]]}):
        evidence = Evidence(GRPO)
        evidence.add(with_call(plan, **facts))
        calls.append(evidence.samples.calls["gen.generate", 1, "cpu"])
    assert all(one.seconds > 0.1 for some in calls for one in some)


@pytest.mark.parametrize("facts", [{"given_back": [0.5, "3", [7]]}, {"resumed": [[0.5, "40-47"]]}])
def test_memory_and_size_of_items_that_change_lanes_are_not_those_of_its_own(
    facts: dict[str, Any],
) -> None:
    plan = trial_plans(GRPO, lanes(2), ITEMS)[0]
    gauged = with_call(plan, gauged=True, working_bytes=900, **facts)
    assert fit(GRPO, [gauged]).stage("gen.generate").costs[0].working is None
    one = with_call(plan, bytes=10**9, **facts)
    assert fit(GRPO, [one]).stage("gen.generate").output_bytes == 100


def test_where_all_calls_change_lanes_their_sizes_will_do() -> None:
    plan = trial_plans(GRAPH, lanes(2), ITEMS)[-1]
    assert switches(plan)
    evidence = Evidence(GRAPH)
    evidence.add(observed(GRAPH, plan, TOLD))
    assert not evidence.samples.output_bytes.get(GENERATE)
    items = sum(count for count, _ in evidence.samples.mixed_bytes[GENERATE])
    assert items == 4 * ITEMS * 4
