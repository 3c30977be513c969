"""What goes on beside a call: other lanes at work, and programs that are none of ours.

Lanes of one machine share its memory, its caches and the processors of whoever controls them. How
much that costs is the slope of seconds over how busy the other lanes were, among calls of one size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, median

from m2flow.plan.profile.curves import by_size
from m2flow.plan.profile.evidence import Sample

LEAST = 0.5
"""The smallest factor that is believed."""

SURE = 3.0
"""A slope must be so many times its standard error, or it is none."""

FEWEST = 6
"""With fewer calls nothing is said."""

FAR = 4.0
"""A call that lies so many median distances off the median of its size does not count."""

WORKING, HELD_UP = 0.5, 0.9
"""Processor seconds in each second of a call from which on a stage works and does not wait; a call
that had less than HELD_UP of what others of its size had was held up by another program."""


def undisturbed(calls: Sequence[Sample]) -> list[Sample]:
    """Return the calls but for those that another program held up, in their order.

    Of stages that wait for something else most of the time nothing can be said.
    """
    least: dict[int, float] = {}
    for group in by_size(calls, lambda call: call.size):
        efforts = sorted(call.effort for call in group)
        usual = efforts[(3 * len(efforts)) // 4]
        least |= {id(call): HELD_UP * usual * (usual >= WORKING) for call in group}
    return [call for call in calls if call.effort >= least[id(call)]]


def fit_alone(calls: Sequence[Sample]) -> float:
    """Return the seconds of a call with all other lanes idle over those with all at work."""
    rows = [row for group in by_size(calls, lambda call: call.size) for row in _centred(group)]
    square = sum(x * x for x, _ in rows)
    if len(rows) < FEWEST or square <= 0:
        return 1.0
    slope = sum(x * y for x, y in rows) / square
    left = sum((y - slope * x) ** 2 for x, y in rows) / (len(rows) - 2)
    if slope <= SURE * (left / square) ** 0.5:
        return 1.0
    beside = fmean(call.beside for call in calls)
    return max(LEAST, 1.0 - slope / (1.0 + slope * (1.0 - beside)))


def _centred(group: Sequence[Sample]) -> Iterator[tuple[float, float]]:
    """Yield how busy others were and how long calls took, as distances from the mean."""
    middle = median(call.seconds for call in group)
    distance = median(abs(call.seconds - middle) for call in group)
    kept = [call for call in group if abs(call.seconds - middle) <= FAR * distance]
    if len(kept) > 1 and middle > 0:
        beside, seconds = fmean(x.beside for x in kept), fmean(x.seconds for x in kept)
        yield from ((call.beside - beside, call.seconds / seconds - 1.0) for call in kept)


def crowded(calls: Sequence[Sample], alone: float) -> list[Sample]:
    """Return the calls as they would have been with all other lanes at work."""
    return [call.slowed(1.0 / (alone + (1.0 - alone) * call.beside)) for call in calls]
