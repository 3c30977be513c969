"""From measurements to a `Profile`: a new one, or a known one corrected.

A stored or computed profile is corrected in two ways. Prices of layouts that ran are fitted to what
was measured, and keep the known curve only where nothing was measured. Prices of a stage's other
layouts are multiplied by how many times as long the stage took as the known profile says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

from m2flow.errors import UserError
from m2flow.flow.graph import StageNode
from m2flow.plan.profile import (
    ByReplicas,
    LinkCost,
    Piecewise,
    Profile,
    PublishCost,
    Quantiles,
    StageCost,
    StageProfile,
    WorkerCost,
)
from m2flow.plan.profile.curves import (
    NEAR,
    Point,
    by_size,
    envelope,
    least_squares,
    monotone,
    spread,
    typical,
)
from m2flow.plan.profile.evidence import Evidence, Sample, Where
from m2flow.plan.profile.growing import fit_done, fit_growth
from m2flow.plan.units import Bytes, BytesPerSecond, Seconds

NO_COPY = BytesPerSecond(1e12)
"""Rate of a link on which larger messages were not seen to take longer."""

TOLD_APART = 2.0
"""How many times as large as the smallest transfer the largest one is where sizes tell the rate."""

KNOWN_CALLS = 2.0
"""A point of a profile that was measured before counts as so many calls; a computed one as none
where anything was measured."""

FEWEST = 4
"""Of fewer values of one size their spread says nothing."""

ENOUGH_LENGTHS = 64
"""With so many measured lengths, known ones do not count."""


def fitted(
    evidence: Evidence,
    known: Profile | None = None,
    *,
    key: Mapping[str, Mapping[str, object]] | None = None,
    links: Mapping[str, LinkCost] | None = None,
) -> Profile:
    """Return the profile that explains what was measured.

    Args:
        evidence: measurements.
        known: what was known before; prices for which there is no measurement come from it.
        key: what the profile depends on; by default that of `known`.
        links: ways between lanes that were measured otherwise; transfers that were seen win.

    Raises:
        UserError: nothing is known of a stage, and it was never called.
    """
    base = known or Profile({})
    places = {**base.links, **(links or {})}
    dispatch, event = _beside(evidence) or (base.dispatch, base.event_overhead)
    return replace(
        base,
        stages={node.name: _stage(node, evidence, base) for node in evidence.graph.nodes},
        workers=_workers(evidence, base),
        publish=_publish(evidence, base),
        links={**places, **_links(evidence.transfers, places.get("node"))},
        dispatch=dispatch,
        event_overhead=event,
        key=base.key if key is None else key,
        source="measured",
    )


def _stage(node: StageNode, evidence: Evidence, known: Profile) -> StageProfile:
    before = known.stages.get(node.name)
    costs = before.costs if before else ()
    free = [one for one in costs if one.max_running is None] or costs
    given = {one.where: one for one in free}
    trust = KNOWN_CALLS if known.source == "measured" else 0.0
    seen = {where[1:]: calls for where, calls in evidence.timed(node.name).items()}
    if not seen and before is None:
        raise UserError(
            "was never called while the flow was measured",
            key=node.name,
            hint="give more steps, or batches with which every stage has something to do",
        )
    both = [(layout, given[layout]) for layout in seen if layout in given]
    ratio = _ratio(
        (call.seconds, one.seconds.at(call.size)) for layout, one in both for call in seen[layout]
    )
    ends = [
        (end.seconds, one.finish_seconds(round(end.size)))
        for layout, one in both
        for end in evidence.finishes((node.name, *layout))
    ]
    expected = sum(seconds for _, seconds in ends)
    finish_ratio = sum(seconds for seconds, _ in ends) / expected if expected else ratio
    ran = [
        _cost((node.name, *layout), calls, evidence, given.get(layout), trust)
        for layout, calls in seen.items()
    ]
    others = [
        one.times(ratio, finish_ratio)
        for one in costs
        if one.max_running is not None or one.where not in seen
    ]
    sizes = evidence.output_bytes.get(node.name, ())
    items = sum(count for count, _ in sizes)
    weight = round(sum(size for _, size in sizes) / items) if items else 0
    lengths, turns = evidence.lengths.get(node.name, ()), evidence.turns.get(node.name, ())
    found = before or StageProfile(tuple(ran))
    drawn = lengths and (found.lengths is None or len(lengths) >= ENOUGH_LENGTHS)
    return StageProfile(
        tuple(sorted((*ran, *others), key=lambda one: (one.kind, one.lanes, one.layout))),
        Bytes(weight) if weight else found.output_bytes,
        Quantiles.of(lengths) if drawn else found.lengths,
        Quantiles.of(turns) if turns else found.turns,
    )


def _cost(
    where: Where,
    calls: Sequence[Sample],
    evidence: Evidence,
    known: StageCost | None,
    trust: float,
) -> StageCost:
    """Fit the price of a stage in one layout that ran."""
    _, layout, lanes, kind = where
    measured = points(calls)
    curve = _merged(measured, known.seconds if known else None, trust)
    before = known or StageCost(lanes, curve)
    gauged = [(one.size, one.seconds) for one in evidence.of("working", where)]
    ended = max((most for size, most in gauged if not size), default=0.0)
    working = [(size, max(most, ended)) for size, most in gauged if size]
    worked, kept = (evidence.worked.get((where, kind), 0.0) for kind in ("finish", "call"))
    shares = evidence.elsewhere.get(where)
    cost = StageCost(
        lanes,
        curve,
        finish=_finish(evidence.finishes(where), before.finish, trust, worked > kept),
        working=envelope(working) if working else before.working,
        error=_error(calls, curve),
        kind=kind,
        layout=layout,
        elsewhere=typical(shares) if shares else before.elsewhere,
    )
    streams = [call for call in calls if call.pieces]
    growth = fit_growth(streams)
    if growth is not None:
        round_, admit, slots = growth
        cost = replace(cost, round=round_, admit=admit, slots=slots)
    elif before.round is not None:
        ratio = typical([call.seconds / before.seconds.at(call.size) for call in calls])
        scaled = before.times(ratio)
        cost = replace(cost, round=scaled.round, admit=scaled.admit, slots=before.slots)
    if streams:
        return replace(cost, done=fit_done(streams) or before.done)
    return replace(cost, spread=_spread_of_one(measured))


def _ratio(seconds: Iterable[tuple[float, float]]) -> float:
    """Return the median of measured over known seconds, of what was known to take any."""
    ratios = [measured / known for measured, known in seconds if known > 0]
    return median(ratios) if ratios else 1.0


def points(samples: Iterable[Sample]) -> list[Point]:
    """Return what is typical for each size, sizes that are near each other together."""
    found = []
    for group in by_size(samples, lambda one: one.size):
        seconds = [one.seconds for one in group]
        size = fmean(one.size for one in group)
        found.append(Point(size, typical(seconds), spread(seconds), len(group)))
    return found


def _merged(measured: Sequence[Point], known: Piecewise | None, trust: float) -> Piecewise:
    """Return the curve through what was measured, and through what is known elsewhere.

    A known curve counts as `trust` calls of each size that was measured; elsewhere it is taken as
    many times as high as it then is there.
    """
    if known is None:
        return monotone(measured)
    found = []
    for one in measured:
        count = one.count + trust
        seconds = (one.count * one.seconds + trust * known.at(one.size)) / count
        found.append(replace(one, seconds=seconds, count=count))
    ratio = _ratio((one.seconds, known.at(one.size)) for one in found)
    for size, seconds in known.points:
        if not any(size / NEAR < one.size < size * NEAR for one in measured):
            found.append(Point(size, seconds * ratio, 0.0, max(1.0, trust)))
    return monotone(found)


def _finish(
    samples: Sequence[Sample], known: ByReplicas | None, trust: float, shared: bool
) -> ByReplicas | None:
    """Fit the price of a `finish` by the number of replicas, which may fall.

    The mean counts: of several mini-batches the last one may have all the work.

    Args:
        samples: what was measured.
        known: what was known before; beyond its points it says nothing.
        trust: as for `_merged`.
        shared: whether one number of replicas tells of others, as each works on its share.
    """
    by_replicas: dict[float, list[float]] = {}
    for one in samples:
        by_replicas.setdefault(float(one.size), []).append(one.seconds)
    found = {replicas: fmean(some) for replicas, some in by_replicas.items()}
    if known is not None:
        least, most = known.points[0][0], known.points[-1][0]
        told = {n: known.at(n) for n in found if least <= n <= most}
        for n, seconds in told.items():
            count = len(by_replicas[n])
            found[n] = (count * found[n] + trust * seconds) / (count + trust)
        ratio = _ratio((found[n], seconds) for n, seconds in told.items())
        found = {**dict(known.scaled(y=ratio).points), **found}
    if len(found) == 1 and shared:
        found.update({2 * n: seconds / 2 for n, seconds in found.items()})
    return ByReplicas(tuple(sorted(found.items()))) if found else None


def _error(calls: Sequence[Sample], curve: Piecewise) -> float:
    """Return the standard error of a curve, relative: how far single calls lie from it."""
    ratios = [call.seconds / curve.at(call.size) for call in calls if curve.at(call.size) > 0]
    return spread(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0


def _spread_of_one(measured: Sequence[Point]) -> float:
    """Return the relative standard deviation between items, from that between calls.

    The mean of n items that are unlike each other varies by the square root of n less.
    """
    known = [one for one in measured if one.count >= FEWEST and one.size > 0]
    return float(median(one.spread * one.size**0.5 for one in known)) if known else 0.0


def _workers(evidence: Evidence, known: Profile) -> dict[str, tuple[WorkerCost, ...]]:
    """Return the state of each worker in each layout that was seen, and the known others."""
    found: dict[Where, WorkerCost] = {
        (worker, one.layout, one.lanes, one.kind): one
        for worker, costs in known.workers.items()
        for one in costs
    }
    moved = {where for what, where, _ in evidence.samples if what in ("onload", "offload")}
    for where in {*evidence.states, *moved}:
        _, layout, lanes, kind = where
        before = found.get(where, WorkerCost(lanes, kind=kind, layout=layout))
        onload, offload = (
            [one.seconds for one in evidence.of(what, where)] for what in ("onload", "offload")
        )
        found[where] = replace(
            before,
            state_bytes=Bytes(evidence.states.get(where, before.state_bytes)),
            onload=Seconds(typical(onload)) if onload else before.onload,
            offload=Seconds(typical(offload)) if offload else before.offload,
        )
    workers: dict[str, list[WorkerCost]] = {}
    for where in sorted(found):
        workers.setdefault(where[0], []).append(found[where])
    return {worker: tuple(costs) for worker, costs in workers.items()}


def _publish(evidence: Evidence, known: Profile) -> tuple[PublishCost, ...]:
    """Return a price for each edge, place and pair of replicas that was seen, and known others."""
    found, left = list[PublishCost](), known.publish
    for one, seconds in evidence.publishes.items():
        found.append(replace(one, seconds=Seconds(typical(seconds))))
        left = tuple(other for other in left if not other.covers(one))
    return (*sorted(found, key=str), *left)


def _links(
    transfers: Iterable[tuple[float, float, float]], known: LinkCost | None
) -> dict[str, LinkCost]:
    """Return latency and rate of transfers on one machine.

    Sizes that hardly differ do not tell one from the other: the rate is the known one then, or
    larger transfers than were seen would be said to take longer by as much as they are larger.
    """
    seen = [one for one in transfers if one[2] > 0]
    if not seen:
        return {}
    fastest = NO_COPY if known is None else known.rate
    largest = max(size for _, size, _ in seen) or 1.0
    if largest < TOLD_APART * min(size for _, size, _ in seen):
        waits = [max(0.0, seconds - size / fastest) / parts for parts, size, seconds in seen]
        return {"node": LinkCost(Seconds(fmean(waits)), fastest)}
    latency, slope = least_squares(
        [[parts, size / largest] for parts, size, _ in seen],
        [seconds for *_, seconds in seen],
        [1.0 / seconds for *_, seconds in seen],
    )
    rate = BytesPerSecond(largest / slope) if slope > 0 else fastest
    return {"node": LinkCost(Seconds(latency), min(rate, fastest))}


def _beside(evidence: Evidence) -> tuple[Seconds, Seconds] | None:
    """Return what a call takes beside its lane: in all, and of each event before it.

    What the controller takes for an event cannot be told from the way there and back where events
    come one at a time: all of it is on the way then.
    """
    if not evidence.gaps:
        return None
    rows = [[1.0, float(events)] for events, _ in evidence.gaps]
    seconds = [seconds for _, seconds in evidence.gaps]
    middle = median(seconds) or 1e-9
    found = least_squares(rows, seconds, [1.0 / max(one, middle / 10) for one in seconds])
    whole, event = found
    return Seconds(max(0.0, whole - event)), Seconds(event)
