"""The packed trainer on a model of 1.5 billion parameters: its share of the device's matrix rate.

Mini-batches of packed answers of 4,096 tokens, random bfloat16 weights, float32 masters. Compared
is the rate of a bfloat16 product of 8,192 x 8,192 random matrices, measured in the same run after
each way, of which the highest counts.
Arithmetic is counted as 6 for each parameter and trained token, and 12 for each layer, channel and
pair of tokens that attend to each other (Kaplan et al. 2020, arXiv 2001.08361, table 1; causal:
half of the pairs); recomputed activations are no part of it. With `--device cpu` the same on a
small model.
"""

from __future__ import annotations

import gc
import math
import statistics
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu.profiled import kernels_of
from harness import Target, arguments, conclude, table

from m2flow.algorithms.grpo import GRPOLoss
from m2flow.models.lengths import LogNormalLengths
from m2flow.models.shape import PUBLISHED, model_from_config
from m2flow.models.work import Answers, Division, training_pass, update
from m2flow.plan.profile.hardware import device_called
from m2flow.training.fused import fuse
from m2flow.training.optimizer import AdamWConfig
from m2flow.training.policy import PolicyTrainer, PolicyTrainerConfig
from m2flow.training.rollouts import TokenRollouts

SHARE = 0.45
"""Of the matrix rate that is aimed at."""


@dataclass(frozen=True)
class Work:
    """A model's configuration, answers and their length, the side of a product, steps."""

    config: dict[str, Any]
    answers: int
    tokens: int
    prompt: int
    side: int
    steps: int


SMALL = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 256, "tie_word_embeddings": True,
}  # fmt: skip
WORK = {
    "cuda": Work(PUBLISHED["Qwen2.5-1.5B"], 16, 4096, 256, 8192, 3),
    "cpu": Work(SMALL, 8, 128, 16, 256, 3),
}


def model_of(work: Work, device: str) -> Any:
    """A model with random weights, on the device."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    positions = work.prompt + work.tokens
    config = Qwen2Config(**work.config, max_position_embeddings=positions)
    with torch.device(device):
        model = Qwen2ForCausalLM(config)
    return model.to(torch.bfloat16)


def rollouts_of(work: Work) -> TokenRollouts:
    """Answers to prompts of their own, so that nothing is shared between rows."""
    random = torch.Generator().manual_seed(0)
    words = int(work.config["vocab_size"])

    def ids(count: int) -> list[int]:
        found: list[int] = torch.randint(words, (count,), generator=random).tolist()
        return found

    prompts = [ids(work.prompt) for _ in range(work.answers)]
    answers = [ids(work.tokens) for _ in range(work.answers)]
    logprobs = [[-1.0] * work.tokens] * work.answers
    advantages = [(-1.0) ** number for number in range(work.answers)]
    return TokenRollouts.from_rows(prompts, answers, logprobs, advantages)


def synchronise(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def matrix_rate(side: int, device: str) -> float:
    """Operations a second of a bfloat16 product of random matrices, the median of ten."""
    one, other = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    seconds = []
    for _ in range(12):
        synchronise(device)
        start = time.perf_counter()
        for _ in range(4):
            torch.mm(one, other)
        synchronise(device)
        seconds.append((time.perf_counter() - start) / 4)
    return 2 * side**3 / statistics.median(seconds[2:])


def operations(work: Work, parameters: int) -> float:
    """Of a mini-batch; see the module docstring."""
    length = work.prompt + work.tokens
    attending = 12 * work.config["num_hidden_layers"] * work.config["hidden_size"] * length**2 / 2
    return float(work.answers * (6 * parameters * length + attending))


def measured(
    work: Work, rollouts: TokenRollouts, device: str, again: bool, fused: bool
) -> tuple[dict[str, float], dict[str, Any]]:
    """Figures of mini-batches, and a profile of one with two answers."""
    model = model_of(work, device)
    if fused:
        fuse(model, device, wanted=True)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    config = PolicyTrainerConfig(
        optimizer=AdamWConfig(learning_rate=1e-6),
        tokens_per_microbatch=2 * (work.prompt + work.tokens),
        sharing="none",
        gradient_checkpointing=again,
    )
    trainer = PolicyTrainer(model, GRPOLoss(), config)
    seconds = []
    for _ in range(work.steps + 1):
        synchronise(device)
        start = time.perf_counter()
        trainer.fold(rollouts)
        trainer.finish()
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    taken = statistics.median(seconds[1:])
    few = rollouts.select(torch.arange(2))
    found = {
        "parameters": float(parameters),
        "s a mini-batch": taken,
        "tokens/s": work.answers * work.tokens / taken,
        "TFLOP/s": operations(work, parameters) / taken / 1e12,
        "matrix rate, TFLOP/s": matrix_rate(work.side, device) / 1e12,
        "GB at most": torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0,
    }
    if device == "cuda" and (known := device_called(torch.cuda.get_device_name())):
        shape = model_from_config(work.config)
        lengths = LogNormalLengths(math.log(work.tokens), 1e-6, work.tokens)
        step = training_pass(
            *(shape, Answers(work.prompt, lengths), work.answers, Division()),
            *(config.tokens_per_microbatch, again),
        )
        seconds_of_it = step.on(known) + update(shape, Division(), 1).on(known)
        found["analytic profile over measured"] = seconds_of_it / taken
    return found, kernels_of(lambda: (trainer.fold(few), trainer.finish()))


def main() -> None:
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=tuple(WORK))
    options = parser.parse_args()
    device = options.device
    if device == "cuda" and not torch.cuda.is_available():
        print("this machine has no GPU that PyTorch can use")
        sys.exit(2)
    work = WORK[device]
    rollouts = rollouts_of(work)
    found: dict[str, dict[str, float]] = {}
    profiles: dict[str, dict[str, Any]] = {}
    ways = {"activations kept": (False, False), "computed again": (True, False)}
    if device == "cuda" and find_spec("liger_kernel"):  # last: the rotary embedding stays Liger's
        ways["activations kept, Liger's kernels"] = (False, True)
    for name, (again, fused) in ways.items():
        found[name], profiles[name] = measured(work, rollouts, device, again, fused)
        print(name, {key: round(value, 3) for key, value in found[name].items()}, flush=True)
        if device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    rate = max(some["matrix rate, TFLOP/s"] for some in found.values())
    for some in found.values():
        some["of the matrix rate"] = some["TFLOP/s"] / rate
    columns = list(found["computed again"])
    table(["", *columns], [[name, *some.values()] for name, some in found.items()])
    where = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    best = max(some["of the matrix rate"] for some in found.values())
    targets = [Target("share of the matrix rate", best, SHARE)] if device == "cuda" else []
    results = {"device": where, **found, "profiles": profiles}
    conclude("gpu/training", results, targets, options)


if __name__ == "__main__":
    main()
