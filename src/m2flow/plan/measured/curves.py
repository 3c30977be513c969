"""Monotone curves through noisy measurements.

Isotonic regression (pool adjacent violators; Ayer et al. 1955) over typical values of what was
measured at each size, and least squares with coefficients that are not negative, for curves that
are only seen through their sums. Knows nothing of stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, stdev

from m2flow.plan.profile import Piecewise

TRIM = 10
"""One of so many values is left out at either end."""

FEW = 4
"""Of fewer values all count for their spread."""

NORMAL = 1.4826
"""Standard deviation of a normal distribution, in median distances from its median."""

NEAR = 1.1
"""Sizes that are less than so many times apart are one point of a curve."""

TINY = 1e-11
"""What counts as nothing beside 1, in sums of many products."""


@dataclass(frozen=True)
class Point:
    """What was measured at one size.

    Attributes:
        size: items, replicas, or whatever is counted.
        seconds: the typical value.
        spread: standard deviation of single values, relative to it.
        count: how many there were.
    """

    size: float
    seconds: float
    spread: float
    count: int

    @property
    def error(self) -> float:
        """Standard error of the typical value, relative; that of one value alone is its size."""
        return self.spread / self.count**0.5 if self.count > 1 else 1.0


def typical(values: Sequence[float]) -> float:
    """The mean of the values, but for the very smallest and largest of many.

    A step is a sum of calls, so their mean predicts it, and not their median: a stage may have next
    to nothing to do in most calls and much in a few.
    """
    cut = round(len(values) / TRIM)
    kept = sorted(values)[cut : len(values) - cut]
    return fmean(kept)


def points(samples: Sequence[tuple[float, float]]) -> list[Point]:
    """Measurements (size, seconds) by size, sizes that are near each other together."""
    return [_point(group) for group in _by_size(samples)]


def _by_size(samples: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    groups: list[list[tuple[float, float]]] = []
    for sample in sorted(samples):
        if groups and sample[0] < NEAR * groups[-1][0][0]:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups


def _point(group: Sequence[tuple[float, float]]) -> Point:
    cut = round(len(group) / TRIM)
    kept = sorted(group, key=lambda one: one[1])[cut : len(group) - cut]
    seconds = [value for _, value in group]
    return Point(fmean(size for size, _ in kept), typical(seconds), _spread(seconds), len(group))


def _spread(values: Sequence[float]) -> float:
    """Standard deviation relative to the median; of many, that of the bulk of them."""
    middle = median(values)
    if len(values) < 2 or not middle:
        return 0.0
    if len(values) < FEW:
        return stdev(values) / middle
    return NORMAL * median(abs(value - middle) for value in values) / middle


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The closest sequence that does not fall, by weighted least squares."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, wa, na), (b, wb, nb) = blocks[-2:]
            blocks[-2:] = [((a * wa + b * wb) / (wa + wb), wa + wb, na + nb)]
    return [value for value, _, count in blocks for _ in range(count)]


def monotone(measured: Sequence[Point]) -> Piecewise:
    """The curve that does not fall and comes closest to the points."""
    values = isotonic([one.seconds for one in measured], [one.count for one in measured])
    return Piecewise(tuple((one.size, y) for one, y in zip(measured, values, strict=True)))


def envelope(samples: Sequence[tuple[float, float]]) -> Piecewise:
    """The lowest curve that does not fall and above which nothing was measured.

    Sizes that are near each other count as their smallest.
    """
    reached, found = 0.0, []
    for group in _by_size(samples):
        reached = max(reached, *(value for _, value in group))
        found.append((group[0][0], reached))
    return Piecewise(tuple(found))


def spread_of_one(measured: Sequence[Point]) -> float:
    """Relative standard deviation between items, from that between calls that take several.

    The mean of n items that are unlike each other varies by the square root of n less.
    """
    known = [one for one in measured if one.count >= FEW and one.size > 0]
    return float(median(one.spread * one.size**0.5 for one in known)) if known else 0.0


def residual_error(samples: Sequence[tuple[float, float]], curve: Piecewise) -> float:
    """Standard error of a curve, relative: how far single measurements lie from it."""
    ratios = [seconds / curve.at(size) - 1.0 for size, seconds in samples if curve.at(size) > 0]
    if len(ratios) < 2:
        return 0.0
    cut = round(len(ratios) / TRIM)
    kept = sorted(ratios)[cut : len(ratios) - cut]
    return float(fmean(r * r for r in kept) ** 0.5 / len(kept) ** 0.5)


class Rising:
    """A curve that does not fall as a sum of coefficients that are not negative.

    The value at the first knot, then what each further knot adds; linear in between, flat outside.

    Args:
        knots: rising.
    """

    def __init__(self, knots: Sequence[float]) -> None:
        self.knots = tuple(knots)

    def __len__(self) -> int:
        return len(self.knots)

    def row(self, x: float) -> list[float]:
        """By how much each coefficient counts at x."""
        parts = ((x - a) / (b - a) for a, b in pairwise(self.knots))
        return [1.0, *(min(1.0, max(0.0, part)) for part in parts)]

    def curve(self, coefficients: Sequence[float]) -> Piecewise:
        """The curve of these coefficients."""
        y, reached = 0.0, []
        for knot, added in zip(self.knots, coefficients, strict=True):
            y += added
            reached.append((knot, y))
        return Piecewise(tuple(reached))


def doubling(smallest: float, largest: float) -> list[float]:
    """Knots from the smallest size to the largest, each about twice the one before."""
    knots = [smallest]
    while knots[-1] * 2 * NEAR < largest:
        knots.append(knots[-1] * 2)
    return [*knots, largest] if largest > knots[-1] else knots


def least_squares(
    rows: Sequence[Sequence[float]], values: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Coefficients, none negative, with which weighted sums of a row come closest to its value.

    Measurements that lie far off count less (Huber's weights, twice).
    """
    found = _fitted(rows, values, weights)
    for _ in range(2):
        errors = [
            abs(sum(map(float.__mul__, row, found)) - value) * weight**0.5
            for row, value, weight in zip(rows, values, weights, strict=True)
        ]
        bound = 2.5 * median(errors)
        if bound <= 0:
            break
        tamed = [
            weight * min(1.0, bound / error) if error else weight
            for weight, error in zip(weights, errors, strict=True)
        ]
        found = _fitted(rows, values, tamed)
    return found


def _fitted(
    rows: Sequence[Sequence[float]], values: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """The same for fixed weights, by the active-set method of Lawson and Hanson (1974)."""
    count = len(rows[0])
    gram = [[0.0] * count for _ in range(count)]
    target = [0.0] * count
    for row, value, weight in zip(rows, values, weights, strict=True):
        for i, x in enumerate(row):
            if x:
                target[i] += weight * x * value
                for j, y in enumerate(row):
                    gram[i][j] += weight * x * y
    found, free = [0.0] * count, list[int]()
    for _ in range(3 * count):
        gain = [target[i] - sum(map(float.__mul__, gram[i], found)) for i in range(count)]
        bound = {i: gain[i] / gram[i][i] ** 0.5 for i in range(count) if gram[i][i] > 0}
        others = [i for i in bound if i not in free and gain[i] > TINY * abs(target[i])]
        if not others:
            break
        free.append(max(others, key=bound.__getitem__))
        while free:
            solved = _solved([[gram[i][j] for j in free] for i in free], [target[i] for i in free])
            wanted = dict(zip(free, solved, strict=True))
            below = [i for i in free if wanted[i] <= 0]
            if not below:
                found = [wanted.get(i, 0.0) for i in range(count)]
                break
            reach = min(found[i] / (found[i] - wanted[i]) if found[i] else 0.0 for i in below)
            found = [x + reach * (wanted.get(i, x) - x) for i, x in enumerate(found)]
            free = [i for i in free if wanted[i] > 0 or found[i] > TINY * abs(wanted[i])]
            found = [x if i in free else 0.0 for i, x in enumerate(found)]
    return found


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """The solution of a symmetric system by elimination; what is all but undetermined is 0."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    count, smallest = len(rows), [TINY * row[i] for i, row in enumerate(matrix)]
    for i in range(count):
        if rows[i][i] <= smallest[i]:
            rows[i] = [0.0] * (count + 1)
            rows[i][i] = 1.0
            continue
        for below in range(i + 1, count):
            factor = rows[below][i] / rows[i][i]
            rows[below] = [x - factor * y for x, y in zip(rows[below], rows[i], strict=True)]
    found = [0.0] * count
    for i in reversed(range(count)):
        rest = sum(rows[i][j] * found[j] for j in range(i + 1, count))
        found[i] = (rows[i][count] - rest) / rows[i][i]
    return found
