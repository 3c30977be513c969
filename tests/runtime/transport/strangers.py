"""Strangers who connect and say nothing, or babble, and friends who are served beside them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from m2flow.runtime.transport import handshake, listening
from tests.patience import SOON

PATIENCE = 3600.0
"""Seconds that a server is given for strangers: a friend in line behind one gets no answer."""

Knock = Callable[[], socket.socket]


@pytest.fixture
def patient_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have listeners of this process wait for strangers as long as `PATIENCE`."""
    monkeypatch.setattr(listening, "prove", partial(handshake.prove, seconds=PATIENCE))


@contextlib.contextmanager
def strangers(
    knock: Knock, silent: int = 1, babbling: int = 1, words: bytes = b""
) -> Iterator[list[socket.socket]]:
    """Have strangers connected within; those who babble come again when they are turned away.

    The silent ones, who have said `words` and no more, are those it gives.
    """
    ended = threading.Event()
    begun = [threading.Event() for _ in range(babbling)]

    def babble(number: int) -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError), knock() as one:
                one.settimeout(0.5)
                while not ended.is_set():
                    one.sendall(os.urandom(1 << 12))
                    begun[number].set()

    def check_all_babble() -> None:
        for one in begun:
            one.clear()
            assert one.wait(SOON)

    threads = [threading.Thread(target=babble, args=(number,)) for number in range(babbling)]
    with contextlib.ExitStack() as stack:
        quiet = [stack.enter_context(knock()) for _ in range(silent)]
        for one in quiet:
            one.sendall(words)
        for thread in threads:
            thread.start()
        try:
            check_all_babble()
            yield quiet
            check_all_babble()
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def check_waited_for(quiet: Sequence[socket.socket]) -> None:
    """The server has neither answered these strangers nor turned them away."""
    for one in quiet:
        one.setblocking(False)
        with pytest.raises(BlockingIOError):
            one.recv(1)


def check_nobody_waits(
    visit: Callable[[], object],
    knock: Knock,
    *,
    silent: int = 1,
    babbling: int = 1,
    visits: int = 3,
    words: bytes = b"",
) -> None:
    """Friends have their answers while the server still waits for strangers.

    The server has to wait for those as long as `PATIENCE`, and a friend no longer than `SOON`.
    """
    with strangers(knock, silent, babbling, words) as quiet:
        for _ in range(visits):
            visit()
        check_waited_for(quiet)
