"""Decode steps of the native engine as CUDA graphs, against plain ones, on a model of 1.5 billion.

Both draw the same requests with random bfloat16 weights, one after the other in alternating rounds.
Recording is counted: a round starts without a graph, as after a context switch, and again with
those of the round before.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import Target, arguments, conclude, table

from m2flow.generation.captured import CudaCapture
from m2flow.generation.native import NativeEngine
from m2flow.generation.records import Request, SamplingParams
from m2flow.models.shape import PUBLISHED

MODEL, PROMPT_TOKENS = "Qwen2.5-1.5B", 64
DEVICE = torch.device("cuda:0")


def config_of() -> Any:
    """The published model's configuration."""
    from transformers import Qwen2Config

    return Qwen2Config(**PUBLISHED[MODEL], max_position_embeddings=4096)


def engine_of(captured: bool) -> NativeEngine:
    """An engine with the same random weights as the other."""
    capture = CudaCapture(DEVICE) if captured else None
    engine = NativeEngine(config_of(), dtype=torch.bfloat16, device=DEVICE, capture=capture)
    generator = torch.Generator(DEVICE).manual_seed(0)
    weights = {
        name: torch.randn(box.shape, generator=generator, device=DEVICE).mul_(0.02).bfloat16()
        for name, box in sorted(engine.weight_boxes().items())
    }
    engine.install(weights, 0)
    return engine


def round_seconds(engine: NativeEngine, count: int, tokens: int) -> float:
    """Seconds in which so many answers of so many tokens are drawn, prompts left out."""
    engine.submit(
        Request(n, [n % 50 + 1] * PROMPT_TOKENS, n, SamplingParams(tokens)) for n in range(count)
    )
    engine.step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    while engine.busy:
        engine.step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def nap(engine: NativeEngine) -> float:
    """Seconds of a context switch there and back."""
    start = time.perf_counter()
    engine.sleep()
    engine.wake()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    options = arguments((__doc__ or "").splitlines()[0]).parse_args()
    if not torch.cuda.is_available():
        print("this machine has no GPU that PyTorch can use")
        sys.exit(2)
    tokens, rounds = (128, 2) if options.quick else (512, 5)
    engines = {"plain": engine_of(False), "captured": engine_of(True)}
    found: dict[str, dict[str, float]] = {}
    for count in (1, 8, 64, 256):
        seconds: dict[str, list[float]] = {"plain": [], "after a switch": [], "captured": []}
        for engine in engines.values():
            round_seconds(engine, count, 16)  # libraries are set up
            nap(engine)
        for _ in range(rounds):
            nap(engines["captured"])
            seconds["after a switch"].append(round_seconds(engines["captured"], count, tokens))
            seconds["captured"].append(round_seconds(engines["captured"], count, tokens))
            seconds["plain"].append(round_seconds(engines["plain"], count, tokens))
        rates = {name: count * tokens / statistics.median(some) for name, some in seconds.items()}
        found[f"{count} at a time"] = {
            **{f"{name}, tokens/s": rate for name, rate in rates.items()},
            "gain": rates["captured"] / rates["plain"],
            "gain after a switch": rates["after a switch"] / rates["plain"],
        }
    steps = engines["captured"].captured
    assert steps is not None
    columns = list(found["1 at a time"])
    table(["", *found], [[name, *(some[name] for some in found.values())] for name in columns])
    print(f"{steps.recorded} steps recorded, {steps.replayed} replayed")
    targets = [
        Target(f"{name}: captured over plain", some["gain"], 1.0) for name, some in found.items()
    ]
    results = {"device": torch.cuda.get_device_name(), "model": MODEL, "tokens": tokens, **found}
    results |= {"recorded": steps.recorded, "replayed": steps.replayed}
    conclude("gpu/decode", results, targets, options)


if __name__ == "__main__":
    main()
