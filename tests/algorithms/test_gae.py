"""GAE, rewards at the end, whitening and the critic's loss against slow loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from m2flow.algorithms.gae import generalised_advantages, rewards_at_end, whitened
from m2flow.algorithms.ppo import CriticLoss, explained_variance
from m2flow.algorithms.value_loss import clipped_value_loss
from m2flow.errors import UserError

INF, NAN = math.inf, math.nan

sequences = st.lists(
    st.lists(
        st.tuples(
            st.floats(-10, 10, allow_subnormal=False, width=32),
            st.floats(-10, 10, allow_subnormal=False, width=32),
        ),
        max_size=7,
    ),
    min_size=1,
    max_size=5,
)


def slow(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Equation 16 of the paper, written out: a double sum, no recursion."""
    after = [*values[1:], 0.0][: len(values)]
    surprises = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [
        sum((gamma * lam) ** k * d for k, d in enumerate(surprises[t:])) for t in range(len(values))
    ]


def columns(rows: Any) -> tuple[Tensor, Tensor, Tensor]:
    flat = [token for row in rows for token in row]
    return (
        torch.tensor([r for r, _ in flat], dtype=torch.float64),
        torch.tensor([v for _, v in flat], dtype=torch.float64),
        torch.tensor([len(row) for row in rows]),
    )


@settings(max_examples=1000)
@given(
    rows=sequences,
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_gae_is_the_sum_of_the_paper(
    rows: Any, gamma: float, lam: float, dtype: torch.dtype
) -> None:
    rewards_T, values_T, lengths_B = columns(rows)
    rewards_T, values_T = rewards_T.to(dtype), values_T.to(dtype)
    found = generalised_advantages(rewards_T, values_T, lengths_B, gamma=gamma, lam=lam)
    expected = [
        advantage
        for row in rows
        for advantage in slow([r for r, _ in row], [v for _, v in row], gamma, lam)
    ]
    expected_T = torch.tensor(expected, dtype=torch.float64)
    within = 1e-9 if dtype is torch.float64 else 1e-5
    assert torch.allclose(found.advantages_T.double(), expected_T, rtol=within, atol=within)
    assert torch.equal(found.returns_T, found.advantages_T + values_T)


@given(rows=sequences)
def test_a_sequence_does_not_depend_on_its_neighbours(rows: Any) -> None:
    rewards_T, values_T, lengths_B = columns(rows)
    together = generalised_advantages(rewards_T, values_T, lengths_B)
    alone = [
        generalised_advantages(*columns([row])[:2], torch.tensor([len(row)])).advantages_T
        for row in rows
    ]
    assert torch.equal(together.advantages_T, torch.cat(alone))


def test_the_ends_of_lambda() -> None:
    rewards_T, lengths_B = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([3])
    values_T = torch.tensor([0.2, 0.5, 0.4])
    all_of_them = generalised_advantages(rewards_T, values_T, lengths_B, lam=1.0)
    assert torch.allclose(all_of_them.returns_T, torch.ones(3))
    one_step = generalised_advantages(rewards_T, values_T, lengths_B, lam=0.0)
    assert torch.allclose(one_step.advantages_T, torch.tensor([0.3, -0.1, 0.6]))


def test_no_tokens_at_all() -> None:
    empty_T, none_B = torch.zeros(0), torch.zeros(2, dtype=torch.int64)
    assert generalised_advantages(empty_T, empty_T, none_B).advantages_T.shape == (0,)
    assert rewards_at_end(torch.ones(2), none_B).shape == (0,)
    assert whitened(empty_T).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_widen(dtype: torch.dtype) -> None:
    values_T = torch.ones(2, dtype=dtype)
    found = generalised_advantages(values_T, values_T, torch.tensor([2]))
    assert found.advantages_T.dtype is torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("what", ["reward", "value"])
def test_a_figure_that_is_not_finite_is_named(what: str) -> None:
    fine_T, bad_T = torch.zeros(3), torch.tensor([0.0, NAN, 0.0])
    rewards_T, values_T = (bad_T, fine_T) if what == "reward" else (fine_T, bad_T)
    with pytest.raises(UserError, match=f"{what}: 1 of 3 values are not finite, the first at 1"):
        generalised_advantages(rewards_T, values_T, torch.tensor([1, 2]))


def test_the_reward_comes_with_the_last_token() -> None:
    rewards_T = rewards_at_end(torch.tensor([1.0, 5.0, -2.0]), torch.tensor([2, 0, 3]))
    assert rewards_T.tolist() == [0, 1, 0, 0, -2]


@given(values=st.lists(st.floats(-5, 5), min_size=1, max_size=20))
def test_whitening(values: list[float]) -> None:
    values_T = torch.tensor(values, dtype=torch.float64)
    white_T = whitened(values_T)
    if (values_T - values_T.mean()).abs().max() > 1e-3:
        assert abs(float(white_T.mean())) < 1e-9
        assert float(white_T.std(correction=0)) == pytest.approx(1, abs=1e-4)


def test_equal_values_whiten_to_exactly_zero() -> None:
    """0.1 has no exact mean: a tenth of a rounding error over a deviation of nothing."""
    assert not whitened(torch.full((7,), 0.1)).any()


# --- the critic's loss ---------------------------------------------------------------------------


VALUE = st.floats(-3, 3, width=32) | st.floats(-1e4, 1e4, width=32)


@pytest.mark.parametrize("clip", [None, 0.2, 3.0])
@settings(max_examples=1000)
@given(
    tokens=st.lists(st.tuples(VALUE, VALUE, VALUE), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_value_loss_token_by_token(
    clip: float | None, tokens: list[tuple[float, float, float]], dtype: torch.dtype
) -> None:
    values, old, returns = torch.tensor(tokens, dtype=dtype).T
    values.requires_grad_()
    expected, slopes = [], []
    for v, o, r in tokens:
        losses, slope = [(v - r) ** 2], v - r
        if clip is not None:
            losses.append((min(max(v, o - clip), o + clip) - r) ** 2)
            slope = 0.0 if losses[1] > losses[0] else slope
        expected.append(max(losses) / 2)
        slopes.append(slope)
        near = clip is not None and abs(losses[1] - losses[0]) <= 1e-4 * losses[0]
        assume(not near or losses[1] == losses[0])
    found = clipped_value_loss(values, old, returns, clip=clip)
    (gradient,) = torch.autograd.grad(found.loss_T.sum(), values)
    within = 1e-6 if dtype is torch.float64 else 1e-5
    for ours, theirs in ((found.loss_T, expected), (gradient, slopes)):
        wanted = torch.tensor(theirs, dtype=torch.float64)
        assert torch.allclose(ours.detach().double(), wanted, rtol=within, atol=within)


def test_a_value_that_has_moved_too_far_has_no_gradient() -> None:
    values_T = torch.tensor([0.5, 0.5, 0.05], requires_grad=True)
    found = clipped_value_loss(values_T, torch.zeros(3), torch.tensor([1.0, 0.2, 1.0]), clip=0.1)
    found.loss_T.sum().backward()
    assert values_T.grad is not None
    assert found.clipped_T.tolist() == [True, False, False]
    assert values_T.grad.tolist() == pytest.approx([0.0, 0.3, -0.95])


def test_a_value_within_its_bound_is_not_clipped_by_rounding() -> None:
    draw = torch.Generator().manual_seed(0)
    values_T, returns_T = 0.1 * torch.randn(2, 10_000, generator=draw)
    old_T = values_T - 0.39 * (torch.rand(10_000, generator=draw) - 0.5)
    assert not clipped_value_loss(values_T, old_T, returns_T, clip=0.2).clipped_T.any()


@given(cut=st.integers(0, 6))
def test_a_loss_in_pieces_is_the_loss(cut: int) -> None:
    generator = torch.Generator().manual_seed(1)
    values, old, returns = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    critic, whole_B = CriticLoss(), torch.tensor([1] * 6)
    whole = critic.loss(values, old, returns, whole_B)
    pieces = [
        critic.loss(values[part], old[part], returns[part], whole_B[part])
        for part in (slice(0, cut), slice(cut, 6))
    ]
    assert torch.isclose(whole.loss, pieces[0].loss + pieces[1].loss)
    for name in critic.figures:
        assert torch.isclose(whole.sums[name], pieces[0].sums[name] + pieces[1].sums[name])


def test_explained_variance() -> None:
    returns_T = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    lengths_B = torch.tensor([4])

    def of(values_T: Tensor) -> float:
        sums = CriticLoss().loss(values_T, values_T, returns_T, lengths_B).sums
        return explained_variance({name: float(value) for name, value in sums.items()}, 4)

    assert of(returns_T) == 1
    assert of(torch.full((4,), 0.3, dtype=torch.float64)) == pytest.approx(0)
    assert of(1 - returns_T) < 0
    assert explained_variance(dict.fromkeys(CriticLoss.figures, 0.0), 0) == 0
    returns_T = torch.ones(4, dtype=torch.float64)
    assert of(torch.zeros(4, dtype=torch.float64)) == 0
