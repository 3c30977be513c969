"""Stages that need no worker: pure functions of the columns of samples."""

from __future__ import annotations

from typing import Any

from m2flow.flow import Batch, Ragged, stage
from m2flow.workloads.reasoning.workers.carried import BEGUN, begun_answers, carried_groups
from m2flow.workloads.reasoning.workers.columns import judged, kept, lengths_of, token_pairs

OUTCOME = (
    "prompt", "text", "answer", "reward", "failure", "finish_reason", "num_tokens",
    "num_prompt_tokens",
)  # fmt: skip
"""Columns that a step hands back for metrics and samples; token ids stay on the lanes."""


MORE_OUTCOME = (
    "version", "turns", "verified", "shaped", "reward_model_score", "judge_score", "judge",
    "problem", "tried",
)  # fmt: skip
"""Columns that are handed back where there are such."""


@stage
def outcome(samples: Batch) -> Batch:
    """What is left of a sample when it has been used: figures and text, no token ids.

    Has the columns `OUTCOME`, those of `MORE_OUTCOME` that there are, and `advantage` where there
    is one, or one for each token. Of tokens those are counted that the model drew. A sample that is
    carried over keeps its tokens (`BEGUN`).
    """
    more: dict[str, Any] = {
        "num_tokens": token_pairs(samples).learned_lengths_B.tolist(),
        "num_prompt_tokens": list(samples["prompt_ids"].lengths),
    }
    if "failure" not in samples:  # of a verifier that never fails
        more["failure"] = [""] * len(samples)
    also = [name for name in MORE_OUTCOME if name in samples]
    if "carried" in samples:
        more[BEGUN] = begun_answers(samples)
        also.append(BEGUN)
    left = samples.with_columns(**more).only(*OUTCOME, *also)
    if "advantages" in samples:  # of tokens: their mean
        rows = samples["advantages"].rows()
        return left.with_columns(advantage=[float(row.sum()) / max(1, len(row)) for row in rows])
    if "advantage" in samples:
        return left.with_columns(advantage=samples["advantage"].tolist())
    return left


@stage
def shape_reward(samples: Batch, *, max_tokens: int, buffer: int, kl: float) -> Batch:
    """Adds `shaped`: the reward less what an overlong answer, and drift, cost.

    Args:
        samples: with `reference_logprobs` where `kl` is not 0.
        max_tokens, buffer: see `shaping.overlong_penalty`; a buffer of 0 costs nothing.
        kl: weight of the KL to the reference, summed over the answer.
    """
    import torch

    from m2flow.algorithms.shaping import overlong_penalty, sums_of_sequences

    rewards_B = torch.tensor(samples["reward"], dtype=torch.float64)
    lengths_B = lengths_of(samples, "completion_ids")
    if buffer:
        rewards_B = rewards_B + overlong_penalty(lengths_B, max_tokens, buffer)
    if kl:
        rewards_B = rewards_B + sums_of_sequences(_drift(samples, kl), lengths_B)
    return samples.with_columns(shaped=rewards_B)


@stage(unit="group")
def group_advantage(
    samples: Batch,
    *,
    group_size: int,
    leave_one_out: bool = False,
    normalize_std: bool = True,
    drop_equal: bool = False,
    carries_over: bool = False,
) -> Batch:
    """Adds `advantage`: the reward against the others of its group that could be judged.

    Args:
        samples: whole groups, one after another.
        group_size: samples of a group.
        leave_one_out: against the mean of the others, without itself, and nothing is divided.
        normalize_std: whether to divide by the group's deviation.
        drop_equal: nothing is trained on groups whose rewards are all the same (`dropped`): what
            functions and models gave, with the rewards of turns where there are some; an overlong
            penalty and a KL set no two answers apart here.
        carries_over: nothing is trained on groups with an answer that goes on in a later step
            (`dropped`, `carried`).
    """
    import torch

    from m2flow.algorithms.advantages import (
        equal_groups,
        group_advantages,
        leave_one_out_advantages,
    )

    rewards_B, judged_B = _rewards(samples), judged(samples)
    if leave_one_out:
        advantages_B = leave_one_out_advantages(rewards_B, group_size, judged_B)
    else:
        advantages_B = group_advantages(rewards_B, group_size, normalize_std, judged_B)
    samples = samples.without("spares").with_columns(advantage=advantages_B)  # no use any more
    dropped_B = torch.zeros(len(samples), dtype=torch.bool)
    if drop_equal:
        given_B = rewards_B
        if "turn_rewards" not in samples:
            given_B = torch.tensor(samples["reward"], dtype=torch.float64)
        dropped_B = equal_groups(given_B, group_size, judged_B)
    if carries_over:
        carried = carried_groups(samples, group_size)
        dropped_B = dropped_B | torch.tensor(carried, dtype=torch.bool)
        samples = samples.with_columns(carried=carried)
    return samples.with_columns(dropped=dropped_B) if drop_equal or carries_over else samples


def _rewards(samples: Batch) -> Any:
    """float64 [B], shaped where they have been."""
    import torch

    if "shaped" in samples:
        return samples["shaped"]
    return torch.tensor(samples["reward"], dtype=torch.float64)


@stage
def gae(scored: Batch, valued: Batch, *, gamma: float, lam: float, kl: float = 0.0) -> Batch:
    """Adds `values`, `advantages` and `returns`: generalised advantage estimation of each token.

    The reward of an answer comes with its last token, the KL to the reference with each token.
    Behind the last token nothing is expected, but where `valued` has `beyond`, what a critic
    expects behind an answer that was cut off.
    """
    from m2flow.algorithms.gae import generalised_advantages, rewards_at_end

    values, lengths_B = valued["values"], lengths_of(scored, "completion_ids")
    rewards_T = _token_rewards(scored, kl)
    if "beyond" in valued:
        rewards_T = rewards_T + gamma * rewards_at_end(valued["beyond"].double(), lengths_B)
    found = generalised_advantages(rewards_T, values.values, lengths_B, gamma=gamma, lam=lam)
    return scored.with_columns(
        values=values,
        advantages=Ragged(found.advantages_T, values.lengths),
        returns=Ragged(found.returns_T, values.lengths),
    )


@stage
def reward_to_go(samples: Batch, *, gamma: float, kl: float) -> Batch:
    """Adds `advantages`: of each token the rewards that come with it and after it.

    The reward of an answer comes with its last token, the KL to the reference with each token.

    Source: REINFORCE++ (arXiv 2501.03262), equation 6.
    """
    import torch

    from m2flow.algorithms.gae import generalised_advantages

    lengths_B, rewards_T = lengths_of(samples, "completion_ids"), _token_rewards(samples, kl)
    nothing_T = torch.zeros_like(rewards_T)
    found = generalised_advantages(rewards_T, nothing_T, lengths_B, gamma=gamma, lam=1.0)
    return samples.with_columns(advantages=Ragged(found.advantages_T, lengths_B.tolist()))


def _token_rewards(samples: Batch, kl: float) -> Any:
    """float64 [T]: an answer's reward at its last token, less the KL that each token costs."""
    from m2flow.algorithms.gae import rewards_at_end

    rewards_T = rewards_at_end(_rewards(samples), lengths_of(samples, "completion_ids"))
    return rewards_T + _drift(samples, kl) if kl else rewards_T


def _drift(samples: Batch, kl: float) -> Any:
    """[T] what drift from the reference costs each token.

    A log-probability that is not finite costs nothing here: the learner finds it in its column, and
    leaves the step out.
    """
    import torch

    from m2flow.algorithms.shaping import drift_penalty

    drawn, reference = samples["behaviour_logprobs"], samples["reference_logprobs"]
    drift_T = drift_penalty(drawn.values, reference.values, kl)
    return torch.where(drift_T.isfinite(), drift_T, 0.0)


@stage(unit="step")
def whiten(samples: Batch, *, drop_truncated: bool = False) -> Batch:
    """Brings `advantages` to mean 0 and deviation 1 over all tokens that are trained on.

    An `advantage` of each answer is that of each of its tokens.

    Args:
        samples: all of the step.
        drop_truncated: nothing is trained on answers that were cut off.
    """
    import torch

    from m2flow.algorithms.gae import whitened

    lengths_B = lengths_of(samples, "completion_ids")
    if "advantages" in samples:
        advantages_T = samples["advantages"].values
    else:
        advantages_T = torch.repeat_interleave(samples["advantage"], lengths_B)
    kept_B = kept(samples, drop_truncated=drop_truncated)
    kept_T = torch.repeat_interleave(kept_B, lengths_B)
    if "loss_mask" in samples:
        kept_T &= samples["loss_mask"].values
    white_T = torch.zeros_like(advantages_T)
    white_T[kept_T] = whitened(advantages_T[kept_T])
    return samples.with_columns(advantages=Ragged(white_T, lengths_B.tolist()))
