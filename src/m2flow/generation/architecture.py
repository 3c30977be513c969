"""Decoders of the Llama family, as far as generation must know them.

Reads a Hugging Face configuration; `supported` says which ones the decoder computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from m2flow.generation.supported import QK_NORM, check_supported


@dataclass(frozen=True)
class Architecture:
    """Sizes and switches of a decoder.

    `heads` is the number of query heads; `group` of them share one of the `kv_heads`. With
    `experts`, each layer's MLP is that many of `intermediate_size` channels each, of which
    `experts_per_token` work on a token, weighted by their probabilities (`normalise_experts`: as
    shares of these experts' sum); `own_experts` are here.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_epsilon: float
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tied_embeddings: bool
    max_position: int
    experts: int = 0
    experts_per_token: int = 0
    normalise_experts: bool = False
    own_experts: range = range(0)

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


def architecture_of(config: Any) -> Architecture:
    """Reads a `transformers` configuration.

    Raises:
        UserError: the model is none of those that this decoder computes exactly.
    """
    check_supported(config.to_dict())
    experts = int(getattr(config, "num_experts", 0) or 0)
    is_qwen2 = config.model_type == "qwen2"
    attention_bias = bool(getattr(config, "attention_bias", False))
    return Architecture(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.moe_intermediate_size if experts else config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=_head_dim(config),
        norm_epsilon=config.rms_norm_eps,
        qk_norm=QK_NORM[config.model_type],
        # Qwen2 has biases on queries, keys and values alone, and no switch for them.
        qkv_bias=is_qwen2 or attention_bias,
        out_bias=not is_qwen2 and attention_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        tied_embeddings=bool(config.tie_word_embeddings),
        max_position=config.max_position_embeddings,
        experts=experts,
        experts_per_token=config.num_experts_per_tok if experts else 0,
        normalise_experts=bool(getattr(config, "norm_topk_prob", False)),
        own_experts=range(experts),
    )


def rotation_table(config: Any, dtype: torch.dtype) -> Tensor:
    """The rotary embedding of every position as unit complex numbers.

    Row p holds `exp(i * p * frequency)` for each channel pair of a head (Su et al., "RoFormer",
    arXiv 2104.09864, equation 34), times the attention scaling of the configuration. Angles are
    computed in float32 and rounded to `dtype`, as transformers does.

    Returns:
        complex64 (complex128 for float64) [positions, head_dim / 2].
    """
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        head_dim = _head_dim(config)
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequency, scaling = 1.0 / (rope["rope_theta"] ** exponent), 1.0
    else:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequency, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    position = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angle = position.unsqueeze(1) * frequency.float()
    real, imaginary = (part.mul(scaling).to(dtype) for part in (angle.cos(), angle.sin()))
    if dtype is not torch.float64:
        real, imaginary = real.float(), imaginary.float()
    return torch.complex(real, imaginary)


def _head_dim(config: Any) -> int:
    given = getattr(config, "head_dim", None)
    return given or config.hidden_size // config.num_attention_heads
