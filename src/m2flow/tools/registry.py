"""Tools by the names that a recipe uses: m2flow's own, those of MCP servers, and functions."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from m2flow.errors import UserError, suggestion
from m2flow.tools.tool import Tool
from m2flow.user_code import user_function

_OWN = {
    "calculator": ("m2flow.tools.calculator", "Calculator"),
    "python": ("m2flow.tools.python", "PythonTool"),
    "search": ("m2flow.tools.search", "Search"),
    "mcp": ("m2flow.tools.mcp", "mcp_tools"),
}
"""Name to module, and what makes the tool of the options, or several tools."""

NAMES = tuple(_OWN)


def make_tools(named: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Tool]:
    """The tools of a recipe.

    Args:
        named: of each its name, or the path `module:function` of a function, and its options.

    Raises:
        UserError: there is no such tool, an option is wrong, or two have one name.
    """
    found: list[Tool] = []
    try:
        for name, options in named:
            found += _made(name, options)
        names = [tool.name for tool in found]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UserError("two tools have this name", key="tools", value=twice[0])
    except BaseException:
        for tool in found:
            tool.close()
        raise
    return found


def check_name(name: str) -> None:
    """Refuse a name that is neither a tool of m2flow nor a path of a function.

    Raises:
        UserError: names the nearest.
    """
    if name not in _OWN and not all(name.partition(":")):
        raise UserError(
            "is no tool",
            key="tools",
            value=name,
            expected=f"{', '.join(NAMES)}, or module:function",
            hint=suggestion(name, NAMES),
        )


def _made(name: str, options: Mapping[str, Any]) -> list[Tool]:
    check_name(name)
    if name not in _OWN:
        return [_function(name, options)]
    module, attribute = _OWN[name]
    make: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    signature = inspect.signature(make)
    try:
        signature.bind(**options)
        made = make(**options)
    except TypeError as error:
        raise UserError(
            f"cannot use these options: {error}",
            key=f"tools.{name}",
            value=dict(options),
            expected=f"options: {', '.join(signature.parameters) or 'none'}",
        ) from None
    return made if isinstance(made, list) else [made]


def _function(path: str, options: Mapping[str, Any]) -> Tool:
    from m2flow.tools.function import FunctionTool

    if options:
        raise UserError("a function has no options", key=f"tools.{path}", value=dict(options))
    function = user_function(path, "tools")
    if inspect.isclass(function):
        raise UserError("is a class", key="tools", value=path, expected="a function")
    return FunctionTool(function)
