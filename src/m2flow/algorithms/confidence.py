"""Intervals that hold what was estimated with 95 % confidence."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev

DEVIATIONS = 1.96
"""Standard deviations to either side that hold 95 % of a normal distribution."""


def wilson(share: float, count: float) -> tuple[float, float]:
    """The interval of a probability, from trials that depend on nothing (Wilson 1927).

    Args:
        share: of the trials that succeeded.
        count: trials.
    """
    if not count:
        return 0.0, 1.0
    square = DEVIATIONS**2 / count
    middle = (share + square / 2) / (1 + square)
    reach = DEVIATIONS / (1 + square) * sqrt(share * (1 - share) / count + square / (4 * count))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def of_shares(shares: Sequence[float]) -> tuple[float, float]:
    """The interval of the mean of shares, each of trials that depend on each other.

    Answers to one problem are such trials: what varies is the share of right ones from problem to
    problem (clustered standard errors; Miller 2024, arXiv 2411.00640, equation 4). Shares that
    are all 0 or 1 are single trials, and have the interval of Wilson 1927. So have shares that are
    all the same, as if each were one trial: their deviation of 0 says nothing of other problems.
    """
    if len(set(shares)) < 2 or set(shares) <= {0.0, 1.0}:
        return wilson(fmean(shares), len(shares)) if shares else (0.0, 1.0)
    reach = DEVIATIONS * stdev(shares) / sqrt(len(shares))
    return max(0.0, fmean(shares) - reach), min(1.0, fmean(shares) + reach)
