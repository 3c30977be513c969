"""`Explanation`: why a plan was chosen, as data; made once, then printed, kept and drawn."""

from __future__ import annotations

from dataclasses import dataclass

from m2flow.flow.graph import FlowGraph
from m2flow.plan.explaining.differences import differences
from m2flow.plan.explaining.flips import flips
from m2flow.plan.explaining.other_lanes import Flip
from m2flow.plan.explaining.path import Bottleneck, bottleneck
from m2flow.plan.explaining.rescaled import simulated
from m2flow.plan.prediction import Candidate, Decision
from m2flow.plan.search import Limits

TERMS = ("compute", "switching", "publishing", "links", "waiting")
"""What the seconds of all lanes are made of, in the order in which they are shown."""

RUNNERS_UP = 3
"""So many of the other plans are told in words."""


@dataclass(frozen=True)
class RunnerUp:
    """A plan that was not chosen, and what it does otherwise than the chosen one."""

    candidate: Candidate
    changes: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """Why a plan was chosen.

    Attributes:
        decision: what was chosen from what.
        stages: names of the flow's stages, in its order.
        bottleneck: what bounds the step; None where nothing is known of its spans.
        runners_up: the next best plans.
        flips: what would make another plan the best, smallest change first; None: not asked.
        assumptions: what was taken for granted where nothing was measured, a line each.
    """

    decision: Decision
    stages: tuple[str, ...]
    bottleneck: Bottleneck | None
    runners_up: tuple[RunnerUp, ...]
    flips: tuple[Flip, ...] | None = None
    assumptions: tuple[str, ...] = ()

    @property
    def chosen(self) -> Candidate:
        return self.decision.chosen


def explained(
    decision: Decision,
    graph: FlowGraph,
    *,
    limits: Limits | None = None,
    sensitivity: bool = True,
    simulate: bool = True,
    budget: float = 5.0,
    assumptions: tuple[str, ...] = (),
) -> Explanation:
    """Why a decision was taken.

    Args:
        decision: to be explained.
        graph: its flow.
        limits: as in its search.
        sensitivity: whether to find out what would flip it (seconds of work).
        simulate: whether flips may be simulated; else they are estimated.
        budget: about how many seconds that may take.
        assumptions: to be told with it.
    """
    chosen = decision.chosen
    found = None
    if sensitivity:
        judge = simulated(graph, decision.num_items) if simulate else None
        found = tuple(flips(decision, graph, limits, judge, budget))
    return Explanation(
        decision,
        tuple(node.name for node in graph.nodes),
        bottleneck(chosen, graph),
        tuple(
            RunnerUp(other, tuple(differences(chosen.plan, other.plan)))
            for other in decision.others[:RUNNERS_UP]
        ),
        found,
        assumptions,
    )
