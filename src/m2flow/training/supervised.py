"""Supervised training on prompt and completion pairs: the warm-up before reinforcement learning.

The loss is the mean negative log-likelihood of a batch's completion tokens. Batches are drawn from
seeded permutations of the pairs, one after another, so a run depends on its configuration alone.
Packed as policy training is. Knows neither text nor files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from m2flow.errors import UserError
from m2flow.training.forward import token_logprobs
from m2flow.training.optimizer import AdamWConfig, SumOptimizer
from m2flow.training.packing import Sharing, pack
from m2flow.training.rollouts import TokenPairs
from m2flow.training.schedule import Schedule


@dataclass(frozen=True)
class SupervisedConfig:
    """Every figure of a supervised run.

    `optimizer` None means AdamW 2e-3 with betas (0.9, 0.95), weight decay 0.01, norm clipped at 1,
    50 warm-up steps (or a tenth of a shorter run), then linear decay to 2 % at the last step.
    """

    steps: int = 1500
    batch_size: int = 16
    seed: int = 0
    optimizer: AdamWConfig | None = None
    tokens_per_microbatch: int = 2048
    sharing: Sharing = "none"

    def resolved_optimizer(self) -> AdamWConfig:
        """The optimizer's configuration, defaults filled in."""
        if self.optimizer is not None:
            return self.optimizer
        warmup_steps = min(50, self.steps // 10)
        return AdamWConfig(
            learning_rate=2e-3,
            betas=(0.9, 0.95),
            weight_decay=0.01,
            schedule=Schedule("linear", warmup_steps, self.steps, final_fraction=0.02),
            max_grad_norm=1.0,
        )


@dataclass(frozen=True)
class Progress:
    """Where a run is: steps done, and figures of the last one; `loss` in nats per token."""

    step: int
    steps: int
    loss: float
    grad_norm: float
    learning_rate: float


def train_supervised(
    model: nn.Module,
    pairs: TokenPairs,
    config: SupervisedConfig = SupervisedConfig(),
    *,
    on_progress: Callable[[Progress], None] | None = None,
    progress_every: int = 100,
) -> Progress:
    """Train `model` in place; returns the last step's progress.

    Args:
        model: a transformers causal LM, on one device.
        pairs: at least one pair with a completion.
        config: every figure.
        on_progress: called every `progress_every` steps and at the last one.
        progress_every: in steps.

    Raises:
        UserError: there is nothing to learn from.
        NotFinite: the loss or a gradient became NaN or infinite.
    """
    if not int(pairs.completion_lengths_B.sum()):
        raise UserError(
            "nothing to learn from", key="pairs", value=len(pairs), expected="completions"
        )
    model.eval()
    optimizer = SumOptimizer(model.named_parameters(), config.resolved_optimizer())
    batches = _batches(len(pairs), config.batch_size, config.seed)
    progress = Progress(0, config.steps, float("nan"), 0.0, 0.0)
    for step in range(1, config.steps + 1):
        batch = pairs.select(next(batches))
        loss: float | Tensor = 0.0
        for microbatch in pack(batch, config.tokens_per_microbatch, config.sharing):
            negative = -token_logprobs(model, microbatch).logprobs_T.sum()
            torch.autograd.backward(negative)
            loss = loss + negative.detach()
        num_tokens = int(batch.completion_lengths_B.sum())
        sums = torch.tensor([float(loss), num_tokens], dtype=torch.float64)
        result = optimizer.step(sums, denominator=1, all_reduce=None)
        progress = Progress(
            step,
            config.steps,
            float(loss) / max(num_tokens, 1),
            result.grad_norm,
            result.learning_rate,
        )
        if on_progress is not None and (step % progress_every == 0 or step == config.steps):
            on_progress(progress)
    return progress


def _batches(num_pairs: int, batch_size: int, seed: int) -> Iterator[Tensor]:
    """Row numbers [batch_size], for ever; a batch may span the end of a permutation."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.empty(0, dtype=torch.int64)
    while True:
        while left.numel() < batch_size:
            left = torch.cat([left, torch.randperm(num_pairs, generator=generator)])
        yield left[:batch_size]
        left = left[batch_size:]
