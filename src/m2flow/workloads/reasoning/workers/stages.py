"""Stages that need no worker: pure functions of the columns of samples."""

from __future__ import annotations

from m2flow.flow import Batch, Ragged, stage
from m2flow.workloads.reasoning.workers.columns import lengths_of

OUTCOME = ("prompt", "text", "answer", "reward", "finish_reason", "num_tokens", "num_prompt_tokens")
"""Columns that a step hands back for metrics and samples; token ids stay on the lanes."""


@stage
def outcome(samples: Batch) -> Batch:
    """What is left of a sample when it has been used: figures and text, no token ids."""
    lengths = {
        "num_tokens": list(samples["completion_ids"].lengths),
        "num_prompt_tokens": list(samples["prompt_ids"].lengths),
    }
    return samples.with_columns(**lengths).only(*OUTCOME)


@stage(unit="group")
def group_advantage(samples: Batch, *, group_size: int, normalize_std: bool = True) -> Batch:
    """Adds `advantage`: the reward against the others of its group."""
    import torch

    from m2flow.algorithms.advantages import group_advantages

    rewards_B = torch.tensor(samples["reward"], dtype=torch.float64)
    advantages_B = group_advantages(rewards_B, group_size, normalize_std)
    return samples.with_columns(advantage=advantages_B)


@stage
def gae(scored: Batch, valued: Batch, *, gamma: float, lam: float) -> Batch:
    """Adds `values`, `advantages` and `returns`: generalised advantage estimation of each token.

    The reward of an answer comes with its last token, whether it ended by itself or was cut off.
    """
    import torch

    from m2flow.algorithms.gae import generalised_advantages, rewards_at_end

    values, lengths_B = valued["values"], lengths_of(scored, "completion_ids")
    rewards_B = torch.tensor(scored["reward"], dtype=torch.float64)
    rewards_T = rewards_at_end(rewards_B, lengths_B)
    found = generalised_advantages(rewards_T, values.values, lengths_B, gamma=gamma, lam=lam)
    return scored.with_columns(
        values=values,
        advantages=Ragged(found.advantages_T, values.lengths),
        returns=Ragged(found.returns_T, values.lengths),
    )


@stage(unit="step")
def whiten(samples: Batch) -> Batch:
    """Brings `advantages` to mean 0 and deviation 1 over all tokens of the step."""
    from m2flow.algorithms.gae import whitened

    advantages = samples["advantages"]
    return samples.with_columns(advantages=Ragged(whitened(advantages.values), advantages.lengths))
