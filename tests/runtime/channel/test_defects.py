"""What goes wrong in other channels, each named after the failure; and messages that help."""

from __future__ import annotations

import pickle
import select
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from m2flow.errors import UserError
from m2flow.runtime.transport.channel import (
    Channel,
    ChannelClosed,
    ChannelEmpty,
    ChannelError,
    ChannelFull,
    ChannelTimeout,
    host,
)
from tests.clock import Clock
from tests.patience import SOON


@pytest.fixture
def channel() -> Iterator[Channel]:
    with Channel("rollouts", max_items=2, max_bytes=4096, timeout=SOON) as channel:
        yield channel


class Waits(Clock):
    """Stands for the host's clock and its waiting: what it waits for goes by at once.

    Attributes:
        asked: the seconds that were waited, in turn; nothing comes meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[float] = []

    def register(self, *_: object) -> None: ...

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        self.asked.append(milliseconds / 1000)
        self.now += milliseconds / 1000
        return []


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    waits = Waits()
    monkeypatch.setattr(host, "time", waits)
    monkeypatch.setattr(host, "select", SimpleNamespace(poll=lambda: waits, POLLIN=select.POLLIN))
    return waits


def test_put_nowait_on_a_full_channel_does_not_wait(channel: Channel, waits: Waits) -> None:
    channel.put("a")
    channel.put_nowait("b")
    with pytest.raises(ChannelFull, match=r"'rollouts'.*no room.*2 of 2 items.*of 4,096 bytes"):
        channel.put_nowait("c")
    assert waits.asked == []
    assert channel.get_batch(max_items=2) == ["a", "b"]


def test_an_exception_while_packing_comes_out_of_put(channel: Channel) -> None:
    with pytest.raises(TypeError, match="lock"):
        channel.put({"fine": 1, "not": threading.Lock()})
    assert channel.stats().items == 0
    channel.put("goes on")
    assert channel.get() == "goes on"


class Unreadable:
    """Can be sent, and fails when it is put together again."""

    def __reduce__(self) -> tuple[object, ...]:
        return _fails, ()


def _fails() -> None:
    raise ArithmeticError("cannot be built")


def test_an_exception_while_unpacking_comes_out_of_get_and_blocks_nobody(channel: Channel) -> None:
    channel.put(Unreadable())
    channel.put("next")
    with pytest.raises(ArithmeticError, match="cannot be built"):
        channel.get()
    assert channel.get() == "next"


def test_a_head_item_that_outweighs_the_target_is_not_an_empty_batch(channel: Channel) -> None:
    channel.put("heavy", weight=100)
    channel.put("light", weight=1)
    assert channel.get_batch(weight=10) == ["heavy"]
    channel.close()
    assert channel.get_batch(weight=10) == ["light"]


def test_an_item_larger_than_the_channel_is_refused_and_not_waited_for(channel: Channel) -> None:
    with pytest.raises(UserError, match=r"max_bytes: an item of 5,0\d\d bytes.*'rollouts'.*4,096"):
        channel.put(b"x" * 5000)


def test_a_full_channel_is_bounded_in_bytes_too(channel: Channel) -> None:
    channel.put(b"x" * 3000)
    with pytest.raises(ChannelFull, match="no room for 1,5"):
        channel.put(b"x" * 1500, timeout=0.01)
    channel.put(b"x" * 500)


def test_waits_end_and_say_what_was_there(channel: Channel, waits: Waits) -> None:
    channel.put("for another", key="b")
    with pytest.raises(
        ChannelEmpty,
        match=r"'rollouts', key 'a': no item after 0\.05 s;.*1 of 2 items.*keys \['b'\]",
    ):
        channel.get("a", timeout=0.05)
    with pytest.raises(ChannelEmpty, match="only 1 items, not a whole batch, after 7 s"):
        channel.get_batch(weight=5, key="b", timeout=7.0)
    assert waits.asked == [0.05, 7.0]
    assert channel.get("b") == "for another"


def test_a_wait_without_end_cannot_be_asked_for(channel: Channel) -> None:
    for timeout in (float("inf"), -1.0, float("nan")):
        with pytest.raises(UserError, match="timeout: every wait has an end"):
            channel.get(timeout=timeout)
    with pytest.raises(UserError, match="every wait has an end"):
        Channel(timeout=float("inf"))


def test_closing_wakes_waiting_putters_and_lets_getters_drain(channel: Channel) -> None:
    channel.put("a")
    channel.put("b")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(channel.put, "c")
        while not channel.stats().waiting_putters:
            time.sleep(0.005)
        channel.close()
        with pytest.raises(ChannelClosed, match="'rollouts': closed, it takes no more"):
            waiting.result(SOON)
    assert list(channel) == ["a", "b"]
    with pytest.raises(ChannelClosed, match="nothing is left"):
        channel.get()
    with pytest.raises(ChannelClosed):
        channel.get_batch(max_items=3)
    channel.close()


def test_waiting_putters_are_let_in_in_their_order(channel: Channel) -> None:
    channel.put(0)
    channel.put(1)
    with ThreadPoolExecutor(3) as pool:
        for number in (2, 3, 4):
            pool.submit(channel.put, number)
            while channel.stats().waiting_putters < number - 1:
                time.sleep(0.005)
        assert [channel.get() for _ in range(5)] == [0, 1, 2, 3, 4]


def test_keys_keep_their_order_apart(channel: Channel) -> None:
    channel.put("x", key=7)
    channel.put("y", key="7")
    assert channel.stats().keys == {7: 1, "7": 1}
    assert channel.get("7") == "y"
    assert channel.stats().keys == {7: 1}


@pytest.mark.parametrize("key", [("a", 1), 1.5, True, b"a"])
def test_keys_that_compare_unlike_elsewhere_are_refused(channel: Channel, key: object) -> None:
    with pytest.raises(UserError, match="key: no such key"):
        channel.put("x", key=key)  # type: ignore[arg-type]


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_are_numbers_that_can_be_added(channel: Channel, weight: float) -> None:
    with pytest.raises(UserError, match="weight: no such weight"):
        channel.put("x", weight=weight)


def test_batches_are_bounded(channel: Channel) -> None:
    with pytest.raises(UserError, match="needs weight or max_items"):
        channel.get_batch()
    with pytest.raises(UserError, match="max_items: no such batch"):
        channel.get_batch(max_items=0)
    with pytest.raises(UserError, match="weight: no such weight"):
        channel.get_batch(weight=0)
    with pytest.raises(UserError, match="max_items: no such bound"):
        Channel(max_items=0)


@pytest.mark.parametrize("number", ["1", -1.0, float("nan"), [1], float("inf")])
def test_numbers_that_are_none_are_refused_in_one_line(channel: Channel, number: Any) -> None:
    """Text was compared with a number; a channel was found whose every call waits for ever."""
    channel.put("x")
    for asked in (
        lambda: Channel(timeout=number),
        lambda: Channel.find("rollouts", timeout=number),
        lambda: channel.get(timeout=number),
        lambda: channel.put("y", timeout=number),
        lambda: channel.get_batch(max_items=1, linger=number),
    ):
        with pytest.raises(UserError, match=r"(timeout|linger): every wait has an end"):
            asked()
    for asked in (
        lambda: Channel(max_items=number),
        lambda: Channel(max_bytes=number),
        lambda: channel.get_batch(max_items=number),
    ):
        with pytest.raises(UserError, match=r"(max_items|max_bytes): no such (bound|batch)"):
            asked()
    with pytest.raises(UserError, match="weight: no such weight"):
        channel.put("y", weight=number)
    if number != float("inf"):
        with pytest.raises(UserError, match="weight: no such weight"):
            channel.get_batch(weight=number)
    assert channel.get() == "x"


def test_lingering_gives_what_is_there(channel: Channel) -> None:
    channel.put("one")
    assert channel.get_batch(max_items=2, linger=0.01) == ["one"]
    channel.put("two")
    assert channel.get_batch(max_items=2, linger=0) == ["two"]


@pytest.mark.parametrize("kind", [ChannelFull, ChannelEmpty, ChannelClosed])
def test_errors_cross_processes(kind: type[ChannelError]) -> None:
    error = pickle.loads(pickle.dumps(kind("channel 'x': why")))
    assert type(error) is kind
    assert str(error) == "channel 'x': why"
    assert issubclass(ChannelFull, ChannelTimeout)
    assert issubclass(ChannelTimeout, TimeoutError)


def test_importing_m2flow_gives_the_channel() -> None:
    import m2flow

    assert m2flow.Channel is Channel
