"""The template: a process with a lane's imports done, of which the lanes of a machine are forks.

    python template.py SOCKET MODULE ...

A fresh interpreter takes seconds of a core to import what a lane needs. A fork has it at once, and
shares the memory. A fork runs the script that Ray wanted to run, with its environment and files, as
`ask_template` hands them over. Ray itself is imported when the first one asks: on import it reads
which job its process is for. Only a process of one thread can be forked: where an import has
started another thread, nobody is served, and Python is started as usual.

The template serves processes of the same user only. It ends when its standard input does, which its
launcher holds. SOCKET is the number of the file on which it listens.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple

from m2flow.runtime.lane.ask_template import user_of

ASK_SECONDS = 2.0
"""Longest that one who has connected may take to say what is wanted, to the last byte."""

ASKED_BYTES = 16 << 20
"""More than any environment has."""

WITH_RAY = ("m2flow.runtime.lane.actor", "m2flow.runtime.lane.executor")
"""What any lane needs, and Ray with it."""


class Script(NamedTuple):
    """What a fork is to run.

    Attributes:
        arguments: the script, and its arguments.
        environment: all of its variables.
        folder: where it is to run.
        files: standard input, output and errors.
    """

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]


def main() -> None:
    """Do the imports, and serve; in a fork, run what is wanted."""
    sys.path.pop(0)  # the folder of this file
    listener = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for forks
    while select.select([listener, sys.stdin], [], [])[0] == [listener]:
        line, _ = listener.accept()
        with line:
            wanted = _heard(line)
            if wanted is None:
                continue
            if not _ready(wanted) or os.fork():
                for file in wanted.files:
                    os.close(file)
                continue
            listener.close()
            line.sendall(b"1")
        _run(wanted)
        return


def _heard(line: socket.socket) -> Script | None:
    """What somebody wants; None if it is another user, or goes without saying."""
    until = time.monotonic() + ASK_SECONDS
    line.settimeout(ASK_SECONDS)
    if user_of(line) != os.getuid():
        return None
    files: list[int] = []
    try:
        head, files, _, _ = socket.recv_fds(line, 8, 3)
        size, said = int.from_bytes(head, "big"), bytearray()
        while len(said) < min(size, ASKED_BYTES):
            line.settimeout(max(0.001, until - time.monotonic()))
            part = line.recv(min(size - len(said), 1 << 16))
            if not part:
                break
            said += part
        arguments, environment, folder = json.loads(said)
        return Script(arguments, environment, folder, files)
    except (OSError, ValueError):
        for file in files:
            os.close(file)
        return None


def _ready(wanted: Script) -> bool:
    """Import Ray if that is not done, for the job of the first who asks; whether to fork."""
    if "ray" not in sys.modules:
        os.environ.update(wanted.environment)
        for module in WITH_RAY:
            importlib.import_module(module)
        gc.collect()
        gc.freeze()  # a collection in a fork would copy all pages
    return len(list(Path("/proc/self/task").iterdir())) == 1


def _run(wanted: Script) -> None:
    """Run a script in this process, as if Python had been started with it."""
    os.setpgid(0, 0)  # Ray ends a worker's whole group
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, file in enumerate(wanted.files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(wanted.environment)
    os.chdir(wanted.folder)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # or all forks would draw the same
    sys.argv = wanted.arguments
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
