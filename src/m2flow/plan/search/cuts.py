"""The ways to part a set of tasks in two, and lanes between the two parts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from m2flow.flow.graph import WeightEdge
from m2flow.plan.search.problem import Lanes, Problem
from m2flow.plan.search.tree import Chunked, Spatial, Steps, Temporal, Tree, mask
from m2flow.plan.search.weights import meeting

Menu = Callable[[int], tuple[int, ...]]
"""Lanes that a side may have, of so many of a kind."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A way to part a set of tasks: the first is an ideal of it.

    Attributes:
        first, second: the parts.
        joined: whether the second reads from the first.
        size: bytes between them for a source item.
        shared: workers with stages in both.
        edges: weight edges whose ends come together here.
        in_turn, apart: whether the parts may stand on common lanes, and on disjoint ones.
    """

    first: int
    second: int
    joined: bool
    size: int
    shared: tuple[str, ...]
    edges: tuple[WeightEdge, ...]
    in_turn: bool
    apart: bool


@dataclass(frozen=True)
class Structure:
    """The cuts of some trees: (first, second) of their nodes."""

    in_turn: frozenset[tuple[int, int]] = frozenset()
    apart: frozenset[tuple[int, int]] = frozenset()

    def __or__(self, other: Structure) -> Structure:
        return Structure(self.in_turn | other.in_turn, self.apart | other.apart)


def structure(tree: Tree) -> Structure:
    """The cuts of a tree."""
    match tree:
        case Temporal() | Spatial():
            cut = frozenset({(mask(tree.first), mask(tree.second))})
            here = Structure(in_turn=cut) if isinstance(tree, Temporal) else Structure(apart=cut)
            return here | structure(tree.first) | structure(tree.second)
        case Chunked():
            return structure(tree.inner)
        case Steps():
            found = Structure()
            for n, part in enumerate(tree.parts[:-1]):
                rest = sum(mask(other) for other in tree.parts[n + 1 :])
                found |= structure(part) | Structure(apart=frozenset({(mask(part), rest)}))
            return found | structure(tree.parts[-1])
        case _:
            return Structure()


def chunks_of(tree: Tree) -> set[int]:
    """The chunk sizes of a tree."""
    match tree:
        case Temporal() | Spatial():
            return chunks_of(tree.first) | chunks_of(tree.second)
        case Chunked():
            return {tree.chunk} | chunks_of(tree.inner)
        case Steps():
            return set().union(*(chunks_of(part) for part in tree.parts))
        case _:
            return set()


class Cuts:
    """All cuts of each set of tasks, found once.

    Args:
        problem: what is searched.
        menu: lanes that a side may have.
        only: the cuts that are allowed; None for all.
    """

    def __init__(self, problem: Problem, menu: Menu, only: Structure | None = None) -> None:
        self.problem, self.only = problem, only
        self._menus = [menu(count) for count in problem.lanes]
        self._known: dict[int, tuple[Cut, ...]] = {}
        self._usable: dict[int, tuple[bool, ...]] = {}
        self._splits: dict[
            tuple[tuple[bool, ...], tuple[bool, ...], Lanes], tuple[tuple[Lanes, Lanes], ...]
        ] = {}

    def of(self, part: int) -> tuple[Cut, ...]:
        """The cuts of a set of tasks."""
        if part not in self._known:
            self._known[part] = tuple(self._find(part))
        return self._known[part]

    def _find(self, part: int) -> Iterator[Cut]:
        problem = self.problem
        members = [n for n in range(len(problem.tasks)) if part >> n & 1]
        first = part
        while first := (first - 1) & part:
            second = part & ~first
            if any(problem.tasks[n].before & second for n in members if first >> n & 1):
                continue
            joined, size = problem.crossing(first, second)
            if not joined and not first & part & -part:
                continue  # the same the other way round
            shared = tuple(
                sorted(w for w, on in problem.tasks_of.items() if on & first and on & second)
            )
            only, pair = self.only, (first, second)
            in_turn = only is None or pair in only.in_turn
            apart = not shared and (only is None or pair in only.apart)
            if in_turn or apart:
                edges = meeting(problem, first, second)
                yield Cut(first, second, joined, size, shared, edges, in_turn, apart)

    @cached_property
    def _kinds(self) -> list[set[int]]:
        return [
            {kind for node in task.nodes for _, _, kind in self.problem.layouts(node)}
            for task in self.problem.tasks
        ]

    def usable(self, part: int) -> tuple[bool, ...]:
        """For each kind whether some stage of a part can run on it."""
        if part not in self._usable:
            kinds = set().union(*(k for n, k in enumerate(self._kinds) if part >> n & 1))
            self._usable[part] = tuple(n in kinds for n in range(len(self.problem.kinds)))
        return self._usable[part]

    def splits(self, cut: Cut, lanes: Lanes) -> tuple[tuple[Lanes, Lanes], ...]:
        """Lanes of the two sides: the first has a count of the menu, the second what is left."""
        key = (self.usable(cut.first), self.usable(cut.second), lanes)
        found = self._splits.get(key)
        if found is None:
            found = self._splits[key] = tuple(self._split(*key))
        return found

    def _split(
        self, left: tuple[bool, ...], right: tuple[bool, ...], lanes: Lanes
    ) -> Iterator[tuple[Lanes, Lanes]]:
        options = []
        for n, (mine, other, menu) in enumerate(zip(left, right, self._menus, strict=True)):
            most = lanes[n]
            if mine and other:
                options.append([(x, _floor(menu, most - x)) for x in menu if x <= most])
            elif mine:
                options.append([(most, 0)])
            else:
                options.append([(0, most if other else 0)])
        if len(options) == 1:
            yield from (((x,), (y,)) for x, y in options[0])
        else:
            for pairs in product(*options):
                yield tuple(x for x, _ in pairs), tuple(y for _, y in pairs)
        per_node = self.problem.limits.lanes_per_node
        if per_node is not None and len(lanes) == 1 and lanes[0] > per_node:
            menu = self._menus[0]  # the same within one machine, where links are better
            yield from (((x,), (_floor(menu, per_node - x),)) for x in menu if x < per_node)


def _floor(menu: tuple[int, ...], most: int) -> int:
    return menu[bisect_right(menu, most) - 1]
