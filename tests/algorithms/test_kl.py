"""KL estimators: exact expectations over a small vocabulary, and behaviour at the extremes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2flow.algorithms.kl import KLEstimator, kl_per_token

LOGPROBS = st.floats(-8, 0)


@given(policy=LOGPROBS, reference=LOGPROBS)
def test_agrees_with_the_formulas(policy: float, reference: float) -> None:
    log_ratio = reference - policy  # Schulman's log r
    expected = {
        "k1": -log_ratio,
        "k2": log_ratio**2 / 2,
        "k3": math.exp(log_ratio) - 1 - log_ratio,
    }
    for estimator, value in expected.items():
        found = kl_per_token(
            torch.tensor(policy, dtype=torch.float64),
            torch.tensor(reference, dtype=torch.float64),
            estimator,  # type: ignore[arg-type]
        )
        assert float(found) == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_expectation_is_the_divergence(estimator: KLEstimator) -> None:
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(2, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    exact = (policy.exp() * (policy - reference)).sum()
    estimated = (policy.exp() * kl_per_token(policy, reference, estimator)).sum()
    torch.testing.assert_close(estimated, exact)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_is_zero_and_flat_where_both_agree(estimator: KLEstimator) -> None:
    policy = torch.tensor([-1.0, -2.0], requires_grad=True)
    kl = kl_per_token(policy, policy.detach(), estimator)
    kl.sum().backward()
    assert torch.equal(kl, torch.zeros(2))
    assert torch.equal(policy.grad, torch.zeros(2))


def test_k3_overflow_leaks_no_nan_gradient() -> None:
    policy = torch.tensor([-500.0, -0.1], requires_grad=True)
    kl_per_token(policy, torch.tensor([-0.1, -500.0]), "k3").sum().backward()
    assert torch.isfinite(policy.grad).all()
    assert policy.grad[1] == 1  # far above the reference: pushed down, however far
