"""The bound of a search by area: lanes times seconds that the stages of a step need at least.

A step of T seconds on N_k lanes of each kind k has no more than N_k T of them. While a part has its
v_k lanes for t seconds, they are its own, and every other stage needs lanes of its own elsewhere:
its least *work*, one of a few vectors (lanes of each kind, times seconds). Kinds are not alike, and
what a stage leaves of the one may be of no use to another. So the areas are added up with weights:
for any a_k of at least 0

    t sum_k a_k v_k + sum of the others' min over works w of (sum_k a_k w_k) <= T sum_k a_k N_k.

Each kind alone, all alike, and the weights with which a stage does as well on each kind are tried.
Of two kinds no other weights bound a whole step better.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from m2flow.plan.search.problem import Lanes

Work = tuple[float, ...]
"""Lanes of each kind, times seconds."""

SLACK = 1 + 1e-9
"""For sums that are rounded."""


class Area:
    """How long parts may take at most, and must take at least.

    Args:
        lanes: what there is of each kind.
        works: for each task the least works of its part of a step; none where nothing is known.
        most: seconds of a step beyond which nothing is of interest; may be infinite.
    """

    def __init__(self, lanes: Lanes, works: Sequence[Sequence[Work]], most: float) -> None:
        self.lanes, self.most = lanes, most
        self._weights: list[Work] = []
        if math.isfinite(most):
            self._weights = list(_weights(len(lanes), works))
        self._works = [[_least(weights, own) for own in works] for weights in self._weights]
        self._sums: dict[int, list[float]] = {}
        self._most: dict[tuple[int, Lanes], float] = {}
        self._least: dict[tuple[int, Lanes], float] = {}

    def most_seconds(self, part: int, lanes: Lanes) -> float:
        """Seconds of a step that a part may take on its lanes in a plan that is of interest."""
        key = (part, lanes)
        found = self._most.get(key)
        if found is None:
            found = self.most
            rest = self._sum(((1 << len(self._works[0])) - 1) & ~part) if self._weights else []
            for weights, work in zip(self._weights, rest, strict=True):
                mine = _dot(weights, lanes)
                if mine:
                    found = min(found, (self.most * _dot(weights, self.lanes) - work) / mine)
            self._most[key] = found
        return found

    def least_seconds(self, part: int, lanes: Lanes) -> float:
        """Seconds of a step that a part takes at least on so many lanes."""
        key = (part, lanes)
        found = self._least.get(key)
        if found is None:
            found = 0.0
            for weights, work in zip(self._weights, self._sum(part), strict=True):
                mine = _dot(weights, lanes)
                if work:
                    found = max(found, work / mine if mine else math.inf)
            self._least[key] = found
        return found

    def _sum(self, part: int) -> list[float]:
        """The works of a part's tasks with each of the weights."""
        found = self._sums.get(part)
        if found is None:
            found = [sum(w for n, w in enumerate(own) if part >> n & 1) for own in self._works]
            self._sums[part] = found
        return found


def least_works(works: Iterable[Work]) -> tuple[Work, ...]:
    """Those that no other one matches or undercuts in every kind."""
    kept: list[Work] = []
    for work in sorted(set(works)):
        if not any(all(x <= y for x, y in zip(one, work, strict=True)) for one in kept):
            kept.append(work)
    return tuple(kept)


def _weights(kinds: int, works: Sequence[Sequence[Work]]) -> Iterable[Work]:
    every = {(1.0,) * kinds}
    every |= {tuple(float(n == k) for k in range(kinds)) for n in range(kinds)}
    for own in works:
        alone = [min((w[k] for w in own if sum(w) == w[k]), default=0.0) for k in range(kinds)]
        least = min((work for work in alone if work), default=0.0)
        every.add(tuple(least / work if work else 0.0 for work in alone))
    return sorted(weights for weights in every if any(weights))


def _least(weights: Work, works: Sequence[Work]) -> float:
    return min((_dot(weights, work) for work in works), default=0.0)


def _dot(weights: Work, amounts: Sequence[float]) -> float:
    return sum(w * amount for w, amount in zip(weights, amounts, strict=True))
