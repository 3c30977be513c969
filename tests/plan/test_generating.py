"""Lengths of answers and generation, played: against slow oracles and what must never happen."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.errors import UserError
from m2flow.plan.generating import by_whole_groups, generate, requests
from m2flow.plan.lognormal import LogNormalLengths, fit_lengths


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


def test_the_tail_costs_more_than_the_mean() -> None:
    even = generate(requests([100.0] * 64, 10), 4, price, 8).seconds
    tailed = generate(requests([60.0] * 60 + [700.0] * 4, 10), 4, price, 8)
    assert tailed.seconds > 2 * even
    assert tailed.finished[math.ceil(0.9 * 64) - 1].seconds < even


def test_members_of_a_group_stay_on_one_replica_and_arrive_together() -> None:
    played = generate(requests([1, 9, 2, 3], 0, group=2), 2, price, 4)
    groups = by_whole_groups(played.finished)
    at = {answer.group: answer.seconds for answer in groups}
    last = {g: max(a.seconds for a in played.finished if a.group == g) for g in (0, 1)}
    assert at == last
