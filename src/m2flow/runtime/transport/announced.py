"""Links in which both sides take part: `nccl` between the GPUs of two machines.

Nobody enters a transfer that the other side might not enter. The pieces of an answer wait where
they are until the asker, with memory ready, says over the payload socket that it will receive. The
holder then grants the next number of that pair and direction, and both sides enqueue by number,
whatever their threads do meanwhile; each direction has a channel of its own, so that no two
transfers of a channel wait for each other. Whatever goes wrong after a number was granted breaks
the channel on both sides, for good: later payloads go by host memory. Every wait has the deadline
of the request.

Channels are made on first use, from a store that the holder keeps. Knows no CUDA.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from m2flow.runtime.transport.devices import Finish, LinkRefused, LinkStalled, Standing, Talk
from m2flow.runtime.transport.table import Scope

SLICE_SECONDS = 0.1
"""So often a taker that waits looks whether the other side is still there."""

GRACE_SECONDS = 1.0
"""So much later than the taker the holder gives up: it is the taker's deadline that counts."""

HOLDER, TAKER = 0, 1
"""Ranks in a channel."""


class Channel(Protocol):
    """A connection on which what one side sends the other receives, in order."""

    def send(self, pieces: Sequence[Tensor]) -> Callable[[float], bool]:
        """Enqueue; what is returned waits so many seconds and says whether it is over."""

    def receive(self, pieces: Sequence[Tensor]) -> Callable[[float], bool]:
        """The same for the other side."""

    def abort(self) -> None:
        """End what is under way, here."""


class Meeting(NamedTuple):
    """Where the two sides of a channel find each other: the holder's store."""

    host: str
    port: int


class Channels(Protocol):
    """How channels come about."""

    def open(self) -> tuple[Meeting, Any]:
        """On the holder's side: a store for a channel, and what keeps it."""

    def join(self, meeting: Meeting, store: Any, rank: int, seconds: float) -> Channel:
        """A side's end; the taker has no store. Need not wait for the other side."""

    def empty(self, nbytes: int) -> Tensor:
        """Memory on the device to receive into."""


class Token(NamedTuple):
    """An offer.

    Attributes:
        number: of the pieces that wait at the holder.
        taker: for whom.
        meeting: of their channel.
    """

    number: int
    taker: str
    meeting: Meeting


class Announced:
    """A link whose transfers are announced.

    Args:
        name: of the link.
        standing: where this process stands.
        channels: makes channels.
    """

    scopes: tuple[Scope, ...] = ("gpu_cluster",)

    def __init__(self, name: str, standing: Standing, channels: Channels) -> None:
        self._name, self._standing, self._channels = name, standing, channels
        self._waiting: dict[int, Sequence[Tensor]] = {}
        self._numbers = itertools.count()
        self._out: dict[str, tuple[Meeting, _End]] = {}
        self._in: dict[Meeting, _End] = {}
        self._lock = threading.Lock()

    # --- the holder -------------------------------------------------------------------------------

    def offer(self, pieces: Sequence[Tensor], asker: Standing) -> Token:
        """Keep the pieces until the asker is ready."""
        with self._lock:
            if asker.name not in self._out:
                meeting, store = self._channels.open()
                title = f"{self._name} from {self._standing.name} to {asker.name}"
                self._out[asker.name] = (
                    meeting,
                    _End(title, lambda s: self._channels.join(meeting, store, HOLDER, s)),
                )
            meeting, end = self._out[asker.name]
            if end.broken is not None:
                raise LinkRefused(end.broken)
            number = next(self._numbers)
            self._waiting[number] = pieces
        return Token(number, asker.name, meeting)

    def withdraw(self, token: Token, taken: int) -> None:
        """Let the pieces go, if they still wait."""
        del taken
        self._waiting.pop(token.number, None)

    def proceed(self, token: Token, message: Any) -> tuple[int, Finish]:
        """The asker is ready: its number, and the sending."""
        seconds = float(message) + GRACE_SECONDS
        pieces = self._waiting.pop(token.number)
        _, end = self._out[token.taker]
        turn = end.grant()

        def finish(check: Callable[[], None]) -> None:
            end.run(turn, seconds, lambda channel: channel.send(pieces), check=check)

        return turn, finish

    # --- the taker --------------------------------------------------------------------------------

    def take(
        self, token: Token, sizes: Sequence[int], holder: Standing, talk: Talk
    ) -> list[Tensor]:
        """Say that this side is ready, and receive when it is its turn."""
        with self._lock:
            meeting = token.meeting
            if meeting not in self._in:
                title = f"{self._name} from {holder.name} to {self._standing.name}"
                self._in[meeting] = _End(
                    title, lambda s: self._channels.join(meeting, None, TAKER, s)
                )
            end = self._in[meeting]
        if end.broken is not None:
            raise LinkRefused(end.broken)
        pieces = [self._channels.empty(size) for size in sizes]
        turn = talk.ask(talk.seconds())
        try:
            end.run(turn, talk.seconds(), lambda channel: channel.receive(pieces), check=talk.check)
        except ChannelFailed as error:
            raise LinkRefused(str(error)) from error
        return pieces

    def close(self) -> None:
        """Let go of what waits, and of the channels."""
        with self._lock:
            self._waiting.clear()
            for end in (*(end for _, end in self._out.values()), *self._in.values()):
                end.fail(f"{end.title} was closed")


class ChannelFailed(LinkRefused):
    """A channel could not be made, or says that a transfer failed."""


class _End:
    """One side of a channel, and whose turn it is there.

    Args:
        title: which link, from whom, to whom.
        join: makes the channel, within so many seconds.

    Attributes:
        broken: why nothing goes any more; None while it does.
    """

    def __init__(self, title: str, join: Callable[[float], Channel]) -> None:
        self.title = title
        self.broken: str | None = None
        self._join = join
        self._channel: Channel | None = None
        self._granted = itertools.count()
        self._next = 0
        self._changed = threading.Condition()

    def grant(self) -> int:
        """The next number; the holder alone grants."""
        if self.broken is not None:
            raise LinkRefused(self.broken)
        return next(self._granted)

    def run(
        self,
        turn: int,
        seconds: float,
        act: Callable[[Channel], Callable[[float], bool]],
        *,
        check: Callable[[], None],
    ) -> None:
        """Enqueue a transfer when all before it are enqueued, and wait for its end.

        Raises:
            LinkStalled: it has not ended in time; the channel is broken.
            ChannelFailed: it cannot be carried out; the channel is broken.
            Exception: what `check` raises while this side waits.
        """
        deadline = time.monotonic() + seconds
        try:
            with self._turn(turn, deadline):
                over = _within(deadline, lambda: act(self._joined(deadline)), check)
            while not over(min(SLICE_SECONDS, max(0.0, deadline - time.monotonic()))):
                check()
                if time.monotonic() >= deadline:
                    raise _Late
        except _Late:
            why = f"{self.title} stalled: transfer {turn} has not ended within {seconds:.3g} s"
            self.fail(why)
            raise LinkStalled(why) from None
        except LinkRefused as error:
            self.fail(f"{self.title} failed: {error}")
            raise
        except RuntimeError as error:
            why = f"{self.title} failed: {(str(error) or type(error).__name__).splitlines()[0]}"
            self.fail(why)
            raise ChannelFailed(why) from error
        except BaseException as error:
            self.fail(f"{self.title} broke off: {error}")
            raise

    def _joined(self, deadline: float) -> Channel:
        if self._channel is None:
            self._channel = self._join(max(0.0, deadline - time.monotonic()))
        return self._channel

    @contextmanager
    def _turn(self, turn: int, deadline: float) -> Iterator[None]:
        with self._changed:
            while self._next != turn and self.broken is None:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise _Late
            if self.broken is not None:
                raise ChannelFailed(self.broken)
        # A failure within breaks the channel, so that nobody waits for this turn to be over.
        yield
        with self._changed:
            self._next += 1
            self._changed.notify_all()

    def fail(self, why: str) -> None:
        """Nothing goes any more; what is under way ends."""
        with self._changed:
            if self.broken is not None:
                return
            self.broken = why
            channel, self._channel = self._channel, None
            self._changed.notify_all()
        if channel is not None:
            channel.abort()


class _Late(Exception):
    """The deadline has passed."""


def _within(
    deadline: float, act: Callable[[], Callable[[float], bool]], check: Callable[[], None]
) -> Callable[[float], bool]:
    """Do what may wait for the other side, as the first use of a channel does, on a thread."""
    done: list[Callable[[float], bool]] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            done.append(act())
        except BaseException as error:  # noqa: BLE001 - raised by who waits
            failed.append(error)

    thread = threading.Thread(target=work, name="m2flow channel", daemon=True)
    thread.start()
    while True:
        left = deadline - time.monotonic()
        thread.join(max(0.0, min(SLICE_SECONDS, left)))
        if failed:
            raise failed[0]
        if done:
            return done[0]
        if left <= 0:
            raise _Late
        check()
