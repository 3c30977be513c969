"""One run in which every other block of steps goes without something: what it costs a step.

Runs differ from each other by more than such costs, and so do minutes of one run; neighbours do
not. Four blocks that follow each other (with, without, with, without) are compared: the time of
those with over that of those without, and, for the noise floor, of the first two over the last two.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

BLOCK = 7
"""Steps that follow each other with it, or without."""

WITH, WITHOUT, WITH_TWIN, WITHOUT_TWIN = KINDS = ("with", "without", "with, twin", "without, twin")
"""What blocks are, in turn."""

CYCLE = len(KINDS) * BLOCK
"""Steps of blocks that are compared with each other."""

STEPS, QUICK_STEPS = 50 * CYCLE, 3 * CYCLE
"""Of a run whose blocks of steps differ."""


def has_it(step: int) -> bool:
    """Whether a step, counted from 0, is in a block with it."""
    return kind_of(step) in (WITH, WITH_TWIN)


def kind_of(step: int) -> str:
    """Of the block that a step is in, counted from 0."""
    return KINDS[step // BLOCK % len(KINDS)]


def compare(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What it adds to a step, as a share of it; rows are of steps, counted from 1, at their ends.

    The mean over cycles but for a tenth of them, the smallest and the largest; its standard error;
    and the same of what does not differ.
    """
    seconds: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(KINDS, 0.0))
    for before, after in pairwise(rows):
        step = int(after["step"]) - 1
        if step % BLOCK:  # not the first of a block, which belongs to both
            seconds[step // CYCLE][kind_of(step)] += after["time"] - before["time"]
    del seconds[max(seconds)]  # with the evaluation at the end
    cycles = list(seconds.values())
    costs = [(x[WITH] + x[WITH_TWIN]) / (x[WITHOUT] + x[WITHOUT_TWIN]) - 1 for x in cycles]
    floors = [(x[WITH] + x[WITHOUT]) / (x[WITH_TWIN] + x[WITHOUT_TWIN]) - 1 for x in cycles]
    error = statistics.stdev(costs) / len(costs) ** 0.5
    return {"cost": _middle(costs), "the same twice": _middle(floors), "standard error": error}


def _middle(values: Sequence[float]) -> float:
    """The mean without the smallest and the largest twentieth."""
    cut = len(values) // 20
    return statistics.fmean(sorted(values)[cut : len(values) - cut])
