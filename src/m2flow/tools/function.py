"""A Python function as a tool: its name, its docstring, and the types of its parameters."""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from m2flow.tools.tool import ToolError

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


class FunctionTool:
    """Calls a function with the arguments that it names.

    A `ToolError` that the function raises is told to the model; all else is the function's failure.
    A call that takes too long is left to itself.

    Args:
        function: takes texts, numbers and truth values, and returns what has a text; it may be a
            coroutine function, which is run to its end.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.name: str = getattr(function, "__name__", type(function).__name__)
        self.description = inspect.getdoc(function) or self.name
        self._signature = inspect.signature(function)
        try:
            hints = typing.get_type_hints(function)
        except (NameError, TypeError):
            hints = {}
        parameters = self._signature.parameters.values()
        several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        self._kinds = {
            one.name: hints[one.name]
            for one in parameters
            if hints.get(one.name) in _TYPES and one.kind not in several
        }
        described = {one.name: {"type": _TYPES[self._kinds.get(one.name, str)]}
                     for one in parameters}  # fmt: skip
        required = [one.name for one in parameters if one.default is one.empty]
        self.parameters: Mapping[str, Any] = {
            "type": "object", "properties": described, "required": required
        }  # fmt: skip

    def call(self, arguments: Mapping[str, Any], seconds: float) -> str:
        """What the function returns, as text."""
        try:
            bound = self._signature.bind(**arguments)
        except TypeError as error:
            raise ToolError(str(error)) from None
        for name in bound.arguments.keys() & self._kinds.keys():
            bound.arguments[name] = _read_as(self._kinds[name], name, bound.arguments[name])
        found = self._function(*bound.args, **bound.kwargs)
        return str(asyncio.run(found) if inspect.iscoroutine(found) else found)

    def close(self) -> None:
        """A function holds nothing."""


def _read_as(kind: type, name: str, value: Any) -> Any:
    """An argument as its parameter's type; where a dialect has no types it comes as a text.

    Raises:
        ToolError: it is none of that type.
    """
    if value is None or (isinstance(value, kind) and isinstance(value, bool) == (kind is bool)):
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    whole = isinstance(value, float) and value.is_integer()  # as JSON may write a whole number
    if number and (kind in (float, str) or (kind is int and whole)):
        return kind(value)
    try:
        if kind is bool and isinstance(value, str):
            return {"true": True, "false": False}[value.strip().lower()]
        if kind in (int, float) and isinstance(value, str):
            return kind(value)
    except (ValueError, KeyError):
        pass
    raise ToolError(f"{name} must be of the type {_TYPES[kind]}, and is {value!r}")
