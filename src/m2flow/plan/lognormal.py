"""Output lengths as a log-normal distribution cut at the maximum: few answers are very long.

Two facts fix it: the mean that is seen (of the cut lengths), and the share of answers that reach
the maximum. Samples are drawn by stratified quantiles, so that a few hundred already have the tail.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

from m2flow.errors import UserError

_STANDARD = NormalDist()


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
        """Of the cut lengths, in closed form."""
        if self.spread == 0:
            return min(math.exp(self.log_median), float(self.maximum))
        z = (math.log(self.maximum) - self.log_median) / self.spread
        whole = math.exp(self.log_median + self.spread**2 / 2)
        return whole * _above(self.spread - z) + self.maximum * _above(z)

    def cut(self, maximum: int) -> LogNormalLengths:
        """The same answers under another limit."""
        return LogNormalLengths(self.log_median, self.spread, maximum)

    def quantile(self, share: float) -> float:
        """The length that a share of the answers does not exceed."""
        return min(math.exp(self.log_median + self.spread * _STANDARD.inv_cdf(share)), self.maximum)

    def sample(self, count: int, seed: int = 0) -> list[float]:
        """Lengths at the midpoints of `count` equal shares, in an order drawn from the seed."""
        lengths = [self.quantile((n + 0.5) / count) for n in range(count)]
        random.Random(seed).shuffle(lengths)
        return lengths

    @property
    def deviation(self) -> float:
        """Standard deviation of the cut lengths over their mean, by quantiles."""
        lengths = [self.quantile((n + 0.5) / 400) for n in range(400)]
        mean = sum(lengths) / len(lengths)
        return math.sqrt(sum((length - mean) ** 2 for length in lengths) / len(lengths)) / mean


def fit_lengths(mean: float, maximum: int, share_at_maximum: float = 0.02) -> LogNormalLengths:
    """The distribution of that mean whose given share reaches the maximum.

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
    low, high = 0.0, 20.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if with_spread(middle).mean > mean else (low, middle)
    return with_spread(high)
