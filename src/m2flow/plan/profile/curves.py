"""Monotone curves through noisy measurements.

Isotonic regression (pool adjacent violators; Ayer et al. 1955) over typical values of what was
measured at each size, and least squares with coefficients that are not negative, for curves that
are only seen through their sums. This module knows nothing of stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean, median
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from m2flow.plan.profile import Piecewise

T = TypeVar("T")

Matrix: TypeAlias = npt.NDArray[np.float64]

TRIM = 10
"""One of so many values is left out at either end."""

NORMAL = 1.4826
"""Standard deviation of a normal distribution, in median distances from its median."""

NEAR = 1.1
"""Sizes that are less than so many times apart are one point of a curve."""

TINY = 1e-9
"""What counts as nothing beside 1, in sums of many products."""


@dataclass(frozen=True)
class Point:
    """What was measured at one size.

    Attributes:
        size: items, replicas, or whatever is counted.
        seconds: the typical value.
        spread: standard deviation of single values, relative to it.
        count: how many values there were.
    """

    size: float
    seconds: float
    spread: float
    count: float


def typical(values: Sequence[float]) -> float:
    """Return the mean of the values, but for the smallest and the largest of at least three.

    A step is a sum of calls, so their mean predicts it, and not their median: a stage may have next
    to nothing to do in most calls and much in a few.
    """
    cut = math.ceil(len(values) / TRIM) if len(values) > 2 else 0
    return fmean(sorted(values)[cut : len(values) - cut])


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation of the bulk of the values, relative to their median."""
    middle = median(values)
    return NORMAL * median(abs(value - middle) for value in values) / middle if middle else 0.0


def by_size(samples: Iterable[T], size: Callable[[T], float]) -> list[list[T]]:
    """Group samples whose sizes are near each other, the smallest sizes first."""
    groups: list[list[T]] = []
    for sample in sorted(samples, key=size):
        if groups and size(sample) < NEAR * size(groups[-1][0]):
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the closest sequence that does not fall, by weighted least squares."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, wa, na), (b, wb, nb) = blocks[-2:]
            blocks[-2:] = [((a * wa + b * wb) / (wa + wb), wa + wb, na + nb)]
    return [value for value, _, count in blocks for _ in range(count)]


def monotone(measured: Iterable[Point]) -> Piecewise:
    """Return the curve that does not fall and comes closest to the points."""
    ordered = sorted(measured, key=lambda one: one.size)
    values = isotonic([one.seconds for one in ordered], [one.count for one in ordered])
    return Piecewise(tuple((one.size, y) for one, y in zip(ordered, values, strict=True)))


def envelope(samples: Sequence[tuple[float, float]]) -> Piecewise:
    """Return the lowest curve that does not fall and above which nothing was measured.

    Sizes that are near each other count as their smallest.
    """
    reached, found = 0.0, []
    for group in by_size(samples, lambda sample: sample[0]):
        reached = max(reached, *(value for _, value in group))
        found.append((group[0][0], reached))
    return Piecewise(tuple(found))


def ramps(knots: Sequence[float], x: float) -> list[float]:
    """Return 1, and for each piece between two knots the share of it that lies below x.

    Curves that do not fall are sums of these with coefficients that are not negative; see `rising`.
    """
    parts = ((x - a) / (b - a) for a, b in pairwise(knots))
    return [1.0, *(min(1.0, max(0.0, part)) for part in parts)]


def rising(knots: Sequence[float], coefficients: Iterable[float]) -> Piecewise:
    """Return the curve that begins at the first coefficient and rises by the others."""
    return Piecewise(tuple(zip(knots, accumulate(coefficients), strict=True)))


def doubling(smallest: float, largest: float) -> list[float]:
    """Return knots from the smallest size to the largest, each about twice the one before."""
    knots = [smallest]
    while knots[-1] * 2 * NEAR < largest:
        knots.append(knots[-1] * 2)
    return [*knots, largest] if largest > knots[-1] else knots


def least_squares(
    rows: npt.ArrayLike, values: npt.ArrayLike, weights: npt.ArrayLike
) -> list[float]:
    """Return the coefficients, none negative, whose weighted sums come closest to the values.

    Measurements that lie far off count less (Huber's weights, twice). In the end all coefficients
    are scaled alike, so that the sums have the mean of the values: what is predicted is a sum too.
    """
    matrix, wanted = np.array(rows, float), np.array(values, float)
    given = np.array(weights, float)
    found = _not_negative(matrix * np.sqrt(given)[:, None], wanted * np.sqrt(given))
    for _ in range(2):
        errors = np.abs(matrix @ found - wanted) * np.sqrt(given)
        bound = 2.5 * float(np.median(errors))
        tamed = given * np.minimum(1.0, bound / np.maximum(errors, TINY))
        if bound > 0:
            found = _not_negative(matrix * np.sqrt(tamed)[:, None], wanted * np.sqrt(tamed))
    explained = float(np.sum(matrix @ found))
    return [float(x) * float(np.sum(wanted)) / explained if explained else 0.0 for x in found]


def _not_negative(matrix: Matrix, wanted: Matrix) -> Matrix:
    """Solve least squares; a coefficient that comes out negative is left out, the worst first."""
    found, kept = np.zeros(matrix.shape[1]), np.arange(matrix.shape[1])
    while kept.size:
        solved = np.linalg.lstsq(matrix[:, kept], wanted, rcond=None)[0]
        if solved.min() >= 0:
            found[kept] = solved
            break
        kept = np.delete(kept, solved.argmin())
    return found
