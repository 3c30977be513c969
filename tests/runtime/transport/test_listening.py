"""Who is let in, and that nobody who is not holds up anybody else."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import resource
import socket
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from m2flow.runtime.transport import handshake, listening
from m2flow.runtime.transport.frame import Frame, FrameStream, LineClosed
from m2flow.runtime.transport.handshake import KeyRefused, prove
from m2flow.runtime.transport.lines import SILENCE_SECONDS, LauncherLine
from m2flow.runtime.transport.listening import LOOPBACK, SILENT_SECONDS, Listener, connect
from tests.clock import Clock
from tests.runtime.transport.strangers import SOON, check_nobody_waits, patient_listeners

__all__ = ["patient_listeners"]

KEY = b"of this test"


class Door:
    """A listener, and the connections that it let in."""

    def __init__(self, host: str | None = LOOPBACK) -> None:
        self.came: queue.Queue[socket.socket] = queue.Queue()
        self.listener = Listener(KEY, host, self.came.put)
        self.endpoint = self.listener.endpoint

    def connected(self, *, same_node: bool) -> tuple[FrameStream, FrameStream]:
        """Both ends of a new connection."""
        here = connect(self.endpoint, KEY, same_node=same_node, seconds=SOON)
        return FrameStream(here), FrameStream(self.came.get(timeout=SOON))


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door()
    yield door
    door.listener.close()


@pytest.mark.parametrize("same_node", [True, False])
def test_both_ways_in(door: Door, same_node: bool) -> None:
    here, there = door.connected(same_node=same_node)
    here.send(Frame("question", b"?"))
    assert there.receive().kind == "question"
    here.close()
    with pytest.raises(LineClosed):
        there.receive()


def test_a_wrong_key_is_refused_on_both_sides(door: Door) -> None:
    with pytest.raises(KeyRefused):
        connect(door.endpoint, b"another", same_node=True, seconds=SOON)
    with pytest.raises(queue.Empty):
        door.came.get(timeout=0.1)


def test_another_user_is_turned_away_before_a_word(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user of the machine can call an abstract socket, and listen at a name that is free."""
    user = os.geteuid()
    begun: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: user + 1)
        patch.setattr(listening, "prove", lambda *_, **__: begun.append(1))
        with pytest.raises(KeyRefused, match="another user listens there"):
            connect(door.endpoint, KEY, same_node=True, seconds=SOON)
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(SOON)
            caller.connect("\0" + door.endpoint.unix)
            assert caller.recv(1) == b"", "turned away"
    assert not begun
    assert door.came.empty()


def test_a_caller_cannot_answer_with_what_it_was_sent(door: Door) -> None:
    """Each proof names the side that gives it."""
    one, other = (socket.create_connection(door.endpoint.tcp, SOON) for _ in range(2))
    one.sendall(bytes(32))
    nonce, _ = one.recv(32, socket.MSG_WAITALL), one.recv(32, socket.MSG_WAITALL)
    other.sendall(nonce)  # have the listener itself prove something about it
    other.recv(32, socket.MSG_WAITALL)
    one.sendall(other.recv(32, socket.MSG_WAITALL))
    assert one.recv(1) == b"", "turned away"
    assert door.came.empty()


def exchanged(door: Door) -> None:
    """A question on a connection of its own."""
    here, there = door.connected(same_node=False)
    here.send(Frame("question", b"?"))
    assert there.receive().kind == "question"
    here.close()
    there.close()


@pytest.mark.usefixtures("patient_listeners")
def test_one_silent_stranger_does_not_block_an_accept(door: Door) -> None:
    """It cost the next caller the whole time that a lane waits for its launcher."""
    knock = partial(socket.create_connection, door.endpoint.tcp)
    check_nobody_waits(partial(exchanged, door), knock, silent=3, babbling=0)


@pytest.mark.usefixtures("patient_listeners")
@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n", bytes(31)])
def test_strangers_who_say_half_of_something_hold_up_nobody(door: Door, words: bytes) -> None:
    """All of them still wait when the launcher has been let in, and has had its answer."""
    knock = partial(socket.create_connection, door.endpoint.tcp)
    visit = partial(exchanged, door)
    check_nobody_waits(visit, knock, silent=100, babbling=0, visits=1, words=words)


@pytest.mark.usefixtures("patient_listeners")
def test_strangers_who_babble_without_end_hold_up_nobody(door: Door) -> None:
    knock = partial(socket.create_connection, door.endpoint.tcp)
    check_nobody_waits(partial(exchanged, door), knock, silent=0, babbling=4, visits=20)
    with pytest.raises(queue.Empty):
        door.came.get(timeout=0.1)


class Dripping(Clock):
    """A connection on which one byte comes a second, by a clock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def settimeout(self, seconds: float) -> None:
        self.waits.append(seconds)

    def sendall(self, _: bytes) -> None: ...

    def recv(self, _: int) -> bytes:
        self.now += 1.0
        return b"x"


@pytest.mark.parametrize("accepting", [True, False])
def test_a_handshake_that_drips_meets_its_own_deadline(
    accepting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes in time, and the whole does not."""
    line: Any = Dripping()
    monkeypatch.setattr(handshake, "time", line)
    with pytest.raises(TimeoutError, match="the handshake took too long"):
        prove(line, KEY, accepting=accepting, seconds=5.0)
    assert line.waits == [5.0, 4.0, 3.0, 2.0, 1.0], "never longer than what is left of it"
    assert handshake.HANDSHAKE_SECONDS <= 10


def test_a_process_without_descriptors_accepts_again_when_it_has_some(door: Door) -> None:
    """The thread that accepts had died of EMFILE, and nobody was let in any more.

    Two call: an `accept` that waits already has the descriptor of the first.
    """
    callers = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        for caller in callers:
            caller.connect("\0" + door.endpoint.unix)
        time.sleep(3 * listening.RETRY_SECONDS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for caller in callers:
        prove(caller, KEY, accepting=False, seconds=SOON)
        door.came.get(timeout=SOON).close()
        caller.close()


def test_on_one_machine_nothing_listens_to_others() -> None:
    door = Door(None)
    assert door.endpoint.tcp is None
    assert [one.family for one in door.listener._sockets] == [socket.AF_UNIX]
    with pytest.raises(ConnectionRefusedError, match="its own machine only"):
        connect(door.endpoint, KEY, same_node=False)
    door.connected(same_node=True)
    door.listener.close()


# --- machines that answer no more -----------------------------------------------------------------


def test_a_half_open_tcp_connection_ends_long_before_the_deadline(door: Door) -> None:
    """Both ends probe a machine that is silent, and give it up after `SILENT_SECONDS`."""
    for stream in door.connected(same_node=False):

        def option(name: int, of: FrameStream = stream) -> int:
            return of._socket.getsockopt(socket.IPPROTO_TCP, name)

        assert stream._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        probes = option(socket.TCP_KEEPINTVL) * option(socket.TCP_KEEPCNT)
        assert option(socket.TCP_KEEPIDLE) + probes <= SILENT_SECONDS
        assert option(socket.TCP_USER_TIMEOUT) == 1000 * SILENT_SECONDS
        assert option(socket.TCP_NODELAY) == 1


def test_a_dead_machine_is_given_up_as_soon_while_it_is_called(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would send the first packet again for two minutes."""

    def reach(connection: socket.socket, *_: object) -> None:
        limit = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert limit == 1000 * SILENT_SECONDS
        raise OSError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(listening, "_reach", reach)
    host, port = door.endpoint.tcp or ("", 0)
    with pytest.raises(ConnectionError, match=f"{host}:{port}: Connection timed out"):
        connect(door.endpoint, KEY, same_node=False, seconds=SOON)


def test_an_address_that_cannot_be_reached_is_named(door: Door) -> None:
    """A launcher said no more than that something had timed out."""
    host, port = door.endpoint.tcp or ("", 0)
    with pytest.raises(KeyRefused, match=f"{host}:{port}: "):
        connect(door.endpoint, b"another", same_node=False, seconds=SOON)
    with socket.create_server((host, 0)) as silent:
        here = silent.getsockname()[1]
        endpoint = door.endpoint._replace(tcp=(host, here))
        with pytest.raises(TimeoutError, match=f"{host}:{here}: timed out"):
            connect(endpoint, KEY, same_node=False, seconds=0.1)
    with pytest.raises(ConnectionRefusedError, match=f"{host}:{here}: Connection refused"):
        connect(endpoint, KEY, same_node=False, seconds=SOON)


class Silenced:
    """A socket after the kernel has given the other machine up."""

    def recv_into(self, _: object) -> int:
        raise OSError(errno.ETIMEDOUT, "Connection timed out")


def test_a_machine_given_up_by_the_kernel_is_lost_and_not_late() -> None:
    """Python makes one exception of both: ETIMEDOUT was taken for the deadline of a request."""
    here, _there = socket.socketpair()
    stream = FrameStream(here)
    stream._socket = Silenced()  # type: ignore[assignment]
    with pytest.raises(LineClosed, match="timed out"):
        stream.receive()


def test_a_silent_lane_is_asked_about() -> None:
    here, there = socket.socketpair()
    now = [0.0]
    line, lane = LauncherLine(here, clock=lambda: now[0]), FrameStream(there)
    answers: list[str | None] = [None, "the actor died: its machine is gone"]
    line.on_silence = lambda: answers.pop(0)
    now[0] += 0.9 * SILENCE_SECONDS
    line.check()
    lane.send(Frame("line", b"still here"))
    assert [bytes(one) for one in line.take()] == [b"still here"]
    now[0] += 0.9 * SILENCE_SECONDS
    line.check()
    assert len(answers) == 2, "it has spoken: nobody was asked"
    now[0] += SILENCE_SECONDS
    line.check()
    line.check()
    assert len(answers) == 1, "asked once, and again only after as long"
    now[0] += SILENCE_SECONDS
    with pytest.raises(LineClosed, match="its machine is gone"):
        line.check()
    line.close()
    lane.close()


def test_a_listener_whom_many_call_at_once_is_asked_again() -> None:
    """A Unix socket whose queue is full says so at once, whatever the caller's deadline is."""
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(f"\0m2flow-test-{os.getpid()}")
    unix.listen(1)
    endpoint = listening.ListenerAddress(f"m2flow-test-{os.getpid()}", None)
    waiting = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    with contextlib.ExitStack() as held:
        for one in (unix, *waiting):
            held.enter_context(one)
        for one in waiting:
            one.connect("\0" + endpoint.unix)
        with pytest.raises(TimeoutError, match="too many callers"):
            connect(endpoint, KEY, same_node=True, seconds=0.3)
        for _ in range(2):
            unix.accept()[0].close()
        with pytest.raises(TimeoutError, match="timed out"):  # there is room, and nobody answers
            connect(endpoint, KEY, same_node=True, seconds=0.3)
