"""How a streaming stage works, from the times at which its calls hand output items on.

Items that came together are taken in at once, as many as the stage has slots for, and each leaves
when it has grown to its length. So the number at work in every round is known from the lengths. The
seconds between two pieces are the sum over the rounds between them; the curve through all such sums
is found by least squares.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median

import numpy as np

from m2flow.plan.profile.curves import Matrix, Rising, by_size, doubling, least_squares, spread
from m2flow.plan.profile.data import Piecewise
from m2flow.plan.profile.evidence import Sample
from m2flow.plan.profile.streaming import stretches

SHARES = 16
"""In so many steps of the share of items that are done, `done` says that of the time."""

GOOD_ENOUGH = 0.15
"""Relative error of whole calls up to which rounds explain a stage, for calls of every size."""

NOISE = 2.0
"""Rounds do as well where the error is within so many times that of calls of one size alone."""

FEWEST_CALLS = 2

NEWEST_CALLS = 16
"""Of each size so many calls are looked at."""

Growth = tuple[Piecewise, Piecewise, int | None]
"""`StageCost.round`, `StageCost.admit` and `StageCost.slots`."""


@dataclass(frozen=True)
class _Played:
    """A call with the rounds that its lengths imply.

    Attributes:
        call: what was measured.
        segments: (first round, last round, items at work) in order.
        pieces: for each piece its seconds, and the round in which its last item was finished.
    """

    call: Sample
    segments: tuple[tuple[float, float, int], ...]
    pieces: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, call: Sample, slots: int) -> _Played:
        """Play a call in which so many items are at work at once, the lowest numbers first."""
        grown = sorted(
            (item, length)
            for _, items, lengths in call.pieces
            for item, length in zip(items, lengths, strict=True)
        )
        segments, finished = [], dict[int, float]()
        for start, end, running, ends in stretches([length for _, length in grown], slots):
            finished |= {grown[place][0]: end for place in ends}
            segments.append((start, end, running))
        pieces = [(when, max(finished[item] for item in items)) for when, items, _ in call.pieces]
        return cls(call, tuple(segments), tuple(pieces))

    def rows(self, rounds: Rising, admits: Rising) -> tuple[Matrix, Matrix]:
        """Return the coefficients of each piece's seconds since the one before, and the seconds."""
        edges = [0.0, *(end for _, end, _ in self.segments)]
        each = [[(end - start) * x for x in rounds.row(n)] for start, end, n in self.segments]
        passed = np.cumsum([[0.0] * len(rounds), *each], axis=0)
        grown = np.maximum.accumulate([0.0, *(reached for _, reached in self.pieces)])
        sums = np.stack([np.interp(grown, edges, column) for column in passed.T], axis=1)
        first = np.zeros((len(self.pieces), len(admits)))
        first[0] = admits.row(self.call.size)
        seconds = np.diff([0.0, *(when for when, _ in self.pieces)])
        return np.hstack([np.diff(sums, axis=0), first]), seconds

    def error(self, rounds: Piecewise, admits: Piecewise) -> float:
        """Return how far the whole call is from what the curves say, relative to it."""
        growing = sum((end - start) * rounds.at(count) for start, end, count in self.segments)
        actual = self.call.pieces[-1][0]
        return abs(admits.at(self.call.size) + growing - actual) / actual if actual else 0.0


def fit_growth(calls: Sequence[Sample]) -> Growth | None:
    """Return the curves that explain when pieces came; None where no curves do.

    A stage with a limit of its own is found by the limit under which rounds explain it.
    """
    calls = [call for call in calls if call.pieces and all(_has_lengths(call))]
    groups = by_size(calls, lambda call: call.size)
    calls = [call for group in groups for call in group[-NEWEST_CALLS:]]
    if len(calls) < FEWEST_CALLS:
        return None
    largest = max(call.outputs for call in calls)
    allowed = max(GOOD_ENOUGH, NOISE * _noise(calls))
    limits = {int(x * part) for x in doubling(1.0, largest) for part in (0.75, 1.0)}
    tried: list[tuple[float, Growth]] = []
    for slots in (largest, *sorted(limits - {0, largest}, reverse=True)):
        error, (rounds, admits) = _fitted(calls, slots)
        tried.append((error, (rounds, admits, slots if slots < largest else None)))
        if slots == largest and error <= allowed:
            break
    error, growth = min(tried, key=lambda one: one[0])
    return growth if error <= allowed else None


def _has_lengths(call: Sample) -> Iterator[bool]:
    return (len(items) == len(lengths) > 0 for _, items, lengths in call.pieces)


def _fitted(calls: Sequence[Sample], slots: int) -> tuple[float, tuple[Piecewise, Piecewise]]:
    """Return the curves for a number of slots, and the largest error of calls of one size.

    One size with an error must do: with most calls small, the median of all would hide that large
    calls take several times as long.
    """
    played = [_Played.of(call, slots) for call in calls]
    most = max(running for one in played for *_, running in one.segments)
    rounds, admits = Rising(doubling(1.0, float(most))), Rising(sorted({c.size for c in calls}))
    parts = [one.rows(rounds, admits) for one in played]
    rows, seconds = (np.concatenate(column) for column in zip(*parts, strict=True))
    floor = float(np.median(seconds)) / 10 or 1e-9
    found = least_squares(rows, seconds, 1.0 / np.maximum(seconds, floor))
    round_, admit = rounds.curve(found[: len(rounds)]), admits.curve(found[len(rounds) :])
    errors = [
        median(one.error(round_, admit) for one in group)
        for group in by_size(played, lambda one: one.call.size)
    ]
    return max(errors), (round_, admit)


def _noise(calls: Sequence[Sample]) -> float:
    """Return how far whole calls of one size lie apart, relative to them."""
    groups = by_size(calls, lambda call: call.size)
    return median(spread([call.pieces[-1][0] for call in group]) for group in groups)


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
