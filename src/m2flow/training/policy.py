"""Policy-gradient training of one model replica: fold rollouts in any pieces, then finish.

`fold` adds un-normalised loss gradients, denominators and figures of some rollouts; `finish` adds
them up over replicas, divides by the global denominator and takes one optimizer step. So chunking,
packing and placement change the result by floating-point rounding at most. A replica may be divided
over a gang of lanes, which call everything here together, each with rollouts of its own or with
none. This file does not know where rollouts come from.

Shapes: T completion tokens, R rows of a pack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from m2flow.algorithms.grpo import GRPOLoss
from m2flow.algorithms.kl import kl_per_token
from m2flow.algorithms.loss import token_sum
from m2flow.errors import UserError
from m2flow.models.device import sent
from m2flow.training.forward import token_logprobs
from m2flow.training.optimizer import AdamWConfig, AllReduce
from m2flow.training.packing import Pack, Sharing, pack
from m2flow.training.rollouts import TokenPairs, TokenRollouts
from m2flow.training.sharded import WHOLE, Shards
from m2flow.training.summing import SummingTrainer, column_of, figures_of


@dataclass(frozen=True)
class PolicyTrainerConfig:
    """How a policy is trained, the algorithm apart.

    Attributes:
        optimizer: AdamW, schedule, gradient clipping.
        tokens_per_microbatch: tokens computed at a time; bounds memory.
        sharing: what is computed once in a pack: see `m2flow.training.packing.pack`.
        temperature: that of the sampling, so that log-probabilities compare.
        drop_zero_advantage: skip rows without any gradient; their tokens count all the same.
        gradient_checkpointing: compute activations again in the backward pass: less memory, a third
            more arithmetic.
    """

    optimizer: AdamWConfig = field(default_factory=AdamWConfig)
    tokens_per_microbatch: int = 2048
    sharing: Sharing = "prefix"
    temperature: float = 1.0
    drop_zero_advantage: bool = True
    gradient_checkpointing: bool = False


_TOTALS = (
    "loss",
    "denominator",
    "tokens",
    "samples",
    "samples_dropped",
    "tokens_trained",
    "tokens_computed",
    "behaviour_entropy",
    "fresh",
    "engine_gap",
    "engine_kl",
)


class PolicyTrainer(SummingTrainer):
    """A model with its optimizer; `fold` and `finish` make one step of it.

    Args:
        model: a transformers causal LM; trained in place, with dropout off.
        algorithm: the loss.
        config: everything else.
        shards: how the model is divided, which it has been already (`Shards.shard`). Then every
            method that says so is collective in the gang.
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: GRPOLoss,
        config: PolicyTrainerConfig,
        shards: Shards = WHOLE,
    ) -> None:
        names, again = _TOTALS + algorithm.figures, config.gradient_checkpointing
        super().__init__(model, config.optimizer, names, shards, again)
        self.algorithm = algorithm
        self.config = config
        self._largest_gap: float | Tensor = 0.0

    def fold(self, rollouts: TokenRollouts) -> None:
        """Accumulate the gradient of some rollouts of the mini-batch at hand.

        Collective in the gang; lanes may give unequal numbers of rollouts, or none. Rollouts with
        a value that is NaN or infinite have `finish` take no step.

        Raises:
            UserError: the algorithm needs reference log-probabilities and there are none. On all
                lanes alike.
        """
        with self.shards.together():
            self._check_reference(rollouts)
        rollouts, _ = self.shards.join(rollouts)
        self.check(
            {
                "advantages": rollouts.advantages_T,
                "behaviour_logprobs": rollouts.behaviour_logprobs_T,
                "old_logprobs": rollouts.old_logprobs_T,
                "reference_logprobs": rollouts.reference_logprobs_T,
            }
        )
        rollouts, _ = self.shards.balance(self._counted(rollouts))
        size, sharing = self.config.tokens_per_microbatch, self.config.sharing
        packs = pack(rollouts.pairs, size, sharing, self.shards.part)
        self.fold_packs(
            packs,
            lambda microbatch: self._fold_pack(rollouts, microbatch),
            lambda microbatch: token_logprobs(self.model, microbatch).logprobs_T,
        )

    def _counted(self, rollouts: TokenRollouts) -> TokenRollouts:
        """Add up what is known before any pass; the rollouts that a pass is needed for."""
        lengths_B = rollouts.pairs.learned_lengths_B
        self.add(
            denominator=self.algorithm.denominator(lengths_B),
            tokens=int(lengths_B.sum()),
            samples=len(rollouts),
            behaviour_entropy=-float(rollouts.behaviour_logprobs_T.double().sum()),
        )
        if not (self.config.drop_zero_advantage and self.algorithm.zero_advantage_is_idle):
            return rollouts
        idle_B = rollouts.idle_rows()
        self.add(samples_dropped=int(idle_B.sum()))
        return rollouts.select((~idle_B).nonzero()[:, 0])

    def finish(self, all_reduce: AllReduce | None = None) -> dict[str, float]:
        """One optimizer step on everything folded since the last one.

        Args:
            all_reduce: sums tensors over the data-parallel replicas of a whole model, which all
                call `finish` together, with or without rollouts of their own. None for one
                replica, and for a divided model, all lanes of which call `finish` together.

        Returns:
            Figures of the whole mini-batch, the same on every lane: `loss`, `grad_norm` before
            clipping, `learning_rate`, the algorithm's figures as means over the tokens trained on,
            `behaviour_entropy` (minus the mean log-probability at sampling, over all tokens),
            `tokens`, `samples`, `samples_dropped`, `tokens_trained`, `tokens_computed` (after
            sharing), and `steps` (0 where no token counted, so that no step was taken, else 1).
            Figures of a step that was not taken, and means over no token, are left out.

        Raises:
            NotFinite: the loss, a gradient or a column that was folded in is NaN or infinite; no
                step was taken.
        """
        steps_before = self.optimizer.num_steps
        self.largest_gap, self._largest_gap = float(self._largest_gap), 0.0
        self.engine_figures = {}
        totals, figures = self.step(all_reduce)
        if fresh := totals["fresh"]:
            names = ("engine_gap", "engine_kl")
            self.engine_figures = {name: totals[name] / fresh for name in names}
        trained, tokens = totals["tokens_trained"], totals["tokens"]
        means = {name: totals[name] / trained for name in self.algorithm.figures} if trained else {}
        if tokens:
            means["behaviour_entropy"] = totals["behaviour_entropy"] / tokens
        return {
            **figures,
            **means,
            **{name: totals[name] for name in _TOTALS if name.startswith(("tokens", "samples"))},
            "steps": float(self.optimizer.num_steps - steps_before),
        }

    largest_gap = 0.0
    """Of the fresh tokens that this lane trained on in the last step, the largest absolute
    difference of log-probabilities to those that they were drawn with."""

    engine_figures: Mapping[str, float] = MappingProxyType({})
    """Of the fresh tokens of the last step, on all lanes: `engine_gap`, the mean absolute
    difference of log-probabilities to those that they were drawn with, and `engine_kl`, the
    estimated KL(policy that drew them, policy). Nothing where no token was fresh."""

    def discard(self) -> None:
        super().discard()
        self._largest_gap = 0.0

    def logprobs(self, rollouts: TokenRollouts | TokenPairs) -> Tensor:
        """[T] log-probabilities of all completion tokens under the present weights; no gradient.

        For stale data, several epochs over one batch, and reference models. Collective in the gang,
        where each lane asks for rollouts of its own.
        """
        pairs = rollouts.pairs if isinstance(rollouts, TokenRollouts) else rollouts
        return logprobs_of(
            self.model,
            pairs,
            self.config.tokens_per_microbatch,
            sharing=self.config.sharing,
            temperature=self.config.temperature,
            shards=self.shards,
        )

    def _fold_pack(self, rollouts: TokenRollouts, microbatch: Pack) -> None:
        figures = token_logprobs(
            self.model,
            microbatch,
            temperature=self.config.temperature,
            with_entropy=self.algorithm.needs_entropy,
        )
        device = figures.logprobs_T.device

        def column(values_T: Tensor | None) -> Any:
            return None if values_T is None else column_of(values_T, microbatch, device)

        behaviour_T = column(rollouts.behaviour_logprobs_T)
        old_T = column(rollouts.old_logprobs_T)
        terms = self.algorithm.loss(
            figures.logprobs_T,
            behaviour_T if old_T is None else old_T,
            column(rollouts.advantages_T),
            sent(microbatch.lengths_R, device),
            behaviour_logprobs_T=None if old_T is None else behaviour_T,
            reference_logprobs_T=column(rollouts.reference_logprobs_T),
            entropy_T=figures.entropy_T,
        )
        if rollouts.fresh_T is not None and behaviour_T.numel():
            self._compare(figures.logprobs_T.detach(), behaviour_T, column(rollouts.fresh_T))
        self.learn(terms, microbatch, tokens_trained=microbatch.target_ids_T.numel())

    def _compare(self, logprobs_T: Tensor, behaviour_T: Tensor, fresh_T: Tensor) -> None:
        """Add up how far fresh tokens are from the log-probabilities that they were drawn with."""
        gap_T = torch.where(fresh_T, logprobs_T - behaviour_T, 0.0)
        self.add(
            fresh=token_sum(fresh_T),
            engine_gap=token_sum(gap_T.abs()),
            engine_kl=token_sum(kl_per_token(-gap_T, torch.zeros_like(gap_T))),
        )
        largest = gap_T.abs().max()
        self._largest_gap = torch.maximum(largest, torch.as_tensor(self._largest_gap).to(largest))

    def _check_reference(self, rollouts: TokenRollouts) -> None:
        if self.algorithm.needs_reference and rollouts.reference_logprobs_T is None:
            raise UserError(
                "the loss has a KL term, but the rollouts carry no reference log-probabilities",
                key="reference_logprobs",
                hint="compute them with the reference model, or set kl_coefficient=0",
            )


def logprobs_of(
    model: nn.Module,
    pairs: TokenPairs,
    tokens_per_microbatch: int,
    *,
    sharing: Sharing = "prefix",
    temperature: float = 1.0,
    shards: Shards = WHOLE,
) -> Tensor:
    """[T] log-probabilities of all completion tokens, on the CPU, without gradient.

    Collective in the gang of a divided model; each lane asks for pairs of its own, or for none.
    """

    def forward(microbatch: Pack) -> Tensor:
        return token_logprobs(model, microbatch, temperature=temperature).logprobs_T

    return figures_of(model, forward, pairs, tokens_per_microbatch, sharing, shards)
