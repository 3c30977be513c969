"""Profiles of lanes that are not here: what they hold, and what they refuse."""

from __future__ import annotations

import pytest

from m2flow.errors import UserError
from m2flow.flow import Flow, FlowGraph, Worker, loop, stage
from m2flow.flow import worker as workers
from m2flow.plan.analytic import analytic_profile
from m2flow.plan.analytic_work import (
    Act,
    Answers,
    Fixed,
    Forward,
    Generate,
    Simulate,
    Train,
    TrainPolicy,
)
from m2flow.plan.builders import build_plan
from m2flow.plan.clusters import lane_specs, parse_cluster
from m2flow.plan.embodied_models import LIBERO, OPENVLA_OFT
from m2flow.plan.file import profile_from_json, to_json
from m2flow.plan.hardware import DEVICES, DISPATCH_SECONDS
from m2flow.plan.lognormal import fit_lengths
from m2flow.plan.models import KNOWN_MODELS
from m2flow.plan.roofline import Layout, Rates, decode_step_seconds, prefill_seconds
from m2flow.plan.simulate import simulate

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
WORK = {
    "generator.generate": Generate(QWEN, ANSWERS, (32, 64)),
    "learner.logprobs": Forward(QWEN, ANSWERS),
    "learner.train": Train(QWEN, ANSWERS),
    "score": Fixed(0.001, 0.0001),
}


def grpo() -> FlowGraph:
    return Grpo(generator=Generator(), learner=Learner()).trace()


def test_a_profile_of_lanes_that_are_not_here() -> None:
    profile = analytic_profile(grpo(), parse_cluster("1x8xH100"), WORK, 16)
    assert profile.source == "analytic"
    assert profile_from_json(to_json(profile)) == profile
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


def test_cores_beside_accelerators_run_what_fits_them() -> None:
    profile = analytic_profile(grpo(), parse_cluster("1x4xH100+1x4xCPU"), WORK, 4)
    assert {layout.kind for layout in profile.stage("score").costs} == {"gpu", "cpu"}
    assert {layout.kind for layout in profile.stage("learner.train").costs} == {"gpu"}


def test_a_model_too_large_for_the_cluster() -> None:
    with pytest.raises(UserError, match="at least 2 lanes"):
        analytic_profile(grpo(), parse_cluster("1x1xH100"), WORK, 4)


def test_a_model_that_no_lane_holds_generates_on_several() -> None:
    """66 GB of weights on lanes of 43: in halves, quarters and eighths of them and of the cache."""
    big = KNOWN_MODELS["Qwen2.5-32B"]
    work = {
        "generator.generate": Generate(big, ANSWERS, (32,)),
        "learner.logprobs": Forward(big, ANSWERS),
        "learner.train": Train(big, ANSWERS, sharded=True),
        "score": Fixed(0.001, 0.0001),
    }
    cluster = parse_cluster("4x8xL40S")
    profile = analytic_profile(grpo(), cluster, work, 16)
    layouts = profile.stage("generator.generate").costs
    assert {layout.lanes for layout in layouts} == {2, 4, 8}
    room = lane_specs(cluster)[0].memory_bytes
    assert room is not None
    for layout in layouts:
        state = profile.worker("generator", layout.lanes, "gpu")
        assert state is not None
        assert state.state_bytes == pytest.approx(big.weight_bytes / layout.lanes, abs=1)
        assert state.state_bytes + layout.working_bytes(16) <= room
    with pytest.raises(UserError, match="at least 2 lanes"):
        analytic_profile(grpo(), parse_cluster("1x1xL40S"), work, 16)


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
        analytic_profile(grpo(), parse_cluster("1x8xH100"), {"learner.trian": Fixed()}, 4)


class World(Worker):
    @stage
    def move(self, items):
        return items


class Policy(Worker):
    @stage
    def act(self, items):
        return items

    @stage(accumulates=True)
    def train(self, items):
        return items


class Episodes(Flow):
    world: World
    policy: Policy

    def step(self, items):
        return self.policy.train(loop(self.world.move, self.policy.act, until="done")(items))


def test_a_loop_of_a_simulator_on_cores_and_a_policy() -> None:
    graph = Episodes(world=World(), policy=Policy()).trace()
    work = {
        "world.move": Simulate(LIBERO),
        "policy.act": Act(OPENVLA_OFT),
        "policy.train": TrainPolicy(OPENVLA_OFT, 64),
    }
    profile = analytic_profile(graph, parse_cluster("1x8xH100+1x16xCPU"), work, 64)
    assert {layout.kind for layout in profile.stage("world.move").costs} == {"cpu"}
    assert {layout.kind for layout in profile.stage("policy.act").costs} == {"gpu"}
    (moving,) = profile.stage("world.move").costs
    assert moving.call(32) == pytest.approx(LIBERO.seconds(32))
    with pytest.raises(UserError, match="cpu lanes"):
        analytic_profile(graph, parse_cluster("1x8xH100"), work, 64)
    with pytest.raises(UserError, match="at least 2 lanes"):
        analytic_profile(graph, parse_cluster("1x1xH100+1x1xCPU"), work, 64)


# What a simulation asks ---------------------------------------------------------------------------


def test_rounds_are_decoding_steps_and_take_turns_beyond_the_limit() -> None:
    layouts = {
        (one.lanes, one.max_running): one
        for one in analytic_profile(grpo(), parse_cluster("1x8xH100"), WORK, 16)
        .stage("generator.generate")
        .costs
    }
    own = layouts[2, None]
    assert own.round is not None
    assert own.admit is not None
    for running in (1, 16, 64):
        step = decode_step_seconds(
            QWEN, running, running * ANSWERS.context, H100, Layout(2), Rates()
        )
        assert own.round.at(running) == pytest.approx(step)
    assert own.round.at(640) == pytest.approx(10 * own.round.at(64))
    assert own.admit.at(4) == pytest.approx(
        prefill_seconds(QWEN, 400, 50, H100, Layout(2), Rates())
    )
    fewer = layouts[2, 4].round  # of eight answers each
    assert fewer is not None
    assert fewer.at(32) == own.round.at(32)
    assert fewer.at(64) > own.round.at(64)


def test_answers_that_were_begun_cost_a_prefill_of_all_that_there_is_of_them() -> None:
    own = analytic_profile(grpo(), parse_cluster("1x8xH100"), WORK, 16).stage("generator.generate")
    layout = next(one for one in own.costs if one.lanes == 2)
    assert layout.resume is not None
    assert layout.admit is not None
    each = ANSWERS.lengths.quantile(0.8)
    prompt = ANSWERS.prompt_tokens
    wanted = prefill_seconds(
        QWEN, 64 * (each + prompt), (each + prompt) / 2, H100, Layout(2), Rates()
    )
    assert layout.resume.at(64 * each) == pytest.approx(wanted, rel=0.01)
    assert layout.resume.at(64 * each) > layout.admit.at(64), "more than the prompts alone"


def test_lengths_have_the_tail_of_the_distribution() -> None:
    profile = analytic_profile(grpo(), parse_cluster("1x8xH100"), WORK, 16)
    lengths = profile.stage("generator.generate").lengths
    assert lengths is not None
    assert lengths.largest == 4000
    for share in (0.1, 0.5, 0.9, 0.95):
        assert lengths.at(share) == pytest.approx(ANSWERS.lengths.quantile(share), rel=0.02)
    assert lengths.mean == pytest.approx(600, rel=0.02)


def test_a_simulated_plan_takes_what_was_played() -> None:
    """Drawn lengths under `round` and `admit` against even ones played answer by answer."""
    work = {**WORK, "generator.generate": Generate(QWEN, ANSWERS, (256,))}
    graph, cluster = grpo(), parse_cluster("1x4xH100")
    profile = analytic_profile(graph, cluster, work, 32)
    plan = build_plan(
        "disaggregated",
        graph,
        lane_specs(cluster),
        32,
        layouts={"learner": workers.Layout("fsdp2", 2)},
    )
    simulated = simulate(graph, plan, profile, 32, steps=4)
    (alone,) = (one for one in profile.stage("generator.generate").costs if one.lanes == 1)
    assert simulated.stages["generator.generate"] / 2 == pytest.approx(alone.call(16), rel=0.15)


def test_calls_cost_more_than_the_lanes_own_work() -> None:
    profile = analytic_profile(grpo(), parse_cluster("1x8xH100"), WORK, 16)
    assert profile.dispatch == DISPATCH_SECONDS
