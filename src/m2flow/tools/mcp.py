"""Tools of a server that speaks the Model Context Protocol on its standard input and output.

A process of the server carries out one call at a time: of calls that come together each has a
process of its own, up to what the toolbox carries out at a time, and the processes stay for later
calls. So a process that dies or hangs costs the one call that it had, and another takes its place.
Needs the package `mcp` (extra `mcp`).
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any, Self, TextIO, TypeVar

from m2flow.errors import UserError
from m2flow.tools.tool import ToolError, ToolFailed

if TYPE_CHECKING:
    import anyio

START_SECONDS = 30.0
"""Longest that a server may take to say which tools it has."""

MAX_PAGES = 1000
"""Of a server's list of tools."""

END_SECONDS = 5.0
"""Longest that is waited for processes to be gone."""

STDERR_BYTES = 1 << 20
"""Of what a process has written to standard error so many are kept from one call to the next."""

TOLD_BYTES = 4096
"""So many of the last of them are looked at for the line that says why a process is of no use."""

T = TypeVar("T")


def mcp_tools(
    command: Sequence[str],
    env: Mapping[str, str | int | float | None] | None = None,
    only: Sequence[str] | None = None,
) -> list[MCPTool]:
    """The tools of a server, which is started to ask for them.

    Args:
        command: starts the server.
        env: variables of its environment, beside `PATH`, `HOME` and the like; a number is written
            as text, and None stands for what the variable is here.
        only: names of the tools to take; None for all.

    Raises:
        UserError: an option is of another form, the server does not start or has no such tool, or
            a variable is not set here.
    """
    if importlib.util.find_spec("mcp") is None:
        raise UserError(
            "the package mcp is not installed",
            key="tools.mcp",
            hint='pip install "m2flow[mcp]"',
        )
    if not _are_texts(command) or not command:
        raise UserError(
            "is no command",
            key="tools.mcp.command",
            value=command,
            expected='a list of words, such as ["my-server", "--stdio"]',
        )
    if only is not None and not (_are_texts(only) and only):
        raise UserError(
            "is no list of names",
            key="tools.mcp.only",
            value=only,
            expected="the names of some of the server's tools, such as [search]",
        )
    servers = Servers(command, _filled({} if env is None else env))
    try:
        return _chosen(servers, command, only)
    except BaseException:
        servers.close()
        raise


def _chosen(servers: Servers, command: Sequence[str], only: Sequence[str] | None) -> list[MCPTool]:
    """The tools of these names, or all."""
    try:
        listed = servers.tools()
    except ToolFailed as error:
        raise UserError(
            f"the server does not start: {error}",
            key="tools.mcp.command",
            value=list(command),
            hint="run the command by hand: it must speak MCP on its standard input and output",
        ) from None
    if not listed:
        raise UserError("the server has no tools", key="tools.mcp.command", value=list(command))
    unknown = set(only or ()) - {tool.name for tool in listed}
    if unknown:
        raise UserError(
            f"the server has no tool {sorted(unknown)[0]!r}",
            key="tools.mcp.only",
            value=list(only or ()),
            expected=f"some of {', '.join(tool.name for tool in listed)}",
        )
    return [tool for tool in listed if only is None or tool.name in only]


def _are_texts(value: object) -> bool:
    """Whether a value of a recipe is a list of texts."""
    return isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)


def _filled(env: Mapping[str, str | int | float | None]) -> dict[str, str]:
    """Values of variables, with what the environment has where none is given."""
    if not isinstance(env, Mapping) or not _are_texts([*env]):
        raise UserError(
            "is no table of variables",
            key="tools.mcp.env",
            value=env,
            expected="names with their values, such as {PORT: 8080}",
        )
    filled = {}
    for name, value in env.items():
        key = f"tools.mcp.env.{name}"
        if isinstance(value, bool) or not isinstance(value, str | int | float | None):
            raise UserError("is no text", key=key, value=value, expected="a text, a number or null")
        if value is None and name not in os.environ:
            raise UserError(
                "is not set in the environment",
                key=key,
                hint=f"export {name} before m2flow starts",
            )
        filled[name] = os.environ[name] if value is None else str(value)
    return filled


class MCPTool:
    """One tool of a server.

    Attributes:
        grace_seconds: beyond a call's deadline, for a process that is started for the call.

    Args:
        servers: processes of the server.
        name, description, parameters: as the server says.
    """

    grace_seconds = START_SECONDS + END_SECONDS

    def __init__(
        self, servers: Servers, name: str, description: str, parameters: Mapping[str, Any]
    ) -> None:
        self._servers = servers
        self.name, self.description, self.parameters = name, description, parameters

    def call(self, arguments: Mapping[str, Any], seconds: float) -> str:
        """The texts of the answer, one a line; what is no text is named.

        An answer that is an object alone is its JSON.
        """
        result = self._servers.call(self.name, arguments, seconds)
        text = "\n".join(
            getattr(getattr(one, "resource", one), "text", f"[{one.type}]")
            for one in result.content
        )
        if not result.content and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise ToolError(text)
        return text

    def close(self) -> None:
        """End the processes of the server."""
        self._servers.close()


class Servers:
    """Processes of one server, and the thread in which they are talked to.

    Args:
        command: starts a process.
        env: variables of its environment.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._command, self._env = list(command), dict(env)
        self._free: list[_ServerProcess] = []
        self._all: list[_ServerProcess] = []
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def tools(self) -> list[MCPTool]:
        """What the server has; starts a process.

        Raises:
            ToolFailed: it does not start.
        """
        process = self._taken()
        found = [
            MCPTool(self, tool.name, tool.description or tool.name, tool.input_schema)
            for tool in process.listed
        ]
        self._give_back(process)
        return found

    def call(self, tool: str, arguments: Mapping[str, Any], seconds: float) -> Any:
        """What the server answers.

        Raises:
            ToolError: it refuses the arguments.
            ToolFailed: the process has died, does not answer in time, or none can be started.
        """
        process = self._taken()
        try:
            answer = process.ask(tool, dict(arguments), seconds, self._loop)
            result = _waited(answer, seconds + END_SECONDS)
        except ToolError:
            self._give_back(process)
            raise
        self._give_back(process)
        return result

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            processes = [one for one in self._all if not one.ended.is_set()]
            self._all, self._free = [], []
        for process in processes:
            asyncio.run_coroutine_threadsafe(process.end(), self._loop)
        deadline = time.monotonic() + END_SECONDS
        for process in processes:
            process.ended.wait(max(0.0, deadline - time.monotonic()))
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _taken(self) -> _ServerProcess:
        """A free process, or a new one; those that have died meanwhile are let go of."""
        with self._lock:
            while self._free:
                process = self._free.pop()
                if not process.silent:
                    return process
                asyncio.run_coroutine_threadsafe(process.end(), self._loop)
            process = _ServerProcess(self._command, self._env)
            self._all = [one for one in self._all if not one.ended.is_set()] + [process]
        asyncio.run_coroutine_threadsafe(process.run(), self._loop)
        _waited(process.started, START_SECONDS)
        return process

    def _give_back(self, process: _ServerProcess) -> None:
        with self._lock:
            if process in self._all:
                self._free.append(process)


def _waited(future: Future[T], seconds: float) -> T:
    try:
        return future.result(seconds)
    except (TimeoutError, FutureTimeout):
        raise ToolFailed(f"the server gave nothing within {seconds:g} s") from None


class _ServerProcess:
    """One process of a server, with one call at a time, which one task of the loop talks to.

    Attributes:
        started: done when the process has said which tools it has.
        listed: these tools.
        silent: whether the process can answer nothing more, as far as is known.
        ended: whether the process is gone.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._command, self._env = command, env
        self._asked: asyncio.Queue[tuple[str, dict[str, Any], float, Future[Any]]]
        self._asked = asyncio.Queue()
        self._running: anyio.CancelScope
        self.started: Future[None] = Future()
        self.listed: Sequence[Any] = ()
        self.silent = False
        self.ended = threading.Event()
        self._answer: Future[Any] = Future()

    def ask(
        self,
        tool: str,
        arguments: dict[str, Any],
        seconds: float,
        loop: asyncio.AbstractEventLoop,
    ) -> Future[Any]:
        """Ask the task, on its loop; it ends the process where there is no answer."""
        answer = self._answer = Future()  # before the next line: whoever ends the process looks
        if self.ended.is_set():
            raise ToolFailed("the server has ended")
        loop.call_soon_threadsafe(self._asked.put_nowait, (tool, arguments, seconds, answer))
        return answer

    def _fall_silent(self) -> None:
        self.silent = True

    async def end(self) -> None:
        """Have the task end the process, whatever it waits for."""
        self._running.cancel()  # a task's own `cancel` would also cut off the end of the process

    async def run(self) -> None:
        """Start the process, carry out calls, end it; who waits then is told why it has ended."""
        why = ""
        try:
            with tempfile.TemporaryFile("w+") as errors:
                fcntl.fcntl(errors, fcntl.F_SETFL, os.O_APPEND)  # to its end, also when it is cut
                why = await self._talk(errors)
        except OSError as error:
            why = str(error)
        finally:
            self.ended.set()
            for waiting in (self.started, self._answer):
                if not waiting.done():
                    waiting.set_exception(ToolFailed(why))

    async def _talk(self, errors: TextIO) -> str:
        """Talk to a process that is started for it; return why that has come to its end.

        Args:
            errors: takes what the process writes to standard error.
        """
        try:
            import anyio
            from mcp import ClientSession, StdioServerParameters
            from mcp.client.stdio import stdio_client
            from mcp.shared.exceptions import MCPError
            from mcp.types import INVALID_PARAMS

            # It would tell with a traceback of each line that is no message, such as a banner.
            logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)
            words = StdioServerParameters(
                command=self._command[0], args=list(self._command[1:]), env=dict(self._env)
            )
            with anyio.CancelScope() as self._running:
                async with (
                    stdio_client(words, errlog=errors) as (read, write),
                    ClientSession(_WatchedStream(read, self._fall_silent), write) as session,
                ):
                    async with asyncio.timeout(START_SECONDS):
                        await session.initialize()
                        self.listed = await _listed(session)
                    self.started.set_result(None)
                    while True:
                        tool, arguments, seconds, answer = await self._asked.get()
                        try:
                            async with asyncio.timeout(seconds):
                                answer.set_result(await session.call_tool(tool, arguments))
                        except MCPError as error:
                            if error.code != INVALID_PARAMS:
                                raise
                            answer.set_exception(ToolError(str(error)))
                        except TimeoutError as error:  # the end of the process takes seconds more
                            answer.set_exception(ToolFailed(_told(error, errors)))
                            raise
                        _cut(errors)
        except BaseException as error:
            return _told(error, errors)
        return "its tools have been closed"


class _WatchedStream:
    """A stream of a process's messages that tells when no other can come.

    Args:
        stream: as the package gives it.
        over: called at the end.
    """

    def __init__(self, stream: Any, over: Callable[[], None]) -> None:
        self._stream, self._over = stream, over

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except BaseException:
            self._over()
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def receive(self) -> Any:
        return await self._stream.receive()

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _listed(session: Any) -> list[Any]:
    """All tools of a server, which may tell them page by page."""
    from mcp.types import PaginatedRequestParams

    page = await session.list_tools()
    found = list(page.tools)
    for _ in range(MAX_PAGES):
        if page.next_cursor is None:
            return found
        params = PaginatedRequestParams(cursor=page.next_cursor)
        page = await session.list_tools(params=params)
        found += page.tools
    raise ToolFailed(f"its list of tools has more than {MAX_PAGES} pages")


def _cut(errors: TextIO) -> None:
    """Forget what a process has written to standard error, if that is long."""
    if os.fstat(errors.fileno()).st_size > STDERR_BYTES:
        os.ftruncate(errors.fileno(), 0)


def _told(error: BaseException, errors: TextIO) -> str:
    """Why a process is of no use, with the last line that it has written of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    begin = max(0, os.fstat(errors.fileno()).st_size - TOLD_BYTES)
    written = os.pread(errors.fileno(), TOLD_BYTES, begin)
    lines = written.decode(errors="replace").strip().splitlines()
    why = "no answer in time" if isinstance(error, TimeoutError) else str(error)
    said = f" ({lines[-1][-200:]})" if lines else ""
    return f"{why or type(error).__name__}{said}"
