"""A channel against Ray's queue: put and get of 1 KiB, and bytes per second of larger items.

Both are used by this process and live in a Ray actor, in alternating blocks of the same run; the
channel is measured as hosted by a thread here, too.
"""

from __future__ import annotations

import logging
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import ray
from harness import Target, arguments, conclude, table
from ray.util.queue import Queue

from m2flow.runtime.transport.channel import Channel

SIZES = {"1 KiB": 1 << 10, "1 MiB": 1 << 20, "16 MiB": 1 << 24}
BLOCKS = 5


@contextmanager
def cluster() -> Iterator[None]:
    """The connection to Ray that is there, or a cluster of our own."""
    if ray.is_initialized():
        yield
        return
    folder = tempfile.mkdtemp(prefix="m2b-")
    try:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            logging_level=logging.ERROR,
            _temp_dir=folder,
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def seconds_each(put: Callable[[Any], None], get: Callable[[], Any], item: bytes) -> float:
    began = time.perf_counter()
    put(item)
    got = get()
    taken = time.perf_counter() - began
    assert len(got) == len(item)
    return taken


def channel_rows(quick: bool) -> dict[str, float]:
    """Medians of a put and a get after it.

    Returns:
        `m2flow_p50_ms` and `ray_queue_p50_ms` for 1 KiB, both in a Ray actor; `thread_p50_ms` for a
        channel hosted here; `{who}_mib_per_s_{MiB}` for larger items.
    """
    rows: dict[str, float] = {}
    with cluster(), ExitStack() as stack:
        queue = Queue(actor_options={"num_cpus": 0})
        stack.callback(queue.shutdown, force=True)
        hosts = {
            "m2flow": stack.enter_context(Channel.on_ray()),
            "thread": stack.enter_context(Channel()),
        }
        ways: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {
            who: (channel.put, channel.get) for who, channel in hosts.items()
        }
        ways["ray_queue"] = (queue.put, queue.get)
        for num_bytes in SIZES.values():
            item = bytes(num_bytes)
            times: dict[str, list[float]] = {who: [] for who in ways}
            repeats = max(2, min(40 if quick else 200, (1 << 25) // num_bytes))
            for put, get in ways.values():
                seconds_each(put, get, item)
            for _ in range(2 if quick else BLOCKS):
                for who, (put, get) in ways.items():
                    times[who] += [seconds_each(put, get, item) for _ in range(repeats)]
            for who, taken in times.items():
                median = statistics.median(taken)
                if num_bytes == SIZES["1 KiB"]:
                    rows[f"{who}_p50_ms"] = 1000 * median
                else:
                    mebibytes = num_bytes >> 20
                    rows[f"{who}_mib_per_s_{mebibytes}"] = mebibytes / median
    return rows


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    rows = channel_rows(options.quick)
    table(
        ["", "1 KiB, ms", "1 MiB, MiB/s", "16 MiB, MiB/s"],
        [
            [who, *(rows[f"{who}_{what}"] for what in ("p50_ms", "mib_per_s_1", "mib_per_s_16"))]
            for who in ("m2flow", "thread", "ray_queue")
        ],
    )
    ratio = rows["ray_queue_p50_ms"] / rows["m2flow_p50_ms"]
    targets = [
        Target("times as fast as Ray's queue at 1 KiB", ratio, 8.0),
        Target("ms for a put and a get of 1 KiB", rows["m2flow_p50_ms"], 0.3, at_most=True),
    ]
    conclude("channel_latency", rows, targets, options)


if __name__ == "__main__":
    main()
