"""Handing a tensor of device memory to another process on the same GPU.

By CUDA IPC (opened, not copied), against the way through host memory and shared pages, and against
a raw copy within the device. Needs a GPU; has never been run on one.
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

from m2flow.runtime.links.cuda_ipc import CudaIPC
from m2flow.runtime.links.peers import PayloadServer, Peers
from m2flow.runtime.links.shared_memory import SharedPool

SIZES = {"1 KiB": 1 << 10, "1 MiB": 1 << 20, "100 MiB": 100 << 20}
KEY = b"a secret of this benchmark alone"
WAYS = ("cuda_ipc", "shared")


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this measures links of a GPU, and torch sees none here", file=sys.stderr)
        sys.exit(2)
    repeats = 10 if options.quick else 50
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    address = here.recv()
    peers = Peers(None, KEY, links={"cuda_ipc": CudaIPC()})
    seconds: dict[str, dict[str, float]] = {}
    for name, num_bytes in SIZES.items():
        expected = torch.arange(num_bytes, device="cuda") % 251
        for way in WAYS:
            got = peers.fetch(address, num_bytes, timeout=60.0, link=way, device="cuda:0")
            assert torch.equal(got.long(), expected), f"{way} brought another tensor"
            del got

        def fetch(way: str, size: int = num_bytes) -> Callable[[], Any]:
            return lambda: peers.fetch(address, size, timeout=60.0, link=way, device="cuda:0")

        source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        acts = {"raw copy": lambda s=source, t=target: t.copy_(s), **{w: fetch(w) for w in WAYS}}
        spent: dict[str, list[float]] = {way: [] for way in acts}
        for _ in range(repeats + 1):
            for way, act in acts.items():
                spent[way].append(_timed(act))
        seconds[name] = {way: statistics.median(some[1:]) for way, some in spent.items()}
    peers.close()
    here.close()
    process.join(10)
    ways = ["raw copy", *WAYS]
    table(
        ["size", *(f"{way}, us" for way in ways)],
        [[size, *(1e6 * by_way[way] for way in ways)] for size, by_way in seconds.items()],
    )
    large = seconds["100 MiB"]
    conclude(
        "gpu_links",
        {"device": torch.cuda.get_device_name(), "seconds": seconds},
        [
            Target(
                "100 MiB: times as fast as through host memory",
                large["shared"] / large["cuda_ipc"],
                5.0,
            )
        ],
        options,
    )


def _timed(act: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    act()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _serve(connection: Connection) -> None:
    """Hold the tensors, until the asker closes its end."""
    held = {
        num_bytes: (torch.arange(num_bytes, device="cuda") % 251).to(torch.uint8)
        for num_bytes in SIZES.values()
    }
    torch.cuda.synchronize()
    pool = SharedPool("m2flow-gpu-links-")
    server = PayloadServer(held.__getitem__, pool, KEY, links={"cuda_ipc": CudaIPC()})
    connection.send(server.address)
    try:
        connection.recv()
    except EOFError:
        server.close()
        pool.close()


if __name__ == "__main__":
    main()
