"""Plans with smaller calls of single stages."""

from __future__ import annotations

from typing import Any

from m2flow.engine.plan import LaneSpec
from m2flow.flow import Flow, Worker, stage
from m2flow.plan import build_plan, validate
from m2flow.plan.decide import decide
from m2flow.plan.profile import Piecewise, Profile, Quantiles, StageCost, StageProfile
from m2flow.plan.refining import FINER, finer
from m2flow.plan.units import Bytes

ITEMS = 32
LANES = (LaneSpec(0), LaneSpec(1))


class Generator(Worker):
    @stage(streaming=True)
    def generate(self, items: Any) -> Any: ...


class Learner(Worker):
    @stage(accumulates=True)
    def train(self, items: Any) -> Any: ...


@stage
def score(items: Any) -> Any: ...


class Reasoning(Flow):
    generator: Generator
    learner: Learner

    def step(self, items: Any) -> Any:
        return self.learner.train(score(self.generator.generate(items)))

    def sync(self) -> None:
        self.learner.publish(self.generator)


GRAPH = Reasoning(generator=Generator(), learner=Learner()).trace()
TRAIN = "learner.train"


def profile(call: float, item: float) -> Profile:
    """Generation takes 1 s on one lane and on two, evenly out to the end; training so much."""
    rounds = Piecewise(((1.0, 1.0 / ITEMS), (ITEMS, 1.0 / ITEMS)))
    generate = StageCost(1, Piecewise(((1.0, 1.0), (ITEMS, 1.0))), round=rounds)
    train = StageCost(1, Piecewise(((1.0, call + item), (ITEMS, call + item * ITEMS))))
    lengths = Quantiles(tuple(range(1, ITEMS + 1)))
    return Profile(
        {
            "generator.generate": StageProfile((generate,), Bytes(0), lengths),
            "score": StageProfile((StageCost(1, Piecewise(((1.0, 0.0),))),)),
            TRAIN: StageProfile((train,)),
        }
    )


def test_each_stage_that_can_overlap_is_cut_alone() -> None:
    plan = build_plan("disaggregated", GRAPH, LANES, ITEMS)
    cut = set()
    for variant in finer(plan, GRAPH):
        validate(variant, GRAPH, ITEMS)
        assert variant.mode == "disaggregated" + FINER
        (name,) = {n for n, stage in plan.stages.items() if variant.stages[n] != stage}
        assert variant.stages[name].chunk == -(-(plan.stages[name].chunk or 0) // 2)
        cut.add(name)
    assert cut == {"score", TRAIN}


def test_a_name_does_not_grow_and_single_items_are_not_halved() -> None:
    plan = build_plan("disaggregated", GRAPH, LANES, ITEMS)
    while found := finer(plan, GRAPH):
        assert all(variant.mode == "disaggregated" + FINER for variant in found)
        plan = found[0]
    assert plan.stages["score"].chunk == plan.stages[TRAIN].chunk == 1


def test_nothing_to_gain_where_all_stand_together() -> None:
    assert finer(build_plan("collocated", GRAPH, LANES, ITEMS), GRAPH) == []


def test_a_decision_takes_calls_as_small_as_their_price_allows() -> None:
    free = decide(GRAPH, profile(0.0, 0.9 / ITEMS), LANES, ITEMS).chosen
    dear = decide(GRAPH, profile(0.4, 0.5 / ITEMS), LANES, ITEMS).chosen
    fixed = build_plan("disaggregated", GRAPH, LANES, ITEMS)
    assert free.plan.stages[TRAIN].chunk < fixed.stages[TRAIN].chunk
    assert dear.plan.stages[TRAIN].chunk >= fixed.stages[TRAIN].chunk


def test_what_running_ahead_buys_is_told_against_plans_as_fine() -> None:
    known = profile(0.0, 0.9 / ITEMS)
    alone = decide(GRAPH, known, LANES, ITEMS)
    ahead = decide(GRAPH, known, LANES, ITEMS, max_staleness=1)
    first = ahead.frontier[0]
    assert first.plan.max_staleness == 0
    assert first.prediction.seconds == alone.chosen.prediction.seconds
    assert ahead.chosen.plan.max_staleness == 1
