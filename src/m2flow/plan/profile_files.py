"""Profiles as JSON, in and out; what is read is checked like what is built."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m2flow.errors import UserError, suggestion
from m2flow.plan.profile import (
    Piecewise,
    Profile,
    Quantiles,
)


def to_json(profile: Profile) -> str:
    """The profile as JSON text; a curve is the list of its points."""
    return json.dumps(_plain(profile), indent=1) + "\n"


def from_json(text: str, where: str = "profile") -> Profile:
    """Read a profile back.

    Raises:
        UserError: it is no JSON, a key is unknown, missing or of the wrong type, or a value is
            impossible (a curve that falls, a negative size).
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"is not JSON: {error}", key=where) from None
    profile = _read(Profile, data, where)
    assert isinstance(profile, Profile)
    return profile


def read_profile(path: Path | str) -> Profile:
    """Read a profile file.

    Raises:
        UserError: there is no such file, or it is no profile.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError("there is no such profile", key="profile", value=str(path))
    return from_json(path.read_text(encoding="utf-8"), str(path))


def _plain(value: Any) -> Any:
    if isinstance(value, Piecewise):
        return [list(point) for point in value.points]
    if isinstance(value, Quantiles):
        return list(value.values)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            entry.name: _plain(getattr(value, entry.name)) for entry in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    return value


def _read(kind: Any, data: Any, where: str) -> Any:
    """A JSON value as the annotation `kind` wants it."""
    kind = getattr(kind, "__supertype__", kind)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if data is None and type(None) in inner:
            return None
        return _read(next(entry for entry in inner if entry is not type(None)), data, where)
    if kind is Piecewise:
        return _made(Piecewise, where, points=_read(tuple[tuple[float, float], ...], data, where))
    if kind is Quantiles:
        return _made(Quantiles, where, values=_read(tuple[float, ...], data, where))
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        return _object(kind, data, where)
    if origin is tuple and isinstance(data, list):
        if inner[-1] is Ellipsis:
            return tuple(_read(inner[0], entry, f"{where}[{n}]") for n, entry in enumerate(data))
        if len(inner) == len(data):
            return tuple(_read(one, entry, where) for one, entry in zip(inner, data, strict=True))
    elif origin is not None and isinstance(data, dict) and issubclass(origin, Mapping):
        return {key: _read(inner[1], entry, f"{where}.{key}") for key, entry in data.items()}
    elif kind is object:
        return data
    elif kind is float and isinstance(data, int | float) and not isinstance(data, bool):
        return float(data)
    elif isinstance(kind, type) and type(data) is kind:
        return data
    raise UserError("is of the wrong type", key=where, value=data, expected=_name(kind))


def _object(kind: type[Any], data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise UserError("must be a table", key=where, value=data)
    fields = {entry.name: entry for entry in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    for key in data:
        if key not in fields:
            raise UserError("unknown key", key=f"{where}.{key}", hint=suggestion(key, fields))
    for name, entry in fields.items():
        required = entry.default is entry.default_factory is dataclasses.MISSING
        if required and name not in data:
            raise UserError("is missing", key=f"{where}.{name}")
    values = {key: _read(hints[key], entry, f"{where}.{key}") for key, entry in data.items()}
    return _made(kind, where, **values)


def _made(kind: type[Any], where: str, /, **values: Any) -> Any:
    """Build it; what it refuses is told with the place in the file."""
    try:
        return kind(**values)
    except UserError as error:
        raise UserError(f"{error}", key=where) from None


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", None) or str(kind)
