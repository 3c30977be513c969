"""The handshake: both ends of a new connection prove that they know a key, before any frame.

Frames are unpickled, so nobody gets in without the key. Each side sends a random nonce and answers
the other's with an HMAC over both and its own role; the key itself never travels, and an answer is
good for one connection. The whole exchange has one short deadline, however slowly bytes come in.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

HANDSHAKE_SECONDS = 10.0
"""Longest that a handshake may take."""

_NONCE_BYTES = _PROOF_BYTES = 32


class KeyRefused(ConnectionRefusedError):
    """The other end does not know the key."""


def prove(
    connection: socket.socket, key: bytes, *, accepting: bool, seconds: float = HANDSHAKE_SECONDS
) -> None:
    """Prove to each other that both know the key. The socket blocks without a deadline afterwards.

    Args:
        connection: a connected stream socket.
        key: what both sides have to know.
        accepting: whether this is the side that listened.
        seconds: longest that all of it may take.

    Raises:
        KeyRefused: the other side does not know the key.
        TimeoutError: the other side did not answer in time.
        OSError: the other side is gone.
    """
    deadline = time.monotonic() + seconds
    own = secrets.token_bytes(_NONCE_BYTES)
    if accepting:
        theirs = _received(connection, _NONCE_BYTES, deadline)
        connection.sendall(own + _proof(key, b"accepts", own, theirs))
        shown = _received(connection, _PROOF_BYTES, deadline)
        knows = hmac.compare_digest(shown, _proof(key, b"connects", theirs, own))
    else:
        connection.sendall(own)
        theirs = _received(connection, _NONCE_BYTES, deadline)
        shown = _received(connection, _PROOF_BYTES, deadline)
        knows = hmac.compare_digest(shown, _proof(key, b"accepts", theirs, own))
        if knows:
            connection.sendall(_proof(key, b"connects", own, theirs))
    if not knows:
        raise KeyRefused("somebody else is at the other end: it does not know the key")
    connection.settimeout(None)


def _proof(key: bytes, role: bytes, own: bytes, theirs: bytes) -> bytes:
    return hmac.digest(key, role + own + theirs, "sha256")


def _received(connection: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the handshake took too long")
        connection.settimeout(left)
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionResetError("the other end hung up during the handshake")
        data += part
    return data
