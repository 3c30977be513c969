"""How per-token losses become one number: a weight for each token over one global denominator.

Weights depend on a token's own sequence alone and denominators add up over sequences. So a
mini-batch may be cut in any pieces: sum `weights * losses` and the denominators of the pieces,
divide once at the end, and the result is the loss of the whole, not a mean of means.

Shapes: T completion tokens of B sequences lying one after another, `lengths_B` long.
"""

from __future__ import annotations

from typing import Literal, assert_never

import torch
from torch import Tensor

Aggregation = Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum"]


def token_weights(lengths_B: Tensor, mode: Aggregation, *, dtype: torch.dtype) -> Tensor:
    """The weight of each token's loss: 1, or 1 / (tokens of its sequence).

    token-mean is DAPO's (arXiv 2503.14476, equation 8), sequence-mean-token-mean GRPO's
    (arXiv 2402.03300, equation 3), sequence-mean-token-sum Dr.GRPO's (arXiv 2503.20783, listing 1):
    no division by the answer's own length, but by a budget that is the same for all.

    Args:
        lengths_B: [B] int64, sequence lengths in tokens; they sum to T.
        mode: the aggregation.
        dtype: of the result.

    Returns:
        [T].
    """
    match mode:
        case "token-mean" | "sequence-mean-token-sum":
            num_tokens = int(lengths_B.sum())
            weights_T = torch.ones(num_tokens, dtype=dtype, device=lengths_B.device)
        case "sequence-mean-token-mean":
            weights_T = torch.repeat_interleave(lengths_B.to(dtype).reciprocal(), lengths_B)
        case _:
            assert_never(mode)
    return weights_T


def denominator(lengths_B: Tensor, mode: Aggregation, token_budget: int = 1) -> int:
    """What the weighted sum is divided by: tokens, or sequences that have at least one.

    With sequence-mean-token-sum each sequence counts as `token_budget` tokens, the longest that an
    answer may be.
    """
    if mode == "token-mean":
        return int(lengths_B.sum())
    return int((lengths_B > 0).sum()) * (token_budget if mode == "sequence-mean-token-sum" else 1)
