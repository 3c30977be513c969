"""The decoder's weights: fused copies for decoding, filled from Hugging Face parameter names.

Queries, keys and values are one matrix, gate and up another. Rows of the first are ordered by
key-value head (its queries, its key, its value), so that one head's share of an activation is
contiguous; channels of queries and keys are ordered by rotary pair, so that the rotation is one
complex product. Attention scores do not change by either. Every tensor here is a copy: training
may go on with the originals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from m2flow.generation.architecture import Architecture


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Biases and head norms are None where the architecture has none."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True)
class _Place:
    """Where a parameter goes: rows of a fused tensor, or the whole of a tensor."""

    tensor: Tensor
    rows: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        if self.rows is None:
            return self.tensor.shape
        return torch.Size((self.rows.numel(), *self.tensor.shape[1:]))

    def fill(self, source: Tensor) -> None:
        if self.rows is None:
            self.tensor.copy_(source)
        else:
            self.tensor.index_copy_(0, self.rows, source.to(self.tensor))


class DecoderWeights:
    """All weights of a decoder on one device; garbage until the first `install`."""

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.architecture = a = architecture

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        qkv_rows = (a.heads + 2 * a.kv_heads) * a.head_dim
        self.embedding = new(a.vocab_size, a.hidden_size)
        self.head = self.embedding if a.tied_embeddings else new(a.vocab_size, a.hidden_size)
        self.norm = new(a.hidden_size)
        self.layers = [
            LayerWeights(
                attention_norm=new(a.hidden_size),
                qkv=new(qkv_rows, a.hidden_size),
                qkv_bias=new(qkv_rows) if a.qkv_bias else None,
                qk_norm=new(a.group + 1, a.head_dim) if a.qk_norm else None,
                out=new(a.hidden_size, a.heads * a.head_dim),
                out_bias=new(a.hidden_size) if a.out_bias else None,
                mlp_norm=new(a.hidden_size),
                gate_up=new(2 * a.intermediate_size, a.hidden_size),
                gate_up_bias=new(2 * a.intermediate_size) if a.mlp_bias else None,
                down=new(a.hidden_size, a.intermediate_size),
                down_bias=new(a.hidden_size) if a.mlp_bias else None,
            )
            for _ in range(a.layers)
        ]
        self._places = _places(self)

    def install(self, weights: Mapping[str, Tensor]) -> None:
        """Copies every parameter to its place; see `GenerationEngine.install`."""
        # With tied embeddings the head is the embedding, whether or not it is named twice.
        ignored = {"lm_head.weight"} if self.architecture.tied_embeddings else set()
        missing = sorted(self._places.keys() - weights.keys())
        unknown = sorted(weights.keys() - self._places.keys() - ignored)
        wrong = [
            f"{name} is {list(weights[name].shape)}, not {list(places[0].shape)}"
            for name, places in self._places.items()
            if name in weights and weights[name].shape != places[0].shape
        ]
        if missing or unknown or wrong:
            raise ValueError(f"weights do not fit: {missing=}, {unknown=}, {wrong=}")
        for name, places in self._places.items():
            for place in places:
                place.fill(weights[name])

    def tensors(self) -> list[Tensor]:
        """Every tensor once."""
        candidates = [self.embedding, self.norm]
        candidates += [] if self.architecture.tied_embeddings else [self.head]
        candidates += [t for layer in self.layers for t in vars(layer).values() if t is not None]
        return candidates


def _places(weights: DecoderWeights) -> dict[str, list[_Place]]:
    """Hugging Face parameter name -> where it is copied to."""
    a = weights.architecture
    device = weights.embedding.device
    places = {
        "model.embed_tokens.weight": [_Place(weights.embedding)],
        "model.norm.weight": [_Place(weights.norm)],
    }
    if not a.tied_embeddings:
        places["lm_head.weight"] = [_Place(weights.head)]
    fused_rows = {name: rows.to(device) for name, rows in _fused_rows(a).items()}
    for index, layer in enumerate(weights.layers):
        for name, tensor, bias in (
            ("self_attn.q_proj", layer.qkv, layer.qkv_bias),
            ("self_attn.k_proj", layer.qkv, layer.qkv_bias),
            ("self_attn.v_proj", layer.qkv, layer.qkv_bias),
            ("self_attn.o_proj", layer.out, layer.out_bias),
            ("mlp.gate_proj", layer.gate_up, layer.gate_up_bias),
            ("mlp.up_proj", layer.gate_up, layer.gate_up_bias),
            ("mlp.down_proj", layer.down, layer.down_bias),
            ("input_layernorm", layer.attention_norm, None),
            ("post_attention_layernorm", layer.mlp_norm, None),
        ):
            rows = fused_rows.get(name)
            places[f"model.layers.{index}.{name}.weight"] = [_Place(tensor, rows)]
            if bias is not None:
                places[f"model.layers.{index}.{name}.bias"] = [_Place(bias, rows)]
        if layer.qk_norm is not None:
            channels = _rotary_pairs(a.head_dim).to(device)
            *queries, key = (_Place(row, channels) for row in layer.qk_norm)
            places[f"model.layers.{index}.self_attn.q_norm.weight"] = queries
            places[f"model.layers.{index}.self_attn.k_norm.weight"] = [key]
    return places


def _fused_rows(a: Architecture) -> dict[str, Tensor]:
    """For each fused projection, the row of the fused matrix that each of its rows becomes."""
    row = torch.arange((a.heads + 2 * a.kv_heads) * a.head_dim)
    row_KSD = row.view(a.kv_heads, a.group + 2, a.head_dim)
    pairs = _rotary_pairs(a.head_dim)
    return {
        "self_attn.q_proj": row_KSD[:, : a.group, pairs].flatten(),
        "self_attn.k_proj": row_KSD[:, a.group, pairs].flatten(),
        "self_attn.v_proj": row_KSD[:, a.group + 1].flatten(),
        "mlp.gate_proj": torch.arange(a.intermediate_size),
        "mlp.up_proj": torch.arange(a.intermediate_size, 2 * a.intermediate_size),
    }


def _rotary_pairs(head_dim: int) -> Tensor:
    """Channel c and c + head_dim / 2 are rotated together; they become 2c and 2c + 1."""
    channel = torch.arange(head_dim)
    return 2 * (channel % (head_dim // 2)) + channel // (head_dim // 2)
