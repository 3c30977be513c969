"""Group-relative advantages against a loop, and the ways in which they go wrong elsewhere."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.algorithms.advantages import group_advantages, leave_one_out_advantages
from m2flow.errors import UserError


def loop_advantages(rewards: list[float], size: int, normalize: bool, eps: float) -> list[float]:
    advantages = []
    for start in range(0, len(rewards), size):
        group = rewards[start : start + size]
        mean = math.fsum(group) / size
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in group) / size)
        for reward in group:
            if all(other == group[0] for other in group):
                advantages.append(0.0)
            else:
                advantages.append((reward - mean) / (std + eps) if normalize else reward - mean)
    return advantages


@settings(max_examples=1000)
@given(
    groups=st.lists(
        st.lists(st.floats(-5, 5, width=32), min_size=4, max_size=4), min_size=1, max_size=5
    ),
    normalize=st.booleans(),
)
def test_agrees_with_a_loop(groups: list[list[float]], normalize: bool) -> None:
    rewards = [reward for group in groups for reward in group]
    found = group_advantages(torch.tensor(rewards, dtype=torch.float64), 4, normalize)
    expected = torch.tensor(loop_advantages(rewards, 4, normalize, 1e-6), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_one_right_answer_of_four() -> None:
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), 4)
    expected = torch.tensor([3.0, -1.0, -1.0, -1.0]) / math.sqrt(3)
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=0)


def test_group_of_one_is_refused_and_not_nan() -> None:
    with pytest.raises(UserError, match=r"samples_per_prompt.*at least 2"):
        group_advantages(torch.tensor([1.0, 0.0]), 1)


def test_equal_rewards_give_exact_zero_despite_rounding_of_the_mean() -> None:
    rewards = torch.full((7,), 0.1, dtype=torch.float32).repeat(3)
    assert torch.equal(group_advantages(rewards, 7), torch.zeros(21))


def test_rows_that_do_not_fill_groups_are_refused() -> None:
    with pytest.raises(UserError, match="divisor of the number of samples, 5"):
        group_advantages(torch.zeros(5), 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_reward_that_is_no_number_is_refused_by_sample(bad: float) -> None:
    with pytest.raises(UserError, match="first at 2"):
        group_advantages(torch.tensor([0.0, 1.0, bad, 1.0]), 2)


def test_whole_number_rewards_give_float32() -> None:
    assert group_advantages(torch.tensor([0, 1]), 2).dtype == torch.float32


def test_a_baseline_without_oneself_is_as_wide_as_the_rewards() -> None:
    """`G / (G - 1)` in float32 would be off by 3e-8 of it in a float64 run."""
    rewards = [0.1, 0.9, 0.4, 0.0]
    found_B = leave_one_out_advantages(torch.tensor(rewards, dtype=torch.float64), 4)
    expected = [r - (math.fsum(rewards) - r) / 3 for r in rewards]
    assert found_B.tolist() == pytest.approx(expected, abs=1e-15)
