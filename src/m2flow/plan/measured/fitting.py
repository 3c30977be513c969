"""From single measurements to a `Profile`, with how far they lie apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph, StageNode
from m2flow.plan.measured.crowding import crowded, fit_alone, undisturbed
from m2flow.plan.measured.curves import (
    Point,
    envelope,
    least_squares,
    monotone,
    points,
    residual_error,
    spread_of_one,
    typical,
)
from m2flow.plan.measured.observed import Call, Observed
from m2flow.plan.measured.resuming import fit_resume
from m2flow.plan.measured.samples import LayoutKey, Samples, Sizes
from m2flow.plan.measured.streams import fit_done, fit_rounds
from m2flow.plan.profile import (
    LinkCost,
    Piecewise,
    Profile,
    PublishCost,
    Quantiles,
    StageCost,
    StageProfile,
    WorkerCost,
)
from m2flow.plan.units import Bytes, BytesPerSecond, Seconds

NO_COPY = BytesPerSecond(1e12)
"""Rate of a link on which larger messages were not seen to take longer."""

MATTERS = 0.05
"""Share of all lane time from which on a stage's spread is worth bringing down."""


class Evidence:
    """Measurements as they come in, and how well they agree.

    Args:
        graph: of the steps.
    """

    def __init__(self, graph: FlowGraph) -> None:
        self.graph = graph
        self.samples = Samples()

    def add(self, one: Observed) -> None:
        """Take another run in."""
        self.samples.add(self.graph, one)

    def points(self) -> dict[LayoutKey, list[Point]]:
        """For each stage and layout what was measured, by items of a replica."""
        return {
            where: points(_sizes(crowded(calls, fit_alone(calls))))
            for where, some in self.samples.calls.items()
            if (calls := undisturbed(some))
        }

    def shares(self) -> dict[str, float]:
        """Of all seconds that lanes spent in stages, the share of each stage."""
        spent = dict.fromkeys((node.name for node in self.graph.nodes), 0.0)
        for (stage, _, _), calls in self.samples.calls.items():
            spent[stage] += sum(call.seconds for call in calls)
        for (stage, _, _), finishes in self.samples.finishes.items():
            spent[stage] += sum(seconds for _, seconds in finishes)
        total = sum(spent.values()) or 1.0
        return {stage: seconds / total for stage, seconds in spent.items()}

    def errors(self) -> dict[tuple[LayoutKey, float], float]:
        """Relative standard errors of the points of stages that matter, by layout and size."""
        shares = self.shares()
        return {
            (where, point.size): point.error
            for where, some in self.points().items()
            if shares[where[0]] >= MATTERS
            for point in some
        }


def fit(
    graph: FlowGraph,
    observed: Iterable[Observed],
    *,
    key: Mapping[str, Mapping[str, object]] | None = None,
    links: Mapping[str, LinkCost] | None = None,
) -> Profile:
    """The profile that explains what was seen.

    Curves do not fall with items. A stage's seconds are those of the lane; what it costs beside
    the lane is `Profile.dispatch`.

    Args:
        graph: of the steps.
        observed: at least one run in which every stage was called.
        key: what the profile depends on.
        links: ways between lanes that were measured otherwise; transfers that were seen win.

    Raises:
        UserError: a stage was never called.
    """
    evidence = Evidence(graph)
    for one in observed:
        evidence.add(one)
    return fit_to(evidence, key=key, links=links)


def fit_to(
    evidence: Evidence,
    *,
    key: Mapping[str, Mapping[str, object]] | None = None,
    links: Mapping[str, LinkCost] | None = None,
) -> Profile:
    """The same of measurements that were taken in before."""
    samples = evidence.samples
    return Profile(
        stages={node.name: _stage(node, samples) for node in evidence.graph.nodes},
        workers=_workers(samples),
        publish=tuple(_publish(samples)),
        links={**(links or {}), **_links(samples.transfers, (links or {}).get("node"))},
        dispatch=Seconds(median(samples.gaps) if samples.gaps else 0.0),
        key=key or {},
    )


def _stage(node: StageNode, samples: Samples) -> StageProfile:
    layouts = tuple(
        _layout(where, samples) for where in sorted(samples.calls) if where[0] == node.name
    )
    if not layouts:
        raise UserError(
            "was never called while the flow was measured",
            key=node.name,
            hint="give more steps, or batches with which every stage has something to do",
        )
    sizes = samples.output_bytes.get(node.name) or samples.mixed_bytes.get(node.name, [])
    items = sum(count for count, _ in sizes)
    each = sum(size for _, size in sizes) / items if items else 0.0
    lengths, turns = samples.lengths.get(node.name), samples.turns.get(node.name)
    return StageProfile(
        layouts,
        Bytes(round(each)),
        Quantiles.of(lengths) if lengths else None,
        Quantiles.of(turns) if turns else None,
    )


def _sizes(calls: Sequence[Call]) -> Sizes:
    return [(call.items, call.seconds) for call in calls]


def _layout(where: LayoutKey, samples: Samples) -> StageCost:
    _, lanes, kind = where
    seen = undisturbed(samples.calls[where])
    alone = fit_alone(seen)
    calls = crowded(seen, alone)
    measured = points(_sizes(calls))
    curve = monotone(measured)
    layout = StageCost(
        lanes,
        curve,
        finish=_curve(samples.finishes.get(where, [])),
        working=_working(samples.working.get(where, []), samples.finishing.get(where, 0.0)),
        error=residual_error(_sizes(calls), curve),
        alone=alone,
        kind=kind,
    )
    streams = [call for call in calls if call.pieces]
    if not streams:
        return replace(layout, spread=spread_of_one(measured))
    rounds = fit_rounds(streams)
    if rounds is not None:
        resume = fit_resume(samples.resumed.get(where, []), rounds, alone)
        layout = replace(layout, round=rounds.round, admit=rounds.admit, resume=resume)
    return replace(layout, done=fit_done(streams))


def _curve(samples: Sizes) -> Piecewise | None:
    return monotone(points(samples)) if samples else None


def _working(calls: Sizes, finish: float) -> Piecewise | None:
    """The most that calls took, and the `finish` after them: memory must do for the worst."""
    return envelope([(items, max(most, finish)) for items, most in calls]) if calls else None


def _workers(samples: Samples) -> dict[str, tuple[WorkerCost, ...]]:
    moved = {where[:3] for where in samples.moves}
    found: dict[str, list[WorkerCost]] = {}
    for worker, lanes, kind in sorted({*samples.states, *moved}):
        size = Bytes(samples.states.get((worker, lanes, kind), 0))
        onload, offload = (
            Seconds(typical(samples.moves.get((worker, lanes, kind, what), [0.0])))
            for what in ("onload", "offload")
        )
        found.setdefault(worker, []).append(WorkerCost(lanes, size, onload, offload, kind))
    return {worker: tuple(layouts) for worker, layouts in found.items()}


def _publish(samples: Samples) -> list[PublishCost]:
    """One price for each edge and place, and for each pair of layouts where there are several."""
    several = {where[3:] for where in samples.publishes} != {(1, 1)}
    return [
        PublishCost(
            source,
            target,
            place,
            Seconds(typical(seconds)),
            source_lanes if several else None,
            target_lanes if several else None,
        )
        for (source, target, place, source_lanes, target_lanes), seconds in sorted(
            samples.publishes.items()
        )
    ]


def _links(transfers: Sizes, known: LinkCost | None) -> dict[str, LinkCost]:
    """Latency and rate of transfers on one machine; the known rate where sizes do not tell it."""
    transfers = [(size, seconds) for size, seconds in transfers if seconds > 0]
    if not transfers:
        return {}
    largest = max(size for size, _ in transfers) or 1.0
    latency, slope = least_squares(
        [[1.0, size / largest] for size, _ in transfers],
        [seconds for _, seconds in transfers],
        [1.0 / seconds for _, seconds in transfers],
    )
    fastest = NO_COPY if known is None else known.rate
    rate = BytesPerSecond(largest / slope) if slope > 0 else fastest
    return {"node": LinkCost(Seconds(latency), min(rate, fastest))}
