"""Run Python that nobody has read: no network, no files but a scratch folder, bounded in all else.

from m2flow.rewards.sandbox import run_python
run_python("print(input()[::-1])", "abc").stdout  # "cba\\n"

A program runs in namespaces of its own (network, processes, mounts, IPC, host name), without
capabilities and with an empty environment; where m2flow runs as root, under a user id that owns
nothing. It sees `/usr` and this Python's own folder, read-only, and a `/tmp` in memory that goes
with it. Bubblewrap makes the namespaces where it is installed, else util-linux's `unshare`; where
neither is allowed to, nothing is run. The program's source comes on its standard input, before the
text that it is to read there.

Limits hold for each process (memory, CPU seconds, size of a file) and for the program (processes,
seconds, bytes of output and of files). Memory that belongs to no process cannot be had, except in
files in `/tmp` (`m2flow.rewards.syscalls`). So all of a program takes at most `processes` times
`memory_bytes` and `scratch_bytes`, besides what the kernel needs to keep account of it: its files,
64 open ones for each process, and what is on its way in their pipes and sockets.
"""

from __future__ import annotations

import os
import secrets
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import IO

from m2flow.errors import UserError
from m2flow.rewards.syscalls import refusals

USERS = range(1 << 20, 1 << 30)
"""User ids of programs, one drawn for each: processes are counted by user id."""

PYTHON = "/py"
"""Where a program sees the folder of this Python."""

GRACE_SECONDS = 5.0
"""How long a program that was killed may take to be gone."""

PAGE_BYTES = 4096
"""Of scratch for each file: a file without a word in it takes memory, too."""

_PROGRAM = """
import ctypes, os, sys
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]
def ask(option, value, at):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    if libc.prctl(option, value, at, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option} is refused")
if code := bytes.fromhex(sys.argv[4]):
    ask(38, 1, 0)
    rules = Filter(len(code) // 8, code)
    ask(22, 2, ctypes.addressof(rules))
if os.getpid() == 1:  # which has to keep the signal that it gets when the process outside ends
    ask(4, 0, 0)  # nobody may trace it, nor write to its memory
    if program := os.fork():
        ended = 0
        while ended != program:
            ended, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    ask(4, 1, 0)
def text(length):
    parts = []
    while length and (part := os.read(0, length)):
        parts.append(part); length -= len(part)
    return b"".join(parts).decode()
def run(source, after, word):
    name = "program" if after else "__main__"
    module = sys.modules[name] = type(sys)(name)
    sys.argv = ["program.py"]
    exec(compile(source, "program.py", "exec"), vars(module))
    if after:
        exec(compile(after, "after.py", "exec"), vars(module))
        sys.stdout.flush()
        os.write(1, word.encode())
run(*map(text, map(int, sys.argv[1:4])))  # all is read before the program is: it could echo it
"""


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: from its start to its end.
        cpu_seconds: of each process.
        memory_bytes: address space of each process.
        processes: processes and threads at one time.
        scratch_bytes: of all files in `/tmp`, of which there is one at most for each 4 KiB.
        output_bytes: of standard output and standard error together.
    """

    seconds: float = 10.0
    cpu_seconds: int = 10
    memory_bytes: int = 512 << 20
    processes: int = 8
    scratch_bytes: int = 64 << 20
    output_bytes: int = 1 << 20


LIMITS = Limits()


@dataclass(frozen=True)
class ProgramOutcome:
    """How a program ended.

    Attributes:
        stdout, stderr: what it wrote; bytes that are no UTF-8 are replaced.
        exit_code: its own, 128 and the number of the signal that ended it, or None where it broke
            a limit of the whole program, or ended before what was to follow it.
        why: that in words, else "".
    """

    stdout: str
    stderr: str
    exit_code: int | None
    why: str = ""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself and without an error."""
        return self.exit_code == 0


def run_python(
    source: str, stdin: str = "", *, after: str = "", limits: Limits = LIMITS
) -> ProgramOutcome:
    """Run a program in a sandbox.

    Args:
        source: of the program.
        stdin: what it may read from standard input.
        after: source that is run in the program's namespace once it has come to its end; a program
            that ends its process, or repeats what it reads, does not make it seem so. One that
            searches the interpreter's own frames could: it is in the same process. With it the
            program is a module that is imported: its `__name__` is "program", not "__main__".
        limits: what it may use.

    Raises:
        UserError: no sandbox can be made on this machine.
    """
    return _run(find_way().command(limits), source, stdin, after, limits)


# --- running --------------------------------------------------------------------------------------


def _run(
    command: Sequence[str], source: str, stdin: str, after: str, limits: Limits
) -> ProgramOutcome:
    program, later = source.encode(), after.encode()
    word = secrets.token_bytes(16).hex().encode() if after else b""
    interpreter = f"{PYTHON}/bin/python3.{sys.version_info.minor}"
    lengths = [str(len(part)) for part in (program, later, word)]
    inside = [interpreter, "-I", "-c", _PROGRAM, *lengths, refusals().hex()]
    with subprocess.Popen(
        [*command, *inside],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={},
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stderr is not None
        outputs = {process.stdout: bytearray(), process.stderr: bytearray()}
        try:
            why = _converse(process, program + later + word + stdin.encode(), outputs, limits)
        finally:
            process.kill()  # the namespace's first process: all others go with it
            process.wait(GRACE_SECONDS)
        written, told = (bytes(output) for output in outputs.values())
        code: int | None = process.returncode
        if code == 0 and not written.endswith(word):
            why = "ended before what was to follow it"
        if why:
            code = None
        elif code is not None and code < 0:
            code = 128 - code
        stdout = written.removesuffix(word).decode(errors="replace")
        return ProgramOutcome(stdout, told.decode(errors="replace"), code, why)


def _converse(
    process: subprocess.Popen[bytes],
    words: bytes,
    outputs: dict[IO[bytes], bytearray],
    limits: Limits,
) -> str:
    """Write to a program and read from it until it has ended; the limit that it broke, or ""."""
    deadline, left = time.monotonic() + limits.seconds, memoryview(words)
    assert process.stdin is not None
    with selectors.DefaultSelector() as waiting:
        for stream in outputs:
            os.set_blocking(stream.fileno(), False)
            waiting.register(stream, selectors.EVENT_READ)
        os.set_blocking(process.stdin.fileno(), False)
        waiting.register(process.stdin, selectors.EVENT_WRITE)
        while any(stream in waiting.get_map() for stream in outputs):
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                return f"did not end within {limits.seconds:g} s"
            ready = {key.fileobj for key, _ in waiting.select(seconds)}
            if process.stdin in ready:
                left = _written(process.stdin, left)
                if not left:
                    waiting.unregister(process.stdin)
                    process.stdin.close()
            for stream, output in outputs.items():
                if stream in ready:
                    found = os.read(stream.fileno(), 1 << 16)
                    output += found
                    if not found:
                        waiting.unregister(stream)
            if sum(map(len, outputs.values())) > limits.output_bytes:
                return f"wrote more than {limits.output_bytes} bytes"
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return f"did not end within {limits.seconds:g} s"
    return ""


def _written(stream: IO[bytes], words: memoryview) -> memoryview:
    """Write some of the words; what is left of them, nothing where nobody reads them."""
    try:
        return words[os.write(stream.fileno(), words[: 1 << 16]) :]
    except BrokenPipeError:
        return words[:0]


# --- ways to make a sandbox -----------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A program that makes sandboxes.

    Attributes:
        name: its command.
        command: the words before those that are run in the sandbox.
    """

    name: str
    command: Callable[[Limits], list[str]]


_DIES_WITH_PARENT = (shutil.which("setpriv") or "setpriv", "--pdeathsig=KILL")


def _dropped(limits: Limits, processes_besides: int = 0) -> list[str]:
    """Words that take every privilege away and set the limits.

    `processes_besides`: how many processes that are not the program's are counted with its own.
    """
    words = [*_DIES_WITH_PARENT, "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    if os.geteuid() == 0:
        user = secrets.randbelow(len(USERS)) + USERS.start
        words += [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    return [
        *words,
        shutil.which("prlimit") or "prlimit",
        f"--as={limits.memory_bytes}",
        f"--cpu={limits.cpu_seconds}",
        f"--nproc={limits.processes + processes_besides}",
        f"--fsize={limits.scratch_bytes}",
        "--nofile=64",
        "--core=0",
    ]


def _scratch(limits: Limits) -> str:
    """Options of the file system at `/tmp`; a size of 0 would be none."""
    pages = max(1, limits.scratch_bytes // PAGE_BYTES)
    return f"mode=1777,size={pages * PAGE_BYTES},nr_inodes={pages},nosuid,nodev"


def _environment() -> dict[str, str]:
    return {
        "PATH": "/usr/bin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "LD_LIBRARY_PATH": f"{PYTHON}/lib",
        "OMP_NUM_THREADS": "1",
    }


def _bubblewrap(limits: Limits) -> list[str]:
    words = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session", "--clearenv"]
    words += [f"--unshare-{what}" for what in ("net", "pid", "ipc", "uts", "cgroup-try")]
    # As root bwrap's own first process is root's, which the program has no way into, and which ends
    # with bwrap. The program, of another user, would not: bwrap's end may send it no signal.
    first = 0 if os.geteuid() == 0 else 1
    if first:  # with the privileges to mount, and to drop those
        words.append("--as-pid-1")  # no process of bwrap's own, unbounded, that it could get into
        words += ["--unshare-user", "--uid", "0", "--gid", "0"]
        words += ["--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETPCAP"]
    words += ["--ro-bind", "/usr", "/usr", "--ro-bind", sys.base_prefix, PYTHON]
    for name in ("bin", "lib", "lib64", "sbin"):
        words += ["--symlink", f"usr/{name}", f"/{name}"]
    words += ["--proc", "/proc", "--dev", "/dev", "--dir", "/tmp"]
    words += ["--remount-ro", "/dev", "--remount-ro", "/"]
    for name, value in _environment().items():
        words += ["--setenv", name, value]
    script = ["/bin/sh", "-c", _NEW_SCRATCH, "sandbox", _scratch(limits)]
    return [*words, *script, *_dropped(limits, first)]


_NEW_SCRATCH = """
set -e
mount -t tmpfs -o "$1" none /tmp
cd /tmp
shift
exec "$@"
"""


_NEW_ROOT = """
set -e
mount --make-rprivate /
mount -t tmpfs -o mode=755,size=1m none /mnt
mkdir /mnt/usr "/mnt$2"
mount --bind /usr /mnt/usr
mount --bind "$1" "/mnt$2"
mount -o remount,bind,ro,nosuid,nodev /mnt/usr
mount -o remount,bind,ro,nosuid,nodev "/mnt$2"
for name in bin lib lib64 sbin; do ln -s "usr/$name" "/mnt/$name"; done
mkdir /mnt/proc /mnt/dev /mnt/tmp /mnt/old
mount -t proc -o nosuid,nodev,noexec none /mnt/proc
for name in null zero random urandom; do
    touch "/mnt/dev/$name"
    mount --bind "/dev/$name" "/mnt/dev/$name"
done
mount -t tmpfs -o "$3" none /mnt/tmp
cd /mnt
pivot_root . old
umount -l /old
rmdir /old
mount -o remount,bind,ro /
cd /tmp
shift 3
exec "$@"
"""


def _unshare(limits: Limits) -> list[str]:
    unshare = shutil.which("unshare") or "unshare"
    # A process that gets a user namespace forgets the signal for its parent's death: that comes
    # before.
    words = [] if os.geteuid() == 0 else [unshare, "--user", "--map-root-user"]
    words += [*_DIES_WITH_PARENT, unshare, "--net", "--pid", "--ipc", "--uts", "--mount"]
    words += ["--fork", "--kill-child=KILL"]
    script = ["/bin/sh", "-c", _NEW_ROOT, "sandbox", sys.base_prefix, PYTHON]
    script.append(_scratch(limits))
    environment = [f"{name}={value}" for name, value in _environment().items()]
    return [*words, *script, "/usr/bin/env", "-i", *environment, *_dropped(limits, 1)]


WAYS = (Way("bwrap", _bubblewrap), Way("unshare", _unshare))


@lru_cache(maxsize=1)
def find_way() -> Way:
    """The first way that works here.

    Raises:
        UserError: none does.
    """
    reasons = []
    for way in WAYS:
        try:
            outcome = _run(way.command(LIMITS), "print('ready')", "", "", LIMITS)
        except OSError as error:
            reasons.append(f"{way.name}: {error.strerror}")
            continue
        if outcome.stdout == "ready\n":
            return way
        told = outcome.why or (outcome.stderr.strip() or f"ended with {outcome.exit_code}")
        reasons.append(f"{way.name}: {told.splitlines()[-1]}")
    raise UserError(
        f"no sandbox for programs can be made on this machine ({'; '.join(reasons)})",
        key="reward",
        value="code",
        hint="install bubblewrap, and allow namespaces (in a container: user namespaces, or "
        "--cap-add SYS_ADMIN)",
    )
