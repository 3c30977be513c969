"""Recipes: YAML and `key=value` overrides into a validated model, errors into one line."""

from __future__ import annotations

import copy
import difflib
import json
import logging
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from m2flow.errors import UserError, nearest, reading, suggestion
from m2flow.observe.yaml_text import NumberLoader
from m2flow.workloads.common.recipe import Recipe
from m2flow.workloads.common.registry import workload_named
from m2flow.workloads.common.secret_keys import refuse_secrets
from m2flow.workloads.common.shipped import recipe_file, shipped_recipes

_log = logging.getLogger(__name__)

BASE = "base"
"""Key of a recipe's file: another file beside it, or a recipe of m2flow, that it stands on."""

Source: TypeAlias = str | Path | Mapping[str, Any] | Recipe
"""A recipe: its YAML file, the name of one of m2flow's, its keys and values, or itself."""


def read_recipe(source: Source, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Recipe:
    """Read a recipe and apply overrides; warn of keys that somebody has written without effect.

    Args:
        source: a YAML file, the name of a recipe of m2flow, a table of keys, or a recipe.
        overrides: `key=value` each, or values by key; a dot in a key leads into a section.

    Raises:
        UserError: no such file, no YAML, an unknown key (with the nearest valid one), a value of
            the wrong type, what looks like a secret, or sizes that do not fit each other.
    """
    own: dict[str, Any]
    data: dict[str, Any]
    if isinstance(source, Recipe):
        own, data = {}, source.model_dump(mode="json")
    elif isinstance(source, Mapping):
        own = data = dict(source)
    else:
        own, data = read_yaml(recipe_file(Path(source))), recipe_keys(Path(source))
    said = list(_overrides(overrides))
    asked = _changed(data, said)
    stand_ins = workload_named(asked.get("workload")).recipe.stand_ins(asked)
    recipe = validated(_changed(data, [*stand_ins.items(), *said]) if stand_ins else asked)
    if (notice := recipe.without_effect(_changed(own, said))) is not None:
        _log.warning("%s", notice)
    return recipe


def recipe_keys(path: Path) -> dict[str, Any]:
    """The keys of a recipe's file, or of the recipe of m2flow that has this name, unchecked."""
    return _with_base(recipe_file(path))


def _with_base(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The keys of a recipe's file, on top of those of the file that its `base` names.

    Sections are merged key by key; any other value takes the place of the base's.
    """
    data = read_yaml(path)
    base = data.pop(BASE, None)
    if base is None:
        return data
    if not isinstance(base, str) or not base:
        raise UserError(
            "is no file", key=f"{path}: {BASE}", value=base, expected="a recipe beside this one"
        )
    above = (*above, path.resolve())
    below = recipe_file(Path(base), path.parent)
    if below.resolve() in above:
        raise UserError("leads back to itself", key=f"{path}: {BASE}", value=base)
    return _merged(_with_base(below, above), data)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        inner = merged.get(key)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            value = _merged(inner, value)
        merged[key] = value
    return merged


def _changed(data: Mapping[str, Any], changes: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    changed: dict[str, Any] = _unshared(data)
    for key, value in changes:
        _set(changed, key, _unshared(value))
    return changed


def _unshared(value: Any) -> Any:
    """Copy a value so that no table stands in it twice, as one does that an alias of YAML repeats.

    A change to one section would change the other, too.
    """
    if isinstance(value, Mapping):
        return {key: _unshared(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_unshared(inner) for inner in value]
    return copy.deepcopy(value)


def _overrides(overrides: Sequence[str] | Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(overrides, Mapping):
        yield from overrides.items()
        return
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise UserError(
                "is not an override", key=override, expected="key=value, such as steps=100"
            )
        yield key, parsed(value, key)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    path = Path(path)
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "there is no such recipe"
        raise UserError(
            problem,
            key=str(path),
            expected="a YAML file, or a name that `m2flow recipes` lists",
            hint=_near_recipes(path),
        )
    try:
        with reading(path):
            text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError("is not text", key=str(path), expected="a YAML file in UTF-8") from None
    data = parsed(text, str(path))
    if not isinstance(data, dict):
        found = type(data).__name__ if data is not None else "nothing"
        raise UserError(
            f"must be a table of keys, and holds {found}",
            key=str(path),
            expected="lines such as `steps: 100`",
        )
    return data


def validated(data: Mapping[str, Any]) -> Recipe:
    """Check a recipe's data against the model of its workload."""
    model = workload_named(data.get("workload")).recipe
    try:
        recipe = model.model_validate(data)
    except ValidationError as error:
        raise _one_line(model, error) from None
    refuse_secrets(data)  # a key that is only misspelt has been named by now
    return recipe


_KEY_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")


class _YamlLoader(NumberLoader):
    """The YAML of recipes, where every key is text and stands once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag not in _KEY_TAGS:
                raise yaml.MarkedYAMLError(problem="a key is no text", problem_mark=key.start_mark)
            if key.value in seen:
                problem = f"{key.value} stands there twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def parsed(text: str, key: str) -> Any:
    """A value in YAML, in which numbers know how they were written.

    Raises:
        UserError: under the name `key`, if it is none.
    """
    try:
        # A safe loader that refuses doubled keys. What holds itself is nested without an end.
        return _unshared(yaml.load(text, _YamlLoader))  # noqa: S506
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        problem = f"cannot be read as YAML: {error.problem}{where}"
    except (yaml.YAMLError, ValueError) as error:  # a date such as 2024-13-45 is a ValueError
        problem = f"cannot be read as YAML: {error}"
    except RecursionError:
        problem = "cannot be read as YAML: it is nested too deeply"
    raise UserError(problem, key=key)


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    """Put a value where the dots of a key lead, through sections that may be missing or empty."""
    *sections, name = key.split(".")
    for number, section in enumerate(sections):
        inner = data.get(section)
        if inner is None:
            inner = data[section] = {}
        if not isinstance(inner, dict):
            there = ".".join(sections[: number + 1])
            raise UserError(f"{there} is no section", key=key, value=inner)
        data = inner
    data[name] = value


_TYPES = {
    "dict_type": "a table of keys",
    "list_type": "a list, in brackets",
    "model_type": "a table of keys",
    "tuple_type": "a list, in brackets",
}
"""What pydantic calls by the types of Python, in words of YAML."""


def check_option(key: str, value: object, wanted: Any) -> None:
    """Refuse an option's value that is of another type than what takes it declares.

    Args:
        key: of the recipe, for the error.
        value: as YAML gave it; a list will do for a tuple.
        wanted: a type.

    Raises:
        UserError: it is of another type.
    """
    try:
        TypeAdapter(wanted).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        raise UserError(
            "is wrong", key=key, value=value, expected=_what_was_expected(error)
        ) from None


def _what_was_expected(error: ValidationError) -> str:
    """Say what would have been right in place of the first thing that pydantic found."""
    first = error.errors()[0]
    said = re.sub(r"^(Input should be|Value error,|\w+ should have) ", "", first["msg"])
    said = re.sub(r"\b\d{20,}\b", lambda digits: f"{float(digits[0]):g}", said)
    return _TYPES.get(first["type"], re.sub(" after validation, not .*", "", said))


def _one_line(model: type[Recipe], error: ValidationError) -> UserError:
    """The first thing that pydantic found, in our words."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    key, context = ".".join(path), first.get("ctx", {})
    if first["type"] == "extra_forbidden":
        return UserError("unknown key", key=key, hint=_near_key(model, path))
    if isinstance(cause := context.get("error"), UserError):
        return cause
    if first["type"] == "missing":
        return UserError("is missing", key=key, value=first["input"] or None)
    expected = _what_was_expected(error)
    valid = re.findall(r"'([^']*)'", expected) if first["type"] == "literal_error" else []
    close = nearest(str(first.get("input")), valid)
    return UserError(
        "is wrong",
        key=key,
        value=first.get("input"),
        expected=expected,
        hint=f"did you mean {close!r}?" if close else None,
    )


def _near_key(model: type[BaseModel], path: Sequence[str]) -> str:
    """What an unknown key may have meant: a like name in its section, or its name in others."""
    here = model
    for name in path[:-1]:
        if not name.isdigit():  # the place in a list of sections
            here = _section(here.model_fields[name].annotation) or here
    elsewhere = [key for key in _keys(model) if key.split(".")[-1] == path[-1]]
    if elsewhere and not nearest(path[-1], here.model_fields):
        return f"did you mean {' or '.join(map(repr, elsewhere))}?"
    return suggestion(path[-1], here.model_fields)


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of a recipe, with dots, those of a section after the section itself."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section that a field's type is, or holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_section(one) for one in typing.get_args(annotation))
    return next((one for one in inner if one is not None), None)


def _near_recipes(path: Path) -> str | None:
    """Which recipes a path may have meant: files beside it or in `recipes`, and those of m2flow."""
    folders = (path.parent, path.parent / "recipes")
    there = {file.name: str(file) for folder in folders for file in folder.glob("*.y*ml")}
    there |= {name: name for name in shipped_recipes()}
    close = difflib.get_close_matches(path.name, there, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(there[name] for name in close)}?" if close else None
