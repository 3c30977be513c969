"""A Python function as a tool: its name, its docstring, and the types of its parameters."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any

from m2flow.errors import UserError
from m2flow.rewards.event_loop import run_coroutine
from m2flow.tools.tool import ToolError

_TYPES = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object",
}  # fmt: skip


class FunctionTool:
    """Calls a function with the arguments that it names.

    A `ToolError` that the function raises is told to the model; all else is the function's failure.
    A call that takes too long is left to itself, and that of a coroutine function is cancelled.

    Args:
        function: takes texts, numbers, truth values, lists and objects, and returns what has a
            text; it may be a coroutine function, which is run to its end. A parameter without a
            type is told as a text; `*args` and `**kwargs` are not told.

    Raises:
        UserError: a parameter has a type that a model cannot be told.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.name: str = getattr(function, "__name__", type(function).__name__)
        self.description = inspect.getdoc(function) or self.name
        try:
            self._signature = inspect.signature(function, eval_str=True)
        except (NameError, AttributeError, SyntaxError, TypeError, ValueError) as error:
            raise _untold(f"its types cannot be read: {error}", self.name) from error
        self._signature = _by_name(self._signature)
        several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        told = [one for one in self._signature.parameters.values() if one.kind not in several]
        self._kinds = {one.name: one.annotation for one in told if one.annotation is not one.empty}
        self.parameters: Mapping[str, Any] = {
            "type": "object",
            "properties": {one.name: self._described(one.name) for one in told},
            "required": [one.name for one in told if one.default is one.empty],
        }

    def call(self, arguments: Mapping[str, Any], seconds: float) -> str:
        """What the function returns, as text."""
        try:
            bound = self._signature.bind(**arguments)
        except TypeError as error:
            raise ToolError(str(error)) from None
        for name, value in bound.arguments.items():
            if value is None and self._signature.parameters[name].default is None:
                continue
            if name in self._kinds or value is None:
                bound.arguments[name] = _read_as(self._kinds.get(name, str), name, value)
        bound.apply_defaults()  # in front of a positional argument none may be left out
        found = self._function(*bound.args, **bound.kwargs)
        return str(run_coroutine(found, seconds) if inspect.iscoroutine(found) else found)

    def close(self) -> None:
        """A function holds nothing."""

    def _described(self, name: str) -> dict[str, Any]:
        kind = self._kinds.get(name, str)
        schema = _schema(kind)
        if schema is None:
            said = inspect.formatannotation(kind)
            raise _untold(f"a model cannot be told the type of {name!r}", f"{self.name}: {said}")
        return schema


def _by_name(signature: inspect.Signature) -> inspect.Signature:
    """A signature whose positional-only parameters may be given by name, as a model gives them."""
    only, either = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    given = signature.parameters.values()
    return signature.replace(
        parameters=[one.replace(kind=either) if one.kind is only else one for one in given]
    )


def _untold(why: str, value: str) -> UserError:
    return UserError(
        why,
        key="tools",
        value=value,
        expected="str, int, float, bool, list, dict, Literal[...], Any, or T | None of one of them",
    )


def _bare(kind: Any) -> tuple[Any, bool]:
    """A type without what is noted beside it, and without None; and whether it admits None."""
    admits_none = False
    while True:
        inner = typing.get_args(kind)
        if typing.get_origin(kind) in (typing.Union, UnionType):
            admits_none |= NoneType in inner
            inner = tuple(one for one in inner if one is not NoneType)
            if len(inner) > 1:
                return kind, admits_none
        elif typing.get_origin(kind) is not typing.Annotated:
            return kind, admits_none or kind is Any
        kind = inner[0]


def _schema(kind: Any) -> dict[str, Any] | None:
    """The JSON schema of a type's values; None where there is none."""
    kind, _ = _bare(kind)
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if kind is Any:
        return {}
    if origin is typing.Literal:
        (of, *others) = {type(value) for value in inner}
        return None if others or of not in _TYPES else {"type": _TYPES[of], "enum": list(inner)}
    if origin is list and inner:
        items = _schema(inner[0])
        return None if items is None else {"type": "array", "items": items}
    return {"type": _TYPES[origin]} if isinstance(origin, type) and origin in _TYPES else None


def _read_as(kind: Any, name: str, value: Any) -> Any:
    """An argument as its parameter's type; where a dialect has no types it comes as a text.

    Raises:
        ToolError: it is none of that type.
    """
    kind, admits_none = _bare(kind)
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if kind is Any or (value is None and admits_none):
        return value
    if origin is typing.Literal:
        chosen = _read_as(type(inner[0]), name, value)
        if chosen not in inner:
            raise ToolError(f"{name} must be one of {list(inner)}, and is {value!r}")
        return chosen
    value = _converted(origin, name, value)
    if origin is list and inner:
        return [_read_as(inner[0], name, one) for one in value]
    return value


def _converted(kind: type, name: str, value: Any) -> Any:
    """A value as one of `_TYPES`."""
    if isinstance(value, kind) and isinstance(value, bool) == (kind is bool):
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    whole = isinstance(value, float) and value.is_integer()  # as JSON may write a whole number
    try:
        if number and (kind in (float, str) or (kind is int and whole)):
            return kind(value)
        if kind is bool and isinstance(value, str):
            return {"true": True, "false": False}[value.strip().lower()]
        if kind in (int, float) and isinstance(value, str):
            return kind(value)
        if kind in (list, dict) and isinstance(value, str):
            read = json.loads(value)
            if isinstance(read, kind):
                return read
    except (ValueError, OverflowError, KeyError, RecursionError):
        pass
    raise ToolError(f"{name} must be of the type {_TYPES[kind]}, and is {value!r}")
