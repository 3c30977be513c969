"""What goes over a channel's sockets: fixed headers, JSON keys, opaque bodies, and the handshake.

A client has one request on its way at a time. A reply that hands over items is acknowledged with
one more, unanswered message; until then the items are not the client's. Both sides prove that they
know the channel's secret before a request is read, and only clients ever unpickle.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

REQUEST = struct.Struct("<BxHIdddQ")
"""Operation, bytes of the key, most items, timeout, weight, linger (seconds), bytes of the body."""

REPLY = struct.Struct("<BxxxIdQ")
"""Outcome, number of items, seconds waited, bytes of the body."""

SIZE = struct.Struct("<Q")
"""The table before the items of a reply: the bytes of each."""

HELLO_BYTES, PROOF_BYTES = 32, 32
SCRATCH_BYTES = 1 << 16
"""What one read may bring without a buffer made for it."""

ALIGNMENT = 64

MOST_PARTS = 512
"""Buffers that go into one call of the kernel."""

Key = str | int | None
"""What items may be filed under."""


class Operation(IntEnum):
    """What a client asks for."""

    PUT = 1
    GET = 2
    ACKNOWLEDGE = 3
    PEEK = 4
    STATS = 5
    CLOSE = 6


@dataclass(frozen=True, slots=True)
class Address:
    """Where a channel is hosted, and what it takes to be let in.

    Attributes:
        name: the channel's, for messages.
        machine: identifies the machine and network namespace in which `local` can be reached.
        local: the name of an abstract unix socket.
        remote: host and port for other machines, if it listens there.
        secret: known to handles only.
    """

    name: str
    machine: str
    local: str
    remote: tuple[str, int] | None
    secret: bytes = field(repr=False)
    max_items: int
    max_bytes: int


def this_machine() -> str:
    """Differs between machines, and between network namespaces of one machine."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"


def encoded(key: Key) -> bytes:
    """A key as it travels."""
    return json.dumps(key).encode()


def proof(secret: bytes, side: bytes, hello: bytes, answer: bytes) -> bytes:
    """That a side knows the secret, good for one connection."""
    return hmac.new(secret, side + hello + answer, hashlib.sha256).digest()


def aligned(num_bytes: int) -> int:
    """Rounded up, so that what follows can be read as elements of any dtype."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
