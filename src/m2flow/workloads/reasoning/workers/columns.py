"""The columns of samples as the tensors that training takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from m2flow.flow import Batch
from m2flow.workloads.reasoning.workers.carried import OPEN

if TYPE_CHECKING:
    from torch import Tensor

    from m2flow.training.rollouts import TokenPairs, TokenRollouts
    from m2flow.training.values import ValueTargets


def token_pairs(samples: Batch) -> TokenPairs:
    """Prompts and answers; with `loss_mask` where the model did not draw all of an answer."""
    from m2flow.training.rollouts import TokenPairs

    prompts, completions = samples["prompt_ids"], samples["completion_ids"]
    return TokenPairs(
        prompts.values, lengths_of(samples, "prompt_ids"),
        completions.values, lengths_of(samples, "completion_ids"),
        samples["loss_mask"].values if "loss_mask" in samples else None,
    )  # fmt: skip


def one_longer(pairs: TokenPairs) -> TokenPairs:
    """The pairs with one token more behind each answer, the first of the vocabulary."""
    from m2flow.training.rollouts import TokenPairs

    longer_B = pairs.completion_lengths_B + 1
    ids_T = pairs.completion_ids_T.new_zeros(int(longer_B.sum()))
    ids_T[~last_places(longer_B)] = pairs.completion_ids_T
    return TokenPairs(pairs.prompt_ids_P, pairs.prompt_lengths_B, ids_T, longer_B)


def last_places(lengths_B: Tensor) -> Tensor:
    """Bool [T], the last place of each row; rows lie one behind the other, none of them empty."""
    import torch

    last_T = torch.zeros(int(lengths_B.sum()), dtype=torch.bool)
    last_T[lengths_B.cumsum(0) - 1] = True
    return last_T


def lengths_of(samples: Batch, column: str) -> Tensor:
    """[B] int64, the lengths of a ragged column's rows."""
    import torch

    return torch.tensor(samples[column].lengths, dtype=torch.int64)


def rollouts(samples: Batch, version: int | None = None) -> TokenRollouts:
    """What the policy learns from; `advantages` of tokens, or an `advantage` of each answer.

    Args:
        samples: with the `version` of the weights that drew the first token and the last, if known.
        version: of the weights that learn from them; None where it does not matter.
    """
    import torch

    from m2flow.training.rollouts import TokenRollouts

    pairs = token_pairs(samples)
    behaviour = samples["behaviour_logprobs"].values
    if "advantages" in samples:
        advantages_T = samples["advantages"].values
    else:
        advantages_T = torch.repeat_interleave(samples["advantage"], pairs.completion_lengths_B)
    some = TokenRollouts(pairs, behaviour, advantages_T.to(behaviour.dtype))
    if "old_logprobs" in samples:
        some = replace(some, old_logprobs_T=samples["old_logprobs"].values)
    if "reference_logprobs" in samples:
        some = replace(some, reference_logprobs_T=samples["reference_logprobs"].values)
    if version is not None and "version" in samples:
        fresh_B = torch.tensor([set(drew) == {version} for drew in samples["version"]]).bool()
        fresh_T = torch.repeat_interleave(fresh_B, pairs.completion_lengths_B)
        some = replace(some, fresh_T=fresh_T)
    return some


def value_targets(samples: Batch) -> ValueTargets:
    """What the critic learns from."""
    from m2flow.training.values import ValueTargets

    return ValueTargets(token_pairs(samples), samples["values"].values, samples["returns"].values)


def with_score(
    samples: Batch, name: str, scores: Sequence[float | None], why: Sequence[str], weight: float
) -> Batch:
    """Samples whose `reward` has one more part, and the score itself as `NAME_score`.

    What functions alone gave stays as `verified`; None where they failed.

    Args:
        samples: with `reward` and `failure`; one that has failed stays without a reward.
        name: who has scored.
        scores: of each sample; None where there is no score, so that the sample has no reward. One
            that is not finite is none.
        why: in words, where there is None; "" of a sample that is `unjudged`, which stays as it is.
        weight: of the score in the reward.
    """
    rewards, failures, kept = [], [], list(scores)
    for row, (reward, failure, score, reason) in enumerate(
        zip(samples["reward"], samples["failure"], scores, why, strict=True)
    ):
        if score is not None and not math.isfinite(score):
            kept[row], score, reason = None, None, f"gave {score!r}, no number"
        failures.append(failure or (f"reward {name} {reason}" if score is None and reason else ""))
        rewards.append(0.0 if failures[-1] or score is None else reward + weight * score)
    if "verified" in samples:
        of_functions = samples["verified"]
    else:
        given = zip(samples["reward"], samples["failure"], strict=True)
        of_functions = [None if failure else reward for reward, failure in given]
    columns = {
        "verified": of_functions,
        "reward": rewards,
        "failure": failures,
        f"{name}_score": kept,
    }
    return samples.with_columns(**columns)


def unjudged(samples: Batch) -> list[bool]:
    """Of each sample whether no model judges it: it has no reward, or goes on in a later step."""
    columns = samples["failure"], samples["finish_reason"]
    return [bool(why) or reason == OPEN for why, reason in zip(*columns, strict=True)]


def judged(samples: Batch) -> Tensor:
    """Bool [B], the samples that have a reward."""
    import torch

    if "failure" not in samples:
        return torch.ones(len(samples), dtype=torch.bool)
    return torch.tensor([not why for why in samples["failure"]], dtype=torch.bool)


def kept(samples: Batch, *, drop_truncated: bool) -> Tensor:
    """Bool [B], the samples that are trained on."""
    import torch

    kept_B = judged(samples)
    if "dropped" in samples:
        kept_B &= ~samples["dropped"]
    if drop_truncated:
        whole = [reason == "stop" for reason in samples["finish_reason"]]
        kept_B &= torch.tensor(whole, dtype=torch.bool)
    return kept_B


def kept_rows(samples: Batch, *, drop_truncated: bool) -> Tensor | None:
    """Int64, the samples that are trained on; None where that is all of them."""
    kept_B = kept(samples, drop_truncated=drop_truncated)
    return None if bool(kept_B.all()) else kept_B.nonzero()[:, 0]
