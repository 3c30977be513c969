"""KL estimators: exact expectations over a small vocabulary, and behaviour at the extremes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from m2flow.algorithms.kl import KLEstimator, kl_per_token

LOGPROBS = st.floats(-8, 0, width=32) | st.floats(-300, 0, width=32)
MOST = 20.0
"""The exponent of k3 is cut there, and has no gradient beyond."""


@settings(max_examples=1000)
@given(policy=LOGPROBS, reference=LOGPROBS, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_agrees_with_the_formulas(policy: float, reference: float, dtype: torch.dtype) -> None:
    """And with their derivatives; in float32 too, however far the policies are apart."""
    log_ratio = reference - policy  # Schulman's log r
    assume(abs(log_ratio - MOST) > 1e-4)
    cut = min(log_ratio, MOST)
    expected = {
        "k1": (-log_ratio, 1.0),
        "k2": (log_ratio**2 / 2, -log_ratio),
        "k3": (math.exp(cut) - 1 - cut, 1 - math.exp(cut) if log_ratio < MOST else 0.0),
    }
    within = {"abs": 1e-6, "rel": 1e-6} if dtype is torch.float64 else {"abs": 1e-5, "rel": 1e-5}
    for estimator, (value, slope) in expected.items():
        logprob = torch.tensor(policy, dtype=dtype, requires_grad=True)
        found = kl_per_token(logprob, torch.tensor(reference, dtype=dtype), estimator)  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(found, logprob)
        assert float(found.detach()) == pytest.approx(value, **within)
        assert float(gradient) == pytest.approx(slope, **within)


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
