"""States of a part of a step: what some plan tree of it costs. Only undominated ones are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from m2flow.plan.search.tree import Bound, Cost, Tree

T = TypeVar("T")
State = tuple[Cost, Tree]
Front = list[State]
Bounds = frozenset[Bound]
UNBOUND: Bounds = frozenset()


def pareto(states: Iterable[tuple[Cost, T]]) -> list[tuple[Cost, T]]:
    """The states that no other one matches or undercuts in everything, in order of their cost."""
    front: list[tuple[Cost, T]] = []
    for state in sorted(states, key=_cost):
        a = state[0]
        for b, _ in front:  # b.first <= a.first, as they are sorted
            if (
                b[1] <= a[1]
                and b[2] <= a[2]
                and b[3] <= a[3]
                and b[5] <= a[5]
                and b[4] <= a[4]
                and b[6] <= a[6]
                and b[7] <= a[7]
                and b[8] <= a[8]
            ):
                break
        else:
            front.append(state)
    return front


def shortened(front: list[State], most: int, chunks: int) -> list[State]:
    """The quickest states of a front for a round of so many chunks, and those that take the least
    of what a plan may run out of: memory of lanes, cores, memory of machines."""
    if len(front) <= most:
        return front
    ranked = sorted(front, key=lambda state: state[0][0] + (chunks - 1) * state[0][1])
    kept = ranked[:most]
    least: tuple[Callable[[State], float], ...] = (
        lambda state: state[0].peak,
        lambda state: state[0].cores,
        lambda state: state[0].host + state[0].states,
    )
    for amount in least:
        if amount(min(ranked, key=amount)) < min(map(amount, kept)):
            kept.append(min(ranked, key=amount))
    kept.sort(key=_cost)
    return kept


def paid(state: tuple[Cost, object]) -> float:
    """Seconds of a step whose root is in such a state, without companions."""
    return state[0].first + state[0].publishing


def cheapest(front: Iterable[State]) -> State | None:
    """The state in which a step takes the fewest seconds."""
    return min(front, key=paid, default=None)


def _cost(state: tuple[Cost, object]) -> Cost:
    return state[0]
