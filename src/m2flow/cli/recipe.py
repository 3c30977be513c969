"""Recipes: YAML and `key=value` overrides into a validated model, errors into one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from m2flow.errors import UserError, nearest, suggestion
from m2flow.reasoning.config import ReasoningRecipe

WORKLOADS: Mapping[str, type[BaseModel]] = {"reasoning": ReasoningRecipe}


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> ReasoningRecipe:
    """Read a recipe file and apply overrides.

    Args:
        path: a YAML file.
        overrides: `key=value`, where a dot in the key leads into a section.

    Raises:
        UserError: no such file, no YAML, an unknown key (with the nearest valid one), a value of
            the wrong type, or sizes that do not fit each other.
    """
    data = read_yaml(path)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise UserError("is not an override", value=override, expected="key=value")
        _set(data, key.split("."), _parsed(value, key))
    return validated(data)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    if not path.is_file():
        close = nearest(path.name, [p.name for p in path.parent.glob("*.yaml")])
        raise UserError(
            "there is no such recipe",
            key=str(path),
            hint=f"did you mean {path.parent / close}?" if close else None,
        )
    data = _parsed(path.read_text(), str(path))
    if not isinstance(data, dict):
        raise UserError("must be a table of keys", key=str(path), value=data)
    return data


def validated(data: Mapping[str, Any]) -> ReasoningRecipe:
    """Check a recipe's data against the model of its workload."""
    workload = data.get("workload", "reasoning")
    if workload not in WORKLOADS:
        raise UserError(
            "is not a workload",
            key="workload",
            value=workload,
            hint=suggestion(str(workload), WORKLOADS),
        )
    model = WORKLOADS[workload]
    try:
        recipe = model.model_validate(data)
    except ValidationError as error:
        raise _one_line(model, error) from None
    assert isinstance(recipe, ReasoningRecipe)
    return recipe


def _parsed(text: str, key: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"is not YAML: {error}", key=key) from None


def _set(data: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        inner = data.setdefault(name, {})
        if not isinstance(inner, dict):
            raise UserError("is not a section", key=name, value=inner)
        data = inner
    data[path[-1]] = value


def _one_line(model: type[BaseModel], error: ValidationError) -> UserError:
    """The first thing that pydantic found, in our words."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    key = ".".join(path)
    if first["type"] == "extra_forbidden":
        return UserError("unknown key", key=key, hint=suggestion(path[-1], _fields(model, path)))
    if isinstance(cause := first.get("ctx", {}).get("error"), UserError):
        return cause
    return UserError(
        "is wrong", key=key, value=first.get("input"), expected=_expected(first["msg"])
    )


def _expected(message: str) -> str:
    for opening in ("Input should be ", "Value error, "):
        message = message.removeprefix(opening)
    return message


def _fields(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    """Valid names at the place in the recipe that a path leads to."""
    for name in path[:-1]:
        inner = model.model_fields[name].annotation
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            break
        model = inner
    return list(model.model_fields)
