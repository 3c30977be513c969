"""Run Python that nobody has read: no network, no files but a scratch folder, bounded in all else.

from m2flow.rewards.sandbox import run_python
run_python("print(input()[::-1])", "abc").stdout  # "cba\\n"

A program runs in namespaces of its own (network, processes, mounts, IPC, host name), without
capabilities and with an empty environment; where m2flow runs as root, under a user id that owns
nothing. It sees `/usr` and this Python's own folder, read-only, and a `/tmp` in memory that goes
with it. Bubblewrap makes the namespaces where it is installed, else util-linux's `unshare`; where
neither is allowed to, nothing is run.

A process in the namespaces, the starter, runs the programs of a `Sandbox` one after the other, each
as a fork of itself with pipes for standard streams. Source, input and output go through these: the
starter knows none of them, and can be neither traced nor written to. Where a program leaves a
process or a file behind, its namespaces end, and the next program gets new ones.

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
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from io import FileIO
from typing import Self

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

_STARTER = """
import ctypes, os, socket, sys
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]
def ask(option, value, at):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    if libc.prctl(option, value, at, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option} is refused")
if rules := bytes.fromhex(sys.argv[1]):
    ask(38, 1, 0)
    filter = Filter(len(rules) // 8, rules)
    ask(22, 2, ctypes.addressof(filter))
ask(4, 0, 0)  # nobody may trace this process, nor write to its memory
ask(36, 1, 0)  # whoever loses its parent becomes a child of this process
def nothing_is_left():
    if not rules:
        return False  # there may be memory that belongs to no process
    try:
        if os.listdir("/tmp"):
            return False
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    except PermissionError:  # to list the folder
        pass
    return False
line = socket.socket(fileno=0)
while True:
    lengths, streams, _, _ = socket.recv_fds(line, 99, 3)
    if not lengths:
        os._exit(0)
    if not (program := os.fork()):
        break
    for stream in streams:
        os.close(stream)
    ended = 0
    while ended != program:
        ended, status = os.wait()
    stays = nothing_is_left()
    line.send(b"%d %d" % (os.waitstatus_to_exitcode(status), stays))
    if not stays:
        os._exit(0)  # the namespace's first process, or its only child: all others go with it
line.detach()
ask(4, 1, 0)
for number, stream in enumerate(streams):
    os.dup2(stream, number)
    os.close(stream)
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
run(*map(text, map(int, lengths.split())))  # all is read before the program is: it could echo it
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
    """Run a program in a sandbox of its own.

    Args:
        source, stdin, after: as of `Sandbox.run`.
        limits: what it may use.

    Raises:
        UserError: no sandbox can be made on this machine.
    """
    with Sandbox(limits) as sandbox:
        return sandbox.run(source, stdin, after=after)


class Sandbox:
    """Runs programs one after the other; each finds nothing of those before it.

    Namespaces are made when they are first needed. One thread at a time may use it.

    Args:
        limits: what each program may use.
        way: how namespaces are made; None for the first way that works here.

    Raises:
        UserError: no sandbox can be made on this machine.
    """

    def __init__(self, limits: Limits = LIMITS, way: Way | None = None) -> None:
        self._limits = limits
        self._way = find_way() if way is None else way
        self._process: subprocess.Popen[bytes] | None = None
        """What makes the namespaces, and ends with the starter in them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, source: str, stdin: str = "", *, after: str = "", seconds: float | None = None
    ) -> ProgramOutcome:
        """Run a program.

        Args:
            source: of the program.
            stdin: what it may read from standard input.
            after: source that is run in the program's namespace once it has come to its end; a
                program that ends its process, or repeats what it reads, does not make it seem so.
                One that searches the interpreter's own frames could: it is in the same process.
                With it the program is a module that is imported: its `__name__` is "program", not
                "__main__".
            seconds: what it may take; None for what the limits say.
        """
        limits = self._limits if seconds is None else replace(self._limits, seconds=seconds)
        deadline = time.monotonic() + limits.seconds
        program, later = source.encode(), after.encode()
        word = secrets.token_bytes(16).hex().encode() if after else b""
        process = self._process or self._start()
        feed, out, err = self._begin(b"%d %d %d" % (len(program), len(later), len(word)))
        outputs = {out: bytearray(), err: bytearray()}
        code, stays = 1, False
        try:
            words = memoryview(program + later + word + stdin.encode())
            why, said = _converse(self._line, feed, words, outputs, limits, deadline)
            if not why and said:
                code, stays = int(said.split()[0]), said.endswith(b"1")
            elif not why:  # the starter has ended, or never begun
                code = process.wait(GRACE_SECONDS) or 1
                assert process.stdout is not None
                outputs[err] += process.stdout.read(1 << 16) or b""
        finally:
            for stream in (feed, out, err):
                stream.close()
            if not stays:
                self.close()
        written, told = map(bytes, outputs.values())
        if not why and code == 0 and not written.endswith(word):
            why = "ended before what was to follow it"
        stdout = written.removesuffix(word).decode(errors="replace")
        exit_code = None if why else code if code >= 0 else 128 - code
        return ProgramOutcome(stdout, told.decode(errors="replace"), exit_code, why)

    def _start(self) -> subprocess.Popen[bytes]:
        """Make the namespaces, and the starter in them."""
        interpreter = f"{PYTHON}/bin/python3.{sys.version_info.minor}"
        inside = [interpreter, "-I", "-c", _STARTER, refusals().hex()]
        self._line, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.setblocking(False)
        try:
            process = subprocess.Popen(
                [*self._way.command(self._limits), *inside],
                bufsize=0,
                stdin=its_end.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={},
            )
        except OSError:
            self._line.close()
            raise
        finally:
            its_end.close()
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._process = process
        return process

    def _begin(self, lengths: bytes) -> tuple[FileIO, FileIO, FileIO]:
        """Have a program started; our ends of its input, output and errors."""
        (its_in, feed), (out, its_out), (err, its_err) = os.pipe(), os.pipe(), os.pipe()
        ends = its_in, its_out, its_err
        try:
            socket.send_fds(self._line, [lengths], ends)
        except ConnectionError:
            pass  # the starter has ended, as the line will say
        finally:
            for end in ends:
                os.close(end)
        ours = FileIO(feed, "w"), FileIO(out), FileIO(err)
        for stream in ours:
            os.set_blocking(stream.fileno(), False)
        return ours

    def close(self) -> None:
        """End the starter, and with it whatever runs in the namespaces."""
        if self._process is not None:
            process, self._process = self._process, None
            self._line.close()
            process.kill()  # the namespace's first process: all others go with it
            process.wait(GRACE_SECONDS)
            assert process.stdout is not None
            process.stdout.close()


def _converse(
    line: socket.socket,
    feed: FileIO,
    words: memoryview,
    outputs: Mapping[FileIO, bytearray],
    limits: Limits,
    deadline: float,
) -> tuple[str, bytes]:
    """Write to a program and read from it until it has ended.

    Returns:
        The limit that it broke, or ""; and what the starter said of its end, b"" for nothing.
    """
    said = b""
    sources: tuple[socket.socket | FileIO, ...] = (line, *outputs)
    with selectors.DefaultSelector() as waiting:
        for source in sources:
            waiting.register(source, selectors.EVENT_READ)
        waiting.register(feed, selectors.EVENT_WRITE)
        while any(source in waiting.get_map() for source in sources):
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                return f"did not end within {limits.seconds:g} s", said
            ready = {key.fileobj for key, _ in waiting.select(seconds)}
            if feed in ready:
                words = _written(feed, words)
                if not words:
                    waiting.unregister(feed)
                    feed.close()
            for stream, output in outputs.items():
                if stream in ready:
                    found = os.read(stream.fileno(), 1 << 16)
                    output += found
                    if not found:
                        waiting.unregister(stream)
            if sum(map(len, outputs.values())) > limits.output_bytes:
                return f"wrote more than {limits.output_bytes} bytes", said
            if line in ready:
                waiting.unregister(line)
                try:
                    said = line.recv(99)
                except ConnectionError:  # the starter ended before it was asked
                    said = b""
    return "", said


def _written(stream: FileIO, words: memoryview) -> memoryview:
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


def _dropped(limits: Limits) -> list[str]:
    """Words that take every privilege away and set the limits."""
    words = [*_DIES_WITH_PARENT, "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    if os.geteuid() == 0:
        user = secrets.randbelow(len(USERS)) + USERS.start
        words += [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    return [
        *words,
        shutil.which("prlimit") or "prlimit",
        f"--as={limits.memory_bytes}",
        f"--cpu={limits.cpu_seconds}",
        f"--nproc={limits.processes + 1}",  # the starter is counted with the program's
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
    if os.geteuid() != 0:  # with the privileges to mount, and to drop those
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
    return [*words, *script, *_dropped(limits)]


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
    return [*words, *script, "/usr/bin/env", "-i", *environment, *_dropped(limits)]


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
            with Sandbox(LIMITS, way) as sandbox:
                outcome = sandbox.run("print('ready')")
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
