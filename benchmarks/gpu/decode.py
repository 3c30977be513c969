"""Decode steps of the native engine: their share of the memory's bandwidth, and what graphs gain.

Random bfloat16 weights of published shapes; groups of sixteen answers to a prompt, all of them as
long. A decode step reads the weights once, and the keys and values of every sequence: so its limit
is those bytes over the bandwidth of a copy on the device, measured in the same run and counted as
bytes read and written. Keys and values of a prompt count once for each of its sixteen answers,
though these read them together since decision 0107: the share of the limit is more than that of the
bandwidth in use. Prompts are left out of the time. Steps recorded as CUDA graphs and plain ones
take turns on the smaller model. With `--device cpu` a small model, without graphs.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu.profiled import kernels_of
from harness import Target, arguments, conclude, table

from m2flow.generation.captured import PLAIN_STEPS, CudaCapture
from m2flow.generation.native import NativeEngine
from m2flow.generation.records import Request, SamplingParams
from m2flow.models.shape import PUBLISHED, model_from_config
from m2flow.models.work import decoding
from m2flow.plan.profile.hardware import device_called

SHARE = 0.6
"""Of the limit that is aimed at, with AIMED_AT answers at a time."""

AIMED_AT = 256
GROUP = 16
PROFILED_STEPS = 5


@dataclass(frozen=True)
class Work:
    """Models by name, which of them runs plainly too, answers at a time, tokens."""

    models: dict[str, dict[str, Any]]
    compared: str
    counts: tuple[int, ...]
    prompt_tokens: int
    tokens: int
    rounds: int
    bandwidth_bytes: int


SMALL = {
    "model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512,
    "tie_word_embeddings": True,
}  # fmt: skip
WORK = {
    "cuda": Work(
        {name: PUBLISHED[name] for name in ("Qwen2.5-1.5B", "Qwen2.5-7B")},
        *("Qwen2.5-1.5B", (64, 256, 1024), 512, 128, 3, 4 << 30),
    ),
    "cpu": Work({"small": SMALL}, "small", (16, 64), 32, 16, 2, 64 << 20),
}


def engine_of(model: dict[str, Any], count: int, device: str, captured: bool) -> NativeEngine:
    """An engine for so many requests at a time, with random weights."""
    from transformers import Qwen2Config

    capture = CudaCapture(torch.device(device)) if captured else None
    engine = NativeEngine(
        Qwen2Config(**model, max_position_embeddings=4096),
        max_running=count,
        dtype=torch.bfloat16,
        device=device,
        capture=capture,
    )
    generator = torch.Generator(device).manual_seed(0)
    weights = {
        name: torch.randn(box.shape, generator=generator, device=device).mul_(0.02).bfloat16()
        for name, box in sorted(engine.weight_boxes().items())
    }
    engine.install(weights, 0)
    return engine


def synchronise(device: str) -> None:
    """Wait for the device."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def round_seconds(engine: NativeEngine, count: int, prompt: int, tokens: int, device: str) -> float:
    """Seconds in which so many answers are drawn, from their first token on."""
    engine.submit(
        Request(n, [n // GROUP % 50 + 1] * prompt, n, SamplingParams(tokens)) for n in range(count)
    )
    while engine.num_running < count:
        engine.step()
    synchronise(device)
    start = time.perf_counter()
    drawn = 0
    while engine.busy:
        drawn += engine.num_running
        engine.step()
    synchronise(device)
    return (time.perf_counter() - start) / drawn * count * tokens


def profiled(engine: NativeEngine, count: int, prompt: int) -> dict[str, Any]:
    """Where the time of some steps goes; the requests are dropped afterwards."""
    engine.submit(
        Request(n, [n // GROUP % 50 + 1] * prompt, n, SamplingParams(99)) for n in range(count)
    )
    while engine.num_running < count:
        engine.step()
    for _ in range(2 * PLAIN_STEPS):
        engine.step()
    found = kernels_of(lambda: [engine.step() for _ in range(PROFILED_STEPS)])
    engine.abort(range(count))
    return found


def bandwidth(num_bytes: int, device: str) -> float:
    """Bytes read and written a second by a copy on the device, the best of ten."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(12):
        synchronise(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return 2 * num_bytes / min(seconds[2:])


def bytes_of_a_step(model: dict[str, Any], count: int, tokens: float) -> float:
    """Of a step in which each sequence reads its own: weights without the table of embeddings, keys
    and values."""
    shape = model_from_config(model)
    looked_up = 0 if shape.tied else shape.vocabulary * shape.hidden
    of_a_token = 2 * shape.layers * shape.kv_heads * shape.head_dim
    return 2.0 * (shape.parameters - looked_up + count * tokens * of_a_token)


def measure(
    name: str, count: int, work: Work, device: str, rate: float
) -> tuple[dict[str, float], dict[str, Any]]:
    """Figures of a model with so many answers at a time, and a profile of some steps."""
    model, tokens = work.models[name], work.tokens
    ways = [True, False] if name == work.compared and device != "cpu" else [device != "cpu"]
    seconds: dict[bool, list[float]] = {}
    again, recorded, profile = 0.0, 0, dict[str, Any]()
    for way in ways:
        engine = engine_of(model, count, device, way)
        round_seconds(engine, count, work.prompt_tokens, 16, device)  # libraries are set up
        seconds[way] = [
            round_seconds(engine, count, work.prompt_tokens, tokens, device)
            for _ in range(work.rounds + way)
        ][-work.rounds :]
        profile = profile or profiled(engine, count, work.prompt_tokens)
        if engine.captured is not None:
            engine.sleep()
            engine.wake()
            before = engine.captured.recorded
            again = round_seconds(engine, count, work.prompt_tokens, tokens, device)
            recorded = engine.captured.recorded - before
        del engine
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()
    taken = statistics.median(seconds[ways[0]])
    limit = count * rate / bytes_of_a_step(model, count, work.prompt_tokens + tokens / 2)
    found = {"tokens/s": count * tokens / taken, "limit, tokens/s": limit}
    found["share of the limit"] = found["tokens/s"] / limit
    if known := device_called(torch.cuda.get_device_name() if device != "cpu" else ""):
        shape = model_from_config(model)
        step = decoding(shape, count, count * (work.prompt_tokens + tokens / 2)).on(known)
        found["analytic profile over measured"] = step * tokens / taken
    if again:
        found["after a context switch, tokens/s"] = count * tokens / again
        found["sizes that were recorded again for it"] = recorded
    if len(ways) > 1:
        found["plain steps, tokens/s"] = count * tokens / statistics.median(seconds[False])
        found["gain of graphs"] = found["tokens/s"] / found["plain steps, tokens/s"]
    return found, profile


def main() -> None:
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=tuple(WORK))
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("this machine has no GPU that PyTorch can use")
        sys.exit(2)
    work, device = WORK[options.device], "cuda:0" if options.device == "cuda" else "cpu"
    rate = bandwidth(work.bandwidth_bytes, device)
    print(f"a copy on the device: {rate / 1e9:.0f} GB/s read and written")
    counts = (AIMED_AT,) if options.quick and device != "cpu" else work.counts
    found: dict[str, dict[str, float]] = {}
    profiles: dict[str, dict[str, Any]] = {}
    for name in work.models:
        for count in counts:
            row, profile = measure(name, count, work, device, rate)
            found[f"{name}, {count} at a time"] = row
            profiles[f"{name}, {count} at a time"] = profile
            print(name, count, {key: round(value, 3) for key, value in row.items()}, flush=True)
    columns = list(dict.fromkeys(key for row in found.values() for key in row))
    rows = [[name, *(row.get(key, "") for key in columns)] for name, row in found.items()]
    table(["", *columns], rows)
    targets = [
        Target(f"{name}: share of the limit", row["share of the limit"], SHARE)
        for name, row in found.items()
        if device != "cpu" and name.endswith(f", {AIMED_AT} at a time")
    ]
    where = "cpu" if device == "cpu" else torch.cuda.get_device_name()
    results = {"device": where, "GB/s": rate / 1e9, **found, "profiles": profiles}
    conclude("gpu/decode", results, targets, options)


if __name__ == "__main__":
    main()
