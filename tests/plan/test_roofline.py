"""Analytic seconds and bytes: against slow oracles, known limits, and what must never happen."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.errors import UserError
from m2flow.flow import Flow, FlowGraph, Worker, loop, stage
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
from m2flow.plan.clusters import lane_specs, parse_cluster
from m2flow.plan.embodied_models import LIBERO, OPENVLA_OFT
from m2flow.plan.footprint import (
    check_generation_fits,
    check_training_fits,
    generation_footprint,
    kv_tokens_that_fit,
    training_footprint,
)
from m2flow.plan.generating import Finished, by_whole_groups, consume, generate, requests
from m2flow.plan.hardware import DEVICES, Device
from m2flow.plan.lognormal import LogNormalLengths, fit_lengths
from m2flow.plan.models import KNOWN_MODELS
from m2flow.plan.profile_files import from_json, to_json
from m2flow.plan.roofline import (
    Layout,
    Rates,
    all_reduce_seconds,
    all_to_all_seconds,
    decode_step_seconds,
    fullest,
    host_copy_seconds,
    log_probability_seconds,
    prefill_seconds,
    publish_seconds,
    training_seconds,
)

H100, H200, L40S = DEVICES["H100"], DEVICES["H200"], DEVICES["L40S"]
QWEN, MOE = KNOWN_MODELS["Qwen2.5-7B"], KNOWN_MODELS["Qwen3-30B-A3B"]
RATES = Rates()


# Lengths ------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(500, 40_000), st.floats(0.05, 0.95), st.floats(0.001, 0.04))
def test_fitted_lengths_have_the_mean_and_the_tail(maximum: int, part: float, tail: float) -> None:
    lengths = fit_lengths(part * maximum, maximum, tail)
    assert lengths.mean == pytest.approx(part * maximum, rel=1e-6)
    drawn = lengths.sample(4000, seed=1)
    assert sum(drawn) / 4000 == pytest.approx(lengths.mean, rel=0.02)
    assert sum(length >= maximum * (1 - 1e-9) for length in drawn) / 4000 == pytest.approx(
        tail, abs=1 / 4000
    )
    assert max(drawn) <= maximum


def test_the_mean_in_closed_form_is_that_of_many_draws() -> None:
    lengths = LogNormalLengths(math.log(1000), 1.0, 3000)
    random_ = random.Random(0)
    drawn = [min(random_.lognormvariate(math.log(1000), 1.0), 3000) for _ in range(100_000)]
    assert lengths.mean == pytest.approx(sum(drawn) / len(drawn), rel=0.01)
    assert lengths.cut(2000).mean < lengths.mean


@pytest.mark.parametrize("mean", [0, 1, 20_000, 30_000])
def test_no_lengths_of_an_impossible_mean(mean: float) -> None:
    with pytest.raises(UserError, match=r"lengths\.mean"):
        fit_lengths(mean, 20_000)


# Generation ---------------------------------------------------------------------------------------


def token_by_token(lengths: list[int], prompt: int, max_running: int) -> list[float]:
    """Seconds of each finish, one decoding step after another: the obvious oracle."""
    waiting, running, now, done = list(lengths), [], 0.0, []
    while waiting or running:
        while waiting and len(running) < max_running:
            running.append([waiting.pop(0), prompt])
        # The cost of a step is that of its middle.
        now += price(len(running), sum(kv for _, kv in running) + len(running) / 2)
        for request in running:
            request[0] -= 1
            request[1] += 1
        done += [now for request in running if request[0] == 0]
        running = [request for request in running if request[0]]
    return done


def price(running: float, kv_tokens: float) -> float:
    return 0.01 + 0.001 * running + 0.0001 * kv_tokens


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 6), st.integers(0, 9))
def test_generation_is_the_sum_of_its_steps(
    lengths: list[int], max_running: int, prompt: int
) -> None:
    played = generate(requests(lengths, prompt), 1, price, max_running)
    slow = token_by_token(lengths, prompt, max_running)
    assert [answer.seconds for answer in played.finished] == pytest.approx(slow)
    assert played.tokens == sum(lengths) + prompt * len(lengths)
    assert not played.left


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
    st.integers(1, 3),
    st.floats(0.01, 3.0),
)
def test_stopping_loses_no_token(lengths: list[int], replicas: int, until: float) -> None:
    wanted = requests(lengths, 5)
    whole = generate(wanted, replicas, price, 3)
    part = generate(wanted, replicas, price, 3, until=until)
    assert len(part.finished) + len(part.left) == len(lengths)
    assert sum(request.whole for request in part.left) + part.tokens == pytest.approx(whole.tokens)
    for request in part.left:
        assert request.tokens > 0
        assert request.context + request.tokens == pytest.approx(request.whole)
    early = [answer for answer in whole.finished if answer.seconds < until - 1e-6]
    assert len(early) <= len(part.finished)


def test_the_tail_costs_more_than_the_mean() -> None:
    even = generate(requests([100.0] * 64, 10), 4, price, 8).seconds
    tailed = generate(requests([60.0] * 60 + [700.0] * 4, 10), 4, price, 8)
    assert tailed.seconds > 2 * even
    assert tailed.seconds_of_share(0.9) < even


def test_members_of_a_group_stay_on_one_replica_and_arrive_together() -> None:
    played = generate(requests([1, 9, 2, 3], 0, group=2), 2, price, 4)
    groups = by_whole_groups(played.finished)
    at = {answer.group: answer.seconds for answer in groups}
    last = {g: max(a.seconds for a in played.finished if a.group == g) for g in (0, 1)}
    assert at == last


def test_a_consumer_is_late_by_its_own_work() -> None:
    arrivals = [Finished(1.0, 10), Finished(2.0, 10), Finished(9.0, 10)]
    assert [done.seconds for done in consume(arrivals, 0.2)] == [3.0, 5.0, 11.0]
    assert consume(arrivals, 0.2, ready=100)[-1].seconds == pytest.approx(106)


# Phases -------------------------------------------------------------------------------------------


def test_decoding_is_bound_by_memory_and_prefill_by_arithmetic() -> None:
    slow_memory = replace(H100, memory_bytes_per_second=H100.memory_bytes_per_second / 2)
    slow_arithmetic = replace(H100, flops_per_second=H100.flops_per_second / 2)

    def decode(device: Device) -> float:
        return decode_step_seconds(QWEN, 32, 32 * 4000, device, Layout(), RATES)

    def prefill(device: Device) -> float:
        return prefill_seconds(QWEN, 8192, 4096, device, Layout(), RATES)

    assert decode(slow_memory) > 1.5 * decode(H100)
    assert decode(slow_arithmetic) == decode(H100)
    assert prefill(slow_arithmetic) == pytest.approx(2 * prefill(H100))
    assert prefill(slow_memory) == prefill(H100)
    assert decode(H200) < decode(H100) < decode(L40S)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.integers(1, 512), st.integers(0, 30_000), st.sampled_from([1, 2, 4]))
def test_a_decoding_step_never_gets_cheaper_by_more_work(
    running: int, context: int, tensor: int
) -> None:
    for model in (QWEN, MOE):
        here = decode_step_seconds(model, running, running * context, H100, Layout(tensor), RATES)
        more = decode_step_seconds(
            model, running + 1, (running + 1) * context, H100, Layout(tensor), RATES
        )
        longer = decode_step_seconds(
            model, running, running * (context + 1), H100, Layout(tensor), RATES
        )
        assert here <= more + 1e-12
        assert here <= longer + 1e-12


def test_training_is_six_flops_for_each_parameter_and_token() -> None:
    tokens = 1e6
    seconds = training_seconds(
        QWEN, tokens, 0, 1, H100, Layout(), Rates(training=0.5), updates=0, recomputes=False
    )
    assert seconds == pytest.approx(6 * QWEN.active_parameters * tokens / (0.5 * 989.5e12))
    again = training_seconds(QWEN, tokens, 0, 1, H100, Layout(), Rates(training=0.5), updates=0)
    assert again == pytest.approx(seconds * 8 / 6)


def test_the_default_rates_give_the_step_they_are_fitted_to() -> None:
    """GRPO on a 7B model, 64 H100: 102 s of log-probabilities, 368 s of training."""
    answers = Answers(150, fit_lengths(7502, 27_648))
    count = 512 * 32
    shape = (count * answers.tokens, answers.context, 64, H100, Layout(4), RATES, count)
    forward = log_probability_seconds(QWEN, *shape, answers.deviation)
    assert forward == pytest.approx(102, rel=0.01)
    training = training_seconds(QWEN, *shape, answers.deviation, updates=4)
    assert training == pytest.approx(368, rel=0.01)


def test_communication() -> None:
    assert all_reduce_seconds(1e9, 1, H100) == all_to_all_seconds(1e9, 1, H100) == 0
    assert all_reduce_seconds(1e9, 8, H100) == pytest.approx(2 * 7 / 8 * 1e9 / (0.8 * 450e9))
    assert all_to_all_seconds(1e9, 8, H100) == all_reduce_seconds(1e9, 8, H100) / 2
    assert all_reduce_seconds(1e9, 16, H100) > 5 * all_reduce_seconds(1e9, 8, H100)
    assert host_copy_seconds(63e9, H100) == pytest.approx(1 / 0.8)
    near, far = (
        publish_seconds(QWEN, H100, H100, Layout(2), same_lanes) for same_lanes in (True, False)
    )
    assert 0 < near < far < 1
    spread = training_seconds(MOE, 1e6, 0, 32, H100, Layout(4, 1, 4), RATES, 100)
    alone = training_seconds(MOE, 1e6, 0, 32, H100, Layout(4, 1, 1), RATES, 100)
    assert spread > alone


def test_the_fullest_rank_by_drawing() -> None:
    random_ = random.Random(1)
    ranks, sequences, deviation = 16, 64, 0.7
    largest = [
        max(
            sum(random_.gauss(1, deviation) for _ in range(sequences)) / sequences
            for _ in range(ranks)
        )
        for _ in range(200)
    ]
    assert fullest(ranks, sequences, deviation) == pytest.approx(sum(largest) / 200, rel=0.02)
    assert fullest(1, 64, 0.7) == 1


# Memory -------------------------------------------------------------------------------------------


def test_state_is_sixteen_bytes_for_each_parameter() -> None:
    assert training_footprint(QWEN, 1, Layout(), 4096).state == 16 * QWEN.parameters
    sharded = training_footprint(QWEN, 8, Layout(), 4096, sharded=True)
    assert sharded.state == 2 * QWEN.parameters
    assert training_footprint(QWEN, 8, Layout(8), 4096).state == sharded.state
    assert training_footprint(QWEN, 8, Layout(), 4096).state > sharded.state
    kept = training_footprint(QWEN, 8, Layout(8), 4096, recomputes=False)
    assert kept.activations > 3 * training_footprint(QWEN, 8, Layout(8), 4096).activations


def test_experts_spread_over_the_ranks() -> None:
    whole = training_footprint(MOE, 8, Layout(), 1024)
    spread = training_footprint(MOE, 8, Layout(expert=8), 1024)
    assert spread.weights == pytest.approx(
        2 * (MOE.parameters - MOE.expert_parameters * 7 / 8), rel=1e-9
    )
    assert spread.weights < whole.weights
    assert spread.optimizer == whole.optimizer


def test_the_cache_fills_what_the_weights_leave() -> None:
    tokens = kv_tokens_that_fit(QWEN, H100, Layout(2))
    held = generation_footprint(QWEN, Layout(2), tokens).total
    assert H100.usable_bytes * 0.999 < held <= H100.usable_bytes


def test_what_fits_on_no_lane_count_says_the_smallest_that_would_do() -> None:
    with pytest.raises(UserError, match="at least 2 lanes") as caught:
        check_training_fits(QWEN, 1, H100, 4096)
    assert caught.value.value == "1xH100"
    assert check_training_fits(QWEN, 2, H100, 4096)
    big = KNOWN_MODELS["Qwen2.5-32B"]
    with pytest.raises(UserError, match="at least 2 lanes"):
        check_generation_fits(big, 1, L40S, 4096)
    assert check_generation_fits(big, 2, L40S, 4096)[0] == Layout(2)
    with pytest.raises(UserError, match="lanes with more memory"):
        check_training_fits(QWEN, 8, DEVICES["CPU"], 1_000_000_000)


# Profiles -----------------------------------------------------------------------------------------


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
    assert from_json(to_json(profile)) == profile
    generating = profile.stage("generator.generate")
    assert {(layout.lanes, layout.max_running) for layout in generating.layouts} == {
        (lanes, limit) for lanes in (1, 2, 4) for limit in (32, 64)
    }
    assert generating.lengths is not None
    assert generating.lengths.mean == pytest.approx(600, rel=0.02)
    training = {layout.lanes: layout for layout in profile.stage("learner.train").layouts}
    assert set(training) == {2, 4, 8}  # one lane does not hold the optimizer
    assert training[8].call(128) < training[2].call(128)
    for lanes, layout in training.items():
        state = profile.worker("learner", lanes, "gpu")
        assert state is not None
        assert state.state_bytes == pytest.approx(16 * QWEN.parameters / lanes, rel=1.0)
        used = state.state_bytes + layout.working_bytes(64)
        assert used <= lane_specs(parse_cluster("1x8xH100"))[0].memory_bytes
    assert profile.publish_seconds("learner", "generator", "cluster", 8, 2) > 0


def test_one_answer_does_not_get_faster_by_idle_replicas() -> None:
    def seconds(lanes: int, count: int) -> float:
        shape = (count * 1000, 500, lanes, H100, Layout(2), RATES, count)
        return log_probability_seconds(QWEN, *shape)

    assert seconds(8, 1) == seconds(2, 1)
    assert seconds(8, 4) == seconds(2, 1)
    assert seconds(8, 8) == pytest.approx(2 * seconds(2, 1))


def test_more_memory_and_bandwidth_make_nothing_slower() -> None:
    small, large = (
        analytic_profile(grpo(), parse_cluster(f"1x8x{name}"), WORK, 8) for name in ("H100", "H200")
    )
    for name, profile in small.stages.items():
        there = {(one.lanes, one.max_running): one for one in large.stage(name).layouts}
        for layout in profile.layouts:
            better = there[layout.lanes, layout.max_running]
            for items in (1, 5, 64):
                assert better.call(items) <= layout.call(items)


def test_two_kinds_of_lanes_have_prices_of_their_own() -> None:
    profile = analytic_profile(grpo(), parse_cluster("1x4xH100+1x4xL40S"), WORK, 4)
    at = {
        (layout.kind, layout.lanes): layout.call(32)
        for layout in profile.stage("learner.logprobs").layouts
    }
    assert at["h100", 4] < at["l40s", 4]


def test_cores_beside_accelerators_run_what_fits_them() -> None:
    profile = analytic_profile(grpo(), parse_cluster("1x4xH100+1x4xCPU"), WORK, 4)
    assert {layout.kind for layout in profile.stage("score").layouts} == {"gpu", "cpu"}
    assert {layout.kind for layout in profile.stage("learner.train").layouts} == {"gpu"}


def test_a_model_too_large_for_the_cluster() -> None:
    with pytest.raises(UserError, match="at least 2 lanes"):
        analytic_profile(grpo(), parse_cluster("1x1xH100"), WORK, 4)


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
    assert {layout.kind for layout in profile.stage("world.move").layouts} == {"cpu"}
    assert {layout.kind for layout in profile.stage("policy.act").layouts} == {"gpu"}
    (moving,) = profile.stage("world.move").layouts
    assert moving.call(32) == pytest.approx(LIBERO.seconds(32))
    with pytest.raises(UserError, match="cpu lanes"):
        analytic_profile(graph, parse_cluster("1x8xH100"), work, 64)
    with pytest.raises(UserError, match="at least 2 lanes"):
        analytic_profile(graph, parse_cluster("1x1xH100+1x1xCPU"), work, 64)
