"""The sandbox: what programs may do, and every way out of it that was thought of."""

from __future__ import annotations

import os
import platform
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from m2flow.errors import UserError
from m2flow.rewards import sandbox
from m2flow.rewards.sandbox import (
    LIMITS,
    WAYS,
    Limits,
    ProgramOutcome,
    Sandbox,
    Way,
    run_python,
)
from m2flow.rewards.syscalls import MACHINES, PARTLY, REFUSED, refusals
from tests.patience import SOON

QUICK = replace(LIMITS, seconds=5.0, cpu_seconds=2)
PATIENT = replace(LIMITS, seconds=120.0)


def works(way: Way) -> bool:
    try:
        with Sandbox(LIMITS, way) as one:
            return one.run("print('ready')").ok
    except OSError:
        return False


WORKING = [way for way in WAYS if works(way)]

if os.environ.get("M2FLOW_NEEDS_SANDBOX"):  # `make test-sandbox`
    assert len(WORKING) == len(WAYS), WORKING
elif not WORKING:
    pytest.skip("neither bubblewrap nor unshare may make namespaces", allow_module_level=True)


@pytest.fixture(params=WORKING, ids=lambda way: way.name, autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sandbox, "find_way", lambda: request.param)
    yield
    deadline = time.monotonic() + SOON
    while left := programs():
        assert time.monotonic() < deadline, left


def programs() -> list[str]:
    """Programs that this process has begun, or that nobody is the parent of any more.

    Other tests may run some of their own meanwhile.
    """
    everything = processes()
    parents = {process: parent for process, parent, _ in everything}
    running = {process: args for process, _, args in everything if "program.py" in args}

    def is_mine(process: int) -> bool:
        above, begun_by = process, None
        while above in parents and above != os.getpid():
            if begun_by is None and above not in running:
                begun_by = above
            above = parents[above]
        return above == os.getpid() or begun_by in (None, 1)

    return [line for process, line in running.items() if is_mine(process)]


def processes() -> list[tuple[int, int, str]]:
    """The number of each process of the machine, its parent's, and its words."""
    words = ["ps", "-eww", "-o", "pid=,ppid=,args="]  # whole lines, however wide a terminal is
    found = subprocess.run(words, capture_output=True, text=True, check=True)
    rows = [line.split(maxsplit=2) for line in found.stdout.splitlines()]
    return [(int(row[0]), int(row[1]), row[2] if len(row) > 2 else "") for row in rows]


def refused(source: str, limits: Limits = QUICK) -> ProgramOutcome:
    outcome = run_python(source, limits=limits)
    assert not outcome.ok, outcome
    return outcome


HOST = """
import sys
from m2flow.rewards import sandbox
way, = (way for way in sandbox.WAYS if way.name == sys.argv[1])
sandbox.find_way = lambda: way
limits = sandbox.Limits(seconds=600.0)
sandbox.run_python("import time; open('/tmp/x', 'w'); time.sleep(600)", limits=limits)
"""


def test_a_program_ends_with_the_process_that_runs_it() -> None:
    """Killed without a word, it left a program that sleeps to itself."""
    host = subprocess.Popen([sys.executable, "-c", HOST, sandbox.find_way().name])
    deadline = time.monotonic() + SOON
    while not any(args.startswith(f"{sandbox.PYTHON}/bin/") for _, _, args in processes()):
        assert time.monotonic() < deadline
        assert host.poll() is None
        time.sleep(0.1)
    host.kill()
    host.wait()  # the fixture sees that nothing is left


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


def test_a_program_may_have_threads_and_processes() -> None:
    source = """
import asyncio, multiprocessing, socket, subprocess, threading

def told(pipe):
    pipe.send("from a process")

if __name__ == "__main__":
    thread = threading.Thread(target=print, args=("from a thread",))
    thread.start(); thread.join()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=told, args=(there,))
    process.start(); print(here.recv()); process.join()
    print(subprocess.run(["echo", "from a command"], capture_output=True, text=True).stdout, end="")
    one, other = socket.socketpair()
    one.sendall(b"from a socket"); print(other.recv(99).decode())
    print(asyncio.run(asyncio.to_thread(lambda: "from a loop")))
"""
    outcome = run_python(source)
    words = [f"from a {what}" for what in ("thread", "process", "command", "socket", "loop")]
    assert outcome.stdout.splitlines() == words, outcome


@pytest.mark.parametrize(("source", "code"), [("1/0", 1), ("raise SystemExit(3)", 3)])
def test_how_it_ended_is_told(source: str, code: int) -> None:
    assert run_python(source).exit_code == code


def test_statements_afterwards_see_what_the_program_defined() -> None:
    assert run_python("def f(x): return x + 1", after="assert f(1) == 2").ok
    outcome = run_python("def f(x): return x", after="assert f(1) == 2")
    assert outcome.exit_code == 1
    assert 'after.py", line 1' in outcome.stderr


@pytest.mark.parametrize(
    "source",
    [
        "import sys\nif __name__ == '__main__': sys.exit(f(input()))",
        "import unittest\nif __name__ == '__main__': unittest.main()",
    ],
)
def test_with_statements_afterwards_a_program_is_no_main_program(source: str) -> None:
    """Its main part waited for words, or ended the process before the statements."""
    assert run_python(f"def f(x): return x + 1\n{source}", after="assert f(1) == 2").ok


def test_a_program_has_no_arguments() -> None:
    """It took the lengths of what the sandbox was given for file names."""
    source = "import sys\nif len(sys.argv) > 1: sys.stdin = open(sys.argv[1])\nprint(input())"
    assert run_python(source, "7").stdout == "7\n"
    assert run_python("import sys; print(sys.argv)").stdout == "['program.py']\n"


@pytest.mark.parametrize("after", ["", "assert Node"])
def test_what_a_program_defines_can_be_looked_up_by_its_module(after: str) -> None:
    source = """
import pickle, sys, typing
class Node:
    next: "Node | None" = None
assert pickle.loads(pickle.dumps(Node())).next is None
assert typing.get_type_hints(Node) == {"next": typing.Optional[Node]}
assert not {"text", "run", "Filter"} & set(vars(sys.modules[__name__]))
"""
    outcome = run_python(source, after=after)
    assert outcome.ok, outcome.stderr


def test_a_program_tests_itself() -> None:
    source = """
import unittest
class Case(unittest.TestCase):
    def test_sum(self):
        self.assertEqual(1 + 1, {})
if __name__ == "__main__":
    unittest.main()
"""
    outcome = run_python(source.format(2))
    assert outcome.ok, outcome.stderr
    assert "Ran 1 test" in outcome.stderr
    assert not run_python(source.format(3)).ok


def test_programs_of_a_sandbox_find_nothing_of_those_before_them() -> None:
    leaves = (
        "open('/tmp/x', 'w')",
        "import os; os.mkdir('/tmp/x', 0)",
        "import os, time\nif os.fork() == 0: os.setsid(); time.sleep(600)",
        "import json; json.loads = None",
        "import os; os.chdir('/'); os.environ['X'] = 'x'",
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))",
        "import os; os._exit(3)",
        "import os; os.kill(os.getpid(), 9)",
        "while True: pass",
    )
    looks = """
import json, os
numbers = [name for name in os.listdir("/proc") if name.isdigit()]
assert len(numbers) <= 3, numbers
json.loads("[]")
print(os.listdir(), os.getcwd(), "X" in os.environ, sorted(map(int, os.listdir("/proc/self/fd"))))
"""
    with Sandbox(replace(PATIENT, cpu_seconds=1)) as one:
        for source in leaves:
            one.run(source)
            outcome = one.run(looks)
            assert outcome.stdout == "[] /tmp False [0, 1, 2, 3]\n", (source, outcome)


def test_a_sandbox_goes_on_after_a_program_that_left_nothing() -> None:
    with Sandbox(PATIENT) as one:
        assert one.run("print(input())", "1").stdout == "1\n"
        first = one._process
        assert one.run("print(input())", "2").stdout == "2\n"
        assert one.run("1 / 0").exit_code == 1
        assert one.run("def f(): return 1", after="assert f() == 1").ok
        assert not one.run("def f(): return 1", after="assert f() == 2").ok
        assert one._process is first
        assert one.run("open('/tmp/x', 'w')").ok
        assert one._process is None


def test_the_process_that_starts_programs_is_out_of_their_reach() -> None:
    source = """
import ctypes, os
starter = os.getppid()
for path in ("mem", "fd/0", "environ", "maps"):
    try:
        open(f"/proc/{starter}/{path}", "rb")
    except PermissionError:
        continue
    raise SystemExit(f"{path} can be opened")
assert ctypes.CDLL(None).ptrace(16, starter, 0, 0) == -1
descriptor = os.pidfd_open(starter)
assert ctypes.CDLL(None).syscall(438, descriptor, 0, 0) == -1  # pidfd_getfd
"""
    with Sandbox(PATIENT) as one:
        outcome = one.run(source)
        assert outcome.ok, outcome


def test_a_program_that_ends_the_process_that_started_it_does_not_pass_by_that() -> None:
    """As the namespace's first process it is no other's to end."""
    with Sandbox(PATIENT) as one:
        for number in (signal.SIGINT, signal.SIGKILL, signal.SIGSTOP):
            source = f"import os; os.kill(os.getppid(), {int(number)}); os._exit(3)"
            assert not one.run(source, seconds=5.0).ok  # stopped, it says nothing more
            assert one.run("print(1)").stdout == "1\n"


# --- limits ---------------------------------------------------------------------------------------


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """The seconds for which this process has waited for a program's words, in turn."""
    asked: list[float | None] = []

    class Selector(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            asked.append(timeout)
            return super().select(timeout)

    monkeypatch.setattr(selectors, "DefaultSelector", Selector)
    return asked


def test_an_endless_program_is_killed(waits: list[float]) -> None:
    outcome = refused("while True: pass", replace(QUICK, seconds=1.0))
    assert (outcome.exit_code, outcome.why) == (None, "did not end within 1 s")
    assert waits
    assert max(waits) <= 1.0


def test_cpu_seconds_are_limited() -> None:
    outcome = refused("while True: pass", replace(QUICK, seconds=60.0, cpu_seconds=1))
    assert outcome.exit_code in (128 + 9, 1)
    assert outcome.why == ""


def test_a_memory_bomb_fails() -> None:
    outcome = refused("x = bytearray(1 << 30)")
    assert "MemoryError" in outcome.stderr


filtered = pytest.mark.skipif(
    platform.machine() not in MACHINES, reason="the numbers of this machine's calls are not known"
)

SYSTEM_V = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
def system_v(size):
    at = libc.shmget(0, ctypes.c_size_t(size), 0o1600)
    if at < 0:
        raise OSError(ctypes.get_errno(), "shmget")
    held = ctypes.c_void_p(libc.shmat(at, None, 0))
    ctypes.memset(held, 1, size)
    libc.shmdt(held)
"""

NAMELESS = """
import os
def nameless(size):
    os.write(os.memfd_create("x"), b"x" * size)
"""

ANOTHER_TMP = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x10000000 | 0x20000) or libc.mount(b"x", b"/tmp", b"tmpfs", 0, None):
    raise OSError(ctypes.get_errno(), "unshare or mount")
"""


@filtered
@pytest.mark.parametrize(
    "source",
    [
        SYSTEM_V + "for _ in range(48): system_v(8 << 20)",
        NAMELESS + "for _ in range(48): nameless(8 << 20)",
        ANOTHER_TMP,
        "import socket; socket.create_server(('127.0.0.1', 0))",
        "import socket; socket.socketpair(30, socket.SOCK_STREAM)",  # any kind but Unix's
        "import ctypes; assert ctypes.CDLL(None).msgget(0, 0o1600) >= 0",
        "import ctypes; assert ctypes.CDLL(None).semget(0, 1, 0o1600) >= 0",
    ],
)
def test_memory_outside_of_processes_cannot_be_had(source: str) -> None:
    told = refused(source, replace(QUICK, memory_bytes=256 << 20)).stderr
    assert "PermissionError" in told or "AssertionError" in told


@filtered
def test_each_refused_call_is_refused_under_all_of_its_numbers() -> None:
    """Without the filter arguments of -1 have other errors; a user namespace could be made."""
    column = MACHINES[platform.machine()].column
    calls = [pair[column] for pair in REFUSED.values()]
    if platform.machine() == "x86_64":
        calls += [0x4000_0000 | number for number in (0, 29, 319)]  # x32
    source = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.argtypes = [ctypes.c_long] * 7
def error(call, first):
    found = libc.syscall(call, first, -1, -1, -1, -1, -1)
    return ctypes.get_errno() if found < 0 else 0
print([error(call, -1) for call in {calls}])
print([error(call, first) for call, first in {
        [(PARTLY["clone"][column], 0x1000_0000), (PARTLY["clone3"][column], 0)]
    }])
"""
    outcome = run_python(source, limits=QUICK)
    assert outcome.stdout.splitlines() == [str([1] * len(calls)), "[1, 38]"], outcome


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86's older calls")
def test_calls_of_an_older_instruction_set_end_a_program() -> None:
    """`int 0x80` has the numbers of 32 bits, of which 20 asks for the process's own."""
    source = """
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("b814000000cd80c3"))
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
print("went on")
"""
    assert refused(source).stdout == ""


def test_a_machine_whose_numbers_are_not_known_has_no_filter() -> None:
    assert refusals("sparc64") == b""
    assert len(refusals("aarch64")) == len(refusals("x86_64")) > 0
    assert all(len(set(column)) == len(REFUSED) for column in zip(*REFUSED.values(), strict=True))


@filtered
def test_several_processes_hold_no_more_than_was_promised() -> None:
    """Each takes memory of every kind that it can get, and says how much it has."""
    source = (
        SYSTEM_V
        + NAMELESS
        + """
import sys, time
PIECE = 4 << 20
kept = []

def private(size):
    kept.append(bytearray(size))

def scratch(size):
    with open(f"/tmp/{os.getpid()}-{time.monotonic_ns()}", "wb", 0) as file:
        if (written := file.write(b"x" * size)) < size:
            raise OSError("full")

def taken():
    total = 0
    for take in (system_v, nameless, scratch, private):
        try:
            for _ in range(24):
                take(PIECE)
                total += PIECE
        except (OSError, MemoryError):
            pass
    return total

read, write = os.pipe()
children = 0
try:
    while children < 9:
        if os.fork() == 0:
            os.write(write, b"%d " % taken())
            time.sleep(600)
        children += 1
except BlockingIOError:
    pass
total = taken()
while children:
    said = os.read(read, 99)
    children -= said.count(b" ")
    total += sum(map(int, said.split()))
print(total)
"""
    )
    limits = replace(QUICK, memory_bytes=64 << 20, processes=2, scratch_bytes=16 << 20)
    total = int(run_python(source, limits=limits).stdout)
    assert 16 << 20 < total <= limits.processes * limits.memory_bytes + limits.scratch_bytes


def test_files_without_a_word_in_them_are_bounded() -> None:
    source = """
made = 0
try:
    for made in range(2000):
        open(f"/tmp/{made}", "x").close()
except OSError as error:
    print(error.strerror)
print(made)
"""
    outcome = run_python(source, limits=replace(QUICK, scratch_bytes=1 << 20))
    assert outcome.stdout == "No space left on device\n255\n"  # the folder is one, too


def test_a_fork_bomb_is_bounded() -> None:
    source = """
import os, time
children = 0
try:
    for _ in range(100):
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
        children += 1
except BlockingIOError:
    print(children)
"""
    outcome = run_python(source, limits=QUICK)
    assert 1 <= int(outcome.stdout) < LIMITS.processes


def test_a_fork_bomb_whose_children_fork_on_is_bounded(waits: list[float]) -> None:
    """None of them ends by itself; all are gone afterwards, as after every test here."""
    source = """
import os
while True:
    try:
        os.fork()
    except BlockingIOError:
        pass
"""
    refused(source)
    assert waits
    assert max(waits) <= QUICK.seconds


def test_a_program_that_sleeps_is_gone_when_its_time_is_over() -> None:
    """Looked for after each test; also where it asks to live on without its parent."""
    source = """
import ctypes, os, time
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
os.fork()
time.sleep(600)
"""
    refused(source, replace(QUICK, seconds=1.0))


def test_a_child_that_outlives_the_program_is_gone_with_it() -> None:
    source = """
import os, time
if os.fork() == 0:
    os.setsid()
    os.close(1); os.close(2)
    time.sleep(600)
"""
    assert run_python(source, limits=QUICK).ok


def test_a_program_that_replaces_itself_from_a_thread_is_gone_when_its_time_is_over() -> None:
    """The signal for the parent's death belongs to a thread, and goes with it."""
    command = "sleep 601.7"
    source = f"""
import os, threading, time
threading.Thread(target=os.execv, args=("/bin/sleep", {command.split()})).start()
time.sleep(600)
"""
    refused(source, replace(QUICK, seconds=1.0))
    deadline = time.monotonic() + SOON
    while (left := process_ids(command)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process_id in left:
        os.kill(process_id, signal.SIGKILL)
    assert not left


def process_ids(command: str) -> list[int]:
    words = ["ps", "-eww", "-o", "pid,args"]
    found = subprocess.run(words, capture_output=True, text=True, check=True)
    lines = [line.split(maxsplit=1) for line in found.stdout.splitlines()]
    return [int(number) for number, words in lines if words == command]


def test_the_first_process_of_a_program_s_namespace_is_out_of_its_reach() -> None:
    source = """
import ctypes, os, signal
assert os.getpid() != 1
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
    try:
        os.kill(1, number)
    except PermissionError:
        pass
libc = ctypes.CDLL(None, use_errno=True)
assert libc.ptrace(16, 1, 0, 0) == -1
try:
    open("/proc/1/mem", "r+b")
except PermissionError:
    print("still here")
"""
    outcome = run_python(source, limits=QUICK)
    assert outcome == ProgramOutcome("still here\n", "", 0)


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
        "import os; assert os.getpid() != 1; open('/proc/1/mem', 'r+b')",
        "import os; os.kill(PROCESS_OF_THE_TEST, 0)",
        "import os; os.setuid(0 if os.getuid() else 1)",  # 0: the test's own user, under a name
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


def test_neither_a_program_nor_a_command_of_its_has_a_capability() -> None:
    source = """
import subprocess
print(open("/proc/self/status").read())
subprocess.run(["cat", "/proc/self/status"])
"""
    lines = run_python(source).stdout.splitlines()
    sets = [line.split()[1] for line in lines if line.startswith("Cap")]
    assert sets == ["0" * 16] * 10  # inheritable, permitted, effective, bounding, ambient


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


@pytest.mark.parametrize(
    "source",
    [
        "import sys; sys.stdout.write(sys.stdin.read())",
        "while True: print(input(), end='')",
        "import os; os.write(1, os.read(0, 1 << 20)[-32:]); os._exit(0)",
    ],
)
def test_a_program_that_repeats_what_it_reads_does_not_pass(source: str) -> None:
    outcome = run_python(source, after="assert False")
    assert not outcome.ok, outcome
    assert "assert" not in outcome.stdout


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
