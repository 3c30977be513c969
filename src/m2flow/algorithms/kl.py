"""Per-token estimators of KL(policy || reference) from log-probabilities of sampled tokens.

The tokens are taken to be drawn from the policy. Each estimator sees the sampled token alone, so
it is a single-sample estimate: k1 has no bias and may be negative, k2 is biased and never negative,
k3 has no bias and is never negative. Source: J. Schulman, "Approximating KL Divergence" (2020),
http://joschu.net/blog/kl-approx.html.

Shapes: T tokens, in any layout.
"""

from __future__ import annotations

from typing import Literal, assert_never

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Exponents are cut to this size before `exp`: beyond it float32 gradients mean nothing."""


def kl_per_token(
    logprobs_T: Tensor, reference_logprobs_T: Tensor, estimator: KLEstimator = "k3"
) -> Tensor:
    """An estimate of KL(policy || reference) at each sampled token.

    With d = log policy - log reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. In k3 the
    exponent is cut at `MAX_LOG_RATIO`, beyond which the gradient is zero instead of overflowing.

    Args:
        logprobs_T: log-probabilities under the policy; gradients flow through them.
        reference_logprobs_T: the same tokens under the reference; same shape.
        estimator: k1, k2 or k3.

    Returns:
        [T], the shape and dtype of the difference.
    """
    assert logprobs_T.shape == reference_logprobs_T.shape
    difference_T = logprobs_T - reference_logprobs_T
    match estimator:
        case "k1":
            return difference_T
        case "k2":
            return 0.5 * difference_T.square()
        case "k3":
            bounded_T = torch.clamp(-difference_T, max=MAX_LOG_RATIO)
            return torch.expm1(bounded_T) - bounded_T
    assert_never(estimator)
