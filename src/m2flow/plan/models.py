"""Shapes of models, and what follows from the shape alone: parameters, FLOPs, bytes of KV cache.

Read from a Hugging Face `config.json` (dense, grouped-query, mixture of experts, tied embeddings);
weights are never needed. Vision-language-action models and simulators have short descriptions of
their own. Counts are exact for the Llama, Mistral, Mixtral and Qwen families. Nothing here knows a
device.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m2flow.errors import UserError, suggestion

WEIGHT_BYTES = 2
"""Of a parameter, or of one number in the KV cache, in 16-bit formats."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder of transformer layers with gated feed-forward blocks.

    Attributes:
        name: for messages.
        layers: number of transformer layers.
        hidden: width of the residual stream.
        heads: query heads; `kv_heads` key-value heads, each `head_dim` wide.
        intermediate: width of a dense feed-forward block.
        vocabulary: rows of the embedding.
        tied: whether the output projection is the embedding.
        moe_layers: layers whose feed-forward block is a mixture of experts.
        experts: in each of those; `experts_per_token` work on a token.
        expert_intermediate: width of an expert.
        shared_intermediate: width of the expert that every token passes; 0 where there is none.
        qkv_bias: whether queries, keys and values have a bias.
        qk_norm: whether queries and keys are normalised by head.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool = False
    moe_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def is_moe(self) -> bool:
        return self.moe_layers > 0

    @property
    def _attention(self) -> int:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        bias = queries + 2 * keys if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return self.hidden * (2 * queries + 2 * keys) + bias + norms

    def _feed_forward(self, experts: float) -> float:
        """Parameters of all feed-forward blocks, so many experts of each mixture counted."""
        dense = (self.layers - self.moe_layers) * 3 * self.hidden * self.intermediate
        shared = 3 * self.hidden * self.shared_intermediate
        shared += self.hidden if self.shared_intermediate else 0  # its gate
        router = self.hidden * self.experts
        expert = 3 * self.hidden * self.expert_intermediate
        return dense + self.moe_layers * (router + shared + experts * expert)

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding alone."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All that memory must hold."""
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        blocks = self.layers * self._attention + int(self._feed_forward(self.experts))
        return blocks + embeddings + self.hidden

    @property
    def active_parameters(self) -> int:
        """Those that work on one token; the looked-up embedding does not count as work."""
        blocks = self.layers * self._attention + int(self._feed_forward(self.experts_per_token))
        return blocks + self.embedding_parameters + self.hidden

    @property
    def expert_parameters(self) -> int:
        """Of all experts of all mixtures."""
        return self.moe_layers * self.experts * 3 * self.hidden * self.expert_intermediate

    @property
    def expert_share(self) -> float:
        """Of all parameters, those of experts; 0 for a dense model."""
        return self.expert_parameters / self.parameters

    @property
    def weight_bytes(self) -> int:
        """Of all weights in a 16-bit format."""
        return self.parameters * WEIGHT_BYTES

    @property
    def kv_bytes_per_token(self) -> int:
        """Of keys and values of one token in all layers, in a 16-bit format."""
        return 2 * self.layers * self.kv_heads * self.head_dim * WEIGHT_BYTES

    def kv_bytes_on_lane(self, tensor: int) -> int:
        """Of one token on each of so many lanes that share the layers.

        Heads stay whole, so with more lanes than key-value heads each lane has a copy of one.
        """
        heads = -(-self.kv_heads // tensor)
        return self.kv_bytes_per_token // self.kv_heads * heads

    def weight_bytes_read(self, tokens: float) -> float:
        """Bytes of weights that a forward pass of so many tokens reads.

        Of `E` experts of which a token takes `k`, `n` tokens that choose independently touch
        `E (1 - (1 - k/E)^n)`.
        """
        if not self.is_moe:
            return float(self.weight_bytes)
        missed = 1 - self.experts_per_token / self.experts
        touched = 1 - math.pow(missed, tokens)
        idle = self.expert_parameters * (1 - touched)
        return (self.parameters - idle) * WEIGHT_BYTES

    def forward_flops(self, tokens: float, context: float) -> float:
        """Of a forward pass.

        Two for each active parameter and token (Kaplan et al. 2020, section 2.1), and
        `4 heads head_dim context` in each layer for scores and values.

        Args:
            tokens: that are worked on.
            context: tokens that each of them attends to, in the mean.
        """
        attention = 4 * self.layers * self.heads * self.head_dim * context
        return tokens * (2 * self.active_parameters + attention)


def model_from_config(config: Mapping[str, Any], name: str = "model") -> ModelShape:
    """The shape that a Hugging Face configuration describes.

    A configuration of several modalities is read by its `text_config`.

    Raises:
        UserError: a key is missing, or the architecture is not a plain decoder.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping) and "hidden_size" not in config:
        config = {**config, **text}
    if config.get("kv_lora_rank"):
        raise UserError(
            "keys and values in a latent space are not described by this model of costs",
            key=f"{name}.kv_lora_rank",
            value=config["kv_lora_rank"],
            expected="multi-head or grouped-query attention",
        )
    kind = str(config.get("model_type", ""))
    layers, hidden = (
        _number(config, name, "num_hidden_layers"),
        _number(config, name, "hidden_size"),
    )
    heads = _number(config, name, "num_attention_heads")
    intermediate = _number(config, name, "intermediate_size")
    expert_keys = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((int(config[key]) for key in expert_keys if config.get(key)), 0)
    sparse: list[int] = []
    if experts:
        period, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
        sparse = [n for n in range(layers) if n not in dense and (n + 1) % period == 0]
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        intermediate=intermediate,
        vocabulary=_number(config, name, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        moe_layers=len(sparse),
        experts=experts,
        experts_per_token=_number(config, name, "num_experts_per_tok") if experts else 0,
        expert_intermediate=int(config.get("moe_intermediate_size") or intermediate)
        if experts
        else 0,
        shared_intermediate=int(config.get("shared_expert_intermediate_size") or 0),
        qkv_bias=bool(config.get("attention_bias", kind in ("qwen2", "qwen2_moe"))),
        qk_norm=kind.startswith("qwen3"),
    )


def _number(config: Mapping[str, Any], name: str, key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(
            "the model's configuration does not say how large the model is",
            key=f"{name}.{key}",
            value=value if value is not None else "nothing",
            expected="a whole number of at least 1",
            hint="give a config.json of a decoder such as Llama's or Qwen's",
        )
    return value


def read_model(source: str | Path) -> ModelShape:
    """The shape of a model by its folder, its `config.json`, or a name in `KNOWN_MODELS`.

    Raises:
        UserError: there is no such file or name, or it does not describe a decoder.
    """
    known = {name.lower(): shape for name, shape in KNOWN_MODELS.items()}
    short = str(source).rstrip("/").split("/")[-1].lower()
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        if short in known:
            return known[short]
        raise UserError(
            "neither a folder with a config.json nor a model whose shape is known",
            key="model",
            value=str(source),
            hint=suggestion(str(source).split("/")[-1], KNOWN_MODELS),
        )
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"is not JSON: {error}", key="model", value=str(path)) from error
    if not isinstance(config, dict):
        raise UserError("holds no JSON object", key="model", value=str(path))
    return model_from_config(config, path.parent.name or "model")


QWEN_7B = ModelShape("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064, qkv_bias=True)
LLAMA_2_7B = ModelShape("Llama-2-7B", 32, 4096, 32, 32, 128, 11008, 32000)

KNOWN_MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("Qwen2.5-0.5B", 24, 896, 14, 2, 64, 4864, 151936, tied=True, qkv_bias=True),
        ModelShape("Qwen2.5-1.5B", 28, 1536, 12, 2, 128, 8960, 151936, tied=True, qkv_bias=True),
        QWEN_7B,
        ModelShape("Qwen2.5-32B", 64, 5120, 40, 8, 128, 27648, 152064, qkv_bias=True),
        ModelShape(
            "Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 6144, 151936,
            moe_layers=48, experts=128, experts_per_token=8, expert_intermediate=768, qk_norm=True,
        ),
        LLAMA_2_7B,
    )
}  # fmt: skip
"""Shapes by name, from the `config.json` that each model is published with."""
