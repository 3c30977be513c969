"""GRPO and its near relatives, by composition only: every formula lives in a file of its own.

Defaults are DAPO's choices (clip-higher, token-mean, no KL term). `sequence-mean-token-mean` with
a KL term gives the first paper's GRPO, `ratio_level="sequence"` GSPO, and
`sequence-mean-token-sum` without `normalize_std` Dr.GRPO. Sources: the files composed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from m2flow.algorithms.aggregation import Aggregation, token_weights
from m2flow.algorithms.kl import KLEstimator, kl_per_token
from m2flow.algorithms.loss import LossTerms, token_sum
from m2flow.algorithms.policy_loss import RatioLevel, clipped_policy_loss


@dataclass(frozen=True)
class GRPOLoss:
    """Group-relative policy optimisation.

    Attributes:
        clip_low, clip_high: how far below and above 1 the ratio may move.
        dual_clip: bound of the loss for negative advantages, or None.
        ratio_level: one ratio a token, or one a sequence.
        aggregation: how per-token losses become one number.
        kl_coefficient: weight of KL(policy || reference) in the loss; 0 needs no reference.
        kl_estimator: k1, k2 or k3.
        entropy_coefficient: weight of an entropy bonus.
        weight_cap: largest importance weight of tokens that another policy drew than the one that
            the ratio is taken against.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    ratio_level: RatioLevel = "token"
    aggregation: Aggregation = "token-mean"
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = "k3"
    entropy_coefficient: float = 0.0
    weight_cap: float = 5.0

    @property
    def figures(self) -> tuple[str, ...]:
        """Per-token figures of `loss`: sums over tokens, to be divided by the tokens."""
        figures: tuple[str, ...] = ("clip_fraction", "ratio", "behaviour_kl", "logprob_gap")
        figures += ("kl",) if self.needs_reference else ()
        return figures + (("entropy",) if self.needs_entropy else ())

    @property
    def needs_reference(self) -> bool:
        return self.kl_coefficient != 0.0

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coefficient != 0.0

    @property
    def zero_advantage_is_idle(self) -> bool:
        """Whether a sequence whose advantages are all zero has no gradient."""
        return not (self.needs_reference or self.needs_entropy)

    def loss(
        self,
        logprobs_T: Tensor,
        old_logprobs_T: Tensor,
        advantages_T: Tensor,
        lengths_B: Tensor,
        *,
        behaviour_logprobs_T: Tensor | None = None,
        reference_logprobs_T: Tensor | None = None,
        entropy_T: Tensor | None = None,
    ) -> LossTerms:
        """Clipped surrogate + kl_coefficient * KL - entropy_coefficient * entropy, weighted.

        Un-normalised, of some whole sequences.

        Args:
            logprobs_T: under the policy that learns, with gradient.
            old_logprobs_T: under the policy that the ratio is taken against.
            advantages_T: constant.
            lengths_B: [B] int64, tokens of each sequence; they sum to T.
            behaviour_logprobs_T: under the policy that drew the tokens, where that is not the
                policy of `old_logprobs_T`; None where it is.
            reference_logprobs_T: under the reference model; needed if `needs_reference`.
            entropy_T: of the policy at the token, with gradient; needed if `needs_entropy`.
        """
        policy = clipped_policy_loss(
            logprobs_T,
            old_logprobs_T,
            advantages_T,
            lengths_B,
            behaviour_logprobs_T=behaviour_logprobs_T,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            ratio_level=self.ratio_level,
            weight_cap=self.weight_cap,
        )
        loss_T = policy.loss_T
        # KL(behaviour || policy): its tokens are the behaviour policy's, hence the swapped sides.
        behaviour_kl_T = kl_per_token(-policy.log_ratio_T, torch.zeros_like(policy.log_ratio_T))
        sums = {
            "clip_fraction": token_sum(policy.clipped_T),
            "ratio": token_sum(policy.ratio_T),
            "behaviour_kl": token_sum(behaviour_kl_T),
            "logprob_gap": token_sum(policy.log_ratio_T.abs()),
        }
        if self.needs_reference:
            assert reference_logprobs_T is not None
            kl_T = kl_per_token(logprobs_T, reference_logprobs_T, self.kl_estimator)
            loss_T = loss_T + self.kl_coefficient * kl_T
            sums["kl"] = token_sum(kl_T)
        if self.needs_entropy:
            assert entropy_T is not None
            loss_T = loss_T - self.entropy_coefficient * entropy_T
            sums["entropy"] = token_sum(entropy_T)
        weights_T = token_weights(lengths_B, self.aggregation, dtype=loss_T.dtype)
        return LossTerms((weights_T * loss_T).sum(), sums)
