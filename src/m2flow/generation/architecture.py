"""Decoders of the Llama and Gemma families, as far as generation must know them.

Reads a Hugging Face configuration; `supported` says which ones the decoder computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from m2flow.errors import UserError
from m2flow.generation.supported import GEMMA, QK_NORM, activation_of, not_fused


@dataclass(frozen=True)
class Architecture:
    """Sizes and switches of a decoder.

    `heads` is the number of query heads; `group` of them share one of the `kv_heads`. With
    `experts`, each layer's MLP is that many of `intermediate_size` channels each, of which
    `experts_per_token` work on a token, weighted by their probabilities (`normalise_experts`: as
    shares of these experts' sum); `own_experts` are here.

    With `offset_norms`, a norm scales by 1 + its weight, in float32 at least. With `out_norms`,
    what attention and MLP make is normalised before it is added. Scores are scaled by
    `score_scale`. Scores and logits are capped by `cap tanh(x / cap)` where there is a cap. Each
    layer has its place in `windows`, the number of tokens that one of it attends to, itself
    included (None: all), and in `ropes`, which of the rotation tables it takes.
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
    activation: str = "silu"
    offset_norms: bool = False
    out_norms: bool = False
    embedding_scale: float = 1.0
    score_scale: float = 1.0
    score_cap: float | None = None
    logit_cap: float | None = None
    windows: tuple[int | None, ...] = ()
    ropes: tuple[int, ...] = ()

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


def architecture_of(config: Any) -> Architecture:
    """Reads a `transformers` configuration.

    Raises:
        UserError: the model is none of those that this decoder computes exactly.
    """
    kind = config.model_type
    if (reason := not_fused(config.to_dict())) is not None:
        raise UserError(reason, key="model_type", value=kind)
    experts = int(getattr(config, "num_experts", 0) or 0)
    is_qwen2, has_caps = kind == "qwen2", kind in ("gemma2", "gemma3_text")
    # transformers knows a cap of Gemma 3's scores, and does not compute it.
    score_cap = config.attn_logit_softcapping if kind == "gemma2" else None
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
        qk_norm=kind in QK_NORM,
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
        activation=activation_of(config.to_dict()),
        offset_norms=kind in GEMMA,
        out_norms=has_caps,
        embedding_scale=config.hidden_size**0.5 if kind in GEMMA else 1.0,
        score_scale=(config.query_pre_attn_scalar if has_caps else _head_dim(config)) ** -0.5,
        score_cap=score_cap or None,
        logit_cap=(config.final_logit_softcapping if has_caps else None) or None,
        windows=_windows(config),
        ropes=_ropes(config),
    )


def _windows(config: Any) -> tuple[int | None, ...]:
    """For each layer how many tokens one attends to, itself included; None for all."""
    layers, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    if config.model_type in ("mistral", "qwen3_moe"):  # these have one for all layers
        return (window,) * layers
    types = getattr(config, "layer_types", None) or ("full_attention",) * layers
    return tuple(window if one == "sliding_attention" else None for one in types)


def _ropes(config: Any) -> tuple[int, ...]:
    """For each layer which of the `rotation_tables` is its own."""
    if not _by_layer_type(config):
        return (0,) * config.num_hidden_layers
    types = sorted(set(config.layer_types))
    return tuple(types.index(one) for one in config.layer_types)


def _by_layer_type(config: Any) -> bool:
    """Whether layers of different types have rotary parameters of their own."""
    return any(isinstance(value, Mapping) for value in config.rope_parameters.values())


def rotation_tables(config: Any, dtype: torch.dtype) -> list[Tensor]:
    """The tables that `Architecture.ropes` counts; see `rotation_table`."""
    if not _by_layer_type(config):
        return [rotation_table(config, dtype)]
    return [rotation_table(config, dtype, one) for one in sorted(set(config.layer_types))]


def rotation_table(config: Any, dtype: torch.dtype, layer_type: str | None = None) -> Tensor:
    """The rotary embedding of every position as unit complex numbers.

    Row p holds `exp(i * p * frequency)` for each channel pair of a head (Su et al., "RoFormer",
    arXiv 2104.09864, equation 34), times the attention scaling of the configuration. Angles are
    computed in float32 and rounded to `dtype`, as transformers does.

    Args:
        config: a `transformers` configuration.
        dtype: of the model.
        layer_type: whose parameters count, where types of layers have their own.

    Returns:
        complex64 (complex128 for float64) [positions, head_dim / 2].
    """
    rope = config.rope_parameters
    rope = rope if layer_type is None else rope[layer_type]
    if rope["rope_type"] == "default":
        head_dim = _head_dim(config)
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequency, scaling = 1.0 / (rope["rope_theta"] ** exponent), 1.0
    else:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        of_type = {} if layer_type is None else {"layer_type": layer_type}
        frequency, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](
            config, torch.device("cpu"), **of_type
        )
    position = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angle = position.unsqueeze(1) * frequency.float()
    real, imaginary = (part.mul(scaling).to(dtype) for part in (angle.cos(), angle.sin()))
    if dtype is not torch.float64:
        real, imaginary = real.float(), imaginary.float()
    return torch.complex(real, imaginary)


def _head_dim(config: Any) -> int:
    given = getattr(config, "head_dim", None)
    return given or config.hidden_size // config.num_attention_heads
