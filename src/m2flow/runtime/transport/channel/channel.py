"""`Channel`: a bounded queue between threads, processes and machines, for loops of one's own.

A channel lives in one process, its host; every `Channel` object is a handle that can be pickled to
wherever items are put or got, and connects when it is first used there. Items of a key leave in the
order in which they came, each exactly once: what is handed to a process that dies before it has it
goes back to the head. Every wait ends, at a deadline if nothing else comes, and says what it saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from m2flow.errors import UserError
from m2flow.runtime.transport.channel import hosting
from m2flow.runtime.transport.channel.client import ChannelReply, ChannelRequest, Client, packed
from m2flow.runtime.transport.channel.errors import ChannelClosed, ChannelEmpty, ChannelFull
from m2flow.runtime.transport.channel.host import ChannelAddress, Operation
from m2flow.runtime.transport.channel.state import ChannelStats, Key, Outcome

DEFAULT_TIMEOUT_SECONDS = 600.0
"""How long a call waits where it does not say."""

MAX_ITEMS, MAX_BYTES = 1024, 1 << 30
"""Bounds of a channel that does not say."""

ANY_COUNT = 1 << 32

LONGEST_KEY = 1000
"""Characters of a key."""


class Channel:
    """A new channel, hosted by this process, and the first handle to it.

    Args:
        name: stands in every message; a random one where left out.
        max_items: most items that it holds, over all keys.
        max_bytes: most bytes of packed items that it holds, over all keys. Beside them the host
            holds one item for each `put` that waits.
        timeout: seconds that a call waits where it does not say.
        process: host it in a small process of its own, which ends with this one. Worth the time
            that it takes to start where this process computes in Python all the time.
        listen: address at which other machines reach it. Where Ray is connected to a cluster of
            several nodes, this node's address in it; else none.

    The channel ends with its host: at the end of the process, of a `with` block, or by `terminate`.
    `on_ray` makes one that does not depend on the process that made it.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        max_items: int = MAX_ITEMS,
        max_bytes: int = MAX_BYTES,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        process: bool = False,
        listen: str | None = None,
    ) -> None:
        name = _checked_name(name, max_items, max_bytes, timeout)
        host = hosting.in_process if process else hosting.in_thread
        address, end = host(name, max_items, max_bytes, listen or hosting.node_address())
        self._set_up(address, timeout, end)

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
        name = _checked_name(name, max_items, max_bytes, timeout)
        address = hosting.start_actor(name, max_items, max_bytes)
        return cls._handle(address, timeout, on_ray=True)

    @classmethod
    def find(cls, name: str, *, timeout: float = DEFAULT_TIMEOUT_SECONDS) -> Channel:
        """A handle to the channel of that name that `on_ray` has made."""
        return cls._handle(hosting.find_actor(name), timeout, on_ray=True)

    @classmethod
    def _handle(cls, address: ChannelAddress, timeout: float, on_ray: bool) -> Channel:
        channel = cls.__new__(cls)
        channel._set_up(address, timeout, None, on_ray)
        return channel

    def _set_up(
        self,
        address: ChannelAddress,
        timeout: float,
        end: Callable[[], None] | None,
        on_ray: bool = False,
    ) -> None:
        self._address, self._timeout, self._end, self._on_ray = address, timeout, end, on_ray
        self._idle: list[Client] = []
        self._pid = os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        return Channel._handle, (self._address, self._timeout, self._on_ray)

    def __repr__(self) -> str:
        return f"Channel({self.name!r}, at {self._address.endpoint.tcp or 'this machine'})"

    @property
    def name(self) -> str:
        """What messages call it."""
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
        self._ask(self._put_request(item, weight, key, timeout))

    def put_nowait(self, item: Any, weight: float = 1.0, key: Key = None) -> None:
        """`put` that raises `ChannelFull` where it would wait."""
        self.put(item, weight, key, timeout=0)

    async def aput(
        self, item: Any, weight: float = 1.0, key: Key = None, timeout: float | None = None
    ) -> None:
        """`put` for an event loop. Cancelled while it waits, it puts nothing."""
        await self._ask_async(self._put_request(item, weight, key, timeout))

    def _put_request(
        self, item: Any, weight: float, key: Key, timeout: float | None
    ) -> ChannelRequest:
        if not 0 <= weight < math.inf:
            raise UserError("no such weight", key="weight", value=weight, expected="0 or more")
        buffers = packed(item)
        num_bytes = sum(map(len, buffers))
        if num_bytes > self._address.max_bytes:
            raise UserError(
                f"an item of {num_bytes:,} bytes can never be put into channel {self.name!r}, "
                f"which holds {self._address.max_bytes:,}",
                key="max_bytes",
                hint="make the channel larger or the item smaller",
            )
        return self._request(Operation.PUT, key, timeout, buffers, weight=weight)

    # --- getting ----------------------------------------------------------------------------------

    def get(self, key: Key = None, timeout: float | None = None) -> Any:
        """Take the oldest item of a key; wait for one.

        Raises:
            ChannelEmpty: none has come in time.
            ChannelClosed: the channel is closed and nothing is left under this key.
        """
        return self._ask(self._request(Operation.GET, key, timeout)).items()[0]

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
        return self._ask(self._batch_request(weight, max_items, key, timeout, linger)).items()

    async def aget(self, key: Key = None, timeout: float | None = None) -> Any:
        """`get` for an event loop. Cancelled, it takes nothing."""
        return (await self._ask_async(self._request(Operation.GET, key, timeout))).items()[0]

    async def aget_batch(
        self,
        weight: float | None = None,
        max_items: int | None = None,
        key: Key = None,
        timeout: float | None = None,
        linger: float | None = None,
    ) -> list[Any]:
        """`get_batch` for an event loop. Cancelled, it takes nothing."""
        request = self._batch_request(weight, max_items, key, timeout, linger)
        return (await self._ask_async(request)).items()

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

    def _batch_request(
        self,
        weight: float | None,
        max_items: int | None,
        key: Key,
        timeout: float | None,
        linger: float | None,
    ) -> ChannelRequest:
        if weight is None and max_items is None:
            raise UserError("a batch needs weight or max_items", key="get_batch")
        if weight is not None and not weight > 0:
            raise UserError("no such weight", key="weight", value=weight, expected="more than 0")
        if max_items is not None and not 1 <= max_items < ANY_COUNT:
            raise UserError("no such batch", key="max_items", value=max_items, expected=">= 1")
        return self._request(
            Operation.GET,
            key,
            timeout,
            weight=math.inf if weight is None else weight,
            max_items=max_items or ANY_COUNT,
            linger=math.inf if linger is None else linger,
        )

    def _request(
        self,
        kind: str,
        key: Key,
        timeout: float | None,
        buffers: Sequence[Any] = (),
        **settings: float,
    ) -> ChannelRequest:
        if type(key) not in (str, int, type(None)):
            raise UserError(
                "no such key", key="key", value=key, expected="a string, an integer or None"
            )
        if len(str(key)) > LONGEST_KEY:
            short = f"{str(key)[:40]}..."
            raise UserError(f"longer than {LONGEST_KEY} characters", key="key", value=short)
        seconds = self._timeout if timeout is None else timeout
        if not 0 <= seconds < math.inf:
            raise UserError(
                "every wait has an end", key="timeout", value=timeout, expected="seconds, or None"
            )
        return ChannelRequest(
            kind, key, seconds, {"key": key, "timeout": seconds, **settings}, buffers
        )

    # --- looking, closing -------------------------------------------------------------------------

    def peek(self, key: Key = None) -> Any:
        """A copy of the item that would be taken next; `ChannelEmpty` where there is none."""
        return self._ask(self._request(Operation.PEEK, key, 0)).items()[0]

    def stats(self) -> ChannelStats:
        """What the channel holds, has seen, and who waits."""
        found: ChannelStats = self._ask(self._request(Operation.STATS, None, 0)).stats
        return found

    def size(self) -> int:
        """Items in the channel, over all keys."""
        return self.stats().items

    def qsize(self, key: Key = None) -> int:
        """Items under a key."""
        return self.stats().keys.get(key, 0)

    def keys(self) -> list[Key]:
        """The keys that hold items."""
        return list(self.stats().keys)

    def close(self) -> None:
        """Take nothing more: putters get `ChannelClosed` at once, getters when nothing is left."""
        self._ask(self._request(Operation.CLOSE, None, 0))

    def terminate(self) -> None:
        """End the host, with all that is left in it; other handles get `ChannelLost`.

        On a handle to a channel that another process hosts, only let go of its connections.
        """
        self._drop_connections()
        if self._on_ray:
            hosting.end_actor(self.name)
        if self._end is not None and self._pid == os.getpid():
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.terminate()

    # --- asking the host --------------------------------------------------------------------------

    def _ask(self, request: ChannelRequest) -> ChannelReply:
        client = self._idle_client() or Client(self._address)
        try:
            reply = client.ask(request)
        except BaseException:
            client.close()
            raise
        self._idle.append(client)
        return self._checked(reply, request)

    async def _ask_async(self, request: ChannelRequest) -> ChannelReply:
        client = self._idle_client()
        if client is None:
            client = await asyncio.to_thread(Client, self._address)
        try:
            reply = await client.ask_async(request)
        except BaseException:
            client.close()
            raise
        self._idle.append(client)
        return self._checked(reply, request)

    def _idle_client(self) -> Client | None:
        """A connection that nobody uses, if there is one: each request that waits has its own."""
        if self._pid != os.getpid():  # forked: the connections are the parent's
            self._drop_connections()
            self._pid, self._end = os.getpid(), None
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        return None

    def _drop_connections(self) -> None:
        idle, self._idle = self._idle, []
        for client in idle:
            client.close()

    def _checked(self, reply: ChannelReply, request: ChannelRequest) -> ChannelReply:
        """The reply of a request that succeeded; else raises what became of it."""
        if reply.outcome is Outcome.DONE:
            return reply
        key = request.key
        where = f"channel {self.name!r}" + ("" if key is None else f", key {key!r}")
        if reply.outcome is Outcome.CLOSED:
            rest = (
                "it takes no more items" if request.kind == Operation.PUT else "and nothing is left"
            )
            raise ChannelClosed(f"{where}: closed, {rest}")
        if request.kind == Operation.PEEK:
            raise ChannelEmpty(f"{where}: nothing there")
        stats, most = reply.stats, self._address
        waited = f"after {reply.waited:.3g} s"
        held = (
            f"{stats.items} of {most.max_items} items, {stats.bytes:,} of {most.max_bytes:,} bytes"
        )
        if reply.outcome is Outcome.FULL:
            raise ChannelFull(
                f"{where}: no room for {sum(map(len, request.buffers)):,} bytes {waited}; the "
                f"channel holds {held}; {stats.waiting_putters} other putters and "
                f"{stats.waiting_getters} getters wait"
            )
        found = stats.keys.get(key, 0)
        missing = "no item" if not found else f"only {found} items, not a whole batch,"
        raise ChannelEmpty(
            f"{where}: {missing} {waited}; the channel holds {held}, under keys "
            f"{list(stats.keys)}; {stats.waiting_getters} other getters wait"
        )


def _checked_name(name: str | None, max_items: int, max_bytes: int, timeout: float) -> str:
    for key, value in (("max_items", max_items), ("max_bytes", max_bytes)):
        if value < 1:
            raise UserError("no such bound", key=key, value=value, expected="1 or more")
    if not 0 < timeout < math.inf:
        raise UserError("every wait has an end", key="timeout", value=timeout, expected="seconds")
    return name or f"channel-{secrets.token_hex(4)}"
