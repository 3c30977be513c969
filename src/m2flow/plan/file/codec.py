"""Data classes as JSON text, in and out.

`to_json` writes any nest of data classes, mappings and sequences; a data class becomes an object
with a key for each field. `from_json` reads a data class back and checks every value against the
type of its field: strictly (no number is read from a string, no integer from a boolean), except
that a whole number passes for a float. Keys with a default may be left out.

The first mistake in the text becomes one line: the file, the path of the key, what was found, what
was expected and, for an unknown key, the nearest valid name. Pydantic is imported on first use,
since `import m2flow` loads this module.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from m2flow.errors import UserError, suggestion

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

LONGEST_VALUE = 80
"""Characters of a wrong value that are repeated in the error; a longer value is left out."""

UNKNOWN_KEY, MISSING = "unexpected_keyword_argument", "missing"


def to_json(value: object) -> str:
    """JSON text of data classes, mappings and sequences, indented for people to read and edit."""
    return _writer().dump_json(value, indent=2).decode() + "\n"


def from_json(
    kind: type[T],
    text: str,
    where: str,
    error: type[UserError] = UserError,
    ignore: Sequence[str] = (),
) -> T:
    """Read a data class from JSON text.

    Args:
        kind: the data class.
        text: JSON, as `to_json` writes it.
        where: name of the file, for the error.
        error: class of the error.
        ignore: keys of the outermost object that are skipped.

    Raises:
        UserError: the text is no JSON; a key is unknown or missing; a value has the wrong type, or
            is one that the data class refuses with a `UserError`.
    """
    from pydantic import ValidationError

    try:
        data = json.loads(text)
    except json.JSONDecodeError as mistake:
        raise error(f"is not JSON: {mistake}", key=where) from None
    if isinstance(data, dict):
        data = {key: value for key, value in data.items() if key not in ignore}
    try:
        value: T = _adapter(cast(Hashable, kind)).validate_json(json.dumps([data]))[0]
    except ValidationError as found:
        raise _first(kind, found, where, error) from None
    return value


def read_text(path: Path | str, what: str, key: str, error: type[UserError] = UserError) -> str:
    """The text of a file that a user has named.

    Args:
        path: the file.
        what: kind of file, for the error.
        key: option or setting that names the file, for the error.
        error: class of the error.

    Raises:
        UserError: there is no such file, or it is not text.
    """
    path = Path(path)
    if not path.is_file():
        raise error(f"there is no such {what}", key=key, value=str(path))
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise error("is not a text file", key=key, value=str(path)) from None


@cache
def _writer() -> TypeAdapter[object]:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(object, config=ConfigDict(ser_json_inf_nan="constants"))


@cache
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    """The validator of `[value]`: the list takes the configuration, which a data class does not."""
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(tuple[kind], config=ConfigDict(extra="forbid", strict=True))  # type: ignore[valid-type]


def _first(kind: type[Any], found: Any, where: str, error: type[UserError]) -> UserError:
    """The first of pydantic's errors in one line; an unknown key explains a missing one."""
    entries = found.errors(include_url=False)
    entry = min(entries, key=lambda entry: entry["type"] != UNKNOWN_KEY)
    path = entry["loc"][1:]
    key = f"{where}: {_path_text(path)}" if path else where
    value = entry["input"] if len(repr(entry["input"])) <= LONGEST_VALUE else None
    message = entry["msg"].removeprefix("Value error, ")
    if entry["type"] == UNKNOWN_KEY:
        return error("unknown key", key=key, hint=suggestion(str(path[-1]), _fields(kind, path)))
    if entry["type"] == MISSING:
        return error("is missing", key=key)
    if entry["type"] == "value_error":
        return error(message, key=key)
    expected = message.removeprefix("Input should be ")
    return error("is of the wrong type", key=key, value=value, expected=expected)


def _path_text(path: Sequence[str | int]) -> str:
    """`("lanes", 0, "id")` as `lanes[0].id`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def _fields(kind: Any, path: Sequence[str | int]) -> list[str]:
    """Field names of the data class whose key `path` ends with."""
    for step in path[:-1]:
        kind = _inner(_bare(kind), step)
    return [field.name for field in dataclasses.fields(_bare(kind))]


def _inner(kind: Any, step: str | int) -> Any:
    """The type of what lies in a value of type `kind` under a key or an index."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return typing.get_type_hints(kind)[str(step)]
    inner = typing.get_args(kind)
    if issubclass(typing.get_origin(kind), Mapping):
        return inner[1]
    return inner[0] if inner[-1] is Ellipsis or len(inner) == 1 else inner[int(step)]


def _bare(kind: Any) -> Any:
    """A type without `NewType` and `| None`."""
    kind = getattr(kind, "__supertype__", kind)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return _bare(next(one for one in typing.get_args(kind) if one is not type(None)))
    return kind
