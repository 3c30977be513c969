"""A server of the Model Context Protocol whose tools answer, fail, die and hang."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

from mcp.server.lowlevel import Server
from mcp.server.mcpserver import MCPServer
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError
from mcp.types import INVALID_PARAMS, ListToolsResult, PaginatedRequestParams

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
def complain(count: int) -> str:
    """Write so many bytes to standard error, and a line."""
    sys.stderr.write("x" * count + "\nthat was all\n")
    sys.stderr.flush()
    return "done"


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


async def tell_pages(ends: bool) -> None:
    """Serve the list of tools, two a page; one that does not end has them over and over."""

    async def page(_: Any, params: PaginatedRequestParams | None) -> ListToolsResult:
        tools, begin = await server.list_tools(), int((params and params.cursor) or 0)
        more = begin + 2 < len(tools)
        cursor = str(begin + 2) if more else None if ends else "0"
        return ListToolsResult(tools=tools[begin : begin + 2], next_cursor=cursor)

    paged = Server("pages", on_list_tools=page)
    async with stdio_server() as (read, write):
        await paged.run(read, write, paged.create_initialization_options())


if __name__ == "__main__":
    if "pages" in sys.argv or "endless" in sys.argv:
        asyncio.run(tell_pages("pages" in sys.argv))
        sys.exit()
    if "broken" in sys.argv:
        sys.exit("no configuration found")
    server.run("stdio")
