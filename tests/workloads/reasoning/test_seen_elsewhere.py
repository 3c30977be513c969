"""Defects that were seen in other systems, where no other test here bears their name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.algorithms.grpo import GRPOLoss
from m2flow.flow import Batch, Ragged
from m2flow.training.optimizer import AdamWConfig
from m2flow.training.policy import PolicyTrainer, PolicyTrainerConfig
from m2flow.training.rollouts import TokenRollouts
from m2flow.workloads.reasoning.workers import gae, reward_to_go, whiten
from tests.training.tiny_policy import make_model


def samples_of(masks: list[list[bool]], rewards: list[float]) -> Batch:
    """Answers of which only the tokens of the mask were drawn by the policy."""
    lengths = [len(mask) for mask in masks]
    flat = torch.tensor([one for mask in masks for one in mask])
    return Batch(
        {
            "reward": rewards,
            "completion_ids": Ragged(torch.zeros(len(flat), dtype=torch.int64), lengths),
            "behaviour_logprobs": Ragged(torch.full((len(flat),), -1.0), lengths),
            "finish_reason": ["stop"] * len(lengths),
            "loss_mask": Ragged(flat, lengths),
        }
    )


@st.composite
def masked(draw: st.DrawFn) -> tuple[list[list[bool]], list[float]]:
    """Masks with holes, before all the first token that counts; each has one that counts."""
    rows = draw(st.integers(2, 6))
    masks = [
        [False] * draw(st.integers(0, 4))
        + draw(st.lists(st.booleans(), max_size=4))
        + [True]
        + [False] * draw(st.integers(0, 2))
        for _ in range(rows)
    ]
    return masks, draw(st.lists(st.floats(-2, 2), min_size=rows, max_size=rows))


@settings(derandomize=True, deadline=None, max_examples=80)
@given(masked())
def test_reinforce_plus_plus_gives_masked_tokens_nothing(
    case: tuple[list[list[bool]], list[float]],
) -> None:
    """Elsewhere they got +-10,000 where a mask has a prefix, and moved the mean of the others."""
    masks, rewards = case
    white = whiten(reward_to_go(samples_of(masks, rewards), gamma=1.0, kl=0.0))
    found = white["advantages"].values.tolist()
    flat = [one for mask in masks for one in mask]
    to_go = [reward for mask, reward in zip(masks, rewards, strict=True) for _ in mask]
    kept = [value for value, one in zip(to_go, flat, strict=True) if one]
    middle = sum(kept) / len(kept)
    spread = math.sqrt(sum((value - middle) ** 2 for value in kept) / len(kept))
    for value, raw, one in zip(found, to_go, flat, strict=True):
        if not one:
            assert value == 0.0
        elif spread > 1e-3:
            assert value == pytest.approx((raw - middle) / spread, abs=1e-3)


def test_a_step_ahead_the_critic_reads_values_and_rewards_by_their_names() -> None:
    """Elsewhere an asynchronous PPO swapped what the critic says and what was rewarded."""
    samples = samples_of([[True] * 3, [True] * 2], [1.0, 0.0])
    values = Batch({"values": Ragged(torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]), [3, 2])})
    found = gae(samples, values, gamma=1.0, lam=1.0)
    assert found["advantages"].values.tolist() == pytest.approx([0.9, 0.8, 0.7, -0.4, -0.5])
    assert found["returns"].values.tolist() == pytest.approx([1.0, 1.0, 1.0, 0.0, 0.0])
    assert found["reward"] == [1.0, 0.0]


def figures_of(advantages: list[float]) -> Any:
    config = PolicyTrainerConfig(optimizer=AdamWConfig(learning_rate=1e-3))
    trainer = PolicyTrainer(make_model(), GRPOLoss(), config)
    ids = [torch.tensor([1, 2, 3]) for _ in advantages]
    logprobs = [torch.full((3,), -1.0) for _ in advantages]
    trainer.fold(TokenRollouts.from_rows(ids, ids, logprobs, advantages))
    return trainer.finish()


def test_a_minibatch_without_trained_tokens_has_no_ratio() -> None:
    """It was 0 once, and the zeros were averaged in with the others."""
    nothing, something = figures_of([0.0, 0.0]), figures_of([1.0, -1.0])
    assert nothing["tokens_trained"] == 0
    means = set(GRPOLoss().figures)
    assert {"ratio"} <= means <= set(something)
    assert not means & set(nothing)
