"""What Ray starts in place of Python where a lane is to be a fork of the template.

    python -I -S ask_template.py ADDRESS SCRIPT [ARGUMENT ...]

Hands over to the template (`template.py` beside this file) what it was started with, and exits once
a fork has taken its place. Where no template answers, it becomes the Python that Ray wanted. It
imports little, since each start of a lane waits for it, and nothing of m2flow.
"""

import json
import os
import socket
import struct
import sys

ANSWER_SECONDS = 60.0
"""Longest to wait for a fork: the first one waits for the imports."""


def user_of(line: socket.socket) -> int:
    """The number of the user at the other end."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(user)


def main() -> None:
    """Ask the template for a fork, or else start Python."""
    address, *arguments = sys.argv[1:]
    wanted = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()  # noqa: PTH109 - quick
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.connect(f"\0{address}")
            if user_of(line) != os.getuid():  # it is not to have the environment
                raise PermissionError
            socket.send_fds(line, [len(wanted).to_bytes(8, "big")], [0, 1, 2])
            line.settimeout(ANSWER_SECONDS)
            line.sendall(wanted)
            if line.recv(1):
                return
    except OSError:
        pass  # there is none, it has ended, or somebody else has taken its address
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main()
