"""Control lines: whole frames in order, a launcher that never waits, and no stranger let in."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from m2flow.runtime.transport import listening
from m2flow.runtime.transport.lines import LauncherLine, Line, LineClosed, Waiting, connect
from tests.patience import SOON

KEY = b"k" * 32


@pytest.fixture(params=["unix", "tcp"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Line, LauncherLine]]:
    waiting = Waiting("127.0.0.1", KEY)
    accepted: list[Line] = []
    thread = threading.Thread(target=lambda: accepted.append(waiting.accept(SOON)))
    thread.start()
    launcher = connect(waiting.address, KEY, same_node=request.param == "unix", seconds=SOON)
    thread.join()
    yield accepted[0], launcher
    accepted[0].close()
    launcher.close()


def _take(line: LauncherLine, count: int) -> list[bytes]:
    frames: list[bytes] = []
    deadline = time.monotonic() + SOON
    while len(frames) < count and time.monotonic() < deadline:
        frames += line.take()
        time.sleep(0.001)
    return frames


def test_frames_arrive_whole_and_in_order(ends: tuple[Line, LauncherLine]) -> None:
    lane, launcher = ends
    sizes = [0, 1, 8, 100, 1 << 16, 3]
    for size in sizes:
        launcher.send(bytes([size % 251]) * size)
    assert [len(lane.receive()) for _ in sizes] == sizes
    for size in sizes:
        lane.send(bytes(size))
    assert [len(frame) for frame in _take(launcher, len(sizes))] == sizes
    assert not lane.waiting()


def test_a_launcher_does_not_wait_for_a_lane_that_is_busy(
    ends: tuple[Line, LauncherLine],
) -> None:
    """Nobody reads until both messages have been sent, and most of the first has no room."""
    lane, launcher = ends
    big = bytes(20 << 20)
    launcher.send(big)
    launcher.send(b"after")
    assert launcher.unsent
    assert launcher._socket.gettimeout() == 0.0, "it never waits for room"
    received: list[int] = []

    def read() -> None:
        received.extend(len(lane.receive()) for _ in range(2))

    thread = threading.Thread(target=read)
    thread.start()
    deadline = time.monotonic() + SOON
    while launcher.unsent and time.monotonic() < deadline:
        launcher.flush()
    thread.join(SOON)
    assert received == [len(big), 5]


def test_the_end_of_a_lane_is_seen_after_its_last_words(ends: tuple[Line, LauncherLine]) -> None:
    lane, launcher = ends
    lane.send(b"last")
    lane.close()
    assert _take(launcher, 1) == [b"last"]
    with pytest.raises(LineClosed):
        launcher.take()


def test_the_end_of_a_launcher_is_seen(ends: tuple[Line, LauncherLine]) -> None:
    lane, launcher = ends
    launcher.close()
    with pytest.raises(LineClosed):
        lane.receive()


def test_a_stranger_is_not_let_in() -> None:
    waiting = Waiting("127.0.0.1", KEY)
    accepted: list[Line] = []
    thread = threading.Thread(target=lambda: accepted.append(waiting.accept(SOON)))
    thread.start()
    with pytest.raises((PermissionError, ConnectionError)):
        connect(waiting.address, b"w" * 32, same_node=True, seconds=SOON)
    assert waiting.address.tcp is not None
    garbage = socket.create_connection(waiting.address.tcp)
    garbage.sendall(b"GET / HTTP/1.1\r\n\r\n" * 8)
    garbage.close()
    connect(waiting.address, KEY, same_node=True, seconds=SOON).close()
    thread.join(SOON)
    assert len(accepted) == 1
    accepted[0].close()


def test_a_lane_does_not_wait_for_a_launcher_for_ever() -> None:
    with pytest.raises(TimeoutError):
        Waiting("127.0.0.1", KEY).accept(0.05)


def test_what_the_other_end_has_no_room_for_is_kept() -> None:
    here, there = socket.socketpair()
    sender, receiver = LauncherLine(here), Line(there)
    sender.send(bytes(8 << 20))
    sender.send(b"after")
    assert sender.unsent
    got: list[memoryview] = []
    thread = threading.Thread(target=lambda: got.extend(receiver.receive() for _ in range(2)))
    thread.start()
    while sender.unsent:
        sender.flush()
    thread.join(SOON)
    assert [len(message) for message in got] == [8 << 20, 5]
    sender.close()
    receiver.close()


def test_a_lane_that_reads_nothing_for_long_keeps_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine answers all along: the system gave the line up as that of a silent one."""
    monkeypatch.setattr(listening, "SILENT_SECONDS", 4)
    waiting, accepted = Waiting("127.0.0.1", KEY), list[Line]()
    thread = threading.Thread(target=lambda: accepted.append(waiting.accept(SOON)))
    thread.start()
    launcher = connect(waiting.address, KEY, same_node=False, seconds=SOON)
    thread.join(SOON)
    launcher.send(bytes(32 << 20))
    until = time.monotonic() + 10
    while time.monotonic() < until:
        launcher.flush()  # was LineClosed: Connection timed out
        time.sleep(0.1)
    got: list[int] = []
    reader = threading.Thread(target=lambda: got.append(len(accepted[0].receive())))
    reader.start()
    until = time.monotonic() + SOON
    while launcher.unsent and time.monotonic() < until:
        launcher.flush()
    reader.join(SOON)
    assert got == [32 << 20]
