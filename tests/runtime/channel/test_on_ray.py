"""Channels whose handles travel through Ray: to tasks and actors, by name, and past their maker."""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from m2flow.errors import UserError
from m2flow.runtime.transport.channel import Channel, ChannelFull, ChannelLost

ray = pytest.importorskip("ray")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors cannot import this module

SOON = 30.0


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    folder = Path(tempfile.mkdtemp(prefix="m2c-"))  # Ray's sockets need a short path
    try:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            logging_level=logging.ERROR,
            _temp_dir=str(folder),
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


class Producer:
    """An actor that makes channels and fills them."""

    def make(self, name: str) -> Channel:
        channel = Channel.on_ray(name, max_items=2, timeout=SOON)
        channel.put("made")
        return channel

    def put(self, channel: Channel, item: object) -> None:
        channel.put(item)

    def put_nowait(self, channel: Channel, item: object) -> str:
        try:
            channel.put_nowait(item)
        except ChannelFull as error:
            return str(error)
        return "put"

    def own(self) -> Channel:
        """Hosted by a thread of this actor."""
        self.channel = Channel(timeout=SOON)
        self.channel.put(torch.arange(5))
        return self.channel


@pytest.fixture
def producer() -> Iterator[object]:
    actor = ray.remote(num_cpus=0)(Producer).remote()
    yield actor
    ray.kill(actor)


def test_handles_go_to_actors_and_back(producer: object) -> None:
    with Channel("driver's", max_items=1, timeout=SOON) as channel:
        ray.get(producer.put.remote(channel, {"n": 1}), timeout=SOON)
        # put_nowait on a full channel inside a worker says so, and the worker goes on.
        told = ray.get(producer.put_nowait.remote(channel, {"n": 2}), timeout=SOON)
        assert "1 of 1 items" in told
        assert channel.get() == {"n": 1}
        assert ray.get(producer.put_nowait.remote(channel, {"n": 3}), timeout=SOON) == "put"
        theirs = ray.get(producer.own.remote(), timeout=SOON)
        assert torch.equal(theirs.get(), torch.arange(5))


def test_a_channel_on_ray_outlives_its_maker(producer: object) -> None:
    made = ray.get(producer.make.remote("replay"), timeout=SOON)
    ray.kill(producer)
    assert made.get() == "made"
    found = Channel.find("replay", timeout=SOON)
    found.put("found")
    assert made.get() == "found"
    with pytest.raises(UserError, match=r"name: a channel of that name.*Channel\.find"):
        Channel.on_ray("replay")
    found.terminate()
    with pytest.raises(ChannelLost, match="'replay'"):
        made.get()
    with pytest.raises(UserError, match=r"name: no channel of that name.*Channel\.on_ray"):
        Channel.find("replay")
