"""Tools that a model may call while it works on an answer; each usable alone.

A tool takes named arguments and returns text. `make_tools` makes those that a recipe names, and a
`Toolbox` carries calls out: several at a time, each within its deadline.
"""

from __future__ import annotations

from m2flow.tools.registry import make_tools
from m2flow.tools.tool import Tool, ToolCall, ToolError, ToolFailed, ToolResult
from m2flow.tools.toolbox import Toolbox

__all__ = ["Tool", "ToolCall", "ToolError", "ToolFailed", "ToolResult", "Toolbox", "make_tools"]
