"""`Explanation`: why a plan was chosen, as plain data.

Made once by `explained`, then printed (`in_words`), kept as `decision.json` by the JSON codec, and
drawn by the report. The names of the fields are the keys of the file. All times are seconds, all
sizes bytes, all shares between 0 and 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from m2flow.flow.graph import FlowGraph
from m2flow.plan.explain.bottleneck import Bottleneck, bottleneck
from m2flow.plan.explain.differences import differences, title, where
from m2flow.plan.explain.flips import Flip, Flips
from m2flow.plan.gantt import Gantt, folded, lay_out
from m2flow.plan.prediction import Candidate, Decision, Prediction
from m2flow.plan.race import Tried
from m2flow.plan.sizes import bytes_text

RUNNERS_UP = 3
"""Number of other plans that are listed."""

COLUMNS = 240
"""Columns of time of the chart of the predicted step."""


@dataclass(frozen=True)
class Alternative:
    """Another plan that was simulated.

    Attributes:
        mode, title, max_staleness: of the plan.
        seconds, items_per_second: predicted of a step.
        changes: what it does otherwise than the chosen plan, a phrase each.
    """

    mode: str
    title: str
    max_staleness: int
    seconds: float
    items_per_second: float
    changes: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """Why a plan was chosen.

    Attributes:
        title: of the plan.
        num_lanes: of the plan.
        items_per_step: source items.
        seconds_to_decide: how long search and simulation took.
        considered: number of plans that were simulated.
        stands: which workers stand on which lanes, in words.
        stages: names of the flow's stages, in its order.
        predicted: prediction of the plan; its spans are in `timeline`.
        bottleneck: what bounds the step.
        memory: what the fullest lane holds, in words; empty where sizes are not known.
        runners_up: the next best plans.
        ruled_out: plans that cannot run, and why.
        flips: changes of an input that would change the choice, smallest change first; None: they
            were not looked for.
        frontier: the best plan for each staleness that gains something; empty where none was
            allowed.
        race: plans that were tried in real steps, in the order of their verdicts.
        source: of the prices, "measured" or "analytic".
        assumptions: values that were assumed where nothing was measured, a line each.
        timeline: the predicted step.
        not_flipped: inputs whose changes would have taken too long to simulate.
    """

    title: str
    num_lanes: int
    items_per_step: int
    seconds_to_decide: float
    considered: int
    stands: tuple[str, ...]
    stages: tuple[str, ...]
    predicted: Prediction
    bottleneck: Bottleneck
    memory: str
    runners_up: tuple[Alternative, ...]
    ruled_out: Mapping[str, str]
    flips: tuple[Flip, ...] | None
    frontier: tuple[Alternative, ...]
    race: tuple[Tried, ...]
    source: str
    assumptions: tuple[str, ...]
    timeline: Gantt
    not_flipped: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return float(self.predicted.seconds)


def explained(
    decision: Decision,
    graph: FlowGraph,
    *,
    flips: Flips | None = None,
    race: Sequence[Tried] | None = None,
) -> Explanation:
    """Explain a decision; nothing is simulated.

    Args:
        decision: the choice.
        graph: its flow.
        flips: what `m2flow.plan.explain.flips` has found; None: it was not asked.
        race: plans that were tried in real steps; None: those of the run that the profile is of.
    """
    chosen, profile = decision.chosen, decision.profile
    plan, prediction = chosen.plan, chosen.prediction
    lanes = [lane.id for lane in plan.lanes]
    ahead = any(one.plan.max_staleness for one in (chosen, *decision.others))
    return Explanation(
        title=title(plan),
        num_lanes=len(lanes),
        items_per_step=decision.num_items,
        seconds_to_decide=decision.seconds_to_decide,
        considered=1 + len(decision.others),
        stands=tuple(where(plan)),
        stages=tuple(node.name for node in graph.nodes),
        predicted=replace(prediction, spans=(), alike={}),
        bottleneck=bottleneck(chosen),
        memory=_memory(chosen),
        runners_up=tuple(_alternative(one, decision) for one in decision.others[:RUNNERS_UP]),
        ruled_out=decision.ruled_out,
        flips=None if flips is None else flips.found,
        frontier=tuple(_alternative(one, decision) for one in decision.frontier) if ahead else (),
        race=profile.race if race is None else tuple(race),
        source=profile.source,
        assumptions=profile.assumptions,
        timeline=folded(lay_out(prediction.every_span(), prediction.window, lanes), COLUMNS),
        not_flipped=() if flips is None else flips.not_tried,
    )


def _alternative(other: Candidate, decision: Decision) -> Alternative:
    plan, seconds = other.plan, float(other.prediction.seconds)
    changes = tuple(differences(decision.chosen.plan, plan))
    pace = decision.num_items / seconds if seconds else 0.0
    return Alternative(plan.mode, title(plan), plan.max_staleness, seconds, pace, changes)


def _memory(chosen: Candidate) -> str:
    """What the fullest lane holds at most."""
    peaks, limits = chosen.prediction.peak_bytes, {x.id: x.memory_bytes for x in chosen.plan.lanes}
    fullest = max(peaks, key=lambda lane: peaks[lane], default=None)
    if fullest is None:
        return ""
    limit = limits[fullest]
    of_it = "" if limit is None else f" of {bytes_text(limit)}"
    return f"at most {bytes_text(peaks[fullest])}{of_it} on a lane"
