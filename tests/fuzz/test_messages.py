"""Frames and handshakes with mutated bytes: read rightly, or refused in one way; nothing else.

A frame comes from a peer that has proved that it knows the key; a handshake comes from anybody.
200 examples of each kind; `make test-fuzz` takes 25,000.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from m2flow.runtime.transport.frame import ALIGNMENT, BadFrame, Frame, FrameDecoder
from m2flow.runtime.transport.handshake import KeyRefused, prove
from tests.fuzz.mutations import fuzzed, fuzzed_long

KEY = bytes(range(32))
SMALL = b"".join(
    bytes(piece)
    for frame in (
        Frame("line", b"an order"),
        Frame("reply", b"a head", (bytes(100), b"", bytes(range(64)))),
        Frame("line", b"another order"),
    )
    for piece in frame.pieces()
)
LARGE = b"".join(map(bytes, Frame("fetch", b"head", (bytes(90_000), bytes(3))).pieces()))


def check_frames(data: bytes) -> None:
    decoder, frames, given = FrameDecoder(), list[Frame](), 0
    while given < len(data):
        room = decoder.room()
        count = min(len(room), len(data) - given)
        room[:count] = data[given : given + count]
        given += count
        try:
            frames += decoder.add(count)
        except BadFrame:
            break
    assert sum(map(_size, frames)) <= len(data)
    for frame in frames:
        (again,) = _decoded(b"".join(map(bytes, frame.pieces())))
        assert (again.kind, bytes(again.head)) == (frame.kind, bytes(frame.head))
        assert list(map(bytes, again.buffers)) == list(map(bytes, frame.buffers))


def _size(frame: Frame) -> int:
    return len(frame.head) + sum(map(len, frame.buffers))


def _decoded(data: bytes) -> list[Frame]:
    decoder, frames = FrameDecoder(), list[Frame]()
    while data:
        room = decoder.room()
        count = min(len(room), len(data))
        room[:count] = data[:count]
        frames += decoder.add(count)
        data = data[count:]
    return frames


def check_caller(data: bytes) -> None:
    """A caller who sends this, and hangs up, is not let in."""
    assert not _let_in(data, accepting=True)


def check_listener(data: bytes) -> None:
    """Nor does anybody take a listener who answers this for one that knows the key."""
    assert not _let_in(data, accepting=False)


def _let_in(data: bytes, *, accepting: bool) -> bool:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        try:
            prove(ours, KEY, accepting=accepting, seconds=5.0)
        except (KeyRefused, ConnectionError):
            return False
    return True


def recorded(*, accepting: bool) -> bytes:
    """What one side has sent in a handshake that succeeded: somebody may send it again."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = threading.Thread(target=prove, args=(theirs, KEY), kwargs={"accepting": accepting})
        peer.start()
        tap = _Tap(ours)
        prove(tap, KEY, accepting=not accepting)  # type: ignore[arg-type]
        peer.join()
        return bytes(tap.heard)


class _Tap:
    """A socket that keeps what it has received."""

    def __init__(self, inner: socket.socket) -> None:
        self.heard = bytearray()
        self.sendall, self.settimeout, self._inner = inner.sendall, inner.settimeout, inner

    def recv(self, count: int) -> bytes:
        data = self._inner.recv(count)
        self.heard += data
        return data


KINDS: dict[str, tuple[bytes, Callable[[bytes], None]]] = {
    "small frames": (SMALL, check_frames),
    "a large frame": (LARGE, check_frames),
    "a caller": (recorded(accepting=False), check_caller),
    "a listener": (recorded(accepting=True), check_listener),
}


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_messages(kind: str) -> None:
    content, check = KINDS[kind]
    fuzzed(content, check, 200)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_many_mutated_messages(kind: str) -> None:
    content, check = KINDS[kind]
    fuzzed_long(kind, content, check)


@pytest.mark.parametrize("kind", KINDS)
def test_the_content_itself(kind: str) -> None:
    """Frames are read as they are; a handshake that was overheard lets nobody in."""
    content, check = KINDS[kind]
    check(content)
    if check is check_frames:
        assert sum(map(_size, _decoded(content)))


PREFIX = b"line".ljust(16, b"\0")


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((8, 0, 9), id="a head that ends early"),
        pytest.param((0, 1, 2**63), id="no memory is so large"),
        pytest.param((2**62, 2**61, ALIGNMENT), id="a head beyond the frame"),
        pytest.param((0, 2, ALIGNMENT), id="buffers beyond the frame"),
    ],
)
def test_prefixes_of_no_frame(sizes: tuple[int, int, int]) -> None:
    numbers = b"".join(size.to_bytes(8, "little") for size in sizes)
    with pytest.raises(BadFrame):
        _decoded(PREFIX + numbers + b"\x7f" * ALIGNMENT)
