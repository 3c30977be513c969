"""Links against the raw way: hand-over between two processes, by reference, and first use.

Raw is what one would write by hand for vectors of one known type: a shared-memory block mapped by
both processes, used again and again, one memcpy (or none, where the value is made in the block), a
message through a `multiprocessing` pipe that says where it is, and an acknowledgement back, before
which the block is not written again. m2flow's side is the pool: a value is written, its handle goes
through the same kind of pipe, the reader makes the value of it, touches it, drops it and
acknowledges. Both send bytes, so that neither pays for pickling a message. Both take turns in
blocks of one run, with the same two processes. Each block has a median, and the least of them are
compared: what else the machine does can only make a block slower, and a hand-over of 20 us is at
the mercy of it.

For information: `bare`, a byte each way, written and read by system calls alone, which tells the
reader nothing; and a Batch as lanes exchange it, asked for and answered on this node.
"""

from __future__ import annotations

import mmap
import multiprocessing
import multiprocessing.connection
import os
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from channel_latency import channel_rows
from harness import Target, arguments, conclude, table
from lane_rows import lane_rows

from m2flow.flow.batch import Batch, Ragged
from m2flow.runtime.lane.store import Store
from m2flow.runtime.transport.peering import PeerAddress
from m2flow.runtime.transport.peers import Peers
from m2flow.runtime.transport.server import PayloadServer
from m2flow.runtime.transport.shared_memory import SharedHandle, SharedPool, SharedReader

SIZES = {"1 KiB": 1 << 10, "1 MiB": 1 << 20, "100 MiB": 100 << 20}
LARGEST = max(SIZES.values())
MOST_TIMES_RAW = 1.5
"""For what is copied and large."""

MOST_ADDED_US = 150.0
"""For everything else: what the pool costs does not grow with the size, so that a share of the raw
way's seconds says more about the pipe, and about how busy the machine is, than about the pool. Both
processes wake up for each hand-over, and the pool's code with them."""

MOST_WARM_US = 40.0
"""For writing and reading in one process that does nothing else: the pool without the waking."""

BLOCKS = 20
BLOCK_SECONDS = 0.05


@dataclass
class Other:
    """The process at the other end.

    Attributes:
        raw: where it waits for places in the block, and acknowledges.
        pool: where it waits for handles, and acknowledges.
        block: the raw way's memory, which it has mapped too.
        address: where it serves payloads.
    """

    raw: Connection
    pool: Connection
    block: np.ndarray[Any, Any]
    address: PeerAddress


AUTHKEY = b"benchmark"
PLACE = struct.Struct("QQ")  # the raw way's message: first byte in the block, and bytes
DONE = b"done"


def _batch() -> Batch:
    """About what a stage hands on: ten columns for 64 items, 1.4 MB."""
    columns: dict[str, Any] = {f"scores {n}": torch.rand(64, 512) for n in range(7)}
    columns["tokens"] = Ragged(torch.arange(64 * 512), [512] * 64)
    columns["rewards"] = torch.rand(64)
    columns["answers"] = ["an answer"] * 64
    return Batch(columns)


def _provided(batch: Batch, size: Any) -> Any:
    return batch if size == "batch" else torch.zeros(size)


def _serve(raw: Connection, pool: Connection, addresses: Connection, path: str) -> None:
    """The other end: answers both ways until the pipes close."""
    torch.set_num_threads(1)
    answers = SharedPool(f"m2flow-benchmark-{os.getpid()}-")
    server = PayloadServer(partial(_provided, _batch()), answers, AUTHKEY)
    addresses.send(server.address)
    block = _mapped(path)
    reader = SharedReader()
    fd = raw.fileno()
    while True:
        for ready in multiprocessing.connection.wait([raw, pool]):
            if ready is pool:
                while handle := pool.recv_bytes():
                    value = reader.read(SharedHandle.from_bytes(handle))
                    value[-1].item()
                    del value
                    pool.send_bytes(DONE)
            elif (how := raw.recv()) == "bare":
                while os.read(fd, 1) == b"x":
                    os.write(fd, b"a")
            elif how == "raw":
                while place := raw.recv_bytes():
                    start, size = PLACE.unpack(place)
                    value = torch.from_numpy(block[start : start + size]).view(torch.int64)
                    value[-1].item()
                    raw.send_bytes(DONE)
            else:
                server.close()
                answers.close()
                return


def _mapped(path: str) -> np.ndarray[Any, Any]:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return np.frombuffer(mmap.mmap(descriptor, LARGEST), np.uint8)
    finally:
        os.close(descriptor)


@contextmanager
def other_process() -> Iterator[Other]:
    """Start the process at the other end."""
    context = multiprocessing.get_context("spawn")
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="m2flow-raw-") as file:
        file.truncate(LARGEST)
        pipes = [context.Pipe() for _ in range(3)]
        theirs = [there for _, there in pipes]
        process = context.Process(target=_serve, args=(*theirs, file.name), daemon=True)
        process.start()
        raw, pool, addresses = (here for here, _ in pipes)
        try:
            yield Other(raw, pool, _mapped(file.name), addresses.recv())
            raw.send("end")
            process.join(10)
        finally:
            process.kill()


def hand_over(other: Other, pool: SharedPool, *, blocks: int) -> dict[str, float]:
    """Seconds of each way, the least median of a block: `{raw|m2flow}/{copied|not copied}/{size}`,
    and `bare`."""
    medians: dict[str, list[float]] = {}
    for name, size in SIZES.items():
        ways = _ways(other, pool, size)
        for block in range(blocks + 1):  # the first is not counted: pages are touched in it
            for way, act in ways.items():
                with _turn(other, way):
                    times = _repeat(act)
                if block:
                    medians.setdefault(f"{way}/{name}", []).append(statistics.median(times))
    return {way: min(found) for way, found in medians.items()}


def _ways(other: Other, pool: SharedPool, size: int) -> dict[str, Callable[[], None]]:
    source = torch.arange(size // 8)
    made = pool.empty(source.shape, source.dtype)
    made.copy_(source)
    target, origin = other.block[:size], source.numpy().view(np.uint8)
    fd = other.raw.fileno()

    def raw() -> None:
        other.raw.send_bytes(PLACE.pack(0, size))
        other.raw.recv_bytes()

    def raw_copied() -> None:
        np.copyto(target, origin)
        raw()

    def ours(value: torch.Tensor) -> None:
        other.pool.send_bytes(pool.write(value).to_bytes())
        other.pool.recv_bytes()

    def bare() -> None:
        os.write(fd, b"x")
        os.read(fd, 1)

    return {
        "raw/copied": raw_copied,
        "m2flow/copied": lambda: ours(source),
        "raw/not copied": raw,
        "m2flow/not copied": lambda: ours(made),
        "bare": bare,
    }


@contextmanager
def _turn(other: Other, way: str) -> Iterator[None]:
    """The other end serves one way at a time."""
    if way == "bare":
        other.raw.send("bare")
        yield
        os.write(other.raw.fileno(), b".")
    elif way.startswith("raw"):
        other.raw.send("raw")
        yield
        other.raw.send_bytes(b"")
    else:
        yield
        other.pool.send_bytes(b"")


def _repeat(act: Callable[[], None]) -> list[float]:
    times: list[float] = []
    began = time.perf_counter()
    act()
    while len(times) < 3 or time.perf_counter() - began < BLOCK_SECONDS:
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return times


def by_reference() -> float:
    """Median seconds of handing a Batch of 64 items on within a lane."""
    batch = Batch({"tokens": torch.zeros(64, 128), "reward": torch.zeros(64)})
    items = batch.ids

    def hand_on() -> None:
        store = Store()
        store.put("flow", 0, 0, batch)
        assert store.gather("flow", 0, [(0, items)]) is batch

    return statistics.median(_repeat(hand_on))


def warm(pool: SharedPool) -> float:
    """Median seconds of writing 1 KiB to the pool and reading it, in this process."""
    reader, source = SharedReader(), torch.arange(128)

    def hand_over() -> None:
        value = reader.read(SharedHandle.from_bytes(pool.write(source).to_bytes()))
        value[-1].item()

    return statistics.median(_repeat(hand_over))


def exchanged(address: PeerAddress) -> float:
    """Median seconds of a Batch that a peer of this node has, asked for, received and dropped."""
    peers = Peers(None, AUTHKEY)
    try:
        return statistics.median(_repeat(lambda: peers.fetch(address, "batch", timeout=10)))
    finally:
        peers.close()


def first_use(address: PeerAddress, pairs: int) -> float:
    """Median seconds from a request to a peer never spoken to, to its payload."""
    times = []
    for _ in range(pairs):
        peers = Peers(None, AUTHKEY)
        start = time.perf_counter()
        peers.fetch(address, 1_000, timeout=10)
        times.append(time.perf_counter() - start)
        peers.close()
    return statistics.median(times)


def channel_targets(results: dict[str, Any], *, quick: bool) -> list[Target]:
    """A channel's put and get of 1 KiB, alone and against Ray's queue."""
    rows = channel_rows(quick)
    results["channel"] = rows
    return [
        Target("channel put and get of 1 KiB, ms", rows["m2flow_p50_ms"], 0.3, at_most=True),
        Target(
            "times as fast as Ray's queue at 1 KiB",
            rows["ray_queue_p50_ms"] / rows["m2flow_p50_ms"],
            8.0,
        ),
    ]


def lane_targets(results: dict[str, Any], *, quick: bool) -> list[Target]:
    """Dispatch of a call, and publishing weights against a plain copy, on two lanes."""
    rows = lane_rows(quick)
    results["lanes"] = rows
    return [
        Target("dispatch of a call, p50, ms", rows["dispatch"]["p50_ms"], 1.0, at_most=True),
        Target("publish, share of the rate of a copy", rows["publish"]["share_of_copy_rate"], 0.5),
    ]


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    torch.set_num_threads(1)
    pool = SharedPool(f"m2flow-benchmark-{os.getpid()}-")
    try:
        with other_process() as other:
            first = first_use(other.address, 5 if options.quick else 20)
            batch = exchanged(other.address)
            medians = hand_over(other, pool, blocks=6 if options.quick else BLOCKS)
            alone = warm(pool)
    finally:
        pool.close()
    reference = by_reference()

    results: dict[str, Any] = {
        "hand_over_us": {way: 1e6 * seconds for way, seconds in medians.items()},
        "warm_us": 1e6 * alone,
        "by_reference_us": 1e6 * reference,
        "first_use_ms": 1e3 * first,
        "batch_by_peers_us": 1e6 * batch,
    }
    targets, rows = [], []
    for how in ("copied", "not copied"):
        for size, num_bytes in SIZES.items():
            raw, ours = medians[f"raw/{how}/{size}"], medians[f"m2flow/{how}/{size}"]
            rows.append([size, how, 1e6 * raw, 1e6 * ours, ours / raw])
            name = f"hand-over of {size}, {how}"
            bound = (f"{name}, us over raw", 1e6 * (ours - raw), MOST_ADDED_US)
            if how == "copied" and num_bytes == LARGEST:
                bound = (f"{name}, times raw", ours / raw, MOST_TIMES_RAW)
            targets.append(Target(*bound, at_most=True))
    rows.append(["Batch, 10 columns", "asked of a peer", "", 1e6 * batch, ""])
    table(["size", "", "raw, us", "m2flow, us", "times raw"], rows)
    name = "written and read in one process, 1 KiB, us"
    targets.append(Target(name, 1e6 * alone, MOST_WARM_US, at_most=True))
    targets.append(Target("by reference within a lane, us", 1e6 * reference, 20.0, at_most=True))
    targets.append(Target("first use of a pair, ms", 1e3 * first, 50.0, at_most=True))
    targets += channel_targets(results, quick=options.quick)
    targets += lane_targets(results, quick=options.quick)
    conclude("links", results, targets, options)


if __name__ == "__main__":
    main()
