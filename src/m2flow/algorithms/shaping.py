"""What is taken off a reward before advantages are made of it: for length, and for drift.

Shapes: B sequences; T completion tokens of all of them, `lengths_B` long.
"""

from __future__ import annotations

import torch
from torch import Tensor


def overlong_penalty(lengths_B: Tensor, max_tokens: int, buffer: int) -> Tensor:
    """0 for up to `max_tokens - buffer` tokens, from there linearly down to -1 at `max_tokens`.

    Source: DAPO (arXiv 2503.14476), equation 13; its buffer is a fifth of the limit.

    Args:
        lengths_B: [B] int64, tokens.
        max_tokens: the longest answer there is.
        buffer: of how many tokens the penalised stretch is; from 1 to `max_tokens`.

    Returns:
        float64 [B] between -1 and 0.
    """
    assert 1 <= buffer <= max_tokens
    over_B = (lengths_B.to(torch.float64) - (max_tokens - buffer)) / buffer
    return -over_B.clamp(0.0, 1.0)


def drift_penalty(logprobs_T: Tensor, reference_logprobs_T: Tensor, coefficient: float) -> Tensor:
    """`-coefficient * (log policy - log reference)` of each token, k1 of `algorithms.kl`.

    In a reward k1 is right: its sum over an answer is an unbiased estimate of the answer's KL, and
    the policy gradient of the reward is that of the KL.

    Args:
        logprobs_T: [T] under the policy that drew the tokens.
        reference_logprobs_T: [T] under the reference.

    Returns:
        float64 [T].
    """
    return -coefficient * (logprobs_T.to(torch.float64) - reference_logprobs_T.to(torch.float64))


def sums_of_sequences(values_T: Tensor, lengths_B: Tensor) -> Tensor:
    """[B] the sum of each sequence's values; 0 for an empty one."""
    sequence_T = torch.repeat_interleave(torch.arange(lengths_B.numel()), lengths_B)
    return values_T.new_zeros(lengths_B.numel()).index_add(0, sequence_T, values_T)
