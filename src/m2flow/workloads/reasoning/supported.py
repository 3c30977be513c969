"""What plans must know of a recipe's model, without torch: whether it can run, and its heads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m2flow.errors import UserError
from m2flow.generation.supported import check_supported
from m2flow.models.shape import read_model
from m2flow.workloads.reasoning.config import ReasoningRecipe


def check_model(recipe: ReasoningRecipe, model: str | None = None) -> None:
    """Refuse a model that generation does not compute.

    A folder that is not here is not judged: the run itself refuses it.

    Args:
        recipe: its model is judged.
        model: a `config.json`, its folder or a known name in place of the recipe's model.

    Raises:
        UserError: names the model and what of it is not computed.
    """
    source = model if model is not None else recipe.model.path
    key = "--model" if model is not None else "model.path"
    if source is None:
        return
    config = config_json(source)
    if config is None:
        if model is None or not read_model(model).experts:
            return
        config = {"model_type": "mixture of experts"}
    try:
        check_supported(config)
    except UserError as error:
        raise UserError(str(error), key=key, value=source) from None


def heads_of(recipe: ReasoningRecipe, model: str | None = None) -> int | None:
    """Key-value heads of the recipe's model, or of another in its place; None if nobody knows."""
    if model is None and recipe.model.path is None:
        return recipe.model.num_key_value_heads
    source = str(model if model is not None else recipe.model.path)
    return read_model(source).kv_heads if model is not None else key_value_heads(source)


def key_value_heads(folder: str) -> int | None:
    """Key-value heads of the model in a folder; None if its `config.json` is not here."""
    config = config_json(folder)
    if config is None:
        return None
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads")
    return heads if isinstance(heads, int) else None


def config_json(source: str) -> Mapping[str, Any] | None:
    """The configuration in a folder or file; None if there is none that can be read."""
    path = Path(source).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not source or not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:  # the run says what is wrong with the folder
        return None
    return config if isinstance(config, dict) else None
