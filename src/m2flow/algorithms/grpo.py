"""The loss of GRPO and its relatives, by composition only: every formula has a file of its own.

What makes a relative are the attributes; which ones make which, `ALGORITHMS` of the reasoning
workload's recipe says. Sources: the files composed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from m2flow.algorithms.aggregation import Aggregation, denominator, token_weights
from m2flow.algorithms.kl import KLEstimator, kl_per_token
from m2flow.algorithms.loss import LossTerms, token_sum
from m2flow.algorithms.policy_loss import (
    GapRule,
    RatioLevel,
    Surrogate,
    clipped_policy_loss,
    gap_weights,
)
from m2flow.errors import UserError

OUTLIER = math.log(2)
"""A token whose log-ratio is larger, either way, counts as an outlier."""


@dataclass(frozen=True)
class GRPOLoss:
    """Group-relative policy optimisation.

    Attributes:
        surrogate, clip_low, clip_high, dual_clip, ratio_level: see `clipped_policy_loss`.
        aggregation: how per-token losses become one number.
        token_budget: what "sequence-mean-token-sum" divides a sequence's sum by.
        kl_coefficient: weight of KL(policy || reference) in the loss; 0 needs no reference.
        kl_estimator: k2 or k3; the expected gradient of k1 is 0.
        entropy_coefficient: weight of an entropy bonus.
        gap_level, gap_rule, gap_cap: see `gap_weights`.
    """

    surrogate: Surrogate = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    ratio_level: RatioLevel = "token"
    aggregation: Aggregation = "sequence-mean-token-mean"
    token_budget: int = 1
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = "k3"
    entropy_coefficient: float = 0.0
    gap_level: RatioLevel = "token"
    gap_rule: GapRule = "truncate"
    gap_cap: float = 5.0

    def __post_init__(self) -> None:
        if self.needs_reference and self.kl_estimator == "k1":
            raise UserError(
                "the expected gradient of k1 is 0: as a term of the loss it does nothing",
                key="algorithm.kl_estimator",
                value="k1",
                expected="k2 or k3, or algorithm.kl_in: reward",
            )

    @property
    def figures(self) -> tuple[str, ...]:
        """Per-token figures of `loss`: sums over tokens, to be divided by the tokens."""
        figures: tuple[str, ...] = (
            "clip_fraction", "ratio", "ratio_outliers", "behaviour_kl", "logprob_gap",
        )  # fmt: skip
        figures += ("gap_masked",) if self.gap_rule == "mask" else ()
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

    def denominator(self, lengths_B: Tensor) -> int:
        """What the un-normalised loss of all sequences is divided by."""
        return denominator(lengths_B, self.aggregation, self.token_budget)

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
        """Surrogate + kl_coefficient * KL - entropy_coefficient * entropy, weighted.

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
        weights_T = None
        if behaviour_logprobs_T is not None:
            weights_T = gap_weights(
                old_logprobs_T,
                behaviour_logprobs_T,
                lengths_B,
                level=self.gap_level,
                rule=self.gap_rule,
                cap=self.gap_cap,
            )
        policy = clipped_policy_loss(
            logprobs_T,
            old_logprobs_T,
            advantages_T,
            lengths_B,
            weights_T=weights_T,
            surrogate=self.surrogate,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            ratio_level=self.ratio_level,
        )
        loss_T = policy.loss_T
        drift_T = policy.log_ratio_T  # from the policy that drew the tokens
        if behaviour_logprobs_T is not None:
            drift_T = (logprobs_T.detach() - behaviour_logprobs_T).to(drift_T.dtype)
        # KL(behaviour || policy): its tokens are the behaviour policy's, hence the swapped sides.
        behaviour_kl_T = kl_per_token(-drift_T, torch.zeros_like(drift_T))
        sums = {
            "clip_fraction": token_sum(policy.clipped_T),
            "ratio": token_sum(policy.ratio_T),
            "ratio_outliers": token_sum(policy.log_ratio_T.abs() > OUTLIER),
            "behaviour_kl": token_sum(behaviour_kl_T),
            "logprob_gap": token_sum(drift_T.abs()),
        }
        if self.gap_rule == "mask":
            whole_T = torch.ones_like(policy.ratio_T) if weights_T is None else weights_T
            sums["gap_masked"] = token_sum(whole_T == 0)
        if self.needs_reference:
            assert reference_logprobs_T is not None
            kl_T = kl_per_token(logprobs_T, reference_logprobs_T, self.kl_estimator)
            loss_T = loss_T + self.kl_coefficient * kl_T
            sums["kl"] = token_sum(kl_T)
        if self.needs_entropy:
            assert entropy_T is not None
            loss_T = loss_T - self.entropy_coefficient * entropy_T
            sums["entropy"] = token_sum(entropy_T)
        shares_T = token_weights(lengths_B, self.aggregation, dtype=loss_T.dtype)
        return LossTerms((shares_T * loss_T).sum(), sums)
