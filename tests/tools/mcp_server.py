"""A server of the Model Context Protocol whose tools answer, fail, die and hang."""

from __future__ import annotations

import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.shared.exceptions import MCPError
from mcp.types import INVALID_PARAMS

from m2flow.tools.calculator import calculate

server = MCPServer("test")


@server.tool()
def reverse(text: str) -> str:
    """Write a text backwards."""
    return text[::-1]


@server.tool()
def process() -> str:
    """Say which process this is."""
    return str(os.getpid())


@server.tool()
def refuse(text: str) -> str:
    """Raise an error."""
    raise ValueError(f"no {text} here")


@server.tool()
def die() -> str:
    """End the process."""
    os._exit(3)


@server.tool()
def hang() -> str:
    """Never answer."""
    time.sleep(600)
    return "too late"


@server.tool()
def strict(text: str) -> str:
    """Refuse the arguments by an error of the protocol."""
    raise MCPError(INVALID_PARAMS, f"no {text} is known")


@server.tool()
def shaky(formula: str) -> str:
    """Compute a formula; by its last digit die, hang, or say too much."""
    match formula.strip()[-1:]:
        case "7":
            os._exit(3)
        case "8":
            time.sleep(600)
        case "9":
            return "9" * 1_000_000
    return calculate(formula)


if __name__ == "__main__":
    if "broken" in sys.argv:
        sys.exit("no configuration found")
    server.run("stdio")
