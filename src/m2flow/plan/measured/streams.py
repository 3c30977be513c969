"""How a streaming stage works: seconds of a round by the number at work, and what taking in costs.

All items that came together are at work from the start, and each leaves when it has grown to its
length, so the number at work in every round is known from the lengths alone. The seconds between
two pieces are the sum over the rounds between them; the curve through all such sums is found by
least squares.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median

from m2flow.plan.measured.curves import Rising, doubling, least_squares
from m2flow.plan.measured.observed import Call
from m2flow.plan.profile import Piecewise

SHARES = 16
"""In so many steps of the share of items that are done, that of the time is told."""

GOOD_ENOUGH = 0.15
"""Median relative error of whole calls up to which rounds explain a stage. One that holds items
back for a limit of its own is not explained."""

NOISE = 2.0
"""They do as well where the error is within so many times that of calls of one size alone."""

FEWEST_CALLS = 2


@dataclass(frozen=True)
class Rounds:
    """See `StageCost.round` and `StageCost.admit`."""

    round: Piecewise
    admit: Piecewise


def fit_rounds(calls: Sequence[Call]) -> Rounds | None:
    """The curves that explain when pieces came; None if nothing is known of lengths."""
    calls = [call for call in calls if call.pieces and call.has_lengths and call.outputs]
    if len(calls) < FEWEST_CALLS:
        return None
    at_work = [_at_work(call) for call in calls]
    rounds = Rising(doubling(1.0, float(max(call.outputs for call in calls))))
    admits = Rising(sorted({call.items for call in calls}))
    rows: list[list[float]] = []
    seconds: list[float] = []
    for call, running in zip(calls, at_work, strict=True):
        first = admits.row(call.items)
        reached = before = 0.0
        for when, lengths in call.pieces:
            grown = max(reached, *lengths)
            row = [0.0] * len(rounds)
            for start, end, count in running:
                passed = min(end, grown) - max(start, reached)
                if passed > 0:
                    each = rounds.row(count)
                    row = [a + passed * b for a, b in zip(row, each, strict=True)]
            rows.append([*row, *first])
            seconds.append(when - before)
            first = [0.0] * len(admits)
            reached, before = grown, when
    floor = median(seconds) / 10 or 1e-9
    found = least_squares(rows, seconds, [1.0 / max(value, floor) for value in seconds])
    fitted = Rounds(rounds.curve(found[: len(rounds)]), admits.curve(found[len(rounds) :]))
    errors = [_error(fitted, call, runs) for call, runs in zip(calls, at_work, strict=True)]
    return fitted if median(errors) <= max(GOOD_ENOUGH, NOISE * _noise(calls)) else None


def _noise(calls: Sequence[Call]) -> float:
    """Median relative distance of whole calls from others that took as many items."""
    by_size: dict[float, list[float]] = {}
    for call in calls:
        by_size.setdefault(call.items, []).append(call.pieces[-1][0])
    return median(
        abs(end / middle - 1.0)
        for ends in by_size.values()
        if (middle := median(ends)) > 0
        for end in ends
    )


def _at_work(call: Call) -> list[tuple[float, float, int]]:
    """From each length that an item ends at to the next one, how many are at work in between."""
    lengths = sorted(length for _, some in call.pieces for length in some)
    segments, reached = [], 0.0
    for place, length in enumerate(lengths):
        if length > reached:
            segments.append((reached, length, len(lengths) - place))
            reached = length
    return segments


def _error(fitted: Rounds, call: Call, running: Sequence[tuple[float, float, int]]) -> float:
    growing = sum((end - start) * fitted.round.at(count) for start, end, count in running)
    expected = fitted.admit.at(call.items) + growing
    actual = call.pieces[-1][0]
    return abs(expected - actual) / actual if actual else 0.0


def fit_done(calls: Sequence[Call]) -> Piecewise | None:
    """See `StageCost.done`: from the calls that took most items; None if nothing came early."""
    known = [call for call in calls if call.pieces and call.pieces[-1][0] > 0]
    if not known:
        return None
    most = max(call.outputs for call in known)
    known = [call for call in known if 2 * call.outputs >= most]
    if all(len(call.pieces) == 1 for call in known):
        return None
    curves = [_done(call) for call in known]
    shares = [number / SHARES for number in range(SHARES + 1)]
    passed = [fmean(column) for column in zip(*curves, strict=True)]
    return Piecewise((*zip(shares[:-1], passed[:-1], strict=True), (1.0, 1.0)))


def _done(call: Call) -> list[float]:
    """At each share of the items, the share of the time after which so many were done."""
    handed_on = list(accumulate(call.counts))
    end = call.pieces[-1][0]
    passed = [0.0]
    for number in range(1, SHARES + 1):
        piece = bisect_left(handed_on, call.outputs * number / SHARES)
        passed.append(call.pieces[min(piece, len(call.pieces) - 1)][0] / end)
    return passed
