"""What plans must know of a recipe's model: whether it can run, and what of it is divided.

Nothing here imports torch for a model that the native engine computes itself.
"""

from __future__ import annotations

import logging
from functools import cache

from m2flow.errors import UserError
from m2flow.generation.supported import check_supported, not_fused
from m2flow.models.shape import config_of, read_model
from m2flow.workloads.reasoning.config import ReasoningRecipe


def check_model(recipe: ReasoningRecipe, model: str | None = None) -> None:
    """Refuse a model that the native engine does not compute; other engines know best.

    Says once where transformers' own forward pass is run. A model that is not here is not judged:
    the run itself refuses it.

    Args:
        recipe: its model is judged.
        model: a `config.json`, its folder or a known name in place of the recipe's model.

    Raises:
        UserError: names the model and what of it is not computed.
    """
    if recipe.generation.engine != "native":
        return
    key, source = ("model.path", recipe.model.path) if model is None else ("--model", model)
    if source is not None:
        check_generation(source, key)


def check_generation(source: str, key: str) -> None:
    """As `check_model`, of a `config.json`, its folder or a known name that `key` has given."""
    try:
        config, _ = config_of(source)
    except UserError:  # whoever needs the model says what is wrong with it
        return
    try:
        notice = check_supported(config)
    except UserError as error:
        raise UserError(str(error), key=key, value=source) from None
    if notice is not None:
        _say(f"{source}: {notice}")


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


def heads_of(recipe: ReasoningRecipe, model: str | None = None) -> int | None:
    """Key-value heads of the recipe's model, or of another in its place; None if nobody knows."""
    if model is None and recipe.model.path is None:
        return recipe.model.num_key_value_heads
    return key_value_heads(str(model if model is not None else recipe.model.path))


def key_value_heads(source: str) -> int | None:
    """Key-value heads of a model, as `read_model` finds it; None if its sizes are not known."""
    try:
        return read_model(source).kv_heads
    except UserError:  # the run says what is wrong with the folder
        return None
