"""The sections of a reasoning recipe on algorithms: `algorithm`, and `critic` for PPO."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from m2flow.errors import UserError
from m2flow.workloads.common import recipe as common
from m2flow.workloads.common.recipe import (
    LARGEST,
    Count,
    Natural,
    NonNegative,
    Positive,
    Section,
    Share,
)

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr-grpo": {"scale": "none", "aggregation": "sequence-mean-token-sum"},
    "dapo": {"clip_high": 0.28, "aggregation": "token-mean", "equal_groups": "drop"},
    "gspo": {"ratio_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {
        "surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0, "aggregation": "token-mean",
    },
    "rloo": {"scale": "none", "aggregation": "sequence-mean-token-sum", "kl_in": "reward"},
    "reinforce++": {"scale": "step", "aggregation": "token-mean", "kl_in": "reward"},
    "reinforce++-baseline": {"scale": "step", "aggregation": "token-mean", "kl_estimator": "k2"},
    "ppo": {"scale": "step", "aggregation": "token-mean"},
}  # fmt: skip
"""By name what sets it apart from GRPO as first published; a recipe may say otherwise."""

OF_GROUPS = tuple(name for name in ALGORITHMS if name not in ("ppo", "reinforce++"))
"""Algorithms that compare an answer with the others to its prompt."""

KEYS_OF_ALGORITHMS = {
    "equal_groups": OF_GROUPS,
    "further_draws": OF_GROUPS,
    "gamma": ("ppo", "reinforce++"),
    "lam": ("ppo",),
}
"""Keys of `algorithm` to the algorithms that read them, where not all do."""

FURTHER_DRAWS = {"dapo": 3}
"""By name how often other prompts are asked in place of those whose groups say nothing, where the
recipe does not say."""


class AlgorithmSection(Section):
    """Where advantages come from, and the loss; `name` sets what is not said (`ALGORITHMS`)."""

    name: Literal[
        "grpo", "dr-grpo", "dapo", "gspo", "cispo", "rloo", "reinforce++", "reinforce++-baseline",
        "ppo",
    ] = "grpo"  # fmt: skip
    scale: Literal["group", "step", "none"] = "group"
    equal_groups: Literal["keep", "drop"] = "keep"
    further_draws: Natural | None = None
    truncated: Literal["terminal", "drop", "bootstrap"] = "terminal"
    overlong_buffer: Natural = 0
    surrogate: Literal["clip", "cispo"] = "clip"
    clip_low: Annotated[float, Field(gt=0, le=1, strict=True)] = 0.2
    clip_high: Positive = 0.2
    dual_clip: Annotated[float, Field(gt=1, le=LARGEST, strict=True)] | None = None
    ratio_level: Literal["token", "sequence"] = "token"
    aggregation: Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum"] = (
        "sequence-mean-token-mean"
    )
    epochs: Count = 1
    gamma: Share = 1.0
    lam: Share = 0.95
    kl_coefficient: NonNegative = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    entropy_coefficient: NonNegative = 0.0
    gap_level: Literal["token", "sequence"] = "token"
    gap_rule: Literal["truncate", "mask"] = "truncate"
    gap_cap: Annotated[float, Field(ge=1, le=LARGEST, strict=True)] = 5.0

    @property
    def has_critic(self) -> bool:
        return self.name == "ppo"

    @property
    def kl_in_loss(self) -> float:
        """Weight of the KL term of the loss."""
        return self.kl_coefficient if self.kl_in == "loss" else 0.0

    @property
    def kl_estimator_in_loss(self) -> Literal["k1", "k2", "k3"]:
        """The estimator of the loss's KL term: k3, unless it is said."""
        return self.kl_estimator or "k3"

    @property
    def kl_in_reward(self) -> float:
        """Weight of the KL that is taken off rewards."""
        return self.kl_coefficient if self.kl_in == "reward" else 0.0

    @model_validator(mode="before")
    @classmethod
    def _as_the_name_says(cls, data: Any) -> Any:
        """Keys that are not said are those of the algorithm of that name."""
        name = data.get("name", "grpo") if isinstance(data, dict) else None
        return ALGORITHMS[name] | data if isinstance(name, str) and name in ALGORITHMS else data

    @model_validator(mode="after")
    def _keys_belong_to_the_algorithm(self) -> AlgorithmSection:
        common.refuse_keys_of_others(self, "algorithm.name", KEYS_OF_ALGORITHMS)
        if self.scale == "group" and self.name not in OF_GROUPS:
            raise UserError(
                f"the advantages of {self.name} have no groups",
                key="algorithm.scale",
                value="group",
                expected="step or none",
            )
        if self.scale == "group" and self.name == "rloo":
            raise UserError(
                "rloo divides advantages by no deviation of their group",
                key="algorithm.scale",
                value="group",
                expected="none or step",
            )
        if self.dual_clip is not None and self.surrogate == "cispo":
            raise UserError(
                "cispo bounds the weight of each token, and has no second clip",
                key="algorithm.dual_clip",
                value=self.dual_clip,
                hint="set algorithm.surrogate to clip, or take it out",
            )
        if self.further_draws and self.equal_groups == "keep":
            raise UserError(
                "other prompts are asked in place of groups that are dropped, and none is",
                key="algorithm.further_draws",
                value=self.further_draws,
                hint="set algorithm.equal_groups to drop",
            )
        if self.truncated == "bootstrap" and not self.has_critic:
            raise UserError(
                "only a critic says what would have come after a truncated answer",
                key="algorithm.truncated",
                value="bootstrap",
                hint="set algorithm.name to ppo, or take terminal or drop",
            )
        if self.kl_in_loss and self.kl_estimator == "k1":
            raise UserError(
                "the expected gradient of k1 is 0: as a term of the loss it does nothing",
                key="algorithm.kl_estimator",
                value="k1",
                expected="k2 or k3, or algorithm.kl_in: reward",
            )
        if self.kl_in_reward and self.kl_estimator in ("k2", "k3"):
            raise UserError(
                "in a reward the gradient of k1 is that of the KL, and of the others it is not",
                key="algorithm.kl_estimator",
                value=self.kl_estimator,
                expected="k1, or algorithm.kl_in: loss",
            )
        return self


class CriticSection(Section):
    """PPO's critic, which begins with the policy's weights and a head of zeros.

    What is not said here is as for the policy: `optimizer`, `training`, `minibatches`. The policy
    stands still for the first `warmup_steps` steps, in which the critic alone learns.
    """

    learning_rate: Positive = 1e-3
    value_clip: Positive | None = 0.2
    warmup_steps: Natural = 0
