"""State that leaves memory and comes back: to the bit, through every alias, and really gone."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from m2flow.errors import RunFailed
from m2flow.flow import Place
from m2flow.runtime.lane.state import (
    MovableState,
    module_tensors,
    peak_resident_bytes,
    reset_peak_resident_bytes,
    resident_bytes,
)
from m2flow.runtime.lane.state import spill as spill_module
from m2flow.runtime.lane.state.host_memory import HostMemoryShelf
from m2flow.runtime.lane.state.memory import return_free_memory

MB = 1 << 20


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(spill=tmp_path / "spill")


def state_of(*tensors: Tensor, place: Place) -> MovableState:
    return MovableState(lambda: tensors, place)


def bytes_put(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the bytes of each state that is put into a file from now on."""
    written: list[int] = []
    put = spill_module.FileShelf.put

    def counted(shelf: Any, storages: Any) -> None:
        written.append(sum(storage.nbytes() for storage in storages))
        put(shelf, storages)

    monkeypatch.setattr(spill_module.FileShelf, "put", counted)
    return written


def large_model(megabytes: int = 100) -> nn.Module:
    """Layers of 4 MB, with random weights."""
    layers = [nn.Linear(1024, 1023) for _ in range(megabytes // 4)]
    return nn.Sequential(*layers)


def in_a_new_process(check: Callable[[Place], None], place: Place) -> None:
    """Resident memory is then the check's own: in a process with a past, allocators hold holes."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        processes.submit(check, place).result(timeout=120)


def test_memory_really_falls_and_comes_back(place: Place) -> None:
    in_a_new_process(check_that_memory_falls, place)


def check_that_memory_falls(place: Place) -> None:
    model = large_model()
    state = MovableState(lambda: module_tensors(model), place)
    expected = [tensor.clone() for tensor in model.state_dict().values()]
    gc.collect()
    return_free_memory()  # of the imports
    num_bytes, before = state.nbytes(), resident_bytes()
    assert num_bytes == sum(tensor.nbytes for tensor in expected) > 99 * MB
    for _ in range(2):
        state.offload()
        fallen = before - resident_bytes()
        assert fallen > 0.9 * num_bytes, f"{fallen} of {num_bytes} bytes"
        assert state.nbytes() == num_bytes
        state.onload()
        risen = resident_bytes() - before
        assert abs(risen) < 0.3 * num_bytes, f"{risen} bytes"  # the process breathes
        assert state.nbytes() == num_bytes
    for tensor, wanted in zip(model.state_dict().values(), expected, strict=True):
        assert torch.equal(tensor, wanted)


def test_storages_of_all_sizes_leave_no_hole_in_the_heap(place: Place) -> None:
    """What the C library takes from its heap stays with the process unless that is trimmed."""
    in_a_new_process(check_that_the_heap_has_no_hole, place)


def check_that_the_heap_has_no_hole(place: Place) -> None:
    sizes = [1 << power for power in range(4, 22)] * 10
    tensors = [torch.full((size // 4,), 1.5) for size in sizes]
    state = state_of(*tensors, place=place)
    before = resident_bytes()
    state.offload()
    fallen = before - resident_bytes()
    assert fallen > 0.9 * state.nbytes(), f"{fallen} of {state.nbytes()} bytes"
    state.onload()
    assert all(bool((tensor == 1.5).all()) for tensor in tensors)


def test_two_states_take_turns_within_the_memory_of_one(place: Place) -> None:
    if not reset_peak_resident_bytes():
        pytest.skip("the system does not let a process reset its peak")
    in_a_new_process(check_that_two_states_take_turns, place)


def check_that_two_states_take_turns(place: Place) -> None:
    first, second = large_model(64), large_model(64)
    moving = [MovableState(lambda m=m: module_tensors(m), place) for m in (first, second)]
    moving[1].offload()
    assert reset_peak_resident_bytes()
    before = resident_bytes()
    for _ in range(2):
        for out, back in ((0, 1), (1, 0)):
            moving[out].offload()
            moving[back].onload()
    risen = peak_resident_bytes() - before
    assert risen < 0.1 * moving[0].nbytes(), f"{risen} bytes beside {moving[0].nbytes()}"


def test_every_alias_stays_good(place: Place) -> None:
    flat = torch.randn(100)
    one = nn.Parameter(flat[:40].view(5, 8))
    one.grad = torch.randn(5, 8)
    tied = nn.Parameter(one.detach().T)
    outside = flat[40:]  # never handed over
    optimizer = torch.optim.Adam([one])
    optimizer.step()
    moments = optimizer.state[one]["exp_avg"]
    expected = [tensor.detach().clone() for tensor in (one, tied, outside, moments)]
    gradient = one.grad
    state = MovableState(lambda: [one, tied, gradient, *optimizer.state[one].values()], place)
    assert state.nbytes() == 4 * (100 + 3 * 40 + 1)  # the flat buffer once
    state.offload()
    state.onload()
    for tensor, wanted in zip((one, tied, outside, moments), expected, strict=True):
        assert torch.equal(tensor, wanted)
    optimizer.step()  # in place, through the parameter
    assert not torch.equal(tied, expected[1])
    assert torch.equal(tied, one.T)
    assert torch.equal(flat[:40], one.detach().flatten())


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3000), max_size=40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    seed=st.integers(0, 99),
)
def test_any_tensors_come_back_to_the_bit(sizes: list[int], dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randint(0, 2, (size,), generator=generator).to(dtype)[:: 1 + size % 3]
        for size in sizes
    ]
    expected = [tensor.clone() for tensor in tensors]
    state = state_of(*tensors, place=Place())
    state.offload()
    state.onload()
    for tensor, wanted in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, wanted)


def test_nan_and_minus_zero_come_back_to_the_bit(place: Place) -> None:
    bits = torch.tensor([0x7FC00001, -0x80000000, -0x3FFFFF, 1], dtype=torch.int32)
    large = torch.zeros(MB).view(torch.int32)
    large[-1] = -0x80000000  # -0.0 is not all zero bits
    values, kept = [bits.view(torch.float32), large.view(torch.float32)], [bits.clone(), large[-1]]
    state = state_of(*values, place=place)
    state.offload()
    state.onload()
    assert torch.equal(values[0].view(torch.int32), kept[0])
    assert int(values[1].view(torch.int32)[-1]) == -0x80000000


def test_a_frozen_state_is_put_away_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    written = bytes_put(monkeypatch)
    tensors = [torch.randn(1000), torch.zeros(500), torch.randn(3)]
    expected = [tensor.clone() for tensor in tensors]
    state = MovableState(lambda: tensors, place, frozen=True)
    for _ in range(3):
        state.offload()
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        assert state.nbytes() == sum(tensor.nbytes for tensor in expected)
        state.onload()
        assert all(map(torch.equal, tensors, expected))
    assert len(written) == 1


def test_moving_twice_is_moving_once(place: Place) -> None:
    tensor = torch.arange(1000.0)
    state = state_of(tensor, place=place)
    state.onload()
    assert state.is_resident
    state.offload()
    state.offload()
    assert not state.is_resident
    assert tensor.untyped_storage().nbytes() == 0
    state.onload()
    tensor += 1
    state.onload()
    assert torch.equal(tensor, torch.arange(1000.0) + 1)


def test_present_restores_what_was(place: Place) -> None:
    tensor = torch.arange(1000.0)
    state = state_of(tensor, place=place)
    with state.present():
        assert float(tensor[9]) == 9
    assert state.is_resident
    state.offload()
    with state.present():
        tensor += 1
    assert not state.is_resident
    with pytest.raises(ZeroDivisionError), state.present():
        tensor.sum().item() / 0
    assert not state.is_resident
    state.onload()
    assert torch.equal(tensor, torch.arange(1000.0) + 1)


def test_a_state_may_grow_and_shrink_between_switches(place: Place) -> None:
    tensors = [torch.full((1000,), 1.0)]
    state = MovableState(lambda: tensors, place)
    for size in (5000, 10, 3000):
        state.offload()
        state.onload()
        tensors.append(torch.full((size,), float(size)))
    del tensors[1]
    assert state.nbytes() == 4 * (1000 + 10 + 3000)
    state.offload()
    state.onload()
    assert [float(tensor.mean()) for tensor in tensors] == [1, 10, 3000]


def test_no_room_leaves_the_state_where_it_is(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.arange(100_000.0)
    state = state_of(tensor, place=place)
    pwrite = os.pwrite

    def full(file: int, buffer: Any, start: int) -> int:
        if start > 0:
            raise OSError(28, "No space left on device")
        return pwrite(file, buffer[:1000], start)

    with monkeypatch.context() as patch:
        patch.setattr(spill_module.os, "pwrite", full)
        with pytest.raises(RunFailed, match=r"no room to put 400000 bytes .*spill"):
            state.offload()
    assert state.is_resident
    assert torch.equal(tensor, torch.arange(100_000.0))
    state.offload()
    state.onload()
    assert torch.equal(tensor, torch.arange(100_000.0))


def test_an_onload_that_fails_can_be_tried_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [torch.arange(1000.0), torch.arange(2000.0)]
    state = state_of(*tensors, place=place)
    state.offload()

    def broken(file: int, buffers: Any, start: int) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(spill_module.os, "preadv", broken)
        with pytest.raises(OSError, match="Input/output"):
            state.onload()
    assert not state.is_resident
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    state.onload()
    assert torch.equal(tensors[1], torch.arange(2000.0))


def test_short_writes_and_reads_are_gone_on_with(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [torch.randn(size) for size in (10, 1000, 1, 3000)]
    expected = copy.deepcopy(tensors)
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(spill_module.os, "pwrite", lambda f, b, s: pwrite(f, b[:777], s))
    monkeypatch.setattr(spill_module.os, "preadv", lambda f, b, s: preadv(f, [b[0][:777]], s))
    state = state_of(*tensors, place=place)
    state.offload()
    state.onload()
    for tensor, wanted in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, wanted)


# Memory that is not torch's own


def test_memory_of_numpy_is_replaced_in_all_tensors_that_see_it(place: Place) -> None:
    array = np.arange(10.0)
    whole = torch.from_numpy(array)
    parameter = nn.Parameter(whole[2:6])
    state = state_of(whole, parameter, place=place)
    for _ in range(2):
        state.offload()
        state.onload()
    assert torch.equal(whole, torch.arange(10.0, dtype=torch.float64))
    with torch.no_grad():
        parameter += 1
    assert whole.tolist() == [0, 1, 3, 4, 5, 6, 6, 7, 8, 9]
    assert array[2] == 2  # it went its own way


def test_memory_shared_with_others_is_refused(place: Place) -> None:
    own, shared = torch.arange(5.0), torch.arange(9.0).share_memory_()
    state = state_of(own, shared, place=place)
    with pytest.raises(RunFailed, match="36 bytes lies in memory that other processes"):
        state.offload()
    assert state.is_resident
    assert float(own[4]) == 4


def test_foreign_memory_seen_twice_is_refused(place: Place) -> None:
    array = np.arange(10.0)
    state = state_of(torch.from_numpy(array), torch.from_numpy(array[5:]), place=place)
    with pytest.raises(RunFailed, match="same foreign memory"):
        state.offload()


def test_tensors_elsewhere_stay_where_they_are(place: Place) -> None:
    state = state_of(torch.empty(5, device="meta"), torch.ones(5), place=place)
    assert state.nbytes() == 20
    state.offload()
    state.onload()


# The file


def test_nothing_is_left_in_the_folder(place: Place) -> None:
    assert place.spill is not None
    state = state_of(torch.ones(MB), place=place)
    state.offload()
    assert list(place.spill.iterdir()) == []
    descriptor = state._shelf._file  # type: ignore[attr-defined]
    assert os.fstat(descriptor).st_size == 4 * MB
    state.onload()
    assert os.fstat(descriptor).st_size == 0
    del state
    gc.collect()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(descriptor)


def test_a_process_that_dies_leaves_nothing(tmp_path: Path) -> None:
    code = """
import os, sys, torch
from pathlib import Path
from types import SimpleNamespace
from m2flow.flow import Place
from m2flow.runtime.lane.state import MovableState
tensor = torch.ones(1000)
state = MovableState(lambda: [tensor], Place(spill=Path(sys.argv[1])))
state.offload()
os.kill(os.getpid(), 9)
"""
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert ended.returncode == -9
    assert list(tmp_path.iterdir()) == []


# Threads


@pytest.fixture
def threads_keep_python() -> Iterator[None]:
    """A thread runs on until it lets others run itself, as it does in calls of the system."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("threads_keep_python")
def test_onload_beside_a_computation(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python goes on in another thread while the system copies the bytes to where they belong."""
    tensor = torch.randint(0, 255, (64 * MB,), dtype=torch.uint8)
    state = state_of(tensor, place=place)
    ticks = 0
    stop = threading.Event()
    during: list[int] = []
    preadv = os.preadv

    def tick() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0.0001)

    def watched(file: int, buffers: list[memoryview], start: int) -> int:
        where = torch.frombuffer(buffers[0], dtype=torch.uint8).data_ptr() - tensor.data_ptr()
        assert 0 <= where < tensor.nbytes
        before = ticks
        moved = preadv(file, buffers, start)
        during.append(ticks - before)
        return moved

    monkeypatch.setattr(os, "preadv", watched)
    ticker = threading.Thread(target=tick)
    ticker.start()
    for _ in range(50):  # on a busy machine the other thread may have no core meanwhile
        state.offload()
        state.onload()
        if any(during):
            break
    stop.set()
    ticker.join()
    assert any(during)


# Shards and accelerators


@contextmanager
def mesh_of_one(place: Place) -> Iterator[Any]:
    """A device mesh of one process, for tests in a process of their own.

    DTensor's caches of the thread keep it as long as the process lives. If another thread forks
    (as Ray is started ahead), the child clears these caches and crashes: it waits for the threads
    of the mesh, which were not forked.
    """
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    meet = f"file://{place.spill.parent / 'meet'}"
    distributed.init_process_group("gloo", init_method=meet, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_sharded_training_is_the_same_with_switches(place: Place) -> None:
    in_a_new_process(check_sharded_training, place)


def check_sharded_training(place: Place) -> None:
    from torch.distributed.fsdp import fully_shard

    def train(mesh: Any, switching: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def tensors() -> Iterator[Tensor]:
            yield from module_tensors(model)
            for quantities in optimizer.state.values():
                yield from quantities.values()

        state = MovableState(tensors, place)
        for step in range(3):
            model(torch.randn(5, 8) + step).square().sum().backward()
            if switching:
                state.offload()
                assert all(p.to_local().untyped_storage().nbytes() == 0 for p in model.parameters())
                state.onload()
            optimizer.step()
            optimizer.zero_grad()
            if switching:
                state.offload()
                state.onload()
        return [p.full_tensor().detach() for p in model.parameters()]

    with mesh_of_one(place) as mesh:
        for found, wanted in zip(train(mesh, True), train(mesh, False), strict=True):
            assert torch.equal(found, wanted)


def test_a_shard_that_numpy_has_seen_is_refused(place: Place) -> None:
    """It would be replaced in the parameter, and FSDP2 would go on gathering from the old one."""
    in_a_new_process(check_that_a_shard_is_refused, place)


def check_that_a_shard_is_refused(place: Place) -> None:
    from torch.distributed.fsdp import fully_shard

    model: Any = nn.Linear(4, 3)
    with mesh_of_one(place) as mesh:
        fully_shard(model, mesh=mesh)
        state = MovableState(lambda: module_tensors(model), place)
        weight, bias = (parameter.to_local().detach() for parameter in model.parameters())
        state.offload()
        state.onload()
        weight.numpy()
        with pytest.raises(RunFailed, match="a shard of 48 bytes lies in memory that NumPy"):
            state.offload()
        assert state.is_resident
        assert torch.equal(model(torch.eye(4)), weight.T + bias)


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 50), max_size=20), block=st.integers(1, 60))
def test_blocks_of_host_memory_hold_what_was_put(sizes: list[int], block: int) -> None:
    """The arithmetic of the pinned blocks, with memory that is not pinned."""
    tensors = [torch.arange(size, dtype=torch.uint8) + 1 for size in sizes]
    storages = [tensor.untyped_storage() for tensor in tensors]
    shelf = HostMemoryShelf(torch.device("cpu"), block_bytes=block)
    shelf.put(storages)
    assert len(shelf._blocks) == -(-sum(sizes) // block)
    blocks = [kept.data_ptr() for kept in shelf._blocks]
    for tensor in tensors:
        tensor.zero_()
    shelf.take([(storage, storage.nbytes()) for storage in storages])
    for size, tensor in zip(sizes, tensors, strict=True):
        assert torch.equal(tensor, torch.arange(size, dtype=torch.uint8) + 1)
    shelf.put(storages)
    assert [kept.data_ptr() for kept in shelf._blocks] == blocks


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [(2, MemoryError, "no room to pin 60 bytes"), (1, RuntimeError, "s 1")],
)
def test_a_host_without_room_for_a_pinned_block_is_out_of_memory(
    code: int, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own error of it could not be sent, and what came in its place named no memory."""
    cuda = SimpleNamespace(cudaHostRegister=lambda *_: code)

    def check(code: int) -> None:
        raise RuntimeError(f"CUDA says {code}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    with pytest.raises(error, match=words):
        HostMemoryShelf(torch.device("cuda"), block_bytes=60)._block()


def mounts(*table: tuple[Path, str]) -> Callable[..., list[Any]]:
    """In place of `psutil.disk_partitions`: mount points and their file systems."""
    return lambda **_: [SimpleNamespace(mountpoint=str(at), fstype=kind) for at, kind in table]


def test_a_spill_folder_in_memory_is_left_for_one_on_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where /tmp is a tmpfs, state that was put away had only moved within memory."""
    on_disk = spill_module.on_disk
    fast, disk = tmp_path / "fast", tmp_path / "fast" / "disk"
    disk.mkdir(parents=True)
    monkeypatch.setattr(spill_module, "_ON_DISK", (disk,))
    table = [(Path("/"), "ext4"), (fast, "ext4"), (fast, "tmpfs"), (disk, "ext4")]
    monkeypatch.setattr(psutil, "disk_partitions", mounts(*table))
    assert on_disk(tmp_path) == tmp_path
    assert on_disk(disk / "new") == disk / "new"
    assert on_disk(fast / "not there yet") == disk
    assert not caplog.records
    monkeypatch.setattr(psutil, "disk_partitions", mounts((Path("/"), "tmpfs")))
    assert on_disk(fast) == fast
    assert "frees none; set TMPDIR" in caplog.text


def test_state_is_put_away_where_it_leaves_memory() -> None:
    tensor = torch.ones(1000)
    state = MovableState(lambda: [tensor], Place(spill=Path("/dev/shm/m2flow-test")))
    state.offload()
    shelf = state._shelf
    assert isinstance(shelf, spill_module.FileShelf)
    assert shelf._folder != Path("/dev/shm/m2flow-test")
    assert not Path("/dev/shm/m2flow-test").exists()
    state.onload()
    assert bool((tensor == 1).all())


def test_zeros_are_not_put_anywhere(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients between two steps: their memory goes and comes, their bytes stay nowhere."""
    weights, gradients = torch.randn(MB), torch.zeros(MB)
    late = torch.zeros(MB)
    late[-1] = -0.0  # its bits are not zero, and none of its first bytes is
    state = state_of(weights, gradients, late, place=place)
    written = bytes_put(monkeypatch)
    expected = [tensor.clone() for tensor in (weights, gradients, late)]
    for _ in range(2):
        state.offload()
        assert state.nbytes() == 12 * MB
        assert gradients.untyped_storage().nbytes() == 0
        state.onload()
        for tensor, wanted in zip((weights, gradients, late), expected, strict=True):
            assert torch.equal(tensor.view(torch.int32), wanted.view(torch.int32))
        gradients[5] = expected[1][5] = 1.0
    assert written == [8 * MB, 12 * MB]


def test_room_for_what_is_to_come_is_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    block = HostMemoryShelf._block
    monkeypatch.setattr(HostMemoryShelf, "_block", lambda self: (made.append(1), block(self))[1])
    to_come = 2500
    shelf = HostMemoryShelf(torch.device("cpu"), lambda: to_come, block_bytes=1000)
    small, large = (torch.ones(n, dtype=torch.uint8).untyped_storage() for n in (1500, 4000))
    shelf.put([small])
    assert len(made) == 4
    to_come = 0
    shelf.put([large])
    assert len(made) == 4
