"""What plans must know of a recipe's model: whether it can run, its shape, and what is divided.

Nothing here imports torch for a model that the native engine computes itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from m2flow.errors import UserError
from m2flow.generation.causal_lms import check_packs
from m2flow.generation.supported import check_experts, check_supported, not_fused
from m2flow.models.folder import check_not_quantized
from m2flow.models.shape import ModelShape, config_of, model_from_config, read_model
from m2flow.workloads.reasoning.config import ReasoningRecipe

BYTE_VOCABULARY = 384
"""Rows of the embedding of a tiny model that reads bytes."""


def check_model(recipe: ReasoningRecipe, model: str | None = None) -> None:
    """Refuse a model that is not trained in packs, or that the native engine does not compute.

    Other engines know best what they generate with. Says once where transformers' own forward pass
    is run. A model that is not here is not judged: the run itself refuses it.

    Args:
        recipe: its model is judged.
        model: a `config.json`, its folder or a known name in place of the recipe's model.

    Raises:
        UserError: names the model and what of it is not computed.
    """
    if recipe.judge.path is not None:
        check_generation(recipe.judge.path, "judge.path")
    key, source = ("model.path", recipe.model.path) if model is None else ("--model", model)
    if source is None:
        return
    if recipe.generation.engine == "native":
        check_generation(source, key)
    with _named(source, key) as config:
        if config is None:
            return
        check_not_quantized(config, source)
        if recipe.generation.engine != "native":
            check_experts(config)
        if not_fused(config) is not None:
            check_packs(config)


def check_generation(source: str, key: str) -> None:
    """Refuse a model that the native engine does not compute.

    Args:
        source: a `config.json`, its folder or a known name.
        key: what has named it.
    """
    with _named(source, key) as config:
        if config is not None and (notice := check_supported(config)) is not None:
            _say(f"{source}: {notice}")


@contextmanager
def _named(source: str, key: str) -> Iterator[Mapping[str, Any] | None]:
    """A model's configuration, if it is there; what is refused within names the model."""
    try:
        config, _ = config_of(source)
    except UserError:  # whoever needs the model says what is wrong with it
        yield None
        return
    try:
        yield config
    except UserError as error:
        raise UserError(str(error), key=key, value=source) from None


@cache
def _say(notice: str) -> None:
    """Warn, once in a process."""
    logging.getLogger(__name__).warning("%s", notice)


def is_divided(source: str) -> bool:
    """Whether generation divides a model over several lanes; so if nobody knows it."""
    try:
        return not_fused(config_of(source)[0]) is None
    except UserError:
        return True


def divides_by_heads(recipe: ReasoningRecipe, model: str | None = None) -> bool:
    """Whether trainers can divide layers by heads, as in `tpN`; so if nobody knows the model.

    Args:
        recipe: its model is judged.
        model: a `config.json`, its folder or a known name in place of the recipe's model.
    """
    if recipe.training.fused_kernels:  # they compute no layer that is divided
        return False
    source = recipe.model.path if model is None else model
    if source is None:
        return True
    try:
        config, _ = config_of(source)
    except UserError:
        return True
    return not_fused(config) is None or _is_divisible(json.dumps(config))


@cache
def _is_divisible(config: str) -> bool:
    """Whether a trainer divides a model of this `config.json`; asking takes torch."""
    from m2flow.training.tensor_parallel import check_divisible

    try:
        check_divisible(json.loads(config))
    except UserError:
        return False
    return True


def shape_of(recipe: ReasoningRecipe) -> ModelShape:
    """The shape of the recipe's model: that of its folder, or of the tiny one it builds.

    Raises:
        UserError: the folder has no `config.json`, and no known model has its name.
    """
    model = recipe.model
    if model.path is not None:
        try:
            return read_model(model.path)
        except UserError as error:
            if error.key != "model":
                raise
            raise UserError(
                "neither a folder with a config.json nor a model whose shape is known",
                key="model.path",
                value=model.path,
                hint="--model CONFIG.json or a known name says what shape it has",
            ) from None
    sizes = {
        "model_type": "qwen2",
        "num_hidden_layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "intermediate_size": model.intermediate_size,
        "vocab_size": BYTE_VOCABULARY,
        "tie_word_embeddings": True,
    }
    return model_from_config(sizes, "the recipe's tiny model")


def judging_shape(path: str, key: str) -> ModelShape:
    """The shape of a model that judges.

    Raises:
        UserError: under the name `key`, if nobody knows it.
    """
    try:
        return read_model(path)
    except UserError as error:
        raise UserError(
            f"the sizes of a model that judges are not known: {error}", key=key, value=path
        ) from None


def known_shape(recipe: ReasoningRecipe, model: str | None = None) -> ModelShape | None:
    """The shape of the recipe's model, or of another in its place; None if nobody knows."""
    try:
        return shape_of(recipe) if model is None else read_model(model)
    except UserError:  # the run says what is wrong with the folder
        return None


def key_value_heads(source: str) -> int | None:
    """Key-value heads of a model, as `read_model` finds it; None if its sizes are not known."""
    try:
        return read_model(source).kv_heads
    except UserError:  # the run says what is wrong with the folder
        return None
