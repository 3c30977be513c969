"""A pool hands over without copies, takes back by itself, and leaves nothing behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from m2flow.flow.batch import Batch, Ragged
from m2flow.runtime.transport import blocks
from m2flow.runtime.transport.shared_memory import (
    PoolFull,
    SharedHandle,
    SharedPool,
    SharedReader,
    sweep,
)
from m2flow.runtime.transport.wire import UnsendableError, pack

MIB = 1 << 20


@pytest.fixture
def prefix() -> Iterator[str]:
    name = f"m2flow-test-{os.getpid()}-{random.randrange(1 << 30)}-"
    yield name
    assert files(name) == [], "the pool left files"


@pytest.fixture
def pool(prefix: str) -> Iterator[SharedPool]:
    pool = SharedPool(prefix, max_bytes=64 * MIB)
    yield pool
    pool.close()


@pytest.fixture
def reader() -> Iterator[SharedReader]:
    reader = SharedReader()
    yield reader
    reader.close()


def files(prefix: str) -> list[Path]:
    return list(Path("/dev/shm").glob(prefix + "*"))


def test_a_batch_of_every_kind_of_column(pool: SharedPool, reader: SharedReader) -> None:
    batch = Batch(
        {
            "tokens": Ragged(torch.arange(5), [2, 0, 3]),
            "logits": torch.randn(4, 3).t().to(torch.bfloat16),
            "text": ["a", "b", "c"],
            "nothing": torch.zeros(3, 0),
        },
        [4, 7, 9],
    )
    handle = pool.write(batch)
    assert pickle.loads(pickle.dumps(handle)) == handle
    handle = SharedHandle.from_bytes(handle.to_bytes())
    got = reader.read(handle)
    assert got.ids == (4, 7, 9)
    assert [row.tolist() for row in got["tokens"]] == [[0, 1], [], [2, 3, 4]]
    assert torch.equal(got["logits"], batch["logits"])
    assert got["text"] == ["a", "b", "c"]
    assert got["nothing"].shape == (3, 0)
    assert got["logits"].data_ptr() % 64 == 0


def test_python_values_alone(pool: SharedPool, reader: SharedReader) -> None:
    assert reader.read(pool.write({"a": 1})) == {"a": 1}
    assert pool.blocks_in_use() == 0


def test_the_block_comes_back_when_the_last_view_dies(
    pool: SharedPool, reader: SharedReader
) -> None:
    value = reader.read(pool.write({"x": torch.arange(10), "y": torch.ones(3)}))
    view = value["x"][3:5]
    del value
    gc.collect()
    assert pool.blocks_in_use() == 1
    assert view.tolist() == [3, 4]
    del view
    assert pool.blocks_in_use() == 0


def test_the_same_pages_serve_again(pool: SharedPool, reader: SharedReader) -> None:
    addresses = set()
    for number in range(20):
        got = reader.read(pool.write(torch.full((1000,), number)))
        assert got[0] == number
        addresses.add(got.data_ptr())
        del got
    assert len(addresses) == 1
    assert pool.bytes_resident <= 2 * 8192


def test_views_never_change_under_their_holder(pool: SharedPool, reader: SharedReader) -> None:
    chance = random.Random(0)
    held: list[tuple[int, torch.Tensor]] = []
    for number in range(400):
        size = chance.choice([1, 100, 3_000, 50_000])
        held.append((number, reader.read(pool.write(torch.full((size,), number)))))
        while len(held) > 8:
            held.pop(chance.randrange(len(held)))
        for expected, tensor in held:
            assert (tensor == expected).all()
    held.clear()
    del tensor
    gc.collect()
    assert pool.blocks_in_use() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.uint16, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3, 4)])
def test_bare_tensors(
    pool: SharedPool, reader: SharedReader, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    for sent in (tensor, tensor.t() if tensor.ndim == 2 else tensor[..., None].expand(*shape, 2)):
        got = reader.read(SharedHandle.from_bytes(bytearray(pool.write(sent).to_bytes())))
        assert got.dtype is dtype
        assert torch.equal(got, sent)
        del got
        assert pool.blocks_in_use() == 0


def test_what_a_handle_says(pool: SharedPool) -> None:
    bare = pool.write(torch.ones(3, 2, dtype=torch.bfloat16))
    packed = pack([torch.ones(3), torch.ones(2)])
    other = pool.write(packed, "a")
    assert len(bare.to_bytes()) < 200 > len(other.to_bytes()) - len(packed.head)
    for handle in (bare, other):
        pool.release(handle)
    assert pool.blocks_in_use() == 0


def test_thousands_of_tensors(pool: SharedPool, reader: SharedReader) -> None:
    tensors = {str(number): torch.full((3,), number) for number in range(3_000)}
    got = reader.read(pool.write(tensors))
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())


def test_more_turns_than_a_byte_counts(pool: SharedPool, reader: SharedReader) -> None:
    for number in range(600):
        assert reader.read(pool.write(torch.tensor([number]))) == number
    assert pool.blocks_in_use() == 0
    assert pool.bytes_resident <= 8192


def test_several_readers_each_hold_the_block(pool: SharedPool) -> None:
    made = pool.empty((4,))
    values = [SharedReader().read(pool.write(made)) for _ in range(3)]
    del made
    while values:
        assert pool.blocks_in_use() == 1
        values.pop()
    assert pool.blocks_in_use() == 0


def test_a_value_made_in_the_pool_is_not_copied(pool: SharedPool, reader: SharedReader) -> None:
    made = pool.empty((1000, 100), torch.bfloat16)
    made[:] = 2
    resident = pool.bytes_resident
    # A reader that maps the file sees the same pages as the owner.
    got = reader.read(pool.write({"whole": made, "part": made[10:20]}))
    assert pool.bytes_resident == resident
    made[10, 0] = 5
    assert got["whole"][10, 0] == 5
    assert got["part"][0, 0] == 5
    del made
    assert pool.blocks_in_use() == 1
    del got
    assert pool.blocks_in_use() == 0


def test_a_tensor_of_the_pool_goes_to_more_readers_than_it_has_flags(
    pool: SharedPool, reader: SharedReader
) -> None:
    made = pool.empty((8,))
    made[:] = 1
    got = [reader.read(pool.write(made)) for _ in range(100)]
    assert all((one == 1).all() for one in got)
    made[0] = 7
    assert sum(int(one[0] == 7) for one in got) == 64, "the others were copied"
    del got, made
    gc.collect()
    assert pool.blocks_in_use() == 0


def test_empty_of_nothing(pool: SharedPool) -> None:
    assert pool.empty((0, 3), torch.int64).shape == (0, 3)
    assert pool.empty(()).shape == ()


def test_a_full_pool_says_so_and_recovers(prefix: str, reader: SharedReader) -> None:
    pool = SharedPool(prefix, max_bytes=2 * MIB)
    held = reader.read(pool.write(torch.zeros(MIB, dtype=torch.uint8)))
    with pytest.raises(PoolFull, match=r"no room for 2,097,152 bytes.*max_bytes is 2,097,152"):
        pool.write(torch.zeros(2 * MIB, dtype=torch.uint8))
    with pytest.raises(PoolFull):
        pool.empty((2 * MIB,), torch.uint8)
    del held
    for kib in (1, 700, 2048, 3, 1024):  # what is free makes room for other sizes
        pool.release(pool.write(torch.zeros(kib * 1024, dtype=torch.uint8)))
    assert pool.bytes_resident <= 2 * MIB
    pool.close()


def test_views_never_change_while_a_pool_that_is_full_makes_room(
    prefix: str, reader: SharedReader
) -> None:
    pool = SharedPool(prefix, max_bytes=4 * MIB)
    chance = random.Random(1)
    held: list[tuple[int, torch.Tensor]] = []
    refused = 0
    for number in range(600):
        size = chance.choice([3_000, 20_000, 30_000, 70_000, 130_000, 600_000])
        tensor = torch.full((chance.randint(size // 2, size),), number, dtype=torch.int32)
        try:
            held.append((number, reader.read(pool.write(tensor))))
        except PoolFull:
            refused += 1
            del held[::2]
        while held and chance.random() < 0.45:
            held.pop(chance.randrange(len(held)))
        assert all((tensor == expected).all() for expected, tensor in held)
        assert pool.bytes_resident <= 4 * MIB
    assert refused, "the pool was never full"
    pool.close()


def test_a_value_that_is_kept_does_not_spread_the_others(
    pool: SharedPool, reader: SharedReader
) -> None:
    kept = [reader.read(pool.write(torch.zeros(10))) for _ in range(3)]
    made = pool.empty((10,))
    resident = pool.bytes_resident
    for number in range(50):
        assert reader.read(pool.write(torch.full((10,), number)))[0] == number
    assert pool.bytes_resident <= resident + 4096
    del kept, made


def test_a_full_disk_is_an_error_and_no_crash(
    pool: SharedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(descriptor: int, start: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(blocks.os, "posix_fallocate", no_space)
    with pytest.raises(PoolFull, match="/dev/shm has no room"):
        pool.write(torch.zeros(10))


def test_a_reader_that_died_is_forgotten_and_a_lost_handle_released(
    pool: SharedPool, reader: SharedReader
) -> None:
    made = pool.empty((2,))
    pool.write(made, "dead")
    reader.read(pool.write(made, "alive"))
    del made
    assert pool.blocks_in_use() == 1
    pool.forget("nobody")
    assert pool.blocks_in_use() == 1
    pool.forget("dead")
    assert pool.blocks_in_use() == 0

    lost = pool.write(torch.ones(2))
    assert pool.blocks_in_use() == 1
    pool.release(lost)
    assert pool.blocks_in_use() == 0


def test_a_late_flag_does_not_end_another_hand_over(pool: SharedPool, reader: SharedReader) -> None:
    late = reader.read(handle := pool.write(torch.ones(2)))
    pool.release(handle)  # wrongly taken for dead
    current = reader.read(pool.write(torch.zeros(2)))
    assert current.data_ptr() == late.data_ptr()
    del late
    assert pool.blocks_in_use() == 1
    del current
    assert pool.blocks_in_use() == 0


def test_an_error_while_packing_holds_no_block(pool: SharedPool) -> None:
    with pytest.raises(UnsendableError):
        pool.write([torch.ones(5), threading.Lock()])
    packed = pack([torch.ones(5), torch.ones(5, 2).t()])
    packed.buffers[1].source = "no memory"
    with pytest.raises(TypeError):
        pool.write(packed)
    assert pool.blocks_in_use() == 0


def test_views_outlive_the_pool_and_the_reader(prefix: str) -> None:
    pool, reader = SharedPool(prefix), SharedReader()
    value = reader.read(pool.write(torch.arange(3)))
    lost = pool.write(torch.arange(3))
    made = pool.empty((3,))
    pool.close()
    reader.close()
    made[:] = 1
    assert value.tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="closed"):
        pool.write(1.0 * torch.ones(1))
    with pytest.raises(FileNotFoundError):
        SharedReader().read(lost)


def test_many_threads(pool: SharedPool, reader: SharedReader) -> None:
    def work(seed: int) -> None:
        chance = random.Random(seed)
        for number in range(100):
            size = chance.choice([10, 2_000, 40_000])
            got = reader.read(pool.write(torch.full((size,), seed * 1000 + number)))
            time.sleep(0)
            assert (got == seed * 1000 + number).all()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    gc.collect()
    assert pool.blocks_in_use() == 0


def _read_and_add(connection: Any) -> None:
    reader = SharedReader()
    while (handle := connection.recv()) is not None:
        value = reader.read(handle)
        connection.send(int(value.sum()))
        del value


def _hold_for_ever(connection: Any, prefix: str) -> None:
    pool = SharedPool(prefix)
    connection.send(pool.write(torch.ones(10)))
    time.sleep(60)


def test_another_process_reads_and_its_end_gives_back(pool: SharedPool) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_read_and_add, args=(there,))
    process.start()
    for number in range(5):
        here.send(pool.write(torch.full((100_000,), number)))
        assert here.recv() == number * 100_000
    here.send(None)
    process.join(10)
    assert pool.blocks_in_use() == 0
    # One block, and a second where an answer came before the reader had let go.
    assert pool.bytes_resident <= 2 * MIB


def test_a_reader_that_ends_gives_back_what_it_holds(pool: SharedPool) -> None:
    code = (
        "import sys; from m2flow.runtime.transport.shared_memory import SharedHandle, SharedReader;"
        "data = sys.stdin.buffer.read(); reader = SharedReader();"
        "held = reader.read(SharedHandle.from_bytes(data)); print(float(held.sum()))"
    )
    handle = pool.write(torch.ones(5))
    done = subprocess.run(
        [sys.executable, "-c", code], input=handle.to_bytes(), capture_output=True, check=True
    )
    assert (done.stdout, done.stderr) == (b"5.0\n", b"")
    assert pool.blocks_in_use() == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_gives_back_nothing_of_its_parents(pool: SharedPool, reader: SharedReader) -> None:
    values = [reader.read(pool.write(torch.ones(5)))]
    child = os.fork()
    if child == 0:
        values.clear()
        os._exit(0)
    os.waitpid(child, 0)
    assert pool.blocks_in_use() == 1
    values.clear()
    assert pool.blocks_in_use() == 0


def test_a_killed_owner_is_swept(prefix: str, reader: SharedReader) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_hold_for_ever, args=(there, prefix))
    process.start()
    value = reader.read(here.recv())
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert value.sum() == 10
    assert len(files(prefix)) == 1
    assert sweep(prefix) == 1
    assert value.sum() == 10


def test_an_owner_that_ends_without_closing_leaves_nothing(prefix: str) -> None:
    code = (
        "import torch; from m2flow.runtime.transport.shared_memory import SharedPool;"
        f"pool = SharedPool({prefix!r}); pool.write(torch.ones(3)); print('wrote')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "wrote\n"
    assert files(prefix) == []


def test_readers_let_go_of_files_that_the_owner_gave_back(
    prefix: str, reader: SharedReader
) -> None:
    pool = SharedPool(prefix, max_bytes=16 * MIB)
    for mib in (8, 12, 5, 16, 9):
        reader.read(pool.write(torch.zeros(mib * MIB, dtype=torch.uint8)))
    assert pool.bytes_resident <= 16 * MIB
    assert len(files(prefix)) <= 2
    assert len(reader._mappings) <= 2
    pool.close()
