"""Profiles of lanes that are not here: what they hold, and what they refuse."""

from __future__ import annotations

import pytest

from m2flow.errors import UserError
from m2flow.flow import Flow, FlowGraph, Worker, stage
from m2flow.flow import worker as workers
from m2flow.flow.worker import Layout
from m2flow.models.lengths import Answers, fit_lengths
from m2flow.models.shape import KNOWN_MODELS, ModelShape
from m2flow.models.work import (
    ADAM_BYTES,
    decoding,
    forward_pass,
    prefill,
    training_bytes,
    training_pass,
    update,
)
from m2flow.plan.builders import build_plan
from m2flow.plan.file import from_json, to_json
from m2flow.plan.profile import Profile, Quantiles
from m2flow.plan.profile.analytic import analytic_profile
from m2flow.plan.profile.clusters import lane_specs, parse_cluster
from m2flow.plan.profile.hardware import DEVICES, DISPATCH_SECONDS, Device
from m2flow.plan.profile.work import (
    FlowWork,
    LayoutWork,
    Pricer,
    Rounds,
    StageWork,
    Work,
    WorkerWork,
    rising,
)
from m2flow.plan.simulate import simulate
from m2flow.training.division import Division

H100, QWEN = DEVICES["H100"], KNOWN_MODELS["Qwen2.5-7B"]


class Generator(Worker):
    @stage(streaming=True, expands=8)
    def generate(self, items):
        yield items


class Learner(Worker):
    @stage
    def logprobs(self, items):
        return items

    @stage(accumulates=True, minibatches=2)
    def train(self, items):
        return items


@stage
def score(items):
    return items


class Grpo(Flow):
    generator: Generator
    learner: Learner

    def step(self, items):
        samples = score(self.generator.generate(items))
        return self.learner.train(self.learner.logprobs(samples))

    def sync(self):
        self.learner.publish(self.generator)


ANSWERS = Answers(100, fit_lengths(600, 4000))
TOGETHER = 1400
"""Tokens of a micro-batch of training: few enough for two lanes, which gather 10 GB beside 61."""
LENGTHS = Quantiles.of(ANSWERS.lengths.stratified(512), 129)


def works(
    model: ModelShape = QWEN, limits: tuple[int, ...] = (32, 64), again: tuple[bool, ...] = (True,)
) -> Pricer:
    """What the stages of GRPO ask; training may compute activations `again`."""

    def at(device: Device, lanes: int) -> FlowWork:
        divided = [Layout(f"tp{n}", n, (("heads", model.kv_heads, n),)) for n in (1, 2, 4, 8)]
        sharded = [Layout(f"fsdp{n}", n) for n in rising(lanes)]
        size, trained = float(model.weight_bytes), float(ADAM_BYTES * model.parameters)
        return FlowWork(
            {
                "generator.generate": StageWork(
                    tuple(generating(model, one, limits) for one in divided), 11_200, LENGTHS
                ),
                "learner.logprobs": StageWork(tuple(passing(model, one) for one in sharded)),
                "learner.train": StageWork(
                    tuple(trains(model, one, flag) for one in sharded for flag in again)
                ),
                "score": StageWork((LayoutWork(call=lambda n: Work(seconds=0.001 + n * 1e-4)),)),
            },
            {
                "generator": WorkerWork([(one, size / one.lanes) for one in divided], size),
                "learner": WorkerWork([(one, trained / one.lanes) for one in sharded]),
            },
            model.name,
            ("made up",),
        )

    return at


def generating(model: ModelShape, layout: Layout, limits: tuple[int, ...]) -> LayoutWork:
    rounds = Rounds(
        admit=lambda n: prefill(model, n * 100, 50, layout.lanes),
        round=lambda n, tokens: decoding(model, n, tokens, layout.lanes),
        start=100,
        longest=100 + LENGTHS.largest,
        unit_bytes=model.kv_bytes_on_lane(layout.lanes),
        limits=limits,
    )
    return LayoutWork(layout, rounds=rounds)


def passing(model: ModelShape, layout: Layout) -> LayoutWork:
    return LayoutWork(
        layout, lambda n: forward_pass(model, ANSWERS, n, Division(fsdp=layout.lanes), 4100)
    )


def trains(model: ModelShape, layout: Layout, again: bool) -> LayoutWork:
    return LayoutWork(
        layout,
        lambda n: training_pass(model, ANSWERS, n, Division(fsdp=layout.lanes), TOGETHER, again),
        lambda replicas: update(model, Division(fsdp=layout.lanes), replicas),
        lambda _: training_bytes(model, Division(fsdp=layout.lanes), TOGETHER, again),
    )


WORK = works()


def grpo() -> FlowGraph:
    return Grpo(generator=Generator(), learner=Learner()).trace()


def test_a_profile_of_lanes_that_are_not_here() -> None:
    profile = analytic_profile(grpo(), parse_cluster("1x8xH100"), WORK, 16)
    assert profile.source == "analytic"
    assert from_json(Profile, to_json(profile), "profile") == profile
    generating = profile.stage("generator.generate")
    assert {(layout.lanes, layout.max_running) for layout in generating.costs} == {
        (lanes, prompts) for lanes in (1, 2, 4) for prompts in (4, None)
    }
    assert generating.lengths is not None
    assert generating.lengths.mean == pytest.approx(600, rel=0.02)
    training = {layout.lanes: layout for layout in profile.stage("learner.train").costs}
    assert set(training) == {2, 4, 8}  # one lane does not hold the optimizer
    assert training[8].call(128) < training[2].call(128)
    for lanes, layout in training.items():
        state = profile.worker("learner", lanes, "gpu")
        assert state is not None
        assert state.state_bytes == pytest.approx(16 * QWEN.parameters / lanes, rel=1.0)
        used = state.state_bytes + layout.working_bytes(64)
        assert used <= lane_specs(parse_cluster("1x8xH100"))[0].memory_bytes
    assert profile.publish_seconds("learner", "generator", "cluster", 8, 2) > 0


def test_more_memory_and_bandwidth_make_nothing_slower() -> None:
    small, large = (
        analytic_profile(grpo(), parse_cluster(f"1x8x{name}"), WORK, 8) for name in ("H100", "H200")
    )
    for name, profile in small.stages.items():
        there = {(one.lanes, one.max_running): one for one in large.stage(name).costs}
        for layout in profile.costs:
            better = there[layout.lanes, layout.max_running]
            for items in (1, 5, 64):
                assert better.call(items) <= layout.call(items)


def test_two_kinds_of_lanes_have_prices_of_their_own() -> None:
    profile = analytic_profile(grpo(), parse_cluster("1x4xH100+1x4xL40S"), WORK, 4)
    at = {
        (layout.kind, layout.lanes): layout.call(32)
        for layout in profile.stage("learner.logprobs").costs
    }
    assert at["h100", 4] < at["l40s", 4]


def test_publishing_between_two_kinds_of_lanes_is_as_slow_as_the_slower() -> None:
    """It was priced with the first kind of lane at both ends."""
    profile = analytic_profile(grpo(), parse_cluster("1x8xH100+1x8xL40S"), WORK, 4)
    size, wire = QWEN.weight_bytes, DEVICES["L40S"].network_bytes_per_second * 0.8

    def seconds(source: str, target: str) -> float:
        kinds = (source, target)
        return profile.publish_seconds("learner", "generator", "cluster", 8, 1, kinds)

    assert seconds("h100", "l40s") == pytest.approx(size / wire)
    assert seconds("h100", "h100") == pytest.approx(size / (0.8 * 50e9))


def test_cores_beside_accelerators_run_what_fits_them() -> None:
    profile = analytic_profile(grpo(), parse_cluster("1x4xH100+1x4xCPU"), WORK, 4)
    assert {layout.kind for layout in profile.stage("score").costs} == {"gpu", "cpu"}
    assert {layout.kind for layout in profile.stage("learner.train").costs} == {"gpu"}


def test_a_model_too_large_for_the_cluster() -> None:
    with pytest.raises(UserError, match="fits on no 1 lane of"):
        analytic_profile(grpo(), parse_cluster("1x1xH100"), WORK, 4)


def test_a_model_that_no_lane_holds_generates_on_several() -> None:
    """66 GB of weights on lanes of 43: in halves, quarters and eighths of them and of the cache."""
    big = KNOWN_MODELS["Qwen2.5-32B"]
    cluster = parse_cluster("4x8xL40S")
    profile = analytic_profile(grpo(), cluster, works(big, (32,)), 16)
    costs = profile.stage("generator.generate").costs
    assert {(cost.lanes, cost.layout) for cost in costs} == {(2, "tp2"), (4, "tp4"), (8, "tp8")}
    room = lane_specs(cluster)[0].memory_bytes
    assert room is not None
    for cost in costs:
        state = profile.worker("generator", cost.lanes, "gpu")
        assert state is not None
        assert state.state_bytes == pytest.approx(big.weight_bytes / cost.lanes, abs=1)
        assert state.state_bytes + cost.working_bytes(16) <= room
    with pytest.raises(UserError, match="fits on no 1 lane of"):
        analytic_profile(grpo(), parse_cluster("1x1xL40S"), works(big, (32,)), 16)


def test_a_layout_with_an_obstacle_is_not_priced_and_the_profile_says_so() -> None:
    """Plans came without notice for replicas that do not divide the key-value heads."""
    profile = analytic_profile(grpo(), parse_cluster("1x8xH100"), WORK, 16)
    assert {cost.layout for cost in profile.stage("generator.generate").costs} == {
        "tp1", "tp2", "tp4"
    }  # fmt: skip
    assert {cost.layout for cost in profile.workers["generator"]} == {"tp1", "tp2", "tp4"}
    notice = "generator cannot have tp8: 4 heads cannot be divided by 8"
    assert profile.assumptions == ("made up", notice)


def test_of_two_ways_to_run_a_layout_the_first_is_taken_that_fits() -> None:
    """Training keeps its activations where they fit."""
    eager = works(again=(False, True))
    profile = analytic_profile(grpo(), parse_cluster("1x8xH100"), eager, 16)
    kept = {cost.layout: cost for cost in profile.stage("learner.train").costs}
    again = analytic_profile(grpo(), parse_cluster("1x8xH100"), WORK, 16)
    for cost in again.stage("learner.train").costs:
        assert kept[cost.layout].working_bytes(8) >= cost.working_bytes(8)
    assert kept["fsdp8"].call(128) < again.stage("learner.train").costs[-1].call(128)
    two = next(cost for cost in again.stage("learner.train").costs if cost.layout == "fsdp2")
    assert kept["fsdp2"].call(8) == two.call(8), "two lanes hold it in no other way"


def test_weights_are_published_at_a_price_to_replicas_of_every_size() -> None:
    profile = analytic_profile(grpo(), parse_cluster("1x16xH200"), WORK, 16)
    sizes = {layout.lanes for layout in profile.stage("generator.generate").costs}
    assert sizes == {1, 2, 4}  # 28 heads
    prices = [
        profile.publish_seconds("learner", "generator", place, 8, lanes)
        for place in ("same", "cluster")
        for lanes in (1, 2, 4, 8, 16)
    ]
    assert min(prices) > 0


def test_work_for_a_stage_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"learner\.train"):
        analytic_profile(
            grpo(),
            parse_cluster("1x8xH100"),
            lambda *_: FlowWork({"learner.trian": StageWork(())}),
            4,
        )


# What a simulation asks ---------------------------------------------------------------------------


def test_rounds_are_decoding_steps_up_to_the_limit() -> None:
    layouts = {
        (one.lanes, one.max_running): one
        for one in analytic_profile(grpo(), parse_cluster("1x8xH100"), WORK, 16)
        .stage("generator.generate")
        .costs
    }
    own = layouts[2, None]
    assert own.round is not None
    assert own.admit is not None
    drawn = ANSWERS.lengths.stratified(400)
    held = 100 + sum(x * x for x in drawn) / (2 * sum(drawn))
    for running in (1, 16, 64):
        step = decoding(QWEN, running, running * held, 2).on(H100)
        assert own.round.at(running) == pytest.approx(step, rel=5e-3)
    assert own.slots == 64
    assert own.round.points[-1][0] == 64
    assert own.admit.at(4) == pytest.approx(prefill(QWEN, 400, 50, 2).on(H100))
    fewer = layouts[2, 4]  # of eight answers each
    assert fewer.slots == 32
    assert fewer.round is not None
    assert fewer.round.at(32) == own.round.at(32)


def test_lengths_have_the_tail_of_the_distribution() -> None:
    profile = analytic_profile(grpo(), parse_cluster("1x8xH100"), WORK, 16)
    lengths = profile.stage("generator.generate").lengths
    assert lengths is not None
    assert lengths.largest == 4000
    for share in (0.1, 0.5, 0.9, 0.95):
        assert lengths.at(share) == pytest.approx(ANSWERS.lengths.quantile(share), rel=0.02)
    assert lengths.mean == pytest.approx(600, rel=0.02)


@pytest.mark.parametrize("limit", [16, 256])
def test_a_simulated_plan_takes_what_was_played(limit: int) -> None:
    """Drawn lengths under `round` and `admit` against even ones played answer by answer.

    The search ranks by the latter: with a limit of the stage's own the two lay far apart.
    """
    graph, cluster = grpo(), parse_cluster("1x4xH100")
    profile = analytic_profile(graph, cluster, works(limits=(limit,)), 32)
    plan = build_plan(
        "disaggregated",
        graph,
        lane_specs(cluster),
        32,
        layouts={"generator": workers.Layout("tp1"), "learner": workers.Layout("fsdp2", 2)},
    )
    simulated = simulate(graph, plan, profile, 32, steps=4)
    (alone,) = (one for one in profile.stage("generator.generate").costs if one.lanes == 1)
    assert simulated.stages["generator.generate"] / 2 == pytest.approx(alone.call(16), rel=0.15)


def test_calls_cost_more_than_the_lanes_own_work() -> None:
    profile = analytic_profile(grpo(), parse_cluster("1x8xH100"), WORK, 16)
    assert profile.dispatch == DISPATCH_SECONDS
