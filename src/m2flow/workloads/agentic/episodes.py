"""Trajectories as items: what a trajectory holds, how it begins, and how it grows by a turn.

Columns, beside those of a problem:
  completion_ids (Ragged int64)       all that stands behind the prompt
  loss_mask (Ragged bool)             which of it the model drew
  behaviour_logprobs (Ragged)         of these tokens; 0 of others
  turns (list of lists of Turn)       where each turn of the model ends, and what was called
  version                             of the weights that drew the first token and the last
  greedy, done (bool), finish_reason, tool_failure
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from m2flow.flow import Batch, Ragged, stage


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the model, and the answers of the tools that it called.

    Attributes:
        begin, end: its tokens, into `completion_ids`.
        tools: what it called, in order.
        malformed: how many calls were none that could be carried out.
        errors: how many calls were wrong, the malformed ones among them.
        cut: how many answers were too long.
        seconds: that the calls took, one after the other.
        result_end: where the answers end; `end` where nothing was called.
    """

    begin: int
    end: int
    tools: tuple[str, ...] = ()
    malformed: int = 0
    errors: int = 0
    cut: int = 0
    seconds: float = 0.0
    result_end: int = 0


@stage(expands="samples_per_prompt")
def begin_episodes(prompts: Batch, *, samples_per_prompt: int, greedy: bool) -> Batch:
    """Trajectories of each prompt that have no token yet; they differ in their seeds."""
    import torch

    from m2flow.algorithms.sampling import derive_seed

    episodes = prompts.repeat(samples_per_prompt)
    count = len(episodes)
    seeds = zip(episodes.ids, episodes["seed"], strict=True)

    def nothing(dtype: torch.dtype) -> Ragged:
        return Ragged(torch.empty(0, dtype=dtype), [0] * count)

    return episodes.with_columns(
        seed=[derive_seed(int(seed), item % samples_per_prompt) for item, seed in seeds],
        completion_ids=nothing(torch.int64),
        loss_mask=nothing(torch.bool),
        behaviour_logprobs=nothing(torch.float32),
        turns=[[] for _ in range(count)],
        version=[None] * count,
        greedy=torch.full((count,), greedy),
        done=torch.zeros(count, dtype=torch.bool),
        finish_reason=[""] * count,
        tool_failure=[""] * count,
    )


def with_turns(episodes: Batch, drawn: Sequence[Any]) -> Batch:
    """Trajectories, each with a turn more.

    Args:
        episodes: the trajectories.
        drawn: of each the `Completion` that is its turn.
    """
    import torch

    lengths = episodes["completion_ids"].lengths
    added = [(one.token_ids, torch.ones(len(one.token_ids), dtype=torch.bool), one.logprobs)
             for one in drawn]  # fmt: skip
    turns = [
        [*before, Turn(length, length + len(one.token_ids), result_end=length + len(one.token_ids))]
        for before, length, one in zip(episodes["turns"], lengths, drawn, strict=True)
    ]
    versions = [
        one.versions if before is None else (before[0], one.versions[1])
        for before, one in zip(episodes["version"], drawn, strict=True)
    ]
    return appended(episodes, added).with_columns(
        turns=turns, version=versions, finish_reason=[one.finish_reason for one in drawn]
    )


def appended(episodes: Batch, added: Sequence[tuple[Any, Any, Any]]) -> Batch:
    """Trajectories with more tokens, each with its mask and log-probability."""
    import torch

    names = ("completion_ids", "loss_mask", "behaviour_logprobs")
    columns = {}
    for place, name in enumerate(names):
        rows = zip(episodes[name].rows(), added, strict=True)
        # A float64 engine's log-probabilities stay so.
        joined = [torch.cat([row.to(more[place].dtype), more[place]]) for row, more in rows]
        columns[name] = Ragged.from_rows(joined)
    return episodes.with_columns(**columns)
