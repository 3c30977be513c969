"""Curves of a profile from a function of counts: asked at few counts, monotone in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from m2flow.plan.profile import Piecewise


def rising(most: int) -> list[int]:
    """1, 2, 4, ... and `most`: where a function of a count is asked."""
    return sorted({*(2**n for n in range(most.bit_length())), most})


def curve(value: Callable[[int], float], counts: Sequence[int]) -> Piecewise:
    """The function at these counts, none below an earlier one."""
    points: list[tuple[float, float]] = []
    for count in counts:
        found = value(count)
        points.append((float(count), max(found, points[-1][1]) if points else found))
    return Piecewise(tuple(points))


def flat(value: float) -> Piecewise:
    """The same however many items there are."""
    return Piecewise(((1.0, value), (2.0, value)))
