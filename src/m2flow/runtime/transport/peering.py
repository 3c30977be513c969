"""What a `PayloadServer` and the `Peers` that ask it agree on: addresses, failures, messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from m2flow.errors import M2FlowError
from m2flow.runtime.transport.listening import ListenerAddress


class PeerLost(M2FlowError):
    """The process at the other end is gone, or cannot be reached."""


class PeerAddress(NamedTuple):
    """Where a PayloadServer listens.

    Attributes:
        node: the name of its machine; the same name means the same /dev/shm.
        endpoint: its sockets.
        gpu: UUID of the GPU it stands on, or None.
    """

    node: str
    endpoint: ListenerAddress
    gpu: str | None = None


class Location(NamedTuple):
    """Where a process runs.

    Attributes:
        name: what people call it, such as "lane 3".
        node: the name of its machine.
        gpu: UUID of its GPU; None without one.
    """

    name: str
    node: str
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


class FrameKind:
    """Kinds of frames.

    The asker says HELLO (its reader's name and location) once, then one REQUEST (key, whether not
    to use CUDA IPC) at a time. The answer is an ERROR, a STREAM (a packed value), a
    SHARED handle, or a DEVICE offer. The last frame is DONE: what was received stays in use; or
    ABANDONED: the answer under way was never read, so what it holds is taken back. A connection
    that ends without either probably belonged to a process that died: see `ReadersOf`.
    """

    HELLO, REQUEST, DONE, ABANDONED = "hello", "request", "done", "abandoned"
    ERROR, STREAM, SHARED, DEVICE = "error", "stream", "shared", "device"
