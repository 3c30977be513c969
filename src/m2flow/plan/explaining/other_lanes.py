"""What the search would choose on more or fewer lanes, and with more memory on each.

The plan of the search is compared by its shape: which stages stand on the same lanes in turn and
which side by side, whatever the number of lanes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph
from m2flow.plan.prediction import Decision
from m2flow.plan.search import (
    Chunked,
    Found,
    Limits,
    Problem,
    Spatial,
    Steps,
    Temporal,
    Tree,
    problem,
    search,
)

FACTORS = (0.5, 2.0)
"""Of lanes; of memory the larger one."""


SLOW = 20.0
"""A choice that took longer is not put to the search again."""


@dataclass(frozen=True)
class Flip:
    """The smallest change of one input that was found to make another plan the best.

    Attributes:
        what: a stage, "switching", "publishing", "links", "memory" or "lanes".
        factor: what it is multiplied by.
        mode: of the plan that is best then.
        changes: what that plan does otherwise, in words.
        seconds: of a step of the chosen plan then; None where it cannot run.
        instead: of the other one.
        how: "simulated", "estimated" (from a plan's tree, or its chain of work) or "searched".
    """

    what: str
    factor: float
    mode: str
    changes: tuple[str, ...]
    seconds: float | None
    instead: float
    how: str


def searched(decision: Decision, graph: FlowGraph, limits: Limits | None) -> Iterator[Flip]:
    """Flips by the number of lanes and their memory.

    Only for a choice of the search, on lanes that are all alike, that was quickly made: each is a
    search like the one before it.
    """
    lanes = [lane for lane in decision.chosen.plan.lanes if lane.reserved_for is None]
    kinds = {lane.kind for lane in lanes}
    sizes = {lane.memory_bytes for lane in lanes}
    slow = decision.seconds_to_decide > SLOW
    if decision.chosen.found is None or len(kinds) > 1 or len(sizes) > 1 or slow:
        return
    kind, size = kinds.pop(), sizes.pop()

    def asked(count: int, memory: int | None) -> Problem:
        known = {} if memory is None else {kind: memory}
        return problem(graph, decision.profile, {kind: count}, decision.num_items, limits, known)

    every = (decision.chosen, *decision.others)
    drawn = [one.found for one in every if one.found and not one.found.staleness]
    now = min(drawn, key=lambda found: found.seconds, default=None)
    if now is None:
        return
    others = [("lanes", factor, round(len(lanes) * factor), size) for factor in FACTORS]
    others += [("memory", FACTORS[1], len(lanes), int(size * FACTORS[1]))] if size else []
    for what, factor, count, memory in others:
        if not count:
            continue
        try:
            stated = asked(count, memory)
            then = search(stated)[0]
        except UserError:  # no plan fits there
            continue
        if shape(then) != shape(now):
            changes = (f"{in_words(stated, then)} instead of {in_words(stated, now)}",)
            yield Flip(what, factor, "auto", changes, None, float(then.seconds), "searched")


def shape(found: Found) -> str:
    """What stands with what: without numbers of lanes, and whatever the order in turn."""

    def of(tree: Tree) -> str:
        match tree:
            case Chunked():
                return of(tree.inner)
            case Temporal():
                return f"({', '.join(sorted(map(of, _in_turn(tree))))})"
            case Spatial():
                return f"[{of(tree.first)} | {of(tree.second)}]"
            case Steps():
                return f"steps[{' | '.join(map(of, tree.parts))}]"
        return f"{type(tree).__name__} {tree.task}"

    return of(found.tree)


def _in_turn(tree: Tree) -> list[Tree]:
    """The parts of a chain of stages in turn on the same lanes."""
    if isinstance(tree, Chunked):
        return _in_turn(tree.inner)
    if isinstance(tree, Temporal):
        return [*_in_turn(tree.first), *_in_turn(tree.second)]
    return [tree]


def in_words(stated: Problem, found: Found) -> str:
    """`generate, then train` in turn on the same lanes, `(generate on 6 | train on 2)` beside."""
    names = [node.name for task in stated.tasks for node in task.nodes]
    methods = [name.rpartition(".")[2] for name in names]

    def named(name: str) -> str:
        method = name.rpartition(".")[2]
        return method if methods.count(method) == 1 else name

    def told(tree: Tree) -> str:
        match tree:
            case Temporal() | Chunked():
                parts = _in_turn(tree)
                return told(parts[0]) if len(parts) == 1 else ", then ".join(map(told, parts))
            case Spatial():
                sides = [(tree.first, tree.first_lanes), (tree.second, tree.second_lanes)]
            case Steps():
                sides = list(zip(tree.parts, tree.lanes, strict=True))
            case _:
                return "+".join(named(node.name) for node in stated.tasks[tree.task].nodes)
        return f"({' | '.join(f'{told(part)} on {sum(own)} lanes' for part, own in sides)})"

    return told(found.tree)
