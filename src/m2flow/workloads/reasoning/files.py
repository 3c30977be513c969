"""What a recipe names and this machine does not have: a dry run tells, where a run would refuse."""

from __future__ import annotations

from typing import TypeVar

from m2flow.errors import UserError, is_there
from m2flow.models.folder import checked_folder, read_json
from m2flow.workloads.reasoning.config import ReasoningRecipe, WarmupSection

AnyRecipe = TypeVar("AnyRecipe", bound=ReasoningRecipe)


def lacking(recipe: ReasoningRecipe) -> list[str]:
    """Return a line for each model and each file of the recipe that is not there, or not whole."""
    models, files = _models(recipe), _files(recipe)
    found = [f"{key}: {why}" for key, path in models.items() if path and (why := _lacks(path))]
    gone = [
        f"{key}: there is no {path}" for key, path in files.items() if path and not is_there(path)
    ]
    return found + gone


def names_files(recipe: ReasoningRecipe) -> bool:
    """Return whether the recipe names a model or a file: else all of a run is made on the spot."""
    return any((_models(recipe) | _files(recipe)).values())


def _models(recipe: ReasoningRecipe) -> dict[str, str | None]:
    return {
        "model.path": recipe.model.path,
        "reward_model.path": recipe.reward_model.path,
        "judge.path": recipe.judge.path,
    }


def _files(recipe: ReasoningRecipe) -> dict[str, str | None]:
    return {"data.path": recipe.data.path, "data.eval_path": recipe.data.eval_path}


def without_warmup(recipe: AnyRecipe) -> AnyRecipe:
    """Return the recipe; where it names a model, without the warm-up that would load it."""
    if recipe.model.path is None:
        return recipe
    return recipe.model_copy(update={"warmup": WarmupSection()})


def _lacks(path: str) -> str:
    """Return what a folder of a model lacks; nothing where all of it is there."""
    try:
        read_json(checked_folder(path) / "tokenizer_config.json", "the tokenizer")
    except UserError as error:
        return str(error)
    return ""
