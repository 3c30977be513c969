"""Handing a tensor of device memory to another process, by each link that is there.

On one GPU: by CUDA IPC (opened, not copied) and through host memory. On two GPUs of a machine: by
CUDA IPC (copied from device to device) and through host memory. Beside them stands a raw copy
within the device, and to the other one. Needs a GPU; what needs a second one is left out where
there is none.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import Target, arguments, conclude, table

from m2flow.runtime.transport.cuda_ipc import devices_here
from m2flow.runtime.transport.peering import PeerAddress
from m2flow.runtime.transport.peers import Peers
from m2flow.runtime.transport.server import PayloadServer
from m2flow.runtime.transport.shared_memory import SharedPool

SIZES = {"1 KiB": 1 << 10, "1 MiB": 1 << 20, "100 MiB": 100 << 20}
KEY = b"a secret of this benchmark alone"
START_SECONDS, FETCH_SECONDS = 120.0, 60.0


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: this measures links between GPUs", file=sys.stderr)
        sys.exit(2)
    repeats = 10 if options.quick else 50
    seconds = {"same GPU": measured(0, repeats)}
    if torch.cuda.device_count() > 1:
        seconds["other GPU"] = measured(1, repeats)
    else:
        print("one GPU here: links to a second one are not measured")
    rows = [
        [place, size, way, 1e6 * spent, SIZES[size] / spent / 1e9]
        for place, sizes in seconds.items()
        for size, by_way in sizes.items()
        for way, spent in by_way.items()
    ]
    table(["where", "size", "way", "us", "GB/s"], rows)
    targets = [
        Target(
            f"{place}, 100 MiB: times as fast as through host memory",
            sizes["100 MiB"]["staged"] / sizes["100 MiB"]["cuda_ipc"],
            5.0,
        )
        for place, sizes in seconds.items()
        if "cuda_ipc" in sizes["100 MiB"]
    ]
    name = torch.cuda.get_device_name()
    found = {"device": name, "devices": torch.cuda.device_count(), "seconds": seconds}
    conclude("gpu_links", found, targets, options)


def measured(gpu: int, repeats: int) -> dict[str, dict[str, float]]:
    """Median seconds by size and way, of fetching from a process on that GPU."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, gpu), daemon=True)
    process.start()
    if not here.poll(START_SECONDS):
        raise TimeoutError(f"the other process did not start in {START_SECONDS:g} s")
    address = here.recv()
    peers = {
        "cuda_ipc": Peers(None, KEY, name="the asker", devices=devices_here()),
        "staged": Peers(None, KEY, name="the asker", devices=None),
    }
    spent = {}
    for size, num_bytes in SIZES.items():
        acts = _raw_copies(num_bytes, gpu)
        expected = _pattern(num_bytes, "cuda:0")
        for way, asker in peers.items():
            act = _fetching(asker, address, num_bytes)
            got = act()
            assert torch.equal(got.value, expected), f"{way} brought another tensor"
            if (way == "cuda_ipc") != (got.link == "cuda_ipc"):
                print(f"{size}: no {way}, but {got.link}")
                continue
            del got
            acts[way] = act
        spent[size] = _medians(acts, repeats)
    for asker in peers.values():
        asker.close()
    here.close()
    process.join(10)
    process.kill()
    return spent


def _fetching(peers: Peers, address: PeerAddress, num_bytes: int) -> Callable[[], Any]:
    return lambda: peers.receive(address, num_bytes, timeout=FETCH_SECONDS, device="cuda:0")


def _raw_copies(num_bytes: int, gpu: int) -> dict[str, Callable[[], Any]]:
    source = torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{gpu}")
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:0")
    return {"raw copy": lambda: target.copy_(source)}


def _medians(acts: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The ways by turns, so that all meet the same weather; the first round warms up."""
    spent: dict[str, list[float]] = {way: [] for way in acts}
    for _ in range(repeats + 1):
        for way, act in acts.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            act()
            torch.cuda.synchronize()
            spent[way].append(time.perf_counter() - start)
    return {way: statistics.median(some[1:]) for way, some in spent.items()}


def _pattern(num_bytes: int, device: str) -> torch.Tensor:
    return (torch.arange(num_bytes, device=device) % 251).to(torch.uint8)


def _serve(connection: Connection, gpu: int) -> None:
    """Hold the tensors, until the asker closes its end."""
    torch.cuda.set_device(gpu)
    held = {num_bytes: _pattern(num_bytes, f"cuda:{gpu}") for num_bytes in SIZES.values()}
    torch.cuda.synchronize()
    pool = SharedPool("m2flow-gpu-links-")
    devices = devices_here(gpu)
    server = PayloadServer(held.__getitem__, pool, KEY, name="the holder", devices=devices)
    connection.send(server.address)
    connection.poll(None)
    server.close()
    pool.close()


if __name__ == "__main__":
    main()
