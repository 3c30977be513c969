"""`Channel`: a bounded queue between threads, processes and machines, for loops of one's own.

A channel lives in one process, its host; every `Channel` object is a handle that can be pickled to
wherever items are put or got, and connects when it is first used there. Items of a key leave in the
order in which they came, each exactly once: what is handed to a process that dies before it has it
goes back to the head. Every wait ends, at a deadline if nothing else comes, and says what it saw.
A connection that fails in the middle of a request is closed: the host then forgets the request, or
puts back the items that it had handed out.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Self, SupportsFloat

from m2flow.errors import UserError
from m2flow.runtime.arguments import check_seconds
from m2flow.runtime.transport.channel.errors import ChannelClosed, ChannelLost, ChannelTimeout
from m2flow.runtime.transport.channel.host import ChannelAddress, Host, HostActor, node_address
from m2flow.runtime.transport.channel.state import ChannelStats, Key
from m2flow.runtime.transport.frame import Frame, FrameStream
from m2flow.runtime.transport.listening import connect, this_machine

DEFAULT_TIMEOUT_SECONDS = 600.0
"""How long a call waits where it does not say."""

ANSWER_SECONDS = 30.0
"""Longest that the host may take to answer, after what the request itself may wait."""

START_SECONDS = 60.0
"""Longest that an actor may take to start."""

MAX_ITEMS, MAX_BYTES = 1024, 1 << 30
"""Bounds of a channel that does not say."""

_check_wait = partial(check_seconds, most=math.inf)

NAMESPACE = "m2flow-channels"
"""The Ray namespace in which channels have their names."""


class Channel:
    """A new channel, hosted by a thread of this process, and the first handle to it.

    Args:
        name: stands in every message; a random one where left out.
        max_items: most items that it holds, over all keys.
        max_bytes: most bytes of packed items that it holds, over all keys. Beside them the host
            holds one item for each `put` that waits.
        timeout: seconds that a call waits where it does not say.
        listen: address at which other machines reach it. Where Ray is connected to a cluster of
            several nodes, this node's address in it; else none.

    The channel ends with its host: at the end of the process, of a `with` block, or by `terminate`.
    `on_ray` makes one that does not depend on the process that made it.
    """

    _end: Callable[[], None] | None

    def __init__(
        self,
        name: str | None = None,
        *,
        max_items: int = MAX_ITEMS,
        max_bytes: int = MAX_BYTES,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        listen: str | None = None,
    ) -> None:
        name = _checked_name(name, max_items, max_bytes, timeout)
        host = Host(name, max_items, max_bytes, listen or node_address())
        self.__setstate__((host.address, timeout, False))
        self._end = host.stop

    @classmethod
    def on_ray(
        cls,
        name: str | None = None,
        *,
        max_items: int = MAX_ITEMS,
        max_bytes: int = MAX_BYTES,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> Channel:
        """A channel hosted by a Ray actor of its own, until `terminate` or the cluster's end.

        `find` gives a handle to it by its name, in any process that is connected to the cluster.
        """
        import ray

        name = _checked_name(name, max_items, max_bytes, timeout)
        settings = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0}
        try:
            ray.remote(HostActor).options(**settings).remote(name, max_items, max_bytes)
        except ValueError as error:
            if "already" not in str(error):
                raise
            raise UserError(
                "a channel of that name is on the cluster already",
                key="name",
                value=name,
                hint="Channel.find(name) gives a handle to it",
            ) from None
        return cls.find(name, timeout=timeout)

    @classmethod
    def find(cls, name: str, *, timeout: float = DEFAULT_TIMEOUT_SECONDS) -> Channel:
        """A handle to the channel of that name that `on_ray` has made."""
        import ray

        _check_wait("timeout", timeout)

        try:
            actor = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            raise UserError(
                "no channel of that name is on the cluster",
                key="name",
                value=name,
                hint="Channel.on_ray(name) makes one",
            ) from None
        channel = cls.__new__(cls)
        address = ray.get(actor.address.remote(), timeout=START_SECONDS)
        channel.__setstate__((address, timeout, True))
        return channel

    def __getstate__(self) -> tuple[ChannelAddress, float, bool]:
        return self._address, self._timeout, self._on_ray

    def __setstate__(self, handle: tuple[ChannelAddress, float, bool]) -> None:
        self._address, self._timeout, self._on_ray = handle
        self._end = None
        self._idle: list[FrameStream] = []
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"Channel({self.name!r}, at {self._address.endpoint.tcp or 'this machine'})"

    @property
    def name(self) -> str:
        """The name of the channel in messages."""
        return self._address.name

    # --- putting ----------------------------------------------------------------------------------

    def put(
        self, item: Any, weight: float = 1.0, key: Key = None, timeout: float | None = None
    ) -> None:
        """Add an item behind the others of its key; wait while the channel is full.

        Args:
            item: nested structures of tensors, arrays, Batches and what can be pickled. It is
                copied before this returns.
            weight: what it counts for in `get_batch`, such as its number of tokens.
            key: a string, an integer or None.
            timeout: seconds to wait for room; 0 does not wait.

        Raises:
            ChannelFull: there was no room in time.
            ChannelClosed: the channel is closed, or was while this waited.
            UserError: the item is larger than the whole channel.
            TypeError: the item cannot be pickled.
        """
        _require(_weighs(weight), "no such weight", "weight", weight, "0 or more")
        buffers = _packed(item)
        num_bytes = sum(map(len, buffers))
        if num_bytes > self._address.max_bytes:
            raise UserError(
                f"an item of {num_bytes:,} bytes can never be put into channel {self.name!r}, "
                f"which holds {self._address.max_bytes:,}",
                key="max_bytes",
                hint="make the channel larger or the item smaller",
            )
        self._ask("put", key, timeout, buffers, weight=weight)

    def put_nowait(self, item: Any, weight: float = 1.0, key: Key = None) -> None:
        """`put` that raises `ChannelFull` where it would wait."""
        self.put(item, weight, key, timeout=0)

    # --- getting ----------------------------------------------------------------------------------

    def get(self, key: Key = None, timeout: float | None = None) -> Any:
        """Take the oldest item of a key; wait for one.

        Raises:
            ChannelEmpty: none has come in time.
            ChannelClosed: the channel is closed and nothing is left under this key.
        """
        return self.get_batch(max_items=1, key=key, timeout=timeout)[0]

    def get_nowait(self, key: Key = None) -> Any:
        """`get` that raises `ChannelEmpty` where it would wait."""
        return self.get(key, timeout=0)

    def get_batch(
        self,
        weight: float | None = None,
        max_items: int | None = None,
        key: Key = None,
        timeout: float | None = None,
        linger: float | None = None,
    ) -> list[Any]:
        """Take the oldest items of a key, as many as weigh no more than `weight` together.

        There is always one: an item heavier than `weight` comes alone. Waits until the weight or
        `max_items` is reached or the next item does not fit in. Shorter batches come when the
        channel is closed, when it is so full that putters of the key wait, and after `linger`.

        Args:
            weight: no bound where left out.
            max_items: no bound where left out; one of the two must be given.
            linger: seconds after which any batch will do that is not empty; 0 takes what is there.

        Raises:
            ChannelEmpty: the batch was not complete in time; its items are still in the channel.
            ChannelClosed: the channel is closed and nothing is left under this key.
        """
        if weight is None and max_items is None:
            raise UserError("a batch needs weight or max_items", key="get_batch")
        if weight is not None:
            more = isinstance(weight, SupportsFloat) and float(weight) > 0
            _require(more, "no such weight", "weight", weight, "more than 0")
        if max_items is not None:
            _require(_is_bound(max_items), "no such batch", "max_items", max_items, "1 or more")
        if linger is not None:
            _check_wait("linger", linger, zero=True)
        most_weight = math.inf if weight is None else weight
        most_items = math.inf if max_items is None else max_items
        longest = math.inf if linger is None else linger
        counts, buffers = self._ask(
            "get", key, timeout, weight=most_weight, max_items=most_items, linger=longest
        )
        rest = iter(buffers)
        return [_unpacked(*islice(rest, count)) for count in counts]

    def items(self, key: Key = None, timeout: float | None = None) -> Iterator[Any]:
        """Take items of a key one by one until the channel is closed and they are all taken."""
        while True:
            try:
                item = self.get(key, timeout)
            except ChannelClosed:
                return
            yield item

    def __iter__(self) -> Iterator[Any]:
        return self.items()

    # --- looking, closing -------------------------------------------------------------------------

    def stats(self) -> ChannelStats:
        """What the channel holds, has seen, and who waits."""
        found, _ = self._ask("stats")
        assert isinstance(found, ChannelStats)
        return found

    def close(self) -> None:
        """Take nothing more: putters get `ChannelClosed` at once, getters when nothing is left."""
        self._ask("close")

    def terminate(self) -> None:
        """End the host, with all that is left in it; other handles get `ChannelLost`.

        On a handle to a channel that another process hosts, only let go of its connections.
        """
        self._drop_connections()
        if self._on_ray:
            import ray

            with contextlib.suppress(ValueError):  # it has ended
                ray.kill(ray.get_actor(self.name, namespace=NAMESPACE))
        if self._end is not None and self._pid == os.getpid():
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.terminate()

    # --- asking the host --------------------------------------------------------------------------

    def _ask(
        self,
        kind: str,
        key: Key = None,
        timeout: float | None = None,
        buffers: Sequence[Any] = (),
        **settings: float,
    ) -> tuple[Any, Sequence[Any]]:
        """Send a request; return what the host says and the buffers that come with it.

        Of items it says how many buffers each has; their tensors will be views of these.

        Raises:
            ChannelError: the request failed, or the host did not answer.
        """
        _require(
            type(key) in (str, int, type(None)), "no such key", "key", key, "string or integer"
        )
        seconds = self._timeout if timeout is None else timeout
        _check_wait("timeout", seconds, zero=True)
        head = pickle.dumps({"key": key, "timeout": seconds, **settings}, 5)
        stream = self._connection()
        longest = seconds + ANSWER_SECONDS
        stream.deadline = stream.clock() + longest
        try:
            stream.send(Frame(kind, head, buffers))
            frame = stream.receive()
            if frame.buffers:
                stream.send(Frame("took"))
        except BaseException as error:
            stream.close()
            if isinstance(error, TimeoutError):
                raise ChannelTimeout(
                    f"channel {self.name!r}: its host has not answered within {longest:g} s, "
                    f"{ANSWER_SECONDS:g} s more than the {kind} may wait; whether it was done is "
                    "not known"
                ) from None
            if isinstance(error, OSError):
                raise self._lost(error) from error
            raise
        self._idle.append(stream)
        said = pickle.loads(frame.head)
        if frame.kind == "error":
            raise said
        return said, frame.buffers

    def _connection(self) -> FrameStream:
        """Return an idle connection: each waiting request has a connection of its own."""
        if self._pid != os.getpid():  # forked: the connections are the parent's
            self._drop_connections()
            self._pid, self._end = os.getpid(), None
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        address = self._address
        near = address.machine == this_machine()
        try:
            return FrameStream(connect(address.endpoint, address.secret, same_node=near))
        except OSError as error:
            raise self._lost(error) from error

    def _drop_connections(self) -> None:
        idle, self._idle = self._idle, []
        for stream in idle:
            stream.close()

    def _lost(self, error: OSError) -> ChannelLost:
        return ChannelLost(
            f"channel {self.name!r}: its host on {self._address.endpoint.tcp or 'its own machine'} "
            f"cannot be reached ({error}); it has ended, or the network is down, or it listens on "
            "its own machine only: give it listen=ADDRESS"
        )


def _checked_name(name: str | None, max_items: int, max_bytes: int, timeout: float) -> str:
    _require(_is_bound(max_items), "no such bound", "max_items", max_items, "1 or more")
    _require(_is_bound(max_bytes), "no such bound", "max_bytes", max_bytes, "1 or more")
    _check_wait("timeout", timeout)
    return name or f"channel-{secrets.token_hex(4)}"


def _is_bound(count: object) -> bool:
    return isinstance(count, int) and count >= 1


def _weighs(weight: object) -> bool:
    return isinstance(weight, SupportsFloat) and 0 <= float(weight) < math.inf


def _require(holds: bool, what: str, key: str, value: object, expected: str) -> None:
    if not holds:
        raise UserError(what, key=key, value=value, expected=expected)


# --- items as buffers -----------------------------------------------------------------------------

_PLAIN = (bytes, str, int, float, bool, type(None))
"""Types that hold no tensor, so that nothing that knows tensors has to be loaded for them."""


def _packed(value: Any) -> list[Any]:
    """A value as a pickled head and the memory of its tensors and arrays."""
    if type(value) in _PLAIN:
        return [pickle.dumps(value, 5)]
    from m2flow.runtime.transport import wire

    head, buffers, _ = wire.pack(value)
    return [head, *(buffer.memory() for buffer in buffers)]


def _unpacked(head: Any, *memory: Any) -> Any:
    if not memory:
        return pickle.loads(head)
    from m2flow.runtime.transport import wire

    return wire.unpack(head, memory)
