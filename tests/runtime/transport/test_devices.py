"""Payloads on GPUs: which link they take, that they arrive whole, and what happens where one fails.

The GPUs are made up (`fake_gpu`); everything else is real: sockets, shared memory, threads.
"""

from __future__ import annotations

import inspect
import logging
import os
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2flow.flow.batch import Batch, Ragged
from m2flow.runtime.transport.cargo import load, together
from m2flow.runtime.transport.cuda_ipc import _second_storage, _TorchHandle, scope_between
from m2flow.runtime.transport.measure import measure, pairs_to_measure
from m2flow.runtime.transport.peering import Location
from m2flow.runtime.transport.peers import Peers
from m2flow.runtime.transport.server import PayloadServer
from m2flow.runtime.transport.shared_memory import SharedPool
from m2flow.runtime.transport.table import STAGED
from m2flow.runtime.transport.wire import pack, unpack
from tests.runtime.transport.fake_gpu import FakeDriver, FakeGPU, FakeIPC

KEY = b"between us"
HERE = Location("lane 0", "here", "GPU-a")
BESIDE = Location("lane 1", "here", "GPU-a")
ACROSS = Location("lane 2", "here", "GPU-b")
AWAY = Location("lane 3", "there", "GPU-c")
HOST = Location("the launcher", "here")


# --- the choice ---------------------------------------------------------------------------------


def test_the_scope_goes_by_machine_and_gpu() -> None:
    others = (BESIDE, ACROSS, AWAY, HOST)
    assert [scope_between(HERE, one) for one in others] == ["gpu", "gpus", None, None]
    assert [scope_between(one, HERE) for one in others] == ["gpu", "gpus", None, None]


def test_each_scope_is_measured_by_one_pair() -> None:
    places = {0: HOST, 1: HERE, 2: ACROSS, 5: AWAY, 7: BESIDE}
    assert pairs_to_measure(places) == {(0, 1), (0, 5), (1, 2), (1, 7)}
    assert pairs_to_measure({3: HERE, 4: AWAY}) == {(3, 4)}
    assert pairs_to_measure({3: HOST}) == set()


# --- the device part of a payload ---------------------------------------------------------------

sizes = st.sampled_from([0, 1, 3, 255, 256, 257, 1000, 1 << 20])
dtypes = st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.bool])


@given(st.lists(st.tuples(sizes, dtypes, st.booleans(), st.booleans()), max_size=8))
def test_any_mixture_of_devices_comes_back_the_same(parts: Any) -> None:
    gpu = FakeGPU("GPU-a", FakeDriver())
    value = {}
    for number, (count, dtype, on_device, strided) in enumerate(parts):
        rows = max(1, count // dtype.itemsize)
        tensor = torch.randint(0, 2, (rows, 2) if strided else (rows,)).to(dtype)
        tensor = tensor[:, 0] if strided else tensor
        value[f"t{number}"] = gpu.put(tensor) if on_device else tensor
    packed = pack(value)
    cargo = load(packed, gpu.owns)
    host = [buffer.memory().copy() for buffer in cargo.host.buffers]
    got = unpack(cargo.host.head, together(cargo.places, host, cargo.pieces))
    assert got.keys() == value.keys()
    for name, tensor in value.items():
        assert got[name].dtype is tensor.dtype
        assert torch.equal(got[name], tensor)


def test_torch_still_has_the_handle_that_is_sent() -> None:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    there = [names.index(f"storage_{name}") for name in ("device", "handle", "size_bytes")]
    assert there == [6, 7, 8]
    assert names[9] == "storage_offset_bytes"
    assert names[11:] == [
        "ref_counter_handle",
        "ref_counter_offset",
        "event_handle",
        "event_sync_required",
    ]
    assert len(_TorchHandle._fields) == 8
    for name in ("_share_cuda_", "_new_shared_cuda", "_release_ipc_counter"):
        assert hasattr(torch.UntypedStorage, name)


def test_a_second_storage_begins_where_the_piece_does_and_keeps_it() -> None:
    whole = torch.arange(100, dtype=torch.uint8)
    piece = whole[10:30]
    alias = _second_storage(piece)
    assert alias.untyped_storage().nbytes() == 20
    assert alias.data_ptr() == piece.data_ptr()
    del whole, piece
    assert alias[-1] == 29


# --- between two processes ----------------------------------------------------------------------


@pytest.fixture
def pool() -> Iterator[SharedPool]:
    pool = SharedPool(f"m2flow-test-{os.getpid()}-{random.randrange(1 << 30)}-")
    yield pool
    pool.close()


class Pair:
    """A server on GPU-a, and who asks from another place."""

    def __init__(self, pool: SharedPool, gpu: str | None) -> None:
        self.driver = FakeDriver()
        self.here = FakeGPU("GPU-a", self.driver)
        self.values: dict[str, Any] = {}
        self.server = PayloadServer(
            self.values.__getitem__,
            pool,
            KEY,
            name="lane 0",
            devices=self.here.devices,
        )
        there = None if gpu is None else FakeGPU(gpu, self.driver).devices
        self.peers = Peers(None, KEY, name="lane 1", devices=there)

    def get(self, key: Any, **more: Any) -> Any:
        return self.peers.receive(self.server.address, key, timeout=60, **more)

    def mixed(self) -> dict[str, Any]:
        """Two large and three small tensors on the GPU, and a host part of 400 KB."""
        large = torch.randn(600_000)
        value = {
            "logits": self.here.put(large),
            "half": self.here.put(large.to(torch.bfloat16)),
            "small": [self.here.put(torch.arange(n)) for n in (1, 5, 700)],
            "strided": self.here.put(torch.arange(12.0).view(3, 4)).t(),
            "tokens": torch.arange(50_000),
            "ragged": Batch({"text": ["a", "b"], "x": Ragged(torch.arange(3), [1, 2])}),
            "text": "said",
        }
        self.values["mixed"] = value
        return value

    def close(self) -> None:
        self.peers.close()
        self.server.close()


@pytest.fixture(params=["GPU-a", "GPU-b"])
def pair(pool: SharedPool, request: Any) -> Iterator[Pair]:
    pair = Pair(pool, request.param)
    yield pair
    pair.close()


def same(got: Any, value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return got.dtype is value.dtype and torch.equal(got, value)
    if isinstance(value, Batch):
        return got["text"] == value["text"] and torch.equal(got["x"].values, value["x"].values)
    if isinstance(value, dict):
        return got.keys() == value.keys() and all(same(got[name], value[name]) for name in value)
    if isinstance(value, list):
        return len(got) == len(value) and all(map(same, got, value))
    return bool(got == value)


def test_mixed_devices_travel_in_one_message(pair: Pair, pool: SharedPool) -> None:
    value = pair.mixed()
    got = pair.get("mixed")
    assert got.link == "cuda_ipc"
    assert same(got.value, value)
    assert pair.driver.shared == 6
    opened = got.value["logits"].data_ptr() == value["logits"].data_ptr()
    if pair.peers.location.gpu == "GPU-a":
        assert opened, "on one GPU nothing is copied"
        assert (pair.driver.held, pair.driver.finished) == (6, 0)
        kept = got.value["logits"][5:]
        del got
        assert pair.driver.held == 1, "what is read keeps the sender's memory"
        del kept
    else:
        assert not opened, "from another GPU it is copied"
        assert pair.driver.finished == 6, "after what was queued"
        assert pair.driver.held == 0, "and the sender's memory is free at once"
        del got
    assert set(pair.driver.let_go_count.values()) == {1}


def test_what_has_nothing_on_the_device_goes_as_ever(pair: Pair) -> None:
    pair.values["host"] = torch.arange(100_000)
    assert pair.get("host").link == "shared"
    assert pair.driver.shared == 0


def test_who_stands_on_no_gpu_gets_host_memory(pool: SharedPool) -> None:
    pair = Pair(pool, None)
    value = pair.mixed()
    got = pair.get("mixed")
    assert (got.link, pair.driver.shared) == ("shared", 0)
    assert same(got.value, value)
    pair.close()


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_memory_that_cannot_be_opened_goes_by_host_once_and_for_all(
    pair: Pair, caplog: pytest.LogCaptureFixture, broken: int
) -> None:
    value = pair.mixed()
    pair.driver.broken_opens = {broken}
    with caplog.at_level(logging.WARNING):
        got = pair.get("mixed")
    assert got.link == "shared"
    assert same(got.value, value)
    assert pair.driver.held == 0
    assert set(pair.driver.let_go_count.values()) == {1}, "opened or withdrawn, each once"
    assert "no cuda_ipc from lane 0 to lane 1" in caplog.text
    assert "invalid resource handle" in caplog.text
    pair.driver.broken_opens = set()
    assert pair.get("mixed").link == "shared", "nor is it tried again"
    assert pair.driver.shared == 6


def test_memory_that_cannot_be_shared_is_tried_once(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    value = pair.mixed()
    pair.driver.unshareable = True
    assert pair.get("mixed").link == "shared"
    assert "cannot be shared: the allocator does not share\n" in caplog.text
    pair.driver.unshareable = False
    got = pair.get("mixed")
    assert (got.link, pair.driver.shared) == ("shared", 0)
    assert same(got.value, value)


def test_a_view_that_cannot_be_shared_is_copied_first() -> None:
    class Fussy(FakeDriver):
        def share(self, piece: torch.Tensor, *, same_gpu: bool) -> Any:
            if piece.storage_offset():
                raise RuntimeError("invalid device pointer")
            return super().share(piece, same_gpu=same_gpu)

    driver = Fussy()
    link = FakeIPC("GPU-a", driver)
    view = torch.arange(10, dtype=torch.uint8)[3:]
    handles = link.offer([view], BESIDE)
    (got,) = link.take(handles, HERE)
    assert torch.equal(got, view)
    assert got.data_ptr() != view.data_ptr()


def test_an_offer_that_nobody_reads_is_withdrawn(pair: Pair) -> None:
    value = pair.mixed()

    late = threading.Event()

    def slow(key: str) -> Any:
        assert late.wait(30)
        return value

    pair.server._provide = slow
    with pytest.raises(TimeoutError, match="no answer about 'mixed'"):
        pair.peers.fetch(pair.server.address, "mixed", timeout=0.1)
    late.set()
    deadline = time.monotonic() + 60
    while pair.driver.shared < 6 or pair.driver.held:
        assert time.monotonic() < deadline, "the offer is still held"
        time.sleep(0.01)
    assert set(pair.driver.let_go_count.values()) == {1}
    pair.server._provide = pair.values.__getitem__
    assert pair.get("mixed").link == "cuda_ipc"


def test_links_of_a_gpu_are_measured(pair: Pair) -> None:
    scope = "gpu" if pair.peers.location.gpu == "GPU-a" else "gpus"
    table = measure(pair.peers, pair.server.address)
    assert table.costs[scope].keys() == {"cuda_ipc"}
    assert table.costs["node"].keys() == {"stream", "shared"}
    pair.driver.broken_opens = set(range(1000))
    table = measure(pair.peers, pair.server.address)
    assert table.costs[scope].keys() == {STAGED}
