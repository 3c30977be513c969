"""What a `PayloadServer` and the `Peers` that ask it agree on: places, failures, the handshake."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from m2flow.errors import M2FlowError

HANDSHAKE_SECONDS = 5.0


class PeerLost(M2FlowError):
    """The process at the other end is gone, or cannot be reached."""


class LinkUnavailable(M2FlowError):
    """The link that was demanded does not exist between these two places."""


class TokenLink(Protocol):
    """A further link: what is sent stands for the value, and the receiver turns it back."""

    def put(self, value: Any) -> Any:
        """A small picklable token for the value; on the answering side."""

    def get(self, token: Any, timeout: float) -> Any:
        """The value behind a token, within so many seconds; on the asking side."""


class PeerAddress(NamedTuple):
    """Where a PayloadServer listens.

    Attributes:
        node: the name of its machine; the same name means the same /dev/shm.
        unix: path of its unix socket.
        tcp: its host and port.
        gpu: UUID of the GPU it stands on, or None.
    """

    node: str
    unix: str
    tcp: tuple[str, int]
    gpu: str | None = None


@dataclass(frozen=True, slots=True)
class TestPayload:
    """A key that every server answers by itself, with a uint8 tensor of this size.

    Attributes:
        nbytes: its size.
        on_device: whether it is to lie on the server's GPU, in a list of one.
    """

    __test__ = False  # no test class, whatever pytest thinks of its name
    nbytes: int
    on_device: bool = False


class Farewell:
    """The last request on a connection, without an answer.

    DONE: what was received stays in use. ABANDONED: the answer under way was never read, so its
    handle is taken back. A connection that ends without a farewell probably belonged to a process
    that died: see `ReadersOf`.
    """

    DONE = "done"
    ABANDONED = "abandoned"


class About:
    """What else is said of an answer by a link between devices. REFUSED: its offer does not work
    here, and has no answer. PROCEED: the link's own question, and REPLY what it gets. FAILED: what
    came after the reply went wrong; comes unasked, and is of no use to whoever knows already."""

    REFUSED = "refused"
    PROCEED = "proceed"
    REPLY = "reply"
    FAILED = "failed"


def this_node() -> str:
    """A name that this machine's processes agree on and no other machine has."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text().strip() if boot.exists() else ""
    return f"{socket.gethostname()}/{name}"


def authenticate(
    connection: socket.socket, authkey: bytes, seconds: float, *, asking: bool
) -> None:
    """Prove to each other that both know the key; the asking side answers first.

    A stranger that says nothing is given up after so many seconds: TimeoutError.
    """
    connection.settimeout(None)
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    channel = Connection(os.dup(connection.fileno()))
    try:
        if asking:
            answer_challenge(channel, authkey)
            deliver_challenge(channel, authkey)
        else:
            deliver_challenge(channel, authkey)
            answer_challenge(channel, authkey)
    except BlockingIOError as error:
        raise TimeoutError("the handshake took too long") from error
    finally:
        channel.close()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
