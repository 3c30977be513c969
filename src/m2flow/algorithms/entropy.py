"""Entropy of categorical distributions given by logits.

Shapes: M positions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def categorical_entropy(logits_MV: Tensor) -> Tensor:
    """Shannon entropy in nats of softmax(logits) at each position: logsumexp(l) - sum p l.

    A logit of minus infinity (a forbidden token) contributes nothing, to the value or gradient.

    Returns:
        [M], in the dtype of the logits.
    """
    finite_MV = torch.isfinite(logits_MV)
    expected_M = (logits_MV.softmax(-1) * torch.where(finite_MV, logits_MV, 0.0)).sum(-1)
    return logits_MV.logsumexp(-1) - expected_M
