"""Which models transformers' own forward pass can draw from, told from a configuration alone.

Any causal language model that is part of transformers, reads text alone, and keeps keys and values
of each token: so that rows of different lengths share a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from m2flow.errors import UserError

CACHE_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}
"""Layers that keep keys and values of each token, or nothing; by name, as not every transformers
has each."""

OTHER_ENGINE = "take a model of another kind, or see if vLLM knows it: generation.engine: vllm"

NOT_PACKED = {
    "deepseek_v4": "its attention has sinks",
    "doge": "its attention adds a mask that it makes of the values",
    "flint": "its attention has sinks",
    "gpt_oss": "its attention has sinks",
    "granite_swa": "its attention has sinks",
    "granitemoe_swa": "its attention has sinks",
    "hy_v4": "its attention has sinks",
    "mimo_v2_flash": "its attention has sinks",
    "nemotron": "its layers do not tell their attention which rows are packed",
}
"""Model types whose attention transformers dispatches, but not in the way that packs need."""


def check_packs(config: Mapping[str, Any]) -> None:
    """Refuse a causal language model that would take a pack for one long row.

    Of such a model `packed_attention` cannot replace the attention, or a layer carries a state from
    token to token.

    Args:
        config: the content of a `config.json`.

    Raises:
        UserError: names the model type.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    kind = config.get("model_type")
    known = kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING
    if not known:
        raise UserError(
            "transformers has no causal language model of this type, so it is not trained",
            key="model_type",
            value=kind,
            expected="a model that AutoModelForCausalLM knows",
        )
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[kind]]
    why = NOT_PACKED.get(str(kind))
    if not model._supports_attention_backend:
        why = "its attention cannot be replaced"
    elif why is None and _other_layers(configuration_of(config)):
        why = "not all layers keep keys and values of each token, and nothing else"
    if why is not None:
        raise UserError(
            f"{why}, so prompts and answers cannot be packed: it generates, and is not trained",
            key="model_type",
            value=kind,
            expected="a model whose attention transformers dispatches, causal, in windows or not",
        )


def check_causal_lm(config: Mapping[str, Any]) -> None:
    """Refuse what has no forward pass that draws one token after another here.

    Args:
        config: the content of a `config.json`.

    Raises:
        UserError: names the key of the configuration, and what would do.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = config.get("model_type")
    if config.get("is_encoder_decoder"):
        raise UserError(
            "an encoder reads the prompt, and no answer is drawn by going on with it",
            key="is_encoder_decoder",
            value=True,
            expected="a causal (decoder-only) language model",
        )
    made = configuration_of(config)
    if type(made) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            "transformers has no causal language model of this kind",
            key="model_type",
            value=kind,
            expected="a causal (decoder-only) language model",
        )
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(made)]
    if made.get_text_config(decoder=True) is not made:
        raise UserError(
            "a model of more than text",
            key="model_type",
            value=kind,
            expected="its text model in a folder of its own, such as gemma3_text of gemma3",
        )
    if model._is_stateful or _other_layers(made):
        raise UserError(
            "layers keep a state, and not keys and values of each token, so requests of different "
            "lengths cannot share a batch",
            key="model_type",
            value=kind,
            expected="a model that attends in every layer",
            hint=OTHER_ENGINE,
        )
    if "chunked_attention" in (getattr(made, "layer_types", None) or ()):
        raise UserError(
            "attention within chunks of the prompt depends on how a batch is padded",
            key="layer_types",
            value="chunked_attention",
            expected="full_attention or sliding_attention",
            hint=OTHER_ENGINE,
        )


def _other_layers(config: Any) -> set[str]:
    """What the cache of a `transformers` configuration has beside `CACHE_LAYERS`."""
    from transformers import DynamicCache

    return {type(layer).__name__ for layer in DynamicCache(config=config).layers} - CACHE_LAYERS


def configuration_of(config: Mapping[str, Any]) -> Any:
    """The configuration as transformers has it built in.

    Raises:
        UserError: it has no such architecture, or the content is not of one.
    """
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        known = "auto_map" in config
        raise UserError(
            "its code comes with the model, and m2flow runs none but that of transformers"
            if known
            else "transformers does not know this architecture",
            key="auto_map" if known else "model_type",
            value=config["auto_map"] if known else kind,
            expected="a causal language model that transformers has built in, such as qwen2, "
            "qwen3, llama, mistral or gemma3_text",
            hint=OTHER_ENGINE,
        )
    try:
        return CONFIG_MAPPING[kind].from_dict(dict(config))
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"config.json holds what no such model has ({error})",
            key="model_type",
            value=kind,
            expected="the configuration that the model was published with",
        ) from error
