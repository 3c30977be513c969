"""The native engine against transformers and vLLM: answers of long-tailed lengths, 64 at a time.

All draw the same requests with the same threads and dtype, each in a process of its own; one works
while the others wait, in alternating blocks, and the native engine twice, which shows the noise. A
product of matrices and a copy are timed in between: what they reach bounds what any engine could.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from harness import CACHE, ROOT, Target, arguments, conclude, table
from peers.generation_side import Settings
from peers.side import Side

from m2flow.models.causal_lm import TinySpec, build_tiny
from m2flow.models.lengths import fit_lengths
from m2flow.models.shape import ModelShape, read_model

RUNNING, GROUP, PROMPT_TOKENS = 64, 8, 32
NATIVE, AGAIN = "native", "native again"
TARGETS = {"generate": 2.5, "continuous": 4.0, "vllm": 1.0}
"""How many times as fast the native engine has to be."""


@dataclass(frozen=True)
class Model:
    """A model with random weights, and how long answers are.

    Attributes:
        mean, longest: tokens of an answer; 2 % are of the longest.
        requests: answers of a block.
    """

    name: str
    spec: TinySpec
    vocab_size: int
    mean: float
    longest: int
    requests: int

    def folder(self) -> Path:
        """Where it is kept; made on first use."""
        path = CACHE / "generation" / self.name.replace(" ", "")
        if not (path / "model.safetensors").is_file():
            model = build_tiny(
                self.spec, vocab_size=self.vocab_size, eos_token_id=1, pad_token_id=0, seed=0
            )
            model.save_pretrained(path)
        return path

    def lengths(self) -> tuple[int, ...]:
        """Of each answer."""
        drawn = fit_lengths(self.mean, self.longest).sample(self.requests)
        return tuple(max(1, round(length)) for length in drawn)


def models(quick: bool) -> tuple[Model, ...]:
    """0.8 million parameters, those of the quick start; and 0.1 billion."""
    small, large = TinySpec(), TinySpec(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
        intermediate_size=2048, initializer_range=0.02,
    )  # fmt: skip
    if quick:
        return (
            Model("0.8 M", small, 18, 20.0, 64, 128),
            Model("0.1 B", large, 32000, 4.0, 12, 64),
        )
    return Model("0.8 M", small, 18, 140.0, 512, 512), Model("0.1 B", large, 32000, 70.0, 256, 256)


@dataclass(frozen=True)
class Limits:
    """What this machine reached, in the same run and with the same threads."""

    flops: float
    bytes_per_s: float

    @classmethod
    def measured(cls, dtype: torch.dtype) -> Limits:
        """By a product of 1024 x 1024 matrices, and a copy of 256 MiB; the best of some."""
        left, right = (torch.randn(1024, 1024).to(dtype) for _ in range(2))
        memory, copy = (torch.randn(1 << 26) for _ in range(2))
        return cls(
            2 * 1024**3 / min(_seconds(lambda: left @ right) for _ in range(15)),
            2 * memory.numel() * 4 / min(_seconds(lambda: copy.copy_(memory)) for _ in range(5)),
        )


def _seconds(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def least_seconds(
    shape: ModelShape, lengths: Sequence[int], limits: Limits, bytes_per_number: int
) -> float:
    """Seconds that the arithmetic or the bytes of the answers take at the limits, at least.

    Each step of `RUNNING` answers reads all weights and their keys and values once, and computes
    with all weights for each of them; a prompt is computed once for its group.
    """
    kv_bytes = shape.kv_bytes_per_token // 2 * bytes_per_number
    weight_bytes = shape.parameters * bytes_per_number
    prompts = -(-len(lengths) // GROUP) * PROMPT_TOKENS
    seconds = shape.forward_flops(prompts, PROMPT_TOKENS / 2) / limits.flops
    for contexts in _steps(lengths):
        flops = shape.forward_flops(len(contexts), statistics.mean(contexts))
        read = weight_bytes + kv_bytes * sum(contexts)
        seconds += max(flops / limits.flops, read / limits.bytes_per_s)
    return seconds


def _steps(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Tokens before each running answer's next, step by step, when slots are refilled at once."""
    waiting = iter(lengths)
    running: list[list[int]] = []  # tokens drawn, and wanted
    while True:
        running += [[0, length] for length in islice(waiting, RUNNING - len(running))]
        if not running:
            return
        yield [PROMPT_TOKENS + drawn for drawn, _ in running]
        running = [[drawn + 1, length] for drawn, length in running if drawn + 1 < length]


def run(model: Model, options: Namespace, logs: Path) -> dict[str, Any]:
    """Seconds of each block by side, the first of which warms up, and the limits in between."""
    here = str(Path(__file__).parent)
    search_path = os.pathsep.join([here, str(ROOT / "src")])
    python = {"vllm": options.vllm_python}
    engines = [NATIVE, "generate", "continuous", *(["vllm"] if options.vllm_python else []), AGAIN]
    dtype = getattr(torch, options.dtype)
    with ExitStack() as stack:
        sides = {}
        for name in engines:
            settings = Settings(
                name.split()[0], str(model.folder()), options.dtype, options.threads,
                model.lengths(), PROMPT_TOKENS, GROUP, RUNNING,
            )  # fmt: skip
            log = logs / f"generation-{name.replace(' ', '-')}.log"
            program = Path(python.get(name) or sys.executable)
            sides[name] = stack.enter_context(
                Side("peers.generation_side", program, settings, search_path, log)
            )
        for side in sides.values():
            side.ready()
        for side in sides.values():
            side.run(1)
        blocks: dict[str, list[float]] = {name: [] for name in engines}
        limits = []
        for _ in range(options.rounds or (2 if options.quick else 7)):
            limits.append(Limits.measured(dtype))
            for name, side in sides.items():
                blocks[name].append(side.run(1).seconds)
    best = Limits(max(one.flops for one in limits), max(one.bytes_per_s for one in limits))
    return {"blocks": blocks, "limits": best}


def report(model: Model, found: dict[str, Any], dtype: str) -> tuple[dict[str, Any], list[Target]]:
    """Print the table of a model; its results and targets."""
    blocks, limits = found["blocks"], found["limits"]
    shape, lengths = read_model(model.folder()), model.lengths()
    least = least_seconds(shape, lengths, limits, getattr(torch, dtype).itemsize)
    rows, results, targets = [], {}, []
    for name, seconds in blocks.items():
        ratios = [s / n for s, n in zip(seconds, blocks[NATIVE], strict=True)]
        results[name] = {
            "seconds": seconds,
            "tokens_per_s": sum(lengths) / statistics.median(seconds),
            "native_is_so_many_times_as_fast": statistics.median(ratios),
            "ratio_quartiles": statistics.quantiles(ratios, n=4),
            "share_of_the_limit": least / statistics.median(seconds),
        }
        row = results[name]
        rows.append(
            [name, f"{row['tokens_per_s']:.0f}", row["native_is_so_many_times_as_fast"],
             f"{row['share_of_the_limit']:.1%}"]
        )  # fmt: skip
        if name in TARGETS:
            target = f"{model.name}: times as fast as {name}"
            targets.append(Target(target, statistics.median(ratios), TARGETS[name]))
    print(f"\n{model.name} ({shape.parameters:,} parameters), {len(lengths)} answers")
    table(["engine", "tokens/s", "native is faster", "of the limit"], rows)
    noise = max(abs(1 - s / n) for s, n in zip(blocks[AGAIN], blocks[NATIVE], strict=True))
    print(f"the native engine against itself: up to {noise:.1%} apart")
    results |= {
        "noise_floor": noise,
        "limits": vars(limits),
        "lengths": {"mean": statistics.mean(lengths), "longest": max(lengths)},
    }
    return results, targets


def main() -> None:
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm-python", type=Path, help="an interpreter that has vLLM")
    parser.add_argument("--threads", type=int, default=1, help="of each engine")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, help="blocks of each engine")
    parser.add_argument("--only", choices=("0.8 M", "0.1 B"), help="one model alone")
    options: Namespace = parser.parse_args()
    torch.set_num_threads(options.threads)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[-options.threads :])  # of the sides too
    logs = CACHE / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "threads": options.threads, "dtype": options.dtype, "running": RUNNING, "group": GROUP,
        "prompt_tokens": PROMPT_TOKENS,
        "not_measured": [] if options.vllm_python else ["vllm: no --vllm-python was given"],
    }  # fmt: skip
    targets: list[Target] = []
    for model in models(options.quick):
        if options.only in (None, model.name):
            found = run(model, options, logs)
            results[model.name], verdicts = report(model, found, options.dtype)
            targets += verdicts
    os.sched_setaffinity(0, cores)
    conclude("generation", results, targets, options)


if __name__ == "__main__":
    main()
