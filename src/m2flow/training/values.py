"""Values of the completion tokens of a pack, and the training of the critic that gives them.

The value of a token is the critic's figure for the state before it, at the node which predicts the
token. Training is in pieces as that of a policy: `fold` adds un-normalised gradients, `finish`
divides by the global denominator and takes one optimizer step, so that chunking, packing and
placement change the result by rounding at most. Knows neither rewards nor advantages.

Shapes: T completion tokens, N nodes and M predicting nodes of a pack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from m2flow.algorithms.ppo import CriticLoss, explained_variance
from m2flow.models.device import sent
from m2flow.training.attention import packed_attention_on
from m2flow.training.optimizer import AllReduce
from m2flow.training.packing import Pack, pack
from m2flow.training.policy import PolicyTrainerConfig
from m2flow.training.rollouts import TokenPairs, flat_index
from m2flow.training.sharded import WHOLE, Shards
from m2flow.training.summing import SummingTrainer, column_of, figures_of


@dataclass(frozen=True)
class ValueTargets:
    """Token pairs with what a critic learns from.

    Attributes:
        pairs: prompts and completions.
        old_values_T: [T] of the critic at the start of the step.
        returns_T: [T] what it should have said.
    """

    pairs: TokenPairs
    old_values_T: Tensor
    returns_T: Tensor

    @property
    def num_tokens(self) -> int:
        """Completion tokens of all rows."""
        return self.pairs.num_tokens

    def row_lengths(self) -> Tensor:
        """[B] tokens of each row."""
        return self.pairs.row_lengths()

    def select(self, rows_R: Tensor) -> ValueTargets:
        """The given rows (int64 [R]), in that order."""
        tokens_S = flat_index(self.pairs.completion_lengths_B, rows_R)
        pairs = self.pairs.select(rows_R)
        return ValueTargets(pairs, self.old_values_T[tokens_S], self.returns_T[tokens_S])


def token_values(model: nn.Module, microbatch: Pack) -> Tensor:
    """[T] values of the completion tokens of a pack, at least in float32, on the model's device.

    Args:
        model: a critic of `m2flow.models.critic`, on one device.
        microbatch: on any device.
    """
    device = next(model.parameters()).device
    microbatch = microbatch.to(device)
    critic: Any = model
    with packed_attention_on(model):
        values_N: Tensor = critic(
            input_ids=microbatch.input_ids_N[None],
            position_ids=microbatch.position_ids_N[None],
            use_cache=False,
            pack_layout=microbatch.layout,
        ).logits[0, :, 0]
    values_N = values_N.to(torch.promote_types(values_N.dtype, torch.float32))
    values_T = values_N[microbatch.predicting_M][microbatch.prediction_T]
    part, own_T = microbatch.layout.part, microbatch.own_T
    if part is None or own_T is None:
        return values_T
    return part.put_together(values_T[:, None], own_T, microbatch.target_ids_T.numel())[:, 0]


_TOTALS = ("loss", "denominator", "tokens", "tokens_computed")


class ValueTrainer(SummingTrainer):
    """A critic with its optimizer; `fold` and `finish` make one step of it.

    Args:
        model: trained in place, with dropout off.
        algorithm: the loss.
        config: optimizer and packing; what is about policies alone is not looked at.
        shards: how the model is divided, which it has been already. Then `fold`, `finish`,
            `values` are collective in the gang.
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: CriticLoss,
        config: PolicyTrainerConfig,
        shards: Shards = WHOLE,
    ) -> None:
        names, again = _TOTALS + algorithm.figures, config.gradient_checkpointing
        super().__init__(model, config.optimizer, names, shards, again)
        self.algorithm, self.config = algorithm, config

    def values(self, pairs: TokenPairs) -> Tensor:
        """[T] values of all completion tokens, on the CPU, without gradient."""
        sharing, size = self.config.sharing, self.config.tokens_per_microbatch
        return figures_of(self.model, self._values_of, pairs, size, sharing, self.shards)

    def fold(self, targets: ValueTargets) -> None:
        """Accumulate the gradient of some answers of the mini-batch; see `PolicyTrainer`."""
        targets, _ = self.shards.join(targets)
        self.check({"values": targets.old_values_T, "returns": targets.returns_T})
        lengths_B = targets.pairs.learned_lengths_B
        self.add(
            denominator=self.algorithm.denominator(lengths_B),
            tokens=int(lengths_B.sum()),
        )
        targets, _ = self.shards.balance(targets)
        size, sharing = self.config.tokens_per_microbatch, self.config.sharing
        packs = pack(targets.pairs, size, sharing, self.shards.part)
        self.fold_packs(packs, lambda pack: self._fold_pack(targets, pack), self._values_of)

    def finish(self, all_reduce: AllReduce | None = None) -> dict[str, float]:
        """One optimizer step on everything folded since the last one; see `PolicyTrainer.finish`.

        Returns:
            Figures of the whole mini-batch, the same on every lane: `loss`, `grad_norm` before
            clipping, `learning_rate`, `clip_fraction` of the tokens, `value` and `return` (means
            over tokens, at the start of the step), `explained_variance`, `tokens_computed` (after
            sharing), and `steps`; the last two alone where no token counted, so that no step was
            taken.

        Raises:
            NotFinite: the loss, a gradient or a column that was folded in is NaN or infinite; no
                step was taken.
        """
        totals, figures = self.step(all_reduce)
        counts = {"tokens_computed": totals["tokens_computed"], "steps": float(bool(figures))}
        if not figures:
            return counts
        tokens = totals["tokens"]
        return {
            **figures,
            **{name: totals[name] / tokens for name in ("clip_fraction", "value", "return")},
            "explained_variance": explained_variance(totals, tokens),
            **counts,
        }

    def _values_of(self, microbatch: Pack) -> Tensor:
        return token_values(self.model, microbatch)

    def _fold_pack(self, targets: ValueTargets, microbatch: Pack) -> None:
        values_T = self._values_of(microbatch)
        device = values_T.device
        terms = self.algorithm.loss(
            values_T,
            column_of(targets.old_values_T, microbatch, device),
            column_of(targets.returns_T, microbatch, device),
            sent(microbatch.lengths_R, device),
        )
        self.learn(terms, microbatch)
