"""Offloading and onloading a model of 1.5 billion parameters, against the raw copy rate.

On a GPU the raw way is one copy between the device and pinned memory; with `--device cpu` the
spill to a file is measured on a small model, against writing and reading a file as a whole. Raw
copies and switches alternate in one run. What comes back is compared to the bit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import Target, arguments, conclude, table

from m2flow.flow.worker import Place
from m2flow.runtime.lane.state import MovableState, resident_bytes

GB = 1e9
RAW_SHARE = {"cuda": 0.8, "cpu": 0.5}
"""The share of the raw rate that a switch must reach. The raw way moves one large piece; state is
many, and on the CPU each takes its memory from the heap and gives it back."""


def shapes(layers: int, hidden: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Parameters of a Qwen2 model; (28, 1536, 151936) makes 1.5 billion with a tied embedding."""
    intermediate, kv = 35 * hidden // 6, hidden // 6
    layer: list[tuple[int, ...]] = [
        (hidden, hidden), (hidden,), (kv, hidden), (kv,), (kv, hidden), (kv,), (hidden, hidden),
        (intermediate, hidden), (intermediate, hidden), (hidden, intermediate),
        (hidden,), (hidden,),
    ]  # fmt: skip
    return [(vocabulary, hidden), *(layer * layers), (hidden,)]


def make_state(sizes: list[tuple[int, ...]], device: str, with_adam: bool) -> list[Tensor]:
    """bfloat16 weights; for training also gradients, and float32 moments as Adam keeps them."""
    tensors = [torch.empty(size, dtype=torch.bfloat16, device=device) for size in sizes]
    if with_adam:
        count = sum(tensor.numel() for tensor in tensors)
        tensors.append(torch.empty(count, dtype=torch.bfloat16, device=device))
        tensors += [torch.empty(size, device=device) for size in sizes for _ in range(2)]
    for number, tensor in enumerate(tensors):
        tensor.fill_(1 + number % 100)
        tensor.view(-1)[::7] = -1
    return tensors


def checksum(tensors: list[Tensor]) -> list[int]:
    """The sum of each tensor's bits, read as 16-bit integers."""
    return [int(tensor.view(-1).view(torch.int16).sum(dtype=torch.int64)) for tensor in tensors]


def seconds(action: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def raw_on_gpu(num_bytes: int) -> tuple[float, float]:
    """GB/s of one pinned copy from the device, and to it."""
    size = min(num_bytes, 1 << 30)
    there = torch.empty(size, dtype=torch.uint8, device="cuda")
    here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    away = seconds(lambda: here.copy_(there, non_blocking=True))
    back = seconds(lambda: there.copy_(here, non_blocking=True))
    return size / away / GB, size / back / GB


def raw_on_cpu(num_bytes: int) -> tuple[float, float]:
    """GB/s of writing a new file, and of reading it into new memory."""
    with tempfile.TemporaryFile(buffering=0) as file:
        data = torch.ones(num_bytes, dtype=torch.uint8).numpy()
        away = seconds(lambda: file.write(data.data))
        file.seek(0)
        back = seconds(
            lambda: file.readinto(torch.empty(num_bytes, dtype=torch.uint8).numpy().data)
        )
    return num_bytes / away / GB, num_bytes / back / GB


def held_bytes(device: str) -> int:
    """Memory in use on the device, as the system counts it."""
    if device == "cpu":
        return resident_bytes()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def measure(
    sizes: list[tuple[int, ...]], device: str, with_adam: bool, rounds: int
) -> dict[str, float]:
    """Switch back and forth some times; the best of each, and what the first switch took.

    The best, since others on the machine can only take away from a rate.
    """
    tensors = make_state(sizes, device, with_adam)
    state = MovableState(lambda: tensors, Place(device=device))
    num_bytes, expected = state.nbytes(), checksum(tensors)
    raw = raw_on_cpu if device == "cpu" else raw_on_gpu
    first = seconds(state.offload) + seconds(state.onload)
    figures: dict[str, list[float]] = {}
    for _ in range(rounds):
        raw_away, raw_back = raw(num_bytes)
        if device == "cuda":
            torch.cuda.empty_cache()  # what the raw copy used is not the state's
        before = held_bytes(device)
        away = seconds(state.offload)
        freed = before - held_bytes(device)
        back = seconds(state.onload)
        for name, value in (
            ("offload_gb_s", num_bytes / away / GB),
            ("onload_gb_s", num_bytes / back / GB),
            ("raw_away_gb_s", raw_away),
            ("raw_back_gb_s", raw_back),
            ("freed_share", freed / num_bytes),
        ):
            figures.setdefault(name, []).append(value)
    best = {name: max(some) for name, some in figures.items()}
    return {
        "gigabytes": num_bytes / GB,
        **best,
        "offload_share": best["offload_gb_s"] / best["raw_away_gb_s"],
        "onload_share": best["onload_gb_s"] / best["raw_back_gb_s"],
        "freed_share": min(figures["freed_share"]),
        "first_switch_seconds": first,
        "same": float(checksum(tensors) == expected),
    }


def name_of(device: str) -> str:
    return str(torch.cuda.get_device_name()) if device == "cuda" else device


def options_of() -> argparse.Namespace:
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parsed = parser.parse_args()
    if parsed.device == "cuda" and not torch.cuda.is_available():
        print("this machine has no GPU that PyTorch can use; --device cpu measures the spill")
        sys.exit(2)
    return parsed


def main() -> None:
    options = options_of()
    device, rounds = options.device, 3 if options.quick else 7
    if device == "cuda":
        sizes = shapes(28, 1536, 151936)
    else:
        sizes = shapes(2 if options.quick else 8, 768, 30000)
    count = sum(torch.Size(size).numel() for size in sizes)
    found = {
        name: measure(sizes, device, with_adam, rounds)
        for name, with_adam in (("weights", False), ("training", True))
    }
    columns = list(found["weights"])
    print(f"{count / 1e9:.2f} billion parameters on {device}")
    table(["", *found], [[name, *(some[name] for some in found.values())] for name in columns])
    targets = []
    for name, some in found.items():
        for what in ("offload", "onload"):
            title = f"{name}: {what} as a share of the raw rate"
            targets.append(Target(title, some[f"{what}_share"], RAW_SHARE[device]))
        targets.append(Target(f"{name}: share of the bytes freed", some["freed_share"], 0.95))
        targets.append(Target(f"{name}: the same bits come back (1: yes)", some["same"], 1.0))
    conclude(
        "gpu/context_switch",
        {"device": name_of(device), "billion_parameters": count / 1e9, **found},
        targets,
        options,
    )


if __name__ == "__main__":
    main()
