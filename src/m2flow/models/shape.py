"""Shapes of decoders, and what follows from the shape alone: parameters, FLOPs, bytes of KV cache.

Read from a Hugging Face `config.json`; neither weights nor transformers are needed. Parameter
counts are exact for the models that the generation engine computes itself (Llama, Mistral, Qwen2,
Qwen3 with experts too, Gemma). This module knows no device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m2flow.errors import UserError, reading, suggestion
from m2flow.models.folder import read_json

WEIGHT_BYTES = 2
"""Of a parameter, or of one number in the KV cache, in 16-bit formats."""

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "qwen2": {"attention_bias": True},
    "qwen2_moe": {"attention_bias": True},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4, "moe_intermediate_size": 768},
    "gemma": {"head_dim": 256, "num_key_value_heads": 16, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 256, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 256, "num_key_value_heads": 4, "tie_word_embeddings": True},
}
"""By model type: defaults of its configuration class that a `config.json` need not repeat."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names that configurations have for the number of experts among which each token chooses."""


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
        experts: in the feed-forward block of each layer, 0 for a dense one; `experts_per_token`
            work on a token.
        expert_intermediate: width of an expert.
        layer_extras: parameters of a layer beside its matrices: norms and biases.
        dense_layers: of a mixture, layers whose feed-forward block is dense.
        shared_intermediate: of a mixture, width of all experts together that work on every token.
        outputs: of the head, where it is not over the vocabulary: one of a critic or a classifier,
            whose head is never the embedding. 0: as many as the vocabulary has rows.
        model_type: as configurations have it.
        latent_attention: whether keys and values come from a compressed state, as DeepSeek's do;
            sizes and operations are those of plain attention all the same.
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
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    layer_extras: int = 0
    dense_layers: int = 0
    shared_intermediate: int = 0
    latent_attention: bool = False
    outputs: int = 0
    model_type: str = ""

    @property
    def mixtures(self) -> int:
        """Count the layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    def _blocks(self, experts: int) -> int:
        """Parameters of all layers, so many experts of each mixture counted."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        dense = 3 * self.hidden * self.intermediate
        channels = experts * self.expert_intermediate + self.shared_intermediate
        mixture = self.hidden * (self.experts + 3 * channels)  # with the router
        forward = self.mixtures * mixture + (self.layers - self.mixtures) * dense
        return self.layers * (attention + self.layer_extras) + forward

    @property
    def parameters(self) -> int:
        """Count every parameter that memory must hold."""
        return self._blocks(self.experts) + self.outer_parameters

    @property
    def outer_parameters(self) -> int:
        """Count the parameters outside of the layers: embedding, last norm, own head."""
        head = 0 if self.tied and not self.outputs else self.head_parameters
        return self.vocabulary * self.hidden + self.hidden + head

    @property
    def active_parameters(self) -> int:
        """Count the parameters that work on one token, without the embedding's lookup."""
        return self._blocks(self.experts_per_token) + self.head_parameters + self.hidden

    @property
    def shared_parameters(self) -> int:
        """Count the parameters of all layers that work on every token: all but the experts'."""
        return self._blocks(0)

    @property
    def head_parameters(self) -> int:
        """Count the parameters of the output projection."""
        return self.logits * self.hidden

    @property
    def logits(self) -> int:
        """Count the numbers that the head gives for a token."""
        return self.outputs or self.vocabulary

    @property
    def experts_of_a_token(self) -> int:
        """Count the parameters of the experts that work on one token, in all layers."""
        return self.mixtures * self.experts_per_token * 3 * self.hidden * self.expert_intermediate

    @property
    def channels_of_a_token(self) -> int:
        """Count the channels that work on one token in a feed-forward block; in a mixture's, where
        there are mixtures."""
        chosen = self.experts_per_token * self.expert_intermediate + self.shared_intermediate
        return chosen or self.intermediate

    def adapter_parameters(self, rank: int) -> int:
        """Count the parameters of LoRA adapters of a rank on all linear layers but experts'."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        ends = 2 * (self.hidden + queries) + 2 * (self.hidden + keys)  # in and out, layer by layer
        dense = 3 * (self.hidden + self.intermediate)
        shared = 3 * (self.hidden + self.shared_intermediate) if self.shared_intermediate else 0
        forward = self.mixtures * shared + (self.layers - self.mixtures) * dense
        return rank * (self.layers * ends + forward)

    @property
    def expert_parameters(self) -> int:
        """Count the parameters of all experts of all mixtures."""
        return self.mixtures * self.experts * 3 * self.hidden * self.expert_intermediate

    @property
    def expert_share(self) -> float:
        """Return the share of all parameters that experts have; 0 for a dense model."""
        return self.expert_parameters / self.parameters

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weights in a 16-bit format."""
        return self.parameters * WEIGHT_BYTES

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of keys and values of one token in all layers, in a 16-bit format."""
        return 2 * self.layers * self.kv_heads * self.head_dim * WEIGHT_BYTES

    def kv_bytes_on_lane(self, lanes: int) -> int:
        """Return the bytes of one token on each of `lanes` lanes that divide the layers.

        Heads stay whole, so with more lanes than key-value heads each lane has a copy of one.
        """
        return self.kv_bytes_per_token // self.kv_heads * -(-self.kv_heads // lanes)

    def expert_bytes_read(self, tokens: float) -> float:
        """Return the bytes of experts that a forward pass of `tokens` tokens reads.

        Of `E` experts of which a token takes `k`, `n` tokens that choose independently touch
        `E (1 - (1 - k/E)^n)`.
        """
        if not self.experts:
            return 0.0
        idle = math.pow(1 - self.experts_per_token / self.experts, tokens)
        return self.expert_parameters * (1 - idle) * WEIGHT_BYTES

    def forward_flops(self, tokens: float, context: float) -> float:
        """Return the FLOPs of a forward pass.

        Two for each active parameter and token (Kaplan et al. 2020, section 2.1), and
        `4 heads head_dim context` in each layer for scores and values.

        Args:
            tokens: that are worked on.
            context: tokens that each of them attends to, in the mean.
        """
        return tokens * 2 * self.active_parameters + self.attention_flops(tokens, context)

    def attention_flops(self, tokens: float, context: float) -> float:
        """Return those for scores and values alone; arguments as of `forward_flops`."""
        return tokens * 4 * self.layers * self.heads * self.head_dim * context


def model_from_config(config: Mapping[str, Any], name: str = "model") -> ModelShape:
    """Return the shape that a Hugging Face configuration describes.

    Raises:
        UserError: a key is missing.
    """
    kind = str(config.get("model_type", ""))
    given = {key: value for key, value in config.items() if value is not None}
    config = {**DEFAULTS.get(kind, {}), **given}
    layers, hidden, heads, intermediate, vocabulary = (
        _number(config, name, key)
        for key in (
            "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size",
            "vocab_size",
        )
    )  # fmt: skip
    kv_heads = int(config.get("num_key_value_heads", heads))
    head_dim = int(config.get("head_dim", hidden // heads))
    experts = next((int(config[key]) for key in EXPERTS if config.get(key)), 0)
    # Mixtral's experts are as wide as the dense block that they stand for.
    width = int(config.get("moe_intermediate_size", intermediate) * bool(experts))
    shared = int(config.get("shared_expert_intermediate_size", 0))
    return ModelShape(
        name, layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary,
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        experts_per_token=_number(config, name, "num_experts_per_tok") if experts else 0,
        expert_intermediate=width,
        layer_extras=_norms_and_biases(config, kind, heads * head_dim, kv_heads * head_dim),
        dense_layers=min(layers, int(config.get("first_k_dense_replace", 0))) if experts else 0,
        shared_intermediate=(shared or int(config.get("n_shared_experts", 0)) * width),
        latent_attention="kv_lora_rank" in config,
        model_type=kind,
    )  # fmt: skip


def _norms_and_biases(config: Mapping[str, Any], kind: str, queries: int, keys: int) -> int:
    """Count the parameters of one layer that belong to no matrix."""
    hidden = int(config["hidden_size"])
    found = (4 if kind in ("gemma2", "gemma3_text") else 2) * hidden
    if kind.startswith("qwen3") or kind == "gemma3_text":
        found += 2 * queries // int(config["num_attention_heads"])  # norms of queries and keys
    if config.get("attention_bias"):
        found += queries + 2 * keys + (0 if kind in ("qwen2", "qwen2_moe") else hidden)
    if kind == "qwen2_moe":
        found += hidden  # the gate of the shared expert
    if config.get("mlp_bias"):
        found += 2 * int(config["intermediate_size"]) + hidden
    return found


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


def config_of(source: str | Path) -> tuple[dict[str, Any], str]:
    """The configuration of a model by its folder, its `config.json` or a name in `PUBLISHED`; and
    what the model is called.

    Raises:
        UserError: there is no such file or name, or the file holds no JSON object.
    """
    path = Path(source).expanduser()
    with reading(path):
        path = path / "config.json" if path.is_dir() else path
        is_file = path.is_file()
    if is_file:
        return read_json(path, "the architecture"), path.parent.name or "model"
    known = {name.lower(): name for name in PUBLISHED}
    short = str(source).rstrip("/").split("/")[-1]
    # A model that was tuned on conversations has the shape of the one that it was made of.
    if name := known.get(short.lower().removesuffix("-instruct")):
        return PUBLISHED[name], name
    raise UserError(
        "neither a folder with a config.json nor a model whose shape is known",
        key="model",
        value=str(source),
        hint=suggestion(short, PUBLISHED),
    )


def read_model(source: str | Path) -> ModelShape:
    """Return the shape of a model; `source` and errors are those of `config_of`."""
    return model_from_config(*config_of(source))


def _published(kind: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """Write out a configuration from its type and the sizes that every decoder has."""
    names = (
        "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads",
        "intermediate_size", "vocab_size",
    )  # fmt: skip
    return {"model_type": kind, **dict(zip(names, sizes, strict=True)), **more}


PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": _published(
        "qwen2", (24, 896, 14, 2, 4864, 151936), tie_word_embeddings=True
    ),
    "Qwen2.5-1.5B": _published(
        "qwen2", (28, 1536, 12, 2, 8960, 151936), tie_word_embeddings=True
    ),
    "Qwen2.5-3B": _published(
        "qwen2", (36, 2048, 16, 2, 11008, 151936), tie_word_embeddings=True
    ),
    "Qwen2.5-7B": _published("qwen2", (28, 3584, 28, 4, 18944, 152064)),
    "Qwen2.5-32B": _published("qwen2", (64, 5120, 40, 8, 27648, 152064)),
    "Qwen3-0.6B": _published(
        "qwen3", (28, 1024, 16, 8, 3072, 151936), tie_word_embeddings=True
    ),
    "Qwen3-32B": _published("qwen3", (64, 5120, 64, 8, 25600, 151936)),
    "Qwen3-30B-A3B": _published(
        "qwen3_moe", (48, 2048, 32, 4, 6144, 151936), head_dim=128, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768,
    ),
    "Llama-2-7B": _published("llama", (32, 4096, 32, 32, 11008, 32000)),
    "Llama-3.1-8B": _published("llama", (32, 4096, 32, 8, 14336, 128256)),
}  # fmt: skip
"""By name what counts of the `config.json` that a model is published with."""

KNOWN_MODELS = {name: model_from_config(config, name) for name, config in PUBLISHED.items()}
