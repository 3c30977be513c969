"""What goes on beside a call: other lanes at work, and programs that are none of ours.

Lanes of one machine share its memory, its caches and the processors of whoever controls them. How
much that costs is the slope of seconds over how busy the other lanes were, among calls of one size.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from m2flow.plan.measured.curves import NEAR
from m2flow.plan.measured.observed import Call

LEAST = 0.5
"""The smallest factor that is believed."""

SURE = 3.0
"""A slope must be so many times its standard error, or it is none."""

WORKING = 0.5
"""Seconds of processors in each second of a call from which on a stage works and does not wait."""

FEWEST = 6
"""With fewer calls nothing is said."""

FAR = 4.0
"""A call that lies so many median distances off the median of its size does not count."""

HELD_UP = 0.9
"""A call that had so much less of the processor than others of its size was held up."""


def factor_at(alone: float, beside: float) -> float:
    """The factor when the other lanes are so busy, from 0 to 1."""
    return alone + (1.0 - alone) * beside


def fit_alone(calls: Sequence[Call]) -> float:
    """Seconds of a call with all other lanes idle, relative to those with all of them at work."""
    rows = [row for group in _by_size(calls) for row in _centred(group)]
    square = sum(x * x for x, _ in rows)
    if len(rows) < FEWEST or square <= 0:
        return 1.0
    slope = sum(x * y for x, y in rows) / square
    left = sum((y - slope * x) ** 2 for x, y in rows) / (len(rows) - 2)
    if slope <= SURE * (left / square) ** 0.5:
        return 1.0
    beside = fmean(call.beside for call in calls)
    return max(LEAST, 1.0 - slope / (1.0 + slope * (1.0 - beside)))


def _centred(group: Sequence[Call]) -> list[tuple[float, float]]:
    """How busy others were and how long calls of one size took, as distances from the mean."""
    middle = median(call.seconds for call in group)
    distance = median(abs(call.seconds - middle) for call in group)
    kept = [call for call in group if abs(call.seconds - middle) <= FAR * distance]
    if len(kept) < 2 or middle <= 0:
        return []
    beside, seconds = fmean(x.beside for x in kept), fmean(x.seconds for x in kept)
    return [(call.beside - beside, call.seconds / seconds - 1.0) for call in kept]


def undisturbed(calls: Sequence[Call]) -> list[Call]:
    """The calls but for those that another program held up, which say nothing of the stage.

    They had less of the processor than most others of their size. Of stages that wait for something
    else most of the time nothing can be said.
    """
    kept: list[Call] = []
    for group in _by_size(calls):
        efforts = sorted(call.effort for call in group)
        usual = efforts[(3 * len(efforts)) // 4]
        least = HELD_UP * usual if usual >= WORKING else 0.0
        kept += [call for call in group if call.effort >= least]
    return kept


def _by_size(calls: Sequence[Call]) -> list[list[Call]]:
    groups: list[list[Call]] = []
    for call in sorted(calls, key=lambda one: one.items):
        if groups and call.items < NEAR * groups[-1][0].items:
            groups[-1].append(call)
        else:
            groups.append([call])
    return groups


def crowded(calls: Sequence[Call], alone: float) -> list[Call]:
    """The calls as they would have been with all other lanes at work."""
    return [call.slowed(1.0 / factor_at(alone, call.beside)) for call in calls]
