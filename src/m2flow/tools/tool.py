"""What a tool is: a name, a description, a schema of its arguments, and a call that gives text.

Two things may go wrong. `ToolError` is the caller's mistake, such as a formula that divides by
zero: its text is the tool's answer, from which a model can learn. `ToolFailed`, and whatever else a
tool raises, is the tool's own failure: nobody can learn from it, and the trajectory is given up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class ToolError(Exception):
    """The caller's mistake; the text is for the caller."""


class ToolFailed(Exception):
    """The tool itself does not work."""


class Tool(Protocol):
    """A tool. Calls come from several threads at a time."""

    @property
    def name(self) -> str:
        """What a model calls it by."""

    @property
    def description(self) -> str:
        """What it does, for the model that is to use it."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of its arguments: an object with properties."""

    def call(self, arguments: Mapping[str, Any], seconds: float) -> str:
        """Carry a call out.

        Args:
            arguments: by name; nobody has checked them.
            seconds: longest that the call may take. A tool that can end what takes longer does.

        Raises:
            ToolError: the caller's mistake.
            ToolFailed: the tool does not work.
        """

    def close(self) -> None:
        """Let go of processes."""


@dataclass(frozen=True)
class ToolCall:
    """What a model asks for.

    Attributes:
        tool: name of a tool, whether there is one or not.
        arguments: by name, or the whole text where a dialect has no names; see `arguments_of`.
    """

    tool: str
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True)
class ToolResult:
    """What became of a call.

    Attributes:
        text: for the model.
        error: whether the call was wrong, and the text says why.
        failure: why the tool gave nothing; "" where it gave something.
        seconds: that the call took.
    """

    text: str = ""
    error: bool = False
    failure: str = ""
    seconds: float = 0.0


def required_of(tool: Tool) -> list[str]:
    """Names of the arguments that a tool must be given."""
    return list(tool.parameters.get("required") or ())


def arguments_of(tool: Tool, text: str) -> dict[str, str]:
    """The arguments by name of a call whose argument is a text.

    It is the value of the parameter that the tool requires, or else of its first one. Without a
    text a tool that requires nothing is given nothing.

    Raises:
        ToolError: there is a text, and the tool has no parameters.
    """
    names = required_of(tool) or list(tool.parameters.get("properties") or ())
    if not text and not required_of(tool):
        return {}
    if not names:
        raise ToolError(f"{tool.name} takes no argument, and got {text!r}")
    return {names[0]: text}


def text_argument(arguments: Mapping[str, Any], name: str) -> str:
    """An argument that must be a text.

    Raises:
        ToolError: it is missing or no text, or there are others.
    """
    unknown = [key for key in arguments if key != name]
    if name not in arguments or unknown:
        raise ToolError(f"takes the argument {name!r} alone, and got {list(arguments)}")
    value = arguments[name]
    if not isinstance(value, str):
        raise ToolError(f"{name!r} must be a text, and is {type(value).__name__}")
    return value


def schema(**properties: str) -> Mapping[str, Any]:
    """The JSON schema of arguments that are texts, from what each of them is."""
    described = {name: {"type": "string", "description": what} for name, what in properties.items()}
    return {"type": "object", "properties": described, "required": list(properties)}
