"""Tools of a server in real processes: what dies or hangs costs the call that it had, no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from m2flow.errors import UserError
from m2flow.tools import Toolbox, ToolCall, make_tools, mcp
from m2flow.tools.tool import ToolFailed

pytest.importorskip("mcp", reason="needs the extra mcp")
SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]
SAYS_PORT = [sys.executable, "-c", "import os, sys; sys.exit('port ' + os.environ['PORT'])"]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture(scope="module")
def toolbox() -> Iterator[Toolbox]:
    box = Toolbox(make_tools([("mcp", {"command": SERVER, "env": ENVIRONMENT})]), concurrency=3)
    yield box
    box.close()


def test_a_call_is_answered_and_its_mistakes_are_told(toolbox: Toolbox) -> None:
    answers = toolbox.carry_out(
        [
            ToolCall("reverse", {"text": "abc"}),
            ToolCall("reverse", "xy"),
            ToolCall("refuse", {"text": "dogs"}),
        ]
    )
    assert [answer.text for answer in answers[:2]] == ["cba", "yx"]
    assert answers[2].error
    assert "refuse" in answers[2].text
    described = {one["function"]["name"]: one["function"] for one in toolbox.schemas()}
    assert described["reverse"]["description"] == "Write a text backwards."
    assert described["reverse"]["parameters"]["properties"]["text"]["type"] == "string"


def test_a_dead_and_a_hanging_process_cost_their_own_calls(toolbox: Toolbox) -> None:
    dead, hung, fine = toolbox.carry_out(
        [ToolCall("die", {}), ToolCall("hang", {}), ToolCall("reverse", "ab")]
    )
    assert dead.failure.startswith("tool die: ")
    assert hung.failure.startswith("tool hang: no answer in time")
    assert (fine.text, fine.failure) == ("ba", "")
    assert [a.text for a in toolbox.carry_out([ToolCall("reverse", "ab")] * 4)] == ["ba"] * 4


def test_a_call_fails_at_its_deadline_and_not_when_its_process_has_ended(
    toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the end took too long, and the call was told less of its failure."""
    toolbox.carry_out([ToolCall("process", {})])
    monkeypatch.setattr(mcp, "END_SECONDS", 1.0)  # a process that hangs is given two to end
    (hung,) = toolbox.carry_out([ToolCall("hang", {})])
    assert hung.failure.startswith("tool hang: no answer in time")


def test_processes_stay_for_later_calls(toolbox: Toolbox) -> None:
    first = toolbox.carry_out([ToolCall("process", {})])[0].text
    assert toolbox.carry_out([ToolCall("process", {})])[0].text == first


def test_a_process_that_died_while_nobody_called_it_costs_no_call(toolbox: Toolbox) -> None:
    """It was handed out, and the call failed."""
    dead = int(toolbox.carry_out([ToolCall("process", {})])[0].text)
    free = toolbox.tools["process"]._servers._free  # type: ignore[attr-defined]
    os.kill(dead, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while not free[-1].silent:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (found,) = toolbox.carry_out([ToolCall("process", {})])
    assert not found.failure
    assert int(found.text) != dead


def test_arguments_that_the_protocol_refuses_are_the_callers_mistake(toolbox: Toolbox) -> None:
    before = toolbox.carry_out([ToolCall("process", {})])[0].text
    (refused,) = toolbox.carry_out([ToolCall("strict", "dog")])
    assert (refused.error, refused.failure) == (True, "")
    assert "no dog is known" in refused.text
    assert toolbox.carry_out([ToolCall("process", {})])[0].text == before


def test_a_variable_without_a_value_is_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So a secret of the server need not stand in the recipe."""
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    box = Toolbox(make_tools([("mcp", {"command": SERVER, "env": {"PYTHONPATH": None}})]))
    assert box.carry_out([ToolCall("reverse", "ab")])[0].text == "ba"
    box.close()


def test_all_pages_of_a_list_of_tools_are_read(
    toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tools of the first page alone were there."""
    box = Toolbox(make_tools([("mcp", {"command": [*SERVER, "pages"], "env": ENVIRONMENT})]))
    box.close()
    assert list(box.tools) == list(toolbox.tools)
    assert len(box.tools) == 8
    monkeypatch.setattr(mcp, "MAX_PAGES", 9)
    with pytest.raises(UserError, match="does not start: its list of tools has more than 9 pages"):
        make_tools([("mcp", {"command": [*SERVER, "endless"], "env": ENVIRONMENT})])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"command": ["/no/such/server"]}, "the server does not start: .*No such file"),
        ({"command": [*SERVER, "broken"]}, "does not start: .*no configuration found"),
        ({"command": "server --stdio"}, "is no command"),
        ({"command": SERVER, "only": ["revers"]}, "has no tool 'revers'"),
        ({"comand": SERVER}, "cannot use these options: .*comand"),
        ({"command": SERVER, "env": {"NO_SUCH": None}}, r"env\.NO_SUCH: is not set"),
        ({"command": SERVER, "env": ["PORT=80"]}, r"^tools\.mcp\.env: is no table of variables"),
        ({"command": SERVER, "env": {80: "x"}}, r"^tools\.mcp\.env: is no table of variables"),
        ({"command": SERVER, "env": {"PORT": [80]}}, r"^tools\.mcp\.env\.PORT: is no text"),
        ({"command": SERVER, "env": {"DEBUG": True}}, r"^tools\.mcp\.env\.DEBUG: is no text"),
        ({"command": SERVER, "only": "reverse"}, r"^tools\.mcp\.only: is no list of names"),
        ({"command": SERVER, "only": []}, r"^tools\.mcp\.only: is no list of names"),
        ({"command": SAYS_PORT, "env": {"PORT": 8080}}, r"does not start: .*\(port 8080\)"),
    ],
)
def test_what_does_not_start_is_said_in_one_line(options: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        make_tools([("mcp", {"env": ENVIRONMENT, **options})])
    assert "\n" not in str(refused.value)


def test_what_a_process_cannot_be_started_for_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was waited for as long as a start may take, and called a server that gave nothing."""

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(mcp, "START_SECONDS", 5.0)
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(UserError, match="the server does not start: No space left on device"):
        make_tools([("mcp", {"command": SERVER})])


SPEAKS = """
import json, sys

kind = sys.argv[1]
tool = {"name": "answer", "inputSchema": {"type": "object"}}
print("A banner for people.", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    said = {"tools": [] if kind == "no tools" else [tool]}
    if asked["method"] == "initialize":
        version = asked["params"]["protocolVersion"]
        who = {"name": "x", "version": "1"}
        said = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": who}
    elif asked["method"] == "tools/call":
        said = {"content": [], "structuredContent": {"answer": 42}}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": said}), flush=True)
"""
"""A server that writes lines of its own to standard output, and answers without a text."""


def test_lines_that_are_no_messages_leave_nothing_on_the_terminal() -> None:
    """Each left a traceback there, once for each process. An answer that is no text was lost."""
    program = (
        "from m2flow.tools import Toolbox, ToolCall, make_tools\n"
        "import sys\n"
        f"options = {{'command': [sys.executable, '-c', {SPEAKS!r}, '']}}\n"
        "box = Toolbox(make_tools([('mcp', options)]))\n"
        "print(box.carry_out([ToolCall('answer', {})])[0].text)\n"
        "box.close()\n"
    )
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr) == ('{"answer": 42}\n', "")


def test_a_server_without_tools_is_refused() -> None:
    """The run had begun, with nothing for its policy to call."""
    with pytest.raises(UserError, match=r"^tools\.mcp\.command: the server has no tools"):
        make_tools([("mcp", {"command": [sys.executable, "-c", SPEAKS, "no tools"]})])


def left_of(command: str) -> list[str]:
    """Processes of a command line after some time; they are ended."""
    words, deadline = ["ps", "-eww", "-o", "pid,args"], time.monotonic() + 60
    while True:
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        left = [line.split()[0] for line in said.splitlines() if line.endswith(f" {command}")]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for one in left:
        os.kill(int(one), signal.SIGKILL)
    return left


def test_a_server_that_does_not_answer_at_the_start_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mcp, "START_SECONDS", 0.5)
    with pytest.raises(UserError, match=r"the server does not start: .*(0\.5 s|in time)"):
        make_tools([("mcp", {"command": ["sleep", "601.9"]})])
    assert not left_of("sleep 601.9")


def test_a_server_is_ended_where_a_later_tool_is_refused() -> None:
    words = [*SERVER, "beside-a-wrong-one"]
    with pytest.raises(UserError, match="is no tool"):
        make_tools([("mcp", {"command": words, "env": ENVIRONMENT}), ("calculater", {})])
    assert not left_of(" ".join(words))


def test_closing_ends_a_process_that_is_in_a_call() -> None:
    words = [*SERVER, "in-a-call"]
    tools = {
        tool.name: tool for tool in make_tools([("mcp", {"command": words, "env": ENVIRONMENT})])
    }
    told: list[str] = []

    def hang() -> None:
        with pytest.raises(ToolFailed) as failed:
            tools["hang"].call({}, 600.0)
        told.append(str(failed.value))

    thread = threading.Thread(target=hang)
    thread.start()
    deadline = time.monotonic() + 60
    while tools["hang"]._servers._free:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    tools["hang"].close()
    thread.join(60)
    assert told == ["its tools have been closed"]
    assert not left_of(" ".join(words))


def test_what_a_server_writes_to_standard_error_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files: list[Any] = []
    made = tempfile.TemporaryFile

    def kept(*given: Any) -> Any:
        files.append(made(*given))
        return files[-1]

    monkeypatch.setattr(tempfile, "TemporaryFile", kept)
    box = Toolbox(make_tools([("mcp", {"command": SERVER, "env": ENVIRONMENT})]), concurrency=1)
    for _ in range(5):
        (answer,) = box.carry_out([ToolCall("complain", {"count": mcp.STDERR_BYTES // 2})])
        assert answer.text == "done"
    (file,) = files
    assert os.fstat(file.fileno()).st_size < 1.5 * mcp.STDERR_BYTES
    (dead,) = box.carry_out([ToolCall("die", {})])
    assert "that was all" in dead.failure, "the last line is told"
    box.close()


def test_a_text_that_is_embedded_is_a_text() -> None:
    """The policy read `[resource]` in place of the file that it had asked for."""
    from mcp.types import CallToolResult, EmbeddedResource, TextContent, TextResourceContents

    file = EmbeddedResource(resource=TextResourceContents(uri="file:///a.txt", text="hello"))
    answer = CallToolResult(content=[TextContent(text="read"), file])
    servers: Any = type("Servers", (), {"call": lambda *_: answer})()
    assert mcp.MCPTool(servers, "read", "", {}).call({}, 1.0) == "read\nhello"
