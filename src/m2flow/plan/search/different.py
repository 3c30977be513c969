"""Whether two plans differ in more than a size: what makes it worth while to try both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from m2flow.plan.search.leaves import layout_of
from m2flow.plan.search.menus import grid
from m2flow.plan.search.options import lanes_of
from m2flow.plan.search.problem import Problem
from m2flow.plan.search.tree import Chunked, Fused, Leaf, Spatial, Split, Steps, Temporal, Tree

OWN = 4
"""Below so many lanes each number is a size of its own."""

Shape = tuple[object, ...]


class Look(NamedTuple):
    """A plan without its details.

    Attributes:
        shape: what stands in turn and what apart, whatever the order in which the tree has it, and
            the layout of each stage.
        sizes: for each task its lanes and chunk.
    """

    shape: Shape
    sizes: dict[int, tuple[int, int]]


def look(problem: Problem, tree: Tree) -> Look:
    """A plan without its details."""
    sizes = dict(_sizes(problem, tree, int(problem.num_items)))
    return Look(_shape(problem, tree), sizes)


def differ(problem: Problem, one: Look, other: Look) -> bool:
    """Whether plans differ in shape, or in the lanes or the chunk of a stage by more than from one
    size to the next."""
    if one.shape != other.shape:
        return True
    lanes, chunks = grid(sum(problem.lanes)), tuple(int(size) for size in problem.chunks)
    for task, (used, chunk) in one.sizes.items():
        used_there, chunk_there = other.sizes[task]
        if abs(chunks.index(chunk) - chunks.index(chunk_there)) > 1:
            return True
        if used != used_there and min(used, used_there) < OWN:
            return True
        if abs(_rank(lanes, used) - _rank(lanes, used_there)) > 1:
            return True
    return False


def _rank(menu: tuple[int, ...], number: int) -> int:
    return min(range(len(menu)), key=lambda n: abs(menu[n] - number))


def _sizes(problem: Problem, tree: Tree, chunk: int) -> Iterator[tuple[int, tuple[int, int]]]:
    match tree:
        case Chunked():
            yield from _sizes(problem, tree.inner, tree.chunk)
        case Temporal() | Spatial():
            yield from _sizes(problem, tree.first, chunk)
            yield from _sizes(problem, tree.second, chunk)
        case Steps():
            for part in tree.parts:
                yield from _sizes(problem, part, chunk)
        case Leaf() | Fused() | Split():
            yield tree.task, (sum(lanes_of(problem, tree)), chunk)


def _shape(problem: Problem, tree: Tree) -> Shape:
    match tree:
        case Chunked():
            return _shape(problem, tree.inner)
        case Temporal():
            return ("in turn", *sorted(_parts(problem, tree, "in turn"), key=repr))
        case Spatial():
            return ("apart", *sorted(_parts(problem, tree, "apart"), key=repr))
        case Steps():
            return ("steps", *(_shape(problem, part) for part in tree.parts))
        case Leaf():
            node = problem.tasks[tree.task].nodes[0]
            layout, kind = layout_of(problem, node, tree.layout)
            return ("stage", tree.task, layout.lanes, kind)
        case Fused() | Split():
            return (type(tree).__name__, tree.task, tree.layouts)


def _parts(problem: Problem, tree: Temporal | Spatial, word: str) -> list[Shape]:
    """Shapes of what is inside; parts of the same sort are of this one, in whatever nesting."""
    found: list[Shape] = []
    for part in (tree.first, tree.second):
        shape = _shape(problem, part)
        inner = [entry for entry in shape[1:] if isinstance(entry, tuple)]
        found += inner if shape[0] == word else [shape]
    return found
