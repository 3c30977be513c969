"""What plans must know of a recipe's model, without torch: whether it can run, and its heads."""

from __future__ import annotations

from m2flow.errors import UserError
from m2flow.generation.supported import check_supported
from m2flow.models.shape import config_of, read_model
from m2flow.workloads.reasoning.config import ReasoningRecipe


def check_model(recipe: ReasoningRecipe, model: str | None = None) -> None:
    """Refuse a model that the native engine does not compute; other engines know best.

    A model that is not here is not judged: the run itself refuses it.

    Args:
        recipe: its model is judged.
        model: a `config.json`, its folder or a known name in place of the recipe's model.

    Raises:
        UserError: names the model and what of it is not computed.
    """
    if recipe.generation.engine != "native":
        return
    key, source = ("model.path", recipe.model.path) if model is None else ("--model", model)
    if source is None:
        return
    try:
        config, _ = config_of(source)
    except UserError:  # whoever needs the model says what is wrong with it
        return
    try:
        check_supported(config)
    except UserError as error:
        raise UserError(str(error), key=key, value=source) from None


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
