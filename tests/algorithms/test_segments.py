"""Advantages over segments of episodes, against the sums of the definition written out."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st

from m2flow.algorithms.gae import generalised_advantages
from m2flow.algorithms.segments import (
    action_advantages,
    discounted_rewards,
    segment_advantages,
)

turn = st.tuples(
    st.floats(-2, 2), st.floats(-2, 2), st.floats(-2, 2), st.booleans(), st.integers(1, 4)
)
segments = st.lists(st.lists(turn, max_size=8), min_size=1, max_size=4)
share = st.floats(0, 1)


def slow(
    segment: list[tuple[float, float, float, bool, int]], gamma: float, lam: float
) -> list[float]:
    """Each advantage as the sum over the surprises that follow it, up to an end."""
    found = []
    for first in range(len(segment)):
        total, weight = 0.0, 1.0
        for at in range(first, len(segment)):
            reward, value, beyond, ends, steps = segment[at]
            last = ends or at + 1 == len(segment)
            following = beyond if last else segment[at + 1][1]
            total += weight * (reward + gamma**steps * following - value)
            if last:
                break
            weight *= gamma**steps * lam
        found.append(total)
    return found


@given(segments, share, share)
def test_the_sums_of_the_definition(
    given_segments: list[list[tuple[float, float, float, bool, int]]], gamma: float, lam: float
) -> None:
    flat = [one for segment in given_segments for one in segment]
    columns = [torch.tensor([one[n] for one in flat], dtype=torch.float64) for n in range(3)]
    found = segment_advantages(
        *columns,
        torch.tensor([one[3] for one in flat], dtype=torch.bool),
        torch.tensor([one[4] for one in flat], dtype=torch.int64),
        torch.tensor([len(segment) for segment in given_segments]),
        gamma=gamma,
        lam=lam,
    )
    wanted = [x for segment in given_segments for x in slow(segment, gamma, lam)]
    torch.testing.assert_close(found.advantages_T, torch.tensor(wanted, dtype=torch.float64))
    torch.testing.assert_close(found.returns_T, found.advantages_T + columns[1])


def test_one_episode_of_single_steps_is_what_is_known_of_answers() -> None:
    rewards, values = torch.rand(7, dtype=torch.float64), torch.rand(7, dtype=torch.float64)
    lengths, ends = torch.tensor([3, 4]), torch.tensor([False, False, True] + [False] * 3 + [True])
    ones = torch.ones(7, dtype=torch.int64)
    found = segment_advantages(
        rewards, values, torch.zeros(7), ends, ones, lengths, gamma=0.9, lam=0.8
    )
    wanted = generalised_advantages(rewards, values, lengths, gamma=0.9, lam=0.8)
    torch.testing.assert_close(found.advantages_T, wanted.advantages_T)


def test_rewards_within_a_turn_are_discounted() -> None:
    rewards = torch.tensor([[1.0, 1.0, 1.0], [0.0, 2.0, 0.0]])
    assert discounted_rewards(rewards, 0.5).tolist() == [1.75, 1.0]


@given(
    st.integers(1, 4).flatmap(
        lambda width: st.lists(
            st.tuples(st.floats(-2, 2), st.lists(st.floats(-2, 2), min_size=width, max_size=width)),
            min_size=1,
            max_size=6,
        )
    ),
    share,
)
def test_an_action_leaves_out_the_rewards_of_its_turn_before_it(
    turns: list[tuple[float, list[float]]], gamma: float
) -> None:
    advantages = torch.tensor([one for one, _ in turns], dtype=torch.float64)
    rewards = torch.tensor([some for _, some in turns], dtype=torch.float64)
    found = action_advantages(advantages, rewards, gamma)
    for row, (advantage, some) in enumerate(turns):
        left = advantage
        for place, reward in enumerate(some):
            torch.testing.assert_close(float(found[row, place]), left, rtol=1e-9, atol=1e-9)
            left -= gamma**place * reward
    assert torch.equal(found[:, 0], advantages), "chunks of one action are as at the chunk's level"


def test_actions_of_a_turn_expect_the_gradient_of_the_turn() -> None:
    """Summed over all that two choices may come to, each weighed by its probability."""
    logits = torch.tensor([0.3, -0.8], dtype=torch.float64)
    chance, gradients = logits.sigmoid(), torch.zeros(2, 2, dtype=torch.float64)
    for drawn in product((0, 1), repeat=2):
        choice = torch.tensor(drawn, dtype=torch.float64)
        weight = (chance * choice + (1 - chance) * (1 - choice)).prod()
        rewards = torch.stack([1 + 2 * choice[0], choice[0] - 3 * choice[1] * choice[0]])[None]
        advantage = discounted_rewards(rewards, 0.9) - 0.7
        score = choice - chance  # of a Bernoulli choice by its logit
        gradients[0] += weight * score * advantage
        gradients[1] += weight * score * action_advantages(advantage, rewards, 0.9)[0]
    torch.testing.assert_close(gradients[0], gradients[1])
