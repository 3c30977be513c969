"""A whole decode stage whose answers have a long tail, by the native engine alone.

1,024 answers to 64 prompts, of geometric lengths with a mean of 1,000 tokens, cut at 4,096
(`long_answers.py`), 512 at a time: rows come and go all the time, and in the end few are left. Two
rounds, the second after the engine has slept, as in a step of `grpo_step.py`. Shown is the time of
a step by the rows that are at work, beside what the analytic profile says for it; what is over is
the engine's own: rows that come and go, and steps that are recorded. `--quick` has an eighth of the
answers, `--device cpu` a small model.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu.decode import SMALL, synchronise
from gpu.long_answers import write_model
from harness import arguments, conclude, table

from m2flow.generation.captured import CudaCapture
from m2flow.generation.native import NativeEngine
from m2flow.generation.records import Request, SamplingParams
from m2flow.models.shape import PUBLISHED, model_from_config
from m2flow.models.work import decoding
from m2flow.plan.profile.hardware import device_called

GROUP, PROMPT_TOKENS = 16, 9
PRICED_EVERY = 16
"""Steps of which one is priced: what is in the cache changes slowly."""


@dataclass(frozen=True)
class Work:
    """The model, answers in all and at a time, their tokens in the mean and at most, and bytes of
    the cache."""

    model: dict[str, Any]
    answers: int
    running: int
    mean: int
    tokens: int
    cache_bytes: int | None


WORK = {
    "cuda": Work(PUBLISHED["Qwen2.5-1.5B"], 1024, 512, 1000, 4096, 30 << 30),
    "cpu": Work(SMALL, 256, 128, 60, 256, None),
}


def engine_of(work: Work, folder: Path, device: str) -> NativeEngine:
    """An engine with the weights of `write_model`."""
    from safetensors.torch import load_file
    from transformers import AutoConfig

    on_gpu = device != "cpu"
    engine = NativeEngine(
        AutoConfig.from_pretrained(folder),
        max_running=work.running,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        device=device,
        capture=CudaCapture(torch.device(device)) if on_gpu else None,
        cache_bytes=work.cache_bytes,
        ahead=True,
    )
    found = {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path, device=device).items()
    }
    engine.install({name: found[name] for name in engine.weight_boxes()}, 0)
    return engine


def requests(work: Work, stop: int, seed: int) -> Iterator[Request]:
    params = SamplingParams(work.tokens, stop_token_ids=(stop,))
    for n in range(work.answers):
        yield Request(n, [n // GROUP + 1] * PROMPT_TOKENS, seed + n, params)


def edge(rows: int) -> int:
    """The power of 2 that is not below; 0 for none, where requests are still to come in."""
    return 1 << (rows - 1).bit_length() if rows else 0


def measured(
    engine: NativeEngine, work: Work, stop: int, seed: int, device: str
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Figures of a round, and of its steps by the rows at work, rounded up to a power of 2."""
    known = device_called(torch.cuda.get_device_name() if device != "cpu" else "")
    shape = model_from_config({"model_type": "qwen2", **work.model})
    steps, seconds, priced = Counter[int](), Counter[int](), Counter[int]()
    price, tokens, priced_at = 0.0, 0, 0
    recorded = engine.captured.recorded if engine.captured else 0
    engine.submit(requests(work, stop, seed))
    synchronise(device)
    start = last = time.perf_counter()
    for step in range(100 * work.tokens):
        if not engine.busy:
            break
        rows = engine.num_running
        if known and rows and (step % PRICED_EVERY == 0 or edge(rows) != priced_at):
            price, priced_at = (
                decoding(shape, rows, sum(engine._running.lengths)).on(known),
                edge(rows),
            )
        tokens += sum(len(one.token_ids) for one in engine.step())
        now = time.perf_counter()
        steps[edge(rows)] += 1
        seconds[edge(rows)] += now - last
        priced[edge(rows)] += price
        last = now
    synchronise(device)
    taken = time.perf_counter() - start
    found = {"s": taken, "tokens/s": tokens / taken, "tokens": tokens, "steps": steps.total()}
    if known:
        found["analytic profile over measured"] = priced.total() / taken
    if engine.captured:
        found["sizes that were recorded"] = engine.captured.recorded - recorded
    return found, {
        f"up to {rows} rows": {
            "steps": count,
            "ms a step": 1e3 * seconds[rows] / count,
            "priced, ms": 1e3 * priced[rows] / count,
        }
        for rows, count in sorted(steps.items())
    }


def main() -> None:
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=tuple(WORK))
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("this machine has no GPU that PyTorch can use")
        sys.exit(2)
    work, device = WORK[options.device], "cuda:0" if options.device == "cuda" else "cpu"
    if options.quick:
        work = replace(work, answers=work.answers // 8, running=work.running // 8)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="m2flow-tail-") as name:
        share = write_model(work.model, work.mean, Path(name), options.device)
        engine = engine_of(work, Path(name), device)
    from m2flow.models.tokenizer import byte_tokenizer

    stop = byte_tokenizer().eos_token_id
    for number, title in enumerate(("the first round", "after a context switch")):
        figures, steps = measured(engine, work, stop, 10_000 * (number + 1), device)
        found[title] = {**figures, "by rows": steps}
        print(title, {name: round(value, 3) for name, value in figures.items()}, flush=True)
        table(
            ["", *next(iter(steps.values()))],
            [[name, *row.values()] for name, row in steps.items()],
        )
        engine.sleep()
        engine.wake()
    where = "cpu" if device == "cpu" else torch.cuda.get_device_name()
    conclude("gpu/long_tail", {"device": where, "end token": share, **found}, [], options)


if __name__ == "__main__":
    main()
