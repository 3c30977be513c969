"""`end_with_pipe`: a process is gone with its parent, whatever it is doing."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

CHILD = """
import sys
from m2flow.signals import end_with_pipe
end_with_pipe(sys.stdin.fileno())
print("ready", flush=True)
pow(3, 10**9)
"""
"""C code that holds every Python thread up for minutes."""


@pytest.mark.parametrize("early", [False, True])
def test_a_process_in_c_code_ends_when_nobody_holds_the_pipe(early: bool) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        if early:  # before the process has asked for it
            child.stdin.close()
        else:
            assert child.stdout.readline() == b"ready\n"
            child.stdin.close()
        assert child.wait(60) == (1 if early else -signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
