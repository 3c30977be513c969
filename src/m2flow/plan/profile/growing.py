"""How a streaming stage works, from the times at which its calls hand output items on.

Items that came together are taken in at once, as many as the stage has slots for, and each leaves
when it has grown to its length. So the number at work in every round is known from the lengths. The
seconds between two pieces are the sum over the rounds between them; the curve through all such sums
is found by least squares.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter
from statistics import fmean, median

import numpy as np

from m2flow.plan.profile import Piecewise
from m2flow.plan.profile.curves import (
    Matrix,
    by_size,
    doubling,
    least_squares,
    ramps,
    rising,
)
from m2flow.plan.profile.evidence import Sample
from m2flow.plan.profile.streaming import stretches

SHARES = 16
"""In so many steps of the share of items that are done, `done` says that of the time."""

GOOD_ENOUGH = 0.15
"""Relative error of whole calls up to which rounds explain a stage, for calls of every size."""

FEWEST_CALLS = 2

NEWEST_CALLS = 16
"""Of each size so many calls are looked at."""

Growth = tuple[Piecewise, Piecewise, int | None]
"""`StageCost.round`, `StageCost.admit` and `StageCost.slots`."""


def _until(
    call: Sample, slots: int, rounds: Sequence[float], admits: Sequence[float]
) -> tuple[Matrix, Matrix]:
    """Return the coefficients of the seconds until each piece, and the seconds.

    So many items are at work at once, the lowest numbers first.
    """
    grown = sorted(
        (item, length)
        for _, items, lengths in call.pieces
        for item, length in zip(items, lengths, strict=True)
    )
    edges, passed, finished = [0.0], [np.zeros(len(rounds))], dict[int, float]()
    for start, end, running, ends in stretches([length for _, length in grown], slots):
        finished |= {grown[place][0]: end for place in ends}
        edges.append(end)
        passed.append(passed[-1] + (end - start) * np.array(ramps(rounds, running)))
    ends_of = [max(finished[item] for item in items) for _, items, _ in call.pieces]
    reached = np.maximum.accumulate(ends_of)
    sums = [np.interp(reached, edges, column) for column in np.transpose(passed)]
    taken = np.tile(ramps(admits, call.size), (len(call.pieces), 1))
    return np.hstack([np.transpose(sums), taken]), np.array([when for when, *_ in call.pieces])


def fit_growth(calls: Sequence[Sample]) -> Growth | None:
    """Return the curves that explain when pieces came; None where no curves do.

    A stage with a limit of its own is found by the limit under which rounds explain it.
    """
    calls = [call for call in calls if _has_lengths(call)]
    groups = by_size(calls, lambda call: call.size)
    calls = [call for group in groups for call in group[-NEWEST_CALLS:]]
    if len(calls) < FEWEST_CALLS:
        return None
    largest = max(call.outputs for call in calls)
    limits = {int(x * part) for x in doubling(1.0, largest) for part in (0.75, 1.0)}
    tried: list[tuple[float, Growth]] = []
    for slots in (largest, *sorted(limits - {0, largest}, reverse=True)):
        error, (rounds, admits) = _fitted(calls, slots)
        tried.append((error, (rounds, admits, slots if slots < largest else None)))
        if slots == largest and error <= GOOD_ENOUGH:
            break
    error, growth = min(tried, key=lambda one: one[0])
    return growth if error <= GOOD_ENOUGH else None


def _has_lengths(call: Sample) -> bool:
    told = all(len(items) == len(lengths) > 0 for _, items, lengths in call.pieces)
    return told and bool(call.pieces) and call.pieces[-1][0] > 0


def _fitted(calls: Sequence[Sample], slots: int) -> tuple[float, tuple[Piecewise, Piecewise]]:
    """Return the curves for a number of slots, and the largest error of calls of one size.

    One size with an error must do: with most calls small, the median of all would hide that large
    calls take several times as long.
    """
    most = min(slots, max(call.outputs for call in calls))
    rounds, admits = doubling(1.0, float(most)), sorted({call.size for call in calls})
    played = [_until(call, slots, rounds, admits) for call in calls]
    rows = np.concatenate([np.diff(sums, axis=0, prepend=0.0) for sums, _ in played])
    seconds = np.concatenate([np.diff(until, prepend=0.0) for _, until in played])
    floor = float(np.median(seconds)) / 10 or 1e-9
    found = least_squares(rows, seconds, 1.0 / np.maximum(seconds, floor))
    errors = [
        (call.size, abs(float(sums[-1] @ found / until[-1]) - 1.0))
        for call, (sums, until) in zip(calls, played, strict=True)
    ]
    worst = max(median(error for _, error in group) for group in by_size(errors, itemgetter(0)))
    return worst, (rising(rounds, found[: len(rounds)]), rising(admits, found[len(rounds) :]))


def fit_done(calls: Sequence[Sample]) -> Piecewise | None:
    """Return `StageCost.done` from the calls that took most; None if nothing came early."""
    known = [call for call in calls if call.pieces and call.pieces[-1][0] > 0]
    most = max((call.outputs for call in known), default=0)
    known = [call for call in known if 2 * call.outputs >= most]
    if all(len(call.pieces) == 1 for call in known):
        return None
    shares = [number / SHARES for number in range(SHARES + 1)]
    passed = [fmean(column) for column in zip(*map(_done, known), strict=True)]
    return Piecewise((*zip(shares[:-1], passed[:-1], strict=True), (1.0, 1.0)))


def _done(call: Sample) -> list[float]:
    """Return at each share of the items the share of the time after which so many were done."""
    handed_on = list(accumulate(len(items) for _, items, _ in call.pieces))
    wanted = [call.outputs * number / SHARES for number in range(1, SHARES + 1)]
    pieces = [min(bisect_left(handed_on, count), len(handed_on) - 1) for count in wanted]
    return [0.0, *(call.pieces[piece][0] / call.pieces[-1][0] for piece in pieces)]
