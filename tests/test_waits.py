"""Every wait has a deadline and an owner: a call that may block says for how long at most.

Read off the source with `ast`. Calls that say nothing stand in `ENDED_BY`, each with who ends its
wait. What a rule about single calls cannot see is a deadline in a variable that is None, a lock
that is taken by `with`, and what waits for memory or the disk.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "m2flow"

WITHOUT_ARGUMENTS = frozenset(
    {"wait", "result", "exception", "get", "join", "acquire", "accept", "select", "poll"}
)
"""Methods that wait without end where they are given nothing."""

ALWAYS = frozenset(
    {"recv", "recv_into", "recv_bytes", "recv_fds", "communicate", "sendall", "sendmsg"}
)
"""Methods that know no deadline, or take it by name alone."""

PIPES = ("connection.send", "connection.send_bytes")
"""How calls end that wait until the other end of a pipe has taken what they send. Those of a
`FrameStream` all come to its own `sendmsg`."""

FUNCTIONS = frozenset(
    {
        *("ray.get", "ray.wait"),
        *("subprocess.run", "subprocess.check_output", "subprocess.check_call"),
        *("os.read", "os.waitpid", "dist.init_process_group", "dist.new_group"),
    }
)
"""Functions that take their deadline by name alone, or know none. Collectives have that of their
process group."""

LOCKS = frozenset({"fcntl.flock", "fcntl.lockf"})
"""Functions that wait unless they are told not to, or to let go."""

DO_NOT_WAIT = frozenset({"sys.exception", "select.poll"})
"""Functions with such a name."""

KILLED = "the system: the process was sent SIGKILL just before"
OWNER = "the owner's end of the connection: it is closed with the owner, whatever ends that"
DONE = "nobody need: it is done, as was asked just before"
CALL = "the launcher: it is within a call, which has `deadline_seconds`"
THREAD = "whoever closes it: a last entry is put into the queue of the thread"

ENDED_BY = {
    "cli/app.py: dash": "the user, by Ctrl-C",
    "environments/child.py: _Child.run": OWNER,
    "environments/child.py: _Child.next_command": OWNER,
    "environments/process.py: SimulatorProcess.send": "the socket, by its own SO_SNDTIMEO",
    "environments/process.py: SimulatorProcess.kill": KILLED,
    "environments/process.py: SimulatorProcess.read": "the socket, by the SO_RCVTIMEO of `send`",
    "flow/trace.py: current_trace": "nobody need: it is a context variable",
    "generation/external_engine.py: ExternalEngine._send": CALL,
    "generation/external_engine.py: ExternalEngine._receive": CALL,
    "generation/external_process.py: main": "the thread that is waited for: it ends the process",
    "generation/external_process.py: _listen": OWNER,
    "generation/sglang_served.py: _SglangWorkerProcess.__init__": OWNER,
    "generation/sglang_served.py: _SglangWorkerProcess._answered": OWNER,
    "generation/sglang_served.py: _SglangWorkerProcess._install": OWNER,
    "generation/sglang_served.py: _SglangWorkerProcess._says_that_it_works": OWNER,
    "generation/sglang_served.py: _SglangWorkerProcess._sleep": OWNER,
    "generation/sglang_served.py: _SglangWorkerProcess._wake": OWNER,
    "generation/vllm_served.py: _VllmWorkerProcess.__init__": OWNER,
    "generation/vllm_served.py: _VllmWorkerProcess.serve": OWNER,
    "generation/vllm_served.py: _VllmWorkerProcess._start_update": OWNER,
    "generation/vllm_served.py: _VllmWorkerProcess._installed": OWNER,
    "generation/vllm_served.py: _VllmWorkerProcess._sleep": OWNER,
    "generation/vllm_served.py: _VllmWorkerProcess._wake": OWNER,
    "observe/dashboard/server.py: Dashboard.close": "the line before it, which stops the server",
    "observe/loggers.py: MlflowLogger._await_all_but": "MLflow, by MLFLOW_HTTP_REQUEST_TIMEOUT",
    "rewards/event_loop.py: DaemonThreads._work": THREAD,
    "rewards/sandbox.py: _converse": "nobody need: the pipes do not block",
    "rewards/symbolic.py: _ComparingProcess._reply": "nobody need: a reply is a few bytes",
    "rewards/symbolic.py: _ComparingProcess.kill": KILLED,
    "rewards/symbolic.py: serve": OWNER,
    "runtime/driver/ahead.py: LanesAhead.pool": "the thread: lanes start within START_SECONDS",
    "runtime/driver/ahead.py: LanesAhead.__exit__": "the thread: a pool ends within CLOSE_SECONDS",
    "runtime/driver/carrier.py: RayCarrier._joined": DONE,
    "runtime/driver/pool.py: LanePool.receive": "nobody need: the socket does not block",
    "runtime/driver/pool.py: LanePool.ask_all": DONE,
    "runtime/driver/pool.py: _all_answered": DONE,
    "runtime/driver/runner.py: Runner._take_result": DONE,
    "runtime/driver/snapshots.py: SnapshotOnItsWay._fetched": DONE,
    "runtime/driver/template.py: LaneTemplate.close": KILLED,
    "runtime/lane/ask_template.py: main": "the socket, by its timeout of ANSWER_SECONDS",
    "runtime/lane/journal.py: JournalWriter._run": THREAD,
    "runtime/lane/shared.py: SharedProcess.serve": DONE,
    "runtime/lane/template.py: main": OWNER,
    "runtime/lane/template.py: _heard": "the socket, by its timeout of ASK_SECONDS",
    "runtime/transport/frame.py: FrameStream.receive": "`deadline`; without one, the other end",
    "runtime/transport/frame.py: FrameStream.await_end": OWNER,
    "runtime/transport/frame.py: FrameStream.send": "`deadline`; without one, the other end",
    "runtime/transport/groups.py: sum_over": "the process group, by the deadline it was made with",
    "runtime/transport/handshake.py: _received": "the socket, by the timeout of the line before",
    "runtime/transport/handshake.py: prove": "nobody need: a few bytes, which the socket holds",
    "runtime/transport/lines.py: LauncherLine.flush": "nobody need: the socket does not block",
    "runtime/transport/lines.py: LauncherLine.take": "nobody need: the socket does not block",
    "runtime/transport/listening.py: Listener._accept": "`close`, which shuts the socket down",
    "runtime/transport/sweeping.py: _clear_after": "nobody need: it is a file",
    "runtime/transport/sweeping.py: Sweeper.close": "the shell: its input has ended",
    "tools/mcp.py: _ServerProcess._talk": THREAD,
    "tools/toolbox.py: Toolbox.carry_out": "`_answer`: each call has `tool_deadline_seconds`",
    "training/checkpoint.py: broken_file": "the disk: files are read to their end",
    "training/checkpoint.py: _write_manifest": "the disk: files are read to their end",
    "training/trainer_state.py: _Writer.write_data": "the disk: files are written to their end",
    "workloads/agentic/endpoint/agents.py: Agents._work": THREAD,
    "workloads/common/loading.py: in_turn": "the launcher, by its deadline for loading",
}
"""`file: function` -> who ends the waits there."""


def waits_for_ever(call: ast.Call) -> bool:
    """Whether a call may block, and says nothing of how long."""
    told = [word.value for word in call.keywords if word.arg == "timeout"]
    if told:
        return isinstance(told[0], ast.Constant) and told[0].value is None
    named = ast.unparse(call.func)
    if named == "select.select":
        return len(call.args) < 4
    if named in FUNCTIONS:
        return True
    if named in LOCKS:
        return not any(flag in ast.unparse(call.args[1]) for flag in ("LOCK_NB", "LOCK_UN"))
    if named in DO_NOT_WAIT or named.endswith("process.poll"):
        return False
    if named.endswith(("threads.map", *PIPES)):
        return True
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    return name in ALWAYS or (name in WITHOUT_ARGUMENTS and not call.args and not call.keywords)


def waits_in(tree: ast.AST, within: str = "") -> Iterator[tuple[str, int]]:
    """`(function, line)` of each such call, methods as `Class.method`."""
    for node in ast.iter_child_nodes(tree):
        inside = within
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inside = f"{within}.{node.name}".lstrip(".")
        if isinstance(node, ast.Call) and waits_for_ever(node):
            yield within, node.lineno
        yield from waits_in(node, inside)


def test_every_wait_has_a_deadline_or_somebody_who_ends_it() -> None:
    found: dict[str, list[int]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for function, line in waits_in(ast.parse(path.read_text())):
            place = f"{path.relative_to(PACKAGE)}: {function}"
            found.setdefault(place, []).append(line)
    unknown = {place: lines for place, lines in found.items() if place not in ENDED_BY}
    assert not unknown, "give them a deadline"
    assert not ENDED_BY.keys() - found.keys(), "there are none any more"


@pytest.mark.parametrize(
    "call",
    [
        "event.wait()",
        "future.result()",
        "orders.get()",
        "thread.join()",
        "lock.acquire()",
        "line.recv()",
        "socket.recv(4096)",
        "listener.accept()",
        "select.select([line], [], [])",
        "selector.select()",
        "ray.get(answer)",
        "ray.wait([answer])",
        "process.communicate()",
        "subprocess.run(words)",
        "future.exception()",
        "threads.map(answer, calls)",
        "fcntl.flock(file, fcntl.LOCK_EX)",
        "future.result(timeout=None)",
        "self._connection.send(reply)",
        "dist.new_group([0, 1])",
        "socket.sendall(words)",
        "os.read(pipe, 1)",
    ],
)
def test_a_wait_without_a_deadline_is_found(call: str) -> None:
    source = f"class Asker:\n    def ask(self):\n        return [{call}]"
    assert list(waits_in(ast.parse(source))) == [("Asker.ask", 3)]


@pytest.mark.parametrize(
    "call",
    [
        "event.wait(1.0)",
        "future.result(timeout=1.0)",
        "names.get(name)",
        "', '.join(names)",
        "waiting.accept(seconds)",
        "select.select([line], [], [], 1.0)",
        "batch.select(rows)",
        "ray.get(answer, timeout=1.0)",
        "process.communicate(timeout=1.0)",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(file, fcntl.LOCK_UN)",
    ],
)
def test_one_with_a_deadline_is_none(call: str) -> None:
    assert not list(waits_in(ast.parse(call)))
