"""Lengths of answers: a log-normal distribution that is cut at the maximum.

Two facts fix the distribution: the mean that is seen (of the cut lengths), and the share of answers
that reach the maximum. Samples are drawn by stratified quantiles, so that a few hundred have the
tail.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist, fmean, pstdev

from m2flow.errors import UserError

_STANDARD = NormalDist()

WIDEST = 1.5
"""Standard deviation of the logarithm of lengths that are assumed, at most: two answers of three
are within 4.5 times the median. In the run that prices are fitted to it is 0.8."""


def _above(z: float) -> float:
    """The share of a standard normal above z, exact far out too."""
    return math.erfc(z / math.sqrt(2)) / 2


@dataclass(frozen=True, slots=True)
class LogNormalLengths:
    """`min(exp(log_median + spread * z), maximum)` tokens, z standard normal.

    Attributes:
        log_median: natural logarithm of the median before cutting.
        spread: standard deviation of the logarithm.
        maximum: where answers are cut off.
    """

    log_median: float
    spread: float
    maximum: int

    @property
    def mean(self) -> float:
        """Return the mean of the cut lengths, in closed form."""
        if self.spread == 0:
            return min(math.exp(self.log_median), float(self.maximum))
        z = (math.log(self.maximum) - self.log_median) / self.spread
        whole = math.exp(self.log_median + self.spread**2 / 2)
        return whole * _above(self.spread - z) + self.maximum * _above(z)

    def above(self, tokens: float) -> float:
        """Return the share of the answers before cutting that are longer than so many tokens."""
        if self.spread == 0:
            return float(math.log(tokens) < self.log_median)
        return _above((math.log(tokens) - self.log_median) / self.spread)

    def cut(self, maximum: int) -> LogNormalLengths:
        """Return the same answers under another limit."""
        return LogNormalLengths(self.log_median, self.spread, maximum)

    def quantile(self, share: float) -> float:
        """Return the length that a share of the answers does not exceed."""
        return min(math.exp(self.log_median + self.spread * _STANDARD.inv_cdf(share)), self.maximum)

    def stratified(self, count: int) -> list[float]:
        """Return the lengths at the midpoints of `count` equal shares, the shortest first."""
        return [self.quantile((n + 0.5) / count) for n in range(count)]

    def sample(self, count: int, seed: int = 0) -> list[float]:
        """Return the stratified lengths in an order that the seed alone decides."""
        lengths = self.stratified(count)
        random.Random(seed).shuffle(lengths)
        return lengths


@dataclass(frozen=True)
class Answers:
    """What is generated and trained on: prompts of one length, and answers; all in tokens."""

    prompt_tokens: float
    lengths: LogNormalLengths

    @property
    def tokens(self) -> float:
        """Return the mean of an answer and its prompt."""
        return self.prompt_tokens + self.lengths.mean

    @property
    def longest(self) -> int:
        """Return the tokens of the longest answer and its prompt."""
        return math.ceil(self.prompt_tokens + self.lengths.maximum)

    @cached_property
    def deviation(self) -> float:
        """Return the standard deviation of an answer with its prompt, over the mean."""
        return pstdev(self.lengths.stratified(400)) / self.tokens

    @cached_property
    def cubes(self) -> float:
        """Return the mean cube of an answer with its prompt, over the cube of the mean."""
        whole = (self.prompt_tokens + length for length in self.lengths.stratified(400))
        return fmean((tokens / self.tokens) ** 3 for tokens in whole)

    @property
    def context(self) -> float:
        """Return the tokens that a token attends to in the mean."""
        return self.context_of(1.0)

    def computed(self, prompts: float) -> float:
        """Return the tokens that are computed of an answer where so much of its prompt is."""
        return self.tokens - (1 - prompts) * self.prompt_tokens

    def context_of(self, prompts: float) -> float:
        """Return the tokens that each of these attends to in the mean."""
        whole = self.tokens**2 * (1 + self.deviation**2)
        return (whole - (1 - prompts) * self.prompt_tokens**2) / (2 * self.computed(prompts))


def fit_lengths(mean: float, maximum: int, share_at_maximum: float = 0.02) -> LogNormalLengths:
    """Find the distribution of a given mean of which a given share reaches the maximum.

    Args:
        mean: tokens of an answer, cut ones counted as they are.
        maximum: tokens at which answers are cut.
        share_at_maximum: of the answers that reach it; below a half.

    Raises:
        UserError: no such distribution, as when the mean is not below the maximum.
    """
    least = share_at_maximum * maximum
    if not 0 < share_at_maximum < 0.5 or not 1.01 * least < mean < maximum:
        raise UserError(
            f"no lengths of this mean reach their maximum in {share_at_maximum:g} of all answers",
            key="lengths.mean",
            value=mean,
            expected=f"more than {1.01 * least:g} and less than {maximum}",
        )
    z = _STANDARD.inv_cdf(1 - share_at_maximum)

    def with_spread(spread: float) -> LogNormalLengths:
        return LogNormalLengths(math.log(maximum) - z * spread, spread, maximum)

    # The wider, the lower the median below the fixed maximum: the mean falls with the spread.
    return with_spread(_solved(lambda spread: with_spread(spread).mean > mean, 0.0, 20.0))


def lengths_below(mean: float, maximum: int, share_at_maximum: float = 0.02) -> LogNormalLengths:
    """Find the distribution of `fit_lengths`, or where it is wider than `WIDEST` or there is none,
    one of that spread, of which fewer answers reach the maximum.

    Raises:
        UserError: the mean is not above 0 and below the maximum.
    """
    if not 0 < mean < maximum:
        raise UserError(
            "no lengths have this mean under their maximum",
            key="lengths.mean",
            value=mean,
            expected=f"more than 0 and less than {maximum}",
        )

    def with_median(log_median: float) -> LogNormalLengths:
        return LogNormalLengths(log_median, WIDEST, maximum)

    low = math.log(mean) - WIDEST**2  # whose mean is lower even before cutting
    found = with_median(
        _solved(lambda log_median: with_median(log_median).mean < mean, low, low + 100)
    )
    if found.above(maximum) < share_at_maximum:
        return found
    return fit_lengths(mean, maximum, share_at_maximum)


def _solved(falls_short: Callable[[float], bool], low: float, high: float) -> float:
    """Return where a condition that holds at first ends to hold."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if falls_short(middle) else (low, middle)
    return high
