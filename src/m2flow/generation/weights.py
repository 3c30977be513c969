"""The decoder's weights: fused copies for decoding, filled from Hugging Face parameter names.

Queries, keys and values are one matrix, gate and up another. Rows of the first are ordered by
key-value head (its queries, its key, its value), so that one head's share of an activation is
contiguous; channels of queries and keys are ordered by rotary pair, so that the rotation is one
complex product. Attention scores do not change by either. Every tensor here is a copy: training
may go on with the originals.

Of a decoder that is divided over lanes each holds a part of every projection: rows of those that
lead into heads or channels, columns of those that lead out. What is installed may be that part, or
the whole, of which the part is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from m2flow.generation.architecture import Architecture
from m2flow.generation.kernels import is_prepacked, prepacked
from m2flow.generation.tensor_parallel import WHOLE, TensorParallel
from m2flow.models.lora import unsummed
from m2flow.runtime.weights.boxes import Box


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Biases, router and all norms but two are None where there are none.

    `attention_norm` and `mlp_norm` stand before what they are named after, and
    `attention_out_norm` and `mlp_out_norm` behind. With a router, `gate_up` and `down` have the
    experts as a dimension before the others.
    """

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
    router: Tensor | None = None
    attention_out_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None


_MATRICES = ("qkv", "out", "gate_up", "down")


class Prepacked(NamedTuple):
    """What products are made with: layers and head, their large matrices laid out for `linear`."""

    layers: list[LayerWeights]
    head: Tensor


@dataclass(frozen=True)
class _ParameterTarget:
    """Where a parameter goes: rows of a fused tensor, or the whole of a tensor; plus `offset`."""

    tensor: Tensor
    rows: Tensor | None = None
    offset: float = 0.0

    @property
    def shape(self) -> torch.Size:
        if self.rows is None:
            return self.tensor.shape
        return torch.Size((self.rows.numel(), *self.tensor.shape[1:]))

    def fill(self, source: Tensor) -> None:
        if self.offset:
            source = source.to(self.tensor) + self.offset
        if self.rows is None:
            self.tensor.copy_(source)
        else:
            self.tensor.index_copy_(0, self.rows, source.to(self.tensor))


@dataclass(frozen=True)
class _HeldPart:
    """The part of a parameter that is here, and the shape of all of it."""

    box: Box
    whole: torch.Size


class DecoderWeights:
    """A decoder's weights on one device; garbage until the first `install`.

    Args:
        whole: the decoder's sizes.
        dtype, device: of the weights.
        parallel: which part is here; by default all.

    Attributes:
        architecture: the sizes of the part.
    """

    def __init__(
        self,
        whole: Architecture,
        dtype: torch.dtype,
        device: torch.device,
        parallel: TensorParallel = WHOLE,
    ) -> None:
        self.architecture = a = parallel.part(whole)

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        # 1 + weight would lose the bits of a small weight in half precision.
        norm_dtype = torch.promote_types(dtype, torch.float32) if a.offset_norms else dtype

        def norm(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=norm_dtype, device=device)

        experts = (len(a.own_experts),) if a.experts else ()
        qkv_rows = (a.heads + 2 * a.kv_heads) * a.head_dim
        self.embedding = new(a.vocab_size, a.hidden_size)
        self.head = self.embedding if a.tied_embeddings else new(a.vocab_size, a.hidden_size)
        self.norm = norm(a.hidden_size)
        self.layers = [
            LayerWeights(
                attention_norm=norm(a.hidden_size),
                qkv=new(qkv_rows, a.hidden_size),
                qkv_bias=new(qkv_rows) if a.qkv_bias else None,
                qk_norm=norm(a.group + 1, a.head_dim) if a.qk_norm else None,
                out=new(a.hidden_size, a.heads * a.head_dim),
                out_bias=new(a.hidden_size) if a.out_bias else None,
                mlp_norm=norm(a.hidden_size),
                gate_up=new(*experts, 2 * a.intermediate_size, a.hidden_size),
                gate_up_bias=new(2 * a.intermediate_size) if a.mlp_bias else None,
                down=new(*experts, a.hidden_size, a.intermediate_size),
                down_bias=new(a.hidden_size) if a.mlp_bias else None,
                router=new(a.experts, a.hidden_size) if a.experts else None,
                attention_out_norm=norm(a.hidden_size) if a.out_norms else None,
                mlp_out_norm=norm(a.hidden_size) if a.out_norms else None,
            )
            for _ in range(a.layers)
        ]
        self._places = _places(self)
        self._parts = _parts(self._places, whole, parallel)
        self._prepacked: Prepacked | None = None

    def install(self, weights: Mapping[str, Tensor]) -> None:
        """Copies every parameter to its place; see `NativeEngine.install`."""
        # With tied embeddings the head is the embedding, whether or not it is named twice.
        ignored = {"lm_head.weight"} if self.architecture.tied_embeddings else set()
        alike = unsummed(weights)
        missing = sorted(self._places.keys() - weights.keys())
        unknown = sorted(weights.keys() - self._places.keys() - ignored)
        wrong = [
            f"{name} is {list(alike[name].shape)}, not {list(part.whole)}"
            for name, part in self._parts.items()
            if name in alike and alike[name].shape not in (part.whole, part.box.shape)
        ]
        if missing or unknown or wrong:
            raise ValueError(f"weights do not fit: {missing=}, {unknown=}, {wrong=}")
        self.drop_prepacked()
        for name, places in self._places.items():
            held = self._parts[name].box.of(weights[name])
            for place in places:
                place.fill(held)

    @property
    def prepacked(self) -> Prepacked:
        """The layers and the head for products; made on first use, and kept until dropped."""
        if self._prepacked is None:
            layers = [
                replace(layer, **{name: prepacked(vars(layer)[name]) for name in _MATRICES})
                for layer in self.layers
            ]
            self._prepacked = Prepacked(layers, prepacked(self.head))
        return self._prepacked

    def drop_prepacked(self) -> None:
        """Give up what `prepacked` has made."""
        self._prepacked = None

    @property
    def prepacked_bytes(self) -> int:
        """What `prepacked` takes beside the weights, whether or not it is made."""
        matrices = [vars(layer)[name] for layer in self.layers for name in _MATRICES]
        return sum(one.nbytes for one in (*matrices, self.head) if is_prepacked(one))

    def boxes(self) -> dict[str, Box]:
        """Hugging Face parameter name -> the part of it that is here."""
        return {name: part.box for name, part in self._parts.items()}

    def tensors(self) -> list[Tensor]:
        """Every tensor once."""
        candidates = [self.embedding, self.norm]
        candidates += [] if self.architecture.tied_embeddings else [self.head]
        candidates += [t for layer in self.layers for t in vars(layer).values() if t is not None]
        return candidates


def _places(weights: DecoderWeights) -> dict[str, list[_ParameterTarget]]:
    """Hugging Face parameter name -> where it is copied to."""
    a = weights.architecture
    device = weights.embedding.device
    offset = 1.0 if a.offset_norms else 0.0
    places = {
        "model.embed_tokens.weight": [_ParameterTarget(weights.embedding)],
        "model.norm.weight": [_ParameterTarget(weights.norm, offset=offset)],
    }
    if not a.tied_embeddings:
        places["lm_head.weight"] = [_ParameterTarget(weights.head)]
    fused_rows = {name: rows.to(device) for name, rows in _fused_rows(a).items()}
    for index, layer in enumerate(weights.layers):
        modules: list[tuple[str, Tensor, Tensor | None]] = [
            ("self_attn.q_proj", layer.qkv, layer.qkv_bias),
            ("self_attn.k_proj", layer.qkv, layer.qkv_bias),
            ("self_attn.v_proj", layer.qkv, layer.qkv_bias),
            ("self_attn.o_proj", layer.out, layer.out_bias),
        ]
        norms = {
            "input_layernorm": layer.attention_norm,
            "post_attention_layernorm": layer.mlp_norm,
        }
        if layer.attention_out_norm is not None and layer.mlp_out_norm is not None:
            norms |= {
                "post_attention_layernorm": layer.attention_out_norm,
                "pre_feedforward_layernorm": layer.mlp_norm,
                "post_feedforward_layernorm": layer.mlp_out_norm,
            }
        for name, norm in norms.items():
            places[f"model.layers.{index}.{name}.weight"] = [_ParameterTarget(norm, offset=offset)]
        if layer.router is None:
            modules += [
                ("mlp.gate_proj", layer.gate_up, layer.gate_up_bias),
                ("mlp.up_proj", layer.gate_up, layer.gate_up_bias),
                ("mlp.down_proj", layer.down, layer.down_bias),
            ]
        else:
            modules.append(("mlp.gate", layer.router, None))
            experts = f"model.layers.{index}.mlp.experts"
            places[f"{experts}.gate_up_proj"] = [_ParameterTarget(layer.gate_up)]
            places[f"{experts}.down_proj"] = [_ParameterTarget(layer.down)]
        for name, tensor, bias in modules:
            rows = fused_rows.get(name)
            places[f"model.layers.{index}.{name}.weight"] = [_ParameterTarget(tensor, rows)]
            if bias is not None:
                places[f"model.layers.{index}.{name}.bias"] = [_ParameterTarget(bias, rows)]
        if layer.qk_norm is not None:
            channels = _rotary_pairs(a.head_dim).to(device)
            *queries, key = (_ParameterTarget(row, channels, offset) for row in layer.qk_norm)
            places[f"model.layers.{index}.self_attn.q_norm.weight"] = queries
            places[f"model.layers.{index}.self_attn.k_norm.weight"] = [key]
    return places


def _parts(
    places: Mapping[str, list[_ParameterTarget]], whole: Architecture, parallel: TensorParallel
) -> dict[str, _HeldPart]:
    """Hugging Face parameter name -> which part of it is here."""
    own, channels = parallel.part(whole), parallel.channels(whole)
    first_query = parallel.rank * own.heads * own.head_dim
    first_key = parallel.rank * own.kv_heads * own.head_dim
    queries = (first_query, whole.heads * whole.head_dim)
    keys = (first_key, whole.kv_heads * whole.head_dim)
    hidden = (channels.start, whole.intermediate_size)
    divided = {  # the divided dimension, where the part begins in it, and its whole size
        "q_proj": (0, *queries),
        "k_proj": (0, *keys),
        "v_proj": (0, *keys),
        "o_proj": (1, *queries),
        "gate_proj": (0, *hidden),
        "up_proj": (0, *hidden),
        "down_proj": (1, *hidden),
        "experts": (0, own.own_experts.start, whole.experts),
    }
    parts = {}
    for name, (place, *_) in places.items():
        offsets, shape = [0] * len(place.shape), list(place.shape)
        dim, first, size = divided.get(name.split(".")[-2], (len(shape), 0, 0))
        if dim < len(shape):  # a bias of a sum over lanes is whole on each of them
            offsets[dim], shape[dim] = first, size
        parts[name] = _HeldPart(Box(tuple(offsets), tuple(place.shape)), torch.Size(shape))
    return parts


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
