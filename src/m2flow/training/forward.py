"""Log-probabilities of the completion tokens of a pack, by a causal language model.

The head runs at the nodes that predict a completion token and nowhere else. The model is any
transformers causal LM; it is not changed. Knows no losses.

Shapes: T completion tokens of a pack, M predicting nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from m2flow.algorithms.entropy import categorical_entropy
from m2flow.training.attention import packed_attention_on
from m2flow.training.packing import Pack


@dataclass(frozen=True)
class TokenFigures:
    """[T] log-probabilities in nats, and entropies [T] of the distributions they are taken from."""

    logprobs_T: Tensor
    entropy_T: Tensor | None


def token_logprobs(
    model: nn.Module,
    pack: Pack,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> TokenFigures:
    """log softmax(logits / temperature) of each completion token, at least in float32.

    Args:
        model: a transformers causal LM, on one device.
        pack: the micro-batch, on any device.
        temperature: that of the sampling; 0 (greedy) counts as 1.
        with_entropy: whether entropies are wanted too.

    Returns:
        Figures on the model's device, in the order of `pack.target_ids_T`.
    """
    device = next(model.parameters()).device
    pack = pack.to(device)
    causal_lm: Any = model
    with packed_attention_on(model):
        logits_MV: Tensor = causal_lm(
            input_ids=pack.input_ids_N[None],
            position_ids=pack.position_ids_N[None],
            use_cache=False,
            logits_to_keep=pack.predicting_M,
            pack_layout=pack.layout,
        ).logits[0]
    logits_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32))
    if temperature not in (0.0, 1.0):
        logits_MV = logits_MV / temperature
    chosen_T = logits_MV[pack.prediction_T, pack.target_ids_T]
    logprobs_T = chosen_T - logits_MV.logsumexp(-1)[pack.prediction_T]
    entropy_T = categorical_entropy(logits_MV)[pack.prediction_T] if with_entropy else None
    return TokenFigures(logprobs_T, entropy_T)
