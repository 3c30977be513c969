"""Plans, profiles and other data classes as JSON text, in and out.

`to_json` writes any nest of data classes, mappings and sequences; a data class becomes an object
with a key for each field. `from_json` reads a data class back and checks every value against the
type of its field: strictly (no number is read from a string, no integer from a boolean), except
that a whole number passes for a float. Keys with a default may be left out.

The first mistake in the text becomes one line: the file, the path of the key, what was found, what
was expected and, for an unknown key, the nearest valid name. Pydantic is imported on first use,
since `import m2flow` loads this module.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from m2flow.engine.plan import Plan
from m2flow.errors import PlanError, UserError, reading, suggestion
from m2flow.plan.profile import Profile

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

LONGEST_VALUE = 80
"""Characters of a wrong value that are repeated in the error; a longer value is left out."""

DECISION = "decision"
"""The key of a plan file, beside the plan's own, that says why the plan was chosen; not read."""

UNKNOWN_KEY, MISSING = "unexpected_keyword_argument", "missing"


def to_json(value: object) -> str:
    """JSON text of data classes, mappings and sequences, indented for people to read and edit."""
    from pydantic import ConfigDict, TypeAdapter

    writer = TypeAdapter(object, config=ConfigDict(ser_json_inf_nan="constants"))
    return writer.dump_json(value, indent=2).decode() + "\n"


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
    except (ValueError, RecursionError) as mistake:  # a number of 5,000 digits, a thousand brackets
        raise error(f"is not JSON: {mistake}", key=where) from None
    if isinstance(data, dict):
        data = {key: value for key, value in data.items() if key not in ignore}
    try:
        value: T = _adapter(cast(Hashable, kind)).validate_json(json.dumps([data]))[0]
    except ValidationError as found:
        raise _first(kind, found, where, error) from None
    return value


def read_json(
    kind: type[T],
    path: Path | str,
    what: str,
    key: str,
    error: type[UserError] = UserError,
    ignore: Sequence[str] = (),
) -> T:
    """Read a data class from a file that a user has named.

    Args:
        kind, error, ignore: as in `from_json`.
        path: the file.
        what: kind of file, for the error.
        key: option or setting that names the file, for the error.

    Raises:
        UserError: there is no such file, it may not be read, it is not text, or `from_json` refuses
            it.
    """
    path = Path(path)
    try:
        with reading(path):
            if not path.is_file():
                raise error(f"there is no such {what}", key=key, value=str(path))
            text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise error("is not a text file", key=key, value=str(path)) from None
    return from_json(kind, text, str(path), error, ignore)


def read_plan(path: Path | str) -> Plan:
    """Read a plan file.

    Raises:
        PlanError: what `read_json` refuses.
    """
    return read_json(Plan, path, "plan file", "--plan", PlanError, ignore=(DECISION,))


def read_profile(path: Path | str) -> Profile:
    """Read a profile file.

    Raises:
        UserError: what `read_json` refuses, or an impossible value (a curve that falls).
    """
    return read_json(Profile, path, "profile", "profile")


@cache
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    """The validator of `[value]`: the list takes the configuration, which a data class does not."""
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(tuple[kind], config=ConfigDict(extra="forbid", strict=True))  # type: ignore[valid-type]


def _first(kind: type[Any], found: Any, where: str, error: type[UserError]) -> UserError:
    """The first of pydantic's errors in one line; an unknown key explains a missing one."""
    entries = found.errors(include_url=False)
    entry = min(entries, key=lambda entry: entry["type"] != UNKNOWN_KEY)
    path = entry["loc"][1:]  # such as ("lanes", 0, "id"), told as lanes[0].id
    steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    key = f"{where}: {steps.removeprefix('.')}" if path else where
    value = entry["input"] if len(repr(entry["input"])) <= LONGEST_VALUE else None
    message = entry["msg"].removeprefix("Value error, ")
    if entry["type"] == UNKNOWN_KEY:
        return error("unknown key", key=key, hint=suggestion(str(path[-1]), _keys(kind)))
    if entry["type"] == MISSING:
        return error("is missing", key=key)
    if entry["type"] == "value_error":
        return error(message, key=key)
    expected = message.removeprefix("Input should be ")
    return error("is of the wrong type", key=key, value=value, expected=expected)


def _keys(kind: type[Any]) -> set[str]:
    """The keys that objects have in a file of this kind."""
    schema = _adapter(cast(Hashable, kind)).json_schema()
    return {key for one in schema["$defs"].values() for key in one.get("properties", ())}
