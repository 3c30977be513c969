"""The sandbox: what programs may do, and every way out of it that was thought of."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from m2flow.errors import UserError
from m2flow.rewards import sandbox
from m2flow.rewards.sandbox import LIMITS, WAYS, Limits, ProgramOutcome, Way, run_python

QUICK = replace(LIMITS, seconds=5.0, cpu_seconds=2)


def works(way: Way) -> bool:
    try:
        return sandbox._run(way.command(LIMITS), "print('ready')", "", "", LIMITS).ok
    except OSError:
        return False


WORKING = [way for way in WAYS if works(way)]

if not WORKING:
    pytest.skip("neither bubblewrap nor unshare may make namespaces", allow_module_level=True)


@pytest.fixture(params=WORKING, ids=lambda way: way.name, autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sandbox, "find_way", lambda: request.param)
    yield
    deadline = time.monotonic() + 5
    while left := [line for line in processes() if "program.py" in line]:
        assert time.monotonic() < deadline, left


def processes() -> list[str]:
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return found.stdout.splitlines()


def refused(source: str, limits: Limits = QUICK) -> ProgramOutcome:
    outcome = run_python(source, limits=limits)
    assert not outcome.ok, outcome
    return outcome


# --- what works -----------------------------------------------------------------------------------


def test_a_program_reads_and_writes() -> None:
    outcome = run_python("print(input()[::-1]); import sys; print('oh', file=sys.stderr)", "abc\nd")
    assert outcome == ProgramOutcome("cba\n", "oh\n", 0)


def test_a_program_may_use_files_in_its_scratch_folder_and_the_standard_library() -> None:
    source = (
        "import json, math\nopen('x', 'w').write('7')\nprint(json.loads(open('/tmp/x').read()))"
    )
    assert run_python(source).stdout == "7\n"
    assert "7" not in run_python("import os; print(os.listdir('/tmp'))").stdout  # a new one each


def test_long_input_and_output_pass_at_the_same_time() -> None:
    text = "x" * 400_000
    assert run_python("print(input())", text).stdout == text + "\n"
    assert run_python("pass", text).ok  # it does not read


@pytest.mark.parametrize(("source", "code"), [("1/0", 1), ("raise SystemExit(3)", 3)])
def test_how_it_ended_is_told(source: str, code: int) -> None:
    assert run_python(source).exit_code == code


def test_statements_afterwards_see_what_the_program_defined() -> None:
    assert run_python("def f(x): return x + 1", after="assert f(1) == 2").ok
    outcome = run_python("def f(x): return x", after="assert f(1) == 2")
    assert outcome.exit_code == 1
    assert 'after.py", line 1' in outcome.stderr


# --- limits ---------------------------------------------------------------------------------------


def test_an_endless_program_is_killed() -> None:
    started = time.monotonic()
    outcome = refused("while True: pass", replace(QUICK, seconds=1.0))
    assert (outcome.exit_code, outcome.why) == (None, "did not end within 1 s")
    assert time.monotonic() - started < 10


def test_cpu_seconds_are_limited() -> None:
    outcome = refused("while True: pass", replace(QUICK, seconds=60.0, cpu_seconds=1))
    assert outcome.exit_code in (128 + 9, 1)
    assert outcome.why == ""


def test_a_memory_bomb_fails() -> None:
    outcome = refused("x = bytearray(1 << 30)")
    assert "MemoryError" in outcome.stderr


def test_a_fork_bomb_is_bounded() -> None:
    source = """
import os, time
children = 0
try:
    for _ in range(100):
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        children += 1
except BlockingIOError:
    print(children)
"""
    outcome = run_python(source, limits=QUICK)
    assert 1 <= int(outcome.stdout) < LIMITS.processes


def test_a_fork_bomb_whose_children_fork_on_is_bounded() -> None:
    """None of them ends by itself; all are gone afterwards, as after every test here."""
    source = """
import os
while True:
    try:
        os.fork()
    except BlockingIOError:
        pass
"""
    begun = time.monotonic()
    refused(source)
    assert time.monotonic() - begun < 4 * QUICK.seconds


def test_a_child_that_outlives_the_program_is_gone_with_it() -> None:
    source = """
import os, time
if os.fork() == 0:
    os.setsid()
    os.close(1); os.close(2)
    time.sleep(600)
"""
    assert run_python(source, limits=QUICK).ok


def test_output_without_end_is_cut() -> None:
    outcome = refused("while True: print('x' * 10000)")
    assert outcome.why == f"wrote more than {LIMITS.output_bytes} bytes"
    assert len(outcome.stdout) < LIMITS.output_bytes + (1 << 17)


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm", "/", "/usr", "/dev"])
def test_files_are_bounded(folder: str) -> None:
    source = f"""
import os
total = 0
try:
    for n in range(50):
        with open({folder!r} + f"/big{{n}}", "wb") as f:
            total += f.write(b"x" * (4 << 20))
except OSError:
    pass
print(total)
"""
    total = int(run_python(source, limits=QUICK).stdout)
    assert total <= (LIMITS.scratch_bytes if folder == "/tmp" else 0)


def test_a_bomb_of_compressed_data_hits_the_limits() -> None:
    source = """
import zlib
d = zlib.decompressobj()
packed = zlib.compress(b"0" * (100 << 20))
out = b""
for _ in range(40):
    out += zlib.decompress(packed)
"""
    assert "MemoryError" in refused(source, replace(LIMITS, seconds=60.0)).stderr


# --- ways out -------------------------------------------------------------------------------------


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        refused(f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)")
    refused("import socket; socket.create_connection(('1.1.1.1', 53), 1)")
    refused("import socket; socket.getaddrinfo('example.org', 80)")


def test_abstract_sockets_of_the_machine_are_out_of_reach() -> None:
    name = f"\0m2flow-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        refused(f"import socket; socket.socket(socket.AF_UNIX).connect({name!r})")


def test_files_of_the_machine_are_out_of_reach(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    tmp_path.chmod(0o777)
    secret.chmod(0o666)
    for path in (secret, Path("/etc/passwd"), Path("/etc/shadow"), Path.home()):
        refused(f"import os; print(os.stat({str(path)!r}))")
    refused(f"import os; os.symlink({str(secret)!r}, '/tmp/link'); print(open('/tmp/link').read())")
    assert secret.read_text() == "s3cret"


def test_the_parent_s_environment_and_processes_are_out_of_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    source = """
import glob, os
print(dict(os.environ))
for path in glob.glob("/proc/[0-9]*"):
    try:
        print(open(path + "/environ").read(), open(path + "/cmdline").read())
    except OSError as error:
        print(error)
print(len(glob.glob("/proc/[0-9]*")))
"""
    outcome = run_python(source)
    assert "s3cret" not in outcome.stdout
    assert "pytest" not in outcome.stdout
    assert int(outcome.stdout.splitlines()[-1]) < 6


@pytest.mark.parametrize(
    "source",
    [
        "import os; os.kill(PROCESS_OF_THE_TEST, 0)",
        "import os; os.setuid(0)",
        "import os; os.chroot('/tmp')",
        "import os; os.mknod('/tmp/disk', 0o600 | 0o060000, os.makedev(8, 0))",
        "open('/proc/sys/kernel/core_pattern', 'w').write('|/tmp/x')",
        "open('/proc/sysrq-trigger', 'w').write('b')",
        "import ctypes; assert ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, 0) == 0",
        "import ctypes; assert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0",
    ],
)
def test_privileges_are_gone(source: str) -> None:
    refused(source.replace("PROCESS_OF_THE_TEST", str(os.getpid())))


def test_descriptors_of_the_parent_are_closed(tmp_path: Path) -> None:
    secret = (tmp_path / "open").open("w+")
    os.set_inheritable(secret.fileno(), True)
    outcome = run_python("import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))")
    assert outcome.stdout == "[0, 1, 2, 3]\n"  # 3: the folder that is listed
    secret.close()


def test_a_program_that_ends_early_does_not_pass() -> None:
    """Exit code 0 without the statements that follow."""
    for source in ("import os; os._exit(0)", "raise SystemExit", "import sys; sys.exit(0)"):
        outcome = run_python(source, after="assert False")
        assert (outcome.exit_code, outcome.why) == (None, "ended before what was to follow it")
        assert outcome.stdout == ""


def test_many_run_at_the_same_time() -> None:
    found: list[ProgramOutcome] = []

    def one() -> None:
        found.append(run_python("import time; time.sleep(0.3); print(1)"))

    threads = [threading.Thread(target=one) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [outcome.stdout for outcome in found] == ["1\n"] * 6


def test_where_no_sandbox_can_be_made_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(sandbox, "WAYS", (Way("none", lambda limits: ["/nonexistent"]),))
    sandbox.find_way.cache_clear()
    try:
        with pytest.raises(UserError, match=r"no sandbox .*\(none: No such file") as caught:
            run_python("print(1)")
    finally:
        sandbox.find_way.cache_clear()
    assert "bubblewrap" in str(caught.value)
