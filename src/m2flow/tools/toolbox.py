"""`Toolbox`: carries out calls of tools, several at a time, each within its deadline.

A call never raises: what goes wrong is in its `ToolResult`. A tool that does not return in time is
left to itself in its thread, or has ended what it waited for, and costs the caller alone. One that
has done so `TIMEOUTS_IN_A_ROW` times fails for the calls that are left of those carried out
together.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from m2flow.errors import suggestion
from m2flow.rewards.event_loop import SIGN_SECONDS
from m2flow.rewards.reward import TIMEOUTS_IN_A_ROW, in_a_line
from m2flow.tools.tool import Tool, ToolCall, ToolError, ToolResult, arguments_of

GRACE_SECONDS = 2.0
"""Beyond a call's deadline, for a tool that ends by itself what takes too long; a tool whose calls
may have to start something first says more (`grace_seconds`)."""

MAX_CHARACTERS = 1 << 20
"""Of an answer; what is beyond is dropped before anybody reads it."""


def _nothing() -> None:
    """Do nothing."""


class Toolbox:
    """Tools by name.

    Args:
        tools: with different names.
        seconds: deadline of a call.
        concurrency: calls carried out at a time.
    """

    def __init__(self, tools: Sequence[Tool], seconds: float = 10.0, concurrency: int = 8) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self._seconds, self._concurrency = seconds, concurrency

    def schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates and the OpenAI API describe them."""
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": dict(tool.parameters),
                },
            }
            for tool in self.tools.values()
        ]

    def prepare(self) -> None:
        """Have tools read what they need, such as the index of a corpus; later calls do nothing."""
        for tool in self.tools.values():
            getattr(tool, "prepare", _nothing)()

    def carry_out(
        self, calls: Sequence[ToolCall], goes_on: Callable[[], object] = _nothing
    ) -> list[ToolResult]:
        """The answer of each call, in order.

        `goes_on` is called with each, and every `SIGN_SECONDS` meanwhile, on this thread.
        """
        if not calls:
            return []
        self.prepare()  # no call's deadline is for that
        with ThreadPoolExecutor(min(len(calls), self._concurrency)) as threads:
            patience, found = _Patience(), list[ToolResult]()
            for answer in [threads.submit(self._answer, call, patience) for call in calls]:
                while wait([answer], SIGN_SECONDS).not_done:
                    goes_on()  # what a call may take has a bound of its own
                found.append(answer.result())
                goes_on()
        return found

    def close(self) -> None:
        """Let go of what the tools hold."""
        for tool in self.tools.values():
            tool.close()

    def _answer(self, call: ToolCall, patience: _Patience) -> ToolResult:
        tool, began = self.tools.get(call.tool), time.monotonic()
        if tool is None:
            return ToolResult(
                f"no tool {call.tool!r}; {suggestion(call.tool, self.tools)}", error=True
            )
        arguments = call.arguments
        if isinstance(arguments, str):
            try:
                arguments = arguments_of(tool, arguments)
            except ToolError as error:
                return ToolResult(str(error), error=True)
        if why := _unwritable(arguments):
            return ToolResult(f"the arguments cannot be written in UTF-8: {why}", error=True)
        late = f"tool {tool.name}: gave nothing within {self._seconds:g} s"
        begun = patience.begin(tool.name)
        if begun is None:
            return ToolResult(failure=f"{late} {TIMEOUTS_IN_A_ROW} times in a row")
        outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()
        asked = tool, arguments, self._seconds, outcome
        threading.Thread(target=_call, args=asked, daemon=True).start()
        try:
            grace = getattr(tool, "grace_seconds", GRACE_SECONDS)
            found = outcome.get(timeout=self._seconds + grace)
        except queue.Empty:
            found = None
        seconds = time.monotonic() - began
        answered = isinstance(found, str | ToolError)
        patience.end(tool.name, begun, late=not answered and seconds >= self._seconds)
        if found is None:
            return ToolResult(failure=late, seconds=seconds)
        if isinstance(found, str):
            return ToolResult(found[:MAX_CHARACTERS], seconds=seconds)
        if isinstance(found, ToolError):
            return ToolResult(str(found)[:MAX_CHARACTERS], error=True, seconds=seconds)
        why = str(found) or type(found).__name__
        return ToolResult(failure=in_a_line(f"tool {tool.name}: {why}"), seconds=seconds)


class _Patience:
    """Counts, for each tool, the calls carried out together that have come to no end in time.

    They are in a row where no call of the tool has ended since they began.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: Counter[str] = Counter()
        self._late: Counter[str] = Counter()

    def begin(self, tool: str) -> int | None:
        """What `end` is to be told of a call; None where the tool is not to be called any more."""
        with self._lock:
            return None if self._late[tool] >= TIMEOUTS_IN_A_ROW else self._ended[tool]

    def end(self, tool: str, begun: int, *, late: bool) -> None:
        """Count a call, and whether it took too long."""
        with self._lock:
            if not late:
                self._ended[tool] += 1
                self._late[tool] = 0
            elif begun == self._ended[tool]:
                self._late[tool] += 1


def _unwritable(arguments: Mapping[str, Any]) -> str:
    """Why arguments are no text, such as half of a surrogate pair, which JSON can spell; or ""."""
    try:
        json.dumps(arguments, ensure_ascii=False, default=repr).encode()
    except (UnicodeEncodeError, RecursionError) as error:
        return str(error)
    return ""


def _call(
    tool: Tool, arguments: Mapping[str, Any], seconds: float, outcome: queue.SimpleQueue[Any]
) -> None:
    try:
        found: Any = tool.call(arguments, seconds)
        outcome.put(found if isinstance(found, str) else TypeError(f"gave {found!r}, no text"))
    except BaseException as error:
        outcome.put(error)
