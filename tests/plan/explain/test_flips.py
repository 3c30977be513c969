"""What would flip a choice is what the simulator says of other inputs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from m2flow.engine.plan import Plan, StagePlan
from m2flow.plan.choose import choose
from m2flow.plan.explain import explained
from m2flow.plan.explain import flips as module
from m2flow.plan.explain.flips import FACTORS, Flips, flips, rescaled
from m2flow.plan.explain.words import in_words
from m2flow.plan.prediction import Candidate, Decision, Prediction
from m2flow.plan.profile import Piecewise, StageCost, StageProfile
from m2flow.plan.simulate import simulate
from m2flow.plan.units import Bytes
from tests.plan.choose.test_choose import waiting
from tests.plan.explain.cases import GEN, STAGES, TRAIN, plan_of, predicted, profile, span
from tests.plan.random_cases import lanes_of
from tests.plan.small_graphs import GRPO, TALKING


@pytest.mark.parametrize("what", [GEN, TRAIN, "publishing", "links", "switching"])
def test_rescaling_touches_one_input(what: str) -> None:
    before, after = profile(spread=True), rescaled(profile(spread=True), what, 2.0)
    for name in STAGES:
        times = 2.0 if name == what else 1.0
        old, new = before.stage(name).costs[0], after.stage(name).costs[0]
        assert new.seconds.at(8) == pytest.approx(times * old.seconds.at(8))
        for inner in ("round", "finish"):
            if (curve := getattr(old, inner)) is not None:
                assert getattr(new, inner).at(2) == pytest.approx(times * curve.at(2))
    size = Bytes(1000)
    times = 2.0 if what == "links" else 1.0
    assert after.links["node"].seconds(size) == pytest.approx(
        times * before.links["node"].seconds(size)
    )
    times = 2.0 if what == "publishing" else 1.0
    assert after.publish[0].seconds == times * before.publish[0].seconds


@pytest.fixture(scope="module")
def contest() -> Decision:
    """Generation gains by two lanes, training does not, so it may as well stand beside it.

    In turn on both lanes a step takes g / 2 + t, side by side the larger of g and t.
    """
    flat = profile(generate=1.0)
    cost = StageCost(1, Piecewise(((1.0, 0.2), (64.0, 0.2))))  # of each of two mini-batches
    flat = replace(flat, stages={**flat.stages, TRAIN: StageProfile((cost,))})
    plans = [
        replace(plan, stages={GEN: StagePlan(4), TRAIN: StagePlan()}, max_staleness=1)
        for plan in (plan_of("in turn", [0, 1], [0, 1]), plan_of("beside", [0], [1]))
    ]
    judged = [Candidate(plan, simulate(TALKING, plan, flat, 16)) for plan in plans]
    judged.sort(key=lambda one: one.prediction.seconds)
    return Decision(judged[0], tuple(judged[1:]), flat, 16)


def test_a_flip_flips(contest: Decision) -> None:
    """At its factor the rival is faster by simulation; at the next smaller one it is not."""

    def ahead(factor: float, what: str) -> bool:
        scaled = rescaled(contest.profile, what, factor)
        ours, theirs = (
            simulate(TALKING, one.plan, scaled, 16, steps=2).seconds
            for one in (contest.chosen, contest.others[0])
        )
        return bool(1.01 * theirs < ours)

    found = flips(contest, TALKING).found
    assert TRAIN in {flip.input for flip in found}
    for flip in found:
        assert ahead(flip.factor, flip.input)
        smaller = max(f for f in (1.0, *FACTORS) if f < max(flip.factor, 1 / flip.factor))
        assert not ahead(smaller if flip.factor > 1 else 1 / smaller, flip.input)
        assert flip.other_seconds < flip.chosen_seconds
        assert flip.mode == contest.others[0].plan.mode
        assert flip.changes
    changes = [abs(math.log(flip.factor)) for flip in found]
    assert changes == sorted(changes)


def test_a_choice_that_somebody_else_made_has_no_flips() -> None:
    """What was not the best in the first place is not overtaken."""
    slow = Candidate(plan_of("a", [0], [0]), predicted(10, span(0, GEN, 0, 10)))
    fast = Candidate(plan_of("b", [0], [1]), predicted(5, span(0, GEN, 0, 5)))
    assert flips(Decision(slow, (fast,), profile(), 16), TALKING) == Flips()


def test_no_simulation_begins_when_its_events_are_spent(
    contest: Decision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On large steps flips were looked for during minutes, without a word."""
    events = list[int]()

    def counted(*words: Any, **more: Any) -> Prediction:
        found = simulate(*words, **more)
        events.append(found.num_events)
        return found

    monkeypatch.setattr(module, "simulate", counted)
    every = flips(contest, TALKING)
    assert not every.not_tried
    most = sum(events) // 3
    events.clear()
    some = flips(contest, TALKING, most)
    assert sum(events) <= most + max(events)
    assert some.not_tried
    assert {flip.input for flip in some.found}.isdisjoint(some.not_tried)
    told = in_words(explained(contest, TALKING, flips=some))
    assert f"  not tried, as it takes long to simulate: {', '.join(some.not_tried)}" in told


def test_plans_for_many_lanes_are_simulated_on_a_part_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decision = choose(GRPO, waiting(), lanes_of({"cpu": 64}), 128, effort=20)
    asked = list[tuple[int, int]]()

    def counted(graph: Any, plan: Plan, prices: Any, items: int, **more: Any) -> Prediction:
        asked.append((len(plan.lanes), items))
        return simulate(graph, plan, prices, items, **more)

    monkeypatch.setattr(module, "simulate", counted)
    flips(decision, GRPO)
    assert decision.fold == 4
    assert set(asked) == {(16, 32)}
