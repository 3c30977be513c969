"""Supervised training on prompt and completion pairs: the warm-up before reinforcement learning.

The loss is the mean negative log-likelihood of a batch's completion tokens. Batches are drawn from
seeded permutations of the pairs, one after another, so a run depends on its configuration alone.
Packed as policy training is. Knows neither text nor files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from m2flow.training.forward import token_logprobs
from m2flow.training.optimizer import AdamWConfig, SumOptimizer
from m2flow.training.packing import pack
from m2flow.training.rollouts import TokenPairs
from m2flow.training.schedule import Schedule

TOKENS_PER_MICROBATCH = 2048
PROGRESS_EVERY = 25


def train_supervised(
    model: nn.Module,
    pairs: TokenPairs,
    *,
    steps: int,
    batch_size: int = 16,
    seed: int = 0,
    optimizer: AdamWConfig | None = None,
    on_progress: Callable[[int, float], None] | None = None,
) -> float:
    """Train `model` in place; return the last step's loss in nats a token.

    Args:
        model: a transformers causal LM, on one device.
        pairs: at least one pair with a completion.
        steps: optimizer steps.
        batch_size: pairs of a step.
        seed: fixes the order of the pairs.
        optimizer: every figure of it; None for `adamw(steps)`.
        on_progress: called with step and loss every `PROGRESS_EVERY` steps and at the last one.

    Raises:
        NotFinite: the loss or a gradient became NaN or infinite.
    """
    assert int(pairs.learned_lengths_B.sum()), "nothing to learn from"
    model.eval()
    owner = SumOptimizer(model.named_parameters(), optimizer or adamw(steps))
    batches = _batches(len(pairs), batch_size, seed)
    mean = math.nan
    for step in range(1, steps + 1):
        batch = pairs.select(next(batches))
        loss: float | Tensor = 0.0
        for microbatch in pack(batch, TOKENS_PER_MICROBATCH, "none"):
            negative = -token_logprobs(model, microbatch).logprobs_T.sum()
            torch.autograd.backward(negative)
            loss = loss + negative.detach()
        num_tokens = int(batch.learned_lengths_B.sum())
        sums = torch.tensor([float(loss), num_tokens], dtype=torch.float64)
        owner.step(sums, denominator=1, all_reduce=None)
        mean = float(loss) / max(num_tokens, 1)
        if on_progress is not None and (step % PROGRESS_EVERY == 0 or step == steps):
            on_progress(step, mean)
    owner.release()
    return mean


def adamw(steps: int, learning_rate: float = 2e-3) -> AdamWConfig:
    """50 warm-up steps (or a tenth of a shorter run), then linear decay to 2 % at the last step."""
    return AdamWConfig(
        learning_rate=learning_rate,
        betas=(0.9, 0.95),
        weight_decay=0.01,
        schedule=Schedule("linear", min(50, steps // 10), steps, final_fraction=0.02),
    )


def _batches(num_pairs: int, batch_size: int, seed: int) -> Iterator[Tensor]:
    """Row numbers [batch_size], for ever; a batch may span the end of a permutation."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.empty(0, dtype=torch.int64)
    while True:
        while left.numel() < batch_size:
            left = torch.cat([left, torch.randperm(num_pairs, generator=generator)])
        yield left[:batch_size]
        left = left[batch_size:]
