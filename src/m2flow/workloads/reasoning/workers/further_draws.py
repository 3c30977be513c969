"""Groups that teach nothing, and the prompts that are asked in their place.

A group whose answers are all worth the same has no gradient. Each slot of a step therefore carries
spare prompts (`spares`), of which the next one takes the place of a prompt whose group says
nothing (DAPO's dynamic sampling, arXiv 2503.14476, section 3.2). What was asked before stays known
by its number and the share of its answers that were right (`tried`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from m2flow.flow import Batch, Ragged
from m2flow.workloads.reasoning.workers.columns import judged

NUMBER, SPARES, TRIED = "problem", "spares", "tried"
"""Columns: the number of a problem, the further ones of its slot, and those that were given up."""

OF_PROMPTS = ("prompt_ids", "prompt", "answer", "metadata", "seed", "before", NUMBER)
"""Columns that a prompt brings along, where there are such."""


def with_spares(prompts: Batch, count: int) -> Batch:
    """The prompts of a step, each with its spares.

    Args:
        prompts: of each slot the first, then its spares; with the column `problem`.
        count: spares of a slot.
    """
    firsts = range(0, len(prompts), 1 + count)
    # As numbers, which are small in a pickle where they are repeated.
    ids = [row.tolist() for row in prompts["prompt_ids"].rows()]
    others = prompts.without("prompt_ids")
    rows = [{**others.row(row), "prompt_ids": ids[row]} for row in range(len(prompts))]
    spares = [rows[first + 1 : first + 1 + count] for first in firsts]
    slots = Batch(prompts.select(list(firsts)).columns)
    return slots.with_columns(**{SPARES: spares, TRIED: [()] * len(slots)})


def equal_rows(samples: Batch, group_size: int) -> list[int]:
    """Rows of the groups of which nothing can be learned; groups are whole."""
    import torch

    from m2flow.algorithms.advantages import equal_groups

    rewards_B = torch.tensor(samples["reward"], dtype=torch.float64)
    rows: list[int] = equal_groups(rewards_B, group_size, judged(samples)).nonzero()[:, 0].tolist()
    return rows


def next_prompts(samples: Batch, group_size: int, draw: int) -> Batch:
    """The samples of whole groups with their next prompt in place of the one they had.

    Args:
        samples: scored; they keep the columns of their answers, which are of no use any more.
        group_size: samples of a group.
        draw: how many prompts were given up before this one.
    """
    import torch

    spares = [some[draw] for some in samples[SPARES]]
    columns: dict[str, Any] = {
        name: [spare[name] for spare in spares] for name in OF_PROMPTS if name in samples
    }
    columns["prompt_ids"] = Ragged.from_rows([torch.tensor(ids) for ids in columns["prompt_ids"]])
    given_up = zip(samples[TRIED], samples[NUMBER], rates(samples, group_size), strict=True)
    columns[TRIED] = [(*tried, (number, rate)) for tried, number, rate in given_up]
    return samples.with_columns(**columns)


def rates(samples: Batch, group_size: int) -> list[float | None]:
    """Of each sample the share of its group's answers that were right; None if none was judged.

    Right is a reward of 1, and a part of it a part.
    """
    worth = samples["verified"] if "verified" in samples else samples["reward"]
    found: list[float | None] = []
    for first in range(0, len(samples), group_size):
        group = range(first, first + group_size)
        known = [min(max(worth[row], 0.0), 1.0) for row in group if not samples["failure"][row]]
        found += [sum(known) / len(known) if known else None] * group_size
    return found


def put_back(samples: Batch, rows: Sequence[int], changed: Batch) -> Batch:
    """All samples in their order, those of some rows as they are now."""
    gone = set(rows)
    others = [row for row in range(len(samples)) if row not in gone]
    return Batch.concat([samples.select(others), changed]).take(samples.ids)
