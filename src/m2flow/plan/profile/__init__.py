"""`Profile`: what the planner knows of a flow's stages and workers on one kind of hardware.

Plain data with units, JSON in and out. A profile is learned from the spans of steps that ran
(`learning`, from `evidence`), or computed for hardware that is not here (`analytic`, from the
`work` that a workload declares and the `hardware` of a cluster); the search asks nothing else.
Everything that belongs to a step of another shape, another model or another machine is told by its
`key`.

Items are counted as a stage receives them, per replica; `lanes` is how many lanes take part in
each call of a replica. Curves by items are monotone: more items never take less.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from statistics import fmean
from typing import ClassVar, Self

from m2flow.errors import UserError, suggestion
from m2flow.flow.worker import ONE_LANE
from m2flow.plan.race import Tried
from m2flow.plan.units import Bytes, BytesPerSecond, Items, Seconds

KEY_PARTS = ("model", "shapes", "hardware", "versions")
NO_BYTES, NO_TIME = Bytes(0), Seconds(0.0)
PLACES = ("same", "node", "cluster")
"""Where two workers stand to each other: on common lanes, on one machine, on several."""


def _check(holds: bool, message: str, key: str, value: object, expected: str = "") -> None:
    """Refuse a value of a file that makes no sense."""
    if not holds:
        raise UserError(message, key=key, value=value, expected=expected or None)


@dataclass(frozen=True)
class Piecewise:
    """A monotone piecewise-linear function through (x, y) points.

    Attributes:
        points: at least one, x and y not negative, x rising, y not falling.

    Below the first x it is flat (a call has a least price), except that it is 0 at 0. Beyond the
    last x it goes on along the last piece; a single point is met by a line through the origin.
    """

    points: tuple[tuple[float, float], ...]
    may_fall: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check(bool(self.points), "a curve needs at least one point", "points", self.points)
        known = all(0 <= x < math.inf and 0 <= y < math.inf for x, y in self.points)
        _check(known, "a curve's points must be finite and not negative", "points", self.points)
        rises = all(
            x0 < x1 and (self.may_fall or y0 <= y1) for (x0, y0), (x1, y1) in pairwise(self.points)
        )
        _check(rises, "a curve must not fall, and its x must rise", "points", self.points)

    def scaled(self, x: float = 1.0, y: float = 1.0) -> Self:
        """The curve with all arguments and all values so many times as large."""
        return replace(self, points=tuple((x * a, y * b) for a, b in self.points))

    @cached_property
    def _xs(self) -> list[float]:
        return [x for x, _ in self.points]

    def at(self, x: float) -> float:
        """The value at x >= 0."""
        if x <= 0:
            return 0.0
        xs, points = self._xs, self.points
        right = bisect_left(xs, x)
        if right == 0:
            return points[0][1]
        if right == len(xs):
            if right == 1:
                return points[0][1] * x / points[0][0] if points[0][0] else points[0][1]
            right -= 1
        (x0, y0), (x1, y1) = points[right - 1], points[right]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@dataclass(frozen=True)
class ByReplicas(Piecewise):
    """Seconds by the number of replicas, which may fall: each replica has its share of the items.

    Where the curve falls it is linear in 1/replicas, a fixed part and a share. It goes on so on
    both sides, but never faster than 1/replicas. Where it does not fall it is a `Piecewise`.
    """

    may_fall: ClassVar[bool] = True

    def at(self, x: float) -> float:
        right = min(max(1, bisect_left(self._xs, x)), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[max(0, right - 1)], self.points[right]
        if x <= 0 or y0 <= y1:
            return super().at(x)
        found = y1 + (y0 - y1) * (x0 / x) * (x1 - x) / (x1 - x0)
        return min(found, y0 * x0 / x) if x < x0 else max(found, y1 * min(1.0, x1 / x))


@dataclass(frozen=True)
class Quantiles:
    """A distribution by its values at probabilities 0, 1/(n-1), ..., 1; not falling."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        known = bool(self.values) and all(0 <= value < math.inf for value in self.values)
        _check(known, "quantiles must be finite and not negative", "values", self.values)
        rises = all(low <= high for low, high in pairwise(self.values))
        _check(rises, "quantiles must not fall", "values", self.values)

    @classmethod
    def of(cls, samples: Sequence[float], count: int = 33) -> Quantiles:
        """Quantiles of measured values, by linear interpolation between them."""
        every = cls(tuple(sorted(samples)))
        return cls(tuple(every.at(n / (count - 1)) for n in range(count)))

    def at(self, probability: float) -> float:
        """The value that so large a share of all does not exceed."""
        position = probability * (len(self.values) - 1)
        low = min(int(position), len(self.values) - 1)
        high = min(low + 1, len(self.values) - 1)
        return self.values[low] + (self.values[high] - self.values[low]) * (position - low)

    @cached_property
    def mean(self) -> float:
        return fmean((low + high) / 2 for low, high in self._between)

    @cached_property
    def deviation(self) -> float:
        """The standard deviation."""
        if self.values[0] == self.values[-1]:
            return 0.0
        squares = fmean((a * a + a * b + b * b) / 3 for a, b in self._between)
        return math.sqrt(max(0.0, squares - self.mean**2))

    @property
    def _between(self) -> Sequence[tuple[float, float]]:
        return list(pairwise(self.values)) or [(self.values[0], self.values[0])]

    @property
    def largest(self) -> float:
        return self.values[-1]


@dataclass(frozen=True)
class StageCost:
    """What a stage takes on one replica of so many lanes.

    Attributes:
        lanes: lanes that take part in each call of a replica (tensor-parallel, sharded).
        seconds: of a call, by items of the replica. For a streaming stage: until the last of so
            many items that came together is done, the tail of the lengths included.
        max_running: the limit of the plan's `max_running` that this is the price of, or None.
        slots: for a streaming stage, the most output items that a call works on at once; further
            items that the call holds wait, in the order in which they came. None for no limit.
        done: for a streaming stage, by the share of items that are done the share of `seconds`
            that has passed; from (0, 0) to (1, 1). None: rounds tell, or nothing comes out before
            the end.
        round: for a streaming stage, seconds in which each output item that is at work grows by one
            unit of `StageProfile.lengths`, by how many are at work on the replica; None where
            nothing is known of lengths.
        admit: beside the rounds, seconds to take in items, by how many come together; None: none.
        finish: seconds of a `finish`, by the number of replicas; None where there is none.
        working: bytes on each lane that a call takes beside the state, by items of the replica.
        error: standard error of `seconds`, relative.
        spread: how unlike items are, as the relative standard deviation of what single ones take; a
            call takes the mean of its items. 0 where lengths tell it, or nothing is known.
        kind: the kind of lane it was measured on.
        layout: name of the layout of the replica, as the worker declares it.
        elsewhere: for a stage that waits, the share of `seconds` that passes elsewhere, so that
            the lane has nothing to do.
    """

    lanes: int
    seconds: Piecewise
    max_running: int | None = None
    slots: int | None = None
    done: Piecewise | None = None
    round: Piecewise | None = None
    admit: Piecewise | None = None
    finish: ByReplicas | None = None
    working: Piecewise | None = None
    error: float = 0.0
    spread: float = 0.0
    kind: str = "cpu"
    layout: str = ONE_LANE.name
    elsewhere: float = 0.0

    def __post_init__(self) -> None:
        for key in ("lanes", "max_running", "slots"):
            limit = getattr(self, key)
            _check(limit is None or limit >= 1, "must be at least 1", key, limit)
        for key in ("error", "spread", "elsewhere"):
            _check(getattr(self, key) >= 0, "must not be negative", key, getattr(self, key))
        _check(self.elsewhere <= 1, "must be at most 1", "elsewhere", self.elsewhere)
        ends = self.done is None or self.done.points[-1] == (1.0, 1.0)
        _check(ends, "must end at (1, 1)", "done", self.done)

    @property
    def where(self) -> tuple[str, int, str]:
        """Layout, lanes of a replica and their kind."""
        return self.layout, self.lanes, self.kind

    def times(self, ratio: float, finish_ratio: float | None = None) -> StageCost:
        """The cost where everything, or a `finish` otherwise, takes so many times as long."""
        return replace(
            self,
            seconds=self.seconds.scaled(y=ratio),
            round=self.round and self.round.scaled(y=ratio),
            admit=self.admit and self.admit.scaled(y=ratio),
            finish=self.finish
            and self.finish.scaled(y=ratio if finish_ratio is None else finish_ratio),
        )

    def call(self, items: Items) -> Seconds:
        """A call of one replica."""
        return Seconds(self.seconds.at(items))

    def finish_seconds(self, replicas: int) -> Seconds:
        """The `finish` of a mini-batch on so many replicas."""
        return Seconds(self.finish.at(replicas) if self.finish else 0.0)

    def working_bytes(self, items: Items) -> Bytes:
        """What a call takes on each lane beside the worker's state."""
        return Bytes(math.ceil(self.working.at(items)) if self.working else 0)


@dataclass(frozen=True)
class StageProfile:
    """What a stage takes in each layout, and what one of its output items weighs on a link.

    Attributes:
        costs: at least one, each of another layout, running limit or kind of lane.
        output_bytes: of one output item.
        lengths: tokens (or whatever it counts) of an output item.
        turns: for the first member of a loop, how many turns an item stays in it.
    """

    costs: tuple[StageCost, ...]
    output_bytes: Bytes = NO_BYTES
    lengths: Quantiles | None = None
    turns: Quantiles | None = None

    def __post_init__(self) -> None:
        _check(bool(self.costs), "needs at least one cost", "costs", self.costs)
        seen = [(one.layout, one.lanes, one.max_running, one.kind) for one in self.costs]
        once = len(set(seen)) == len(seen)
        _check(once, "has a cost twice (layout, lanes, max_running, kind)", "costs", seen)
        _check(self.output_bytes >= 0, "must not be negative", "output_bytes", self.output_bytes)

    def costs_in(self, layout: str, lanes: int, kind: str) -> list[StageCost]:
        """The costs in a layout, one for each running limit; none where it has no price."""
        return [one for one in self.costs if one.where == (layout, lanes, kind)]

    def times(self, ratio: float) -> StageProfile:
        """The profile where every call takes so many times as long."""
        return replace(self, costs=tuple(cost.times(ratio) for cost in self.costs))


@dataclass(frozen=True)
class WorkerCost:
    """What a worker's state takes on each lane of a replica of so many lanes.

    Attributes:
        lanes: lanes of the replica.
        state_bytes: on each of them while it is resident (weights, gradients, optimizer).
        onload, offload: seconds to bring it to a lane and away from it.
        kind: the kind of lane.
        layout: name of the layout of the replica, as the worker declares it.
    """

    lanes: int
    state_bytes: Bytes = NO_BYTES
    onload: Seconds = NO_TIME
    offload: Seconds = NO_TIME
    kind: str = "cpu"
    layout: str = ONE_LANE.name

    def __post_init__(self) -> None:
        _check(self.lanes >= 1, "must be at least 1", "lanes", self.lanes)
        for key in ("state_bytes", "onload", "offload"):
            value = getattr(self, key)
            _check(0 <= value < math.inf, "must be finite and not negative", key, value)


@dataclass(frozen=True)
class PublishCost:
    """Seconds until a worker's weights are installed in another.

    Attributes:
        source, target: workers.
        place: one of PLACES.
        seconds: for the whole transfer.
        source_lanes, target_lanes: lanes of their replicas; None for any.
        source_kind, target_kind: kinds of the lanes at the two ends; None for any.
    """

    source: str
    target: str
    place: str
    seconds: Seconds
    source_lanes: int | None = None
    target_lanes: int | None = None
    source_kind: str | None = None
    target_kind: str | None = None

    def __post_init__(self) -> None:
        _check(self.place in PLACES, "is no place", "place", self.place, ", ".join(PLACES))
        known = 0 <= self.seconds < math.inf
        _check(known, "must be finite and not negative", "seconds", self.seconds)

    @property
    def ends(self) -> tuple[int | str | None, ...]:
        """Lanes and kinds of the two replicas."""
        return self.source_lanes, self.target_lanes, self.source_kind, self.target_kind

    def alike(self, *ends: int | str | None) -> int:
        """Count what other ends have in common with those that the price was measured with."""
        return sum(mine in (None, one) for mine, one in zip(self.ends, ends, strict=True))

    def covers(self, other: PublishCost) -> bool:
        """Whether the price is one of what the other prices too."""
        same = (self.source, self.target, self.place) == (other.source, other.target, other.place)
        return same and self.alike(*other.ends) == len(self.ends)


@dataclass(frozen=True)
class LinkCost:
    """A way between lanes: what a message takes there at least, and its rate."""

    latency: Seconds
    rate: BytesPerSecond

    def __post_init__(self) -> None:
        known = 0 <= self.latency < math.inf and self.rate > 0
        _check(known, "needs a latency and a positive rate", "links", (self.latency, self.rate))

    def seconds(self, size: Bytes) -> Seconds:
        """One message of so many bytes."""
        return Seconds(self.latency + size / self.rate if size else 0.0)


@dataclass(frozen=True)
class Profile:
    """Everything the planner knows beside the graph and the lanes.

    Attributes:
        stages: by stage name (as in `FlowGraph`); every stage of the graph has one.
        workers: by worker, its state in each layout; a worker left out has no state.
        publish: prices of publishing; an edge with none is free.
        links: by place ("same", "node", "cluster"); a place left out is free.
        dispatch: of a call or a `finish`, seconds beside the lane's own: until its command has
            reached the lane, and until its end is known.
        event_overhead: seconds of the controller for each event that a lane reports. The controller
            handles one event after the other.
        key: what it depends on: for each of KEY_PARTS, names and values.
        source: "measured" or "analytic".
        assumptions: what the prices take for granted, to be told beside the plan.
        race: the plans that were tried in the run that it was learned in.
    """

    stages: Mapping[str, StageProfile]
    workers: Mapping[str, tuple[WorkerCost, ...]] = field(default_factory=dict)
    publish: tuple[PublishCost, ...] = ()
    links: Mapping[str, LinkCost] = field(default_factory=dict)
    dispatch: Seconds = NO_TIME
    event_overhead: Seconds = NO_TIME
    key: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    source: str = "measured"
    assumptions: tuple[str, ...] = ()
    race: tuple[Tried, ...] = ()

    def __post_init__(self) -> None:
        for name in ("dispatch", "event_overhead"):
            value = getattr(self, name)
            _check(0 <= value < math.inf, "must be finite and not negative", name, value)
        for place in self.links:
            _check(place in PLACES, "is no place", "links", place, ", ".join(PLACES))
        for part in self.key:
            _check(part in KEY_PARTS, "is no part of a key", "key", part, ", ".join(KEY_PARTS))

    def stage(self, name: str) -> StageProfile:
        """A stage's profile.

        Raises:
            UserError: the profile does not know the stage.
        """
        if name not in self.stages:
            raise UserError(
                "the profile does not know this stage", key=name, hint=suggestion(name, self.stages)
            )
        return self.stages[name]

    def cost(
        self, stage: str, layout: str, lanes: int, kind: str, max_running: int | None = None
    ) -> StageCost:
        """What a stage takes in a layout, of several limits with the nearest one.

        Raises:
            UserError: the profile does not know the stage, or not in this layout.
        """
        own = self.stage(stage)
        fitting = own.costs_in(layout, lanes, kind)
        if not fitting:
            known = {f"{one.layout} on {one.lanes} x {one.kind}" for one in own.costs}
            raise UserError(
                "the profile does not know this stage in this layout on lanes of this kind",
                key=stage,
                value=f"{layout} on {lanes} x {kind}",
                expected=", ".join(sorted(known)),
            )
        wanted = 1 / (max_running or math.inf)
        return min(fitting, key=lambda one: abs(1 / (one.max_running or math.inf) - wanted))

    def worker(
        self, name: str, lanes: int, kind: str, layout: str | None = None
    ) -> WorkerCost | None:
        """A worker's state on a replica of so many lanes; None if it was never laid out so.

        Args:
            name: the worker.
            lanes, kind: of its replicas.
            layout: name of the layout; None for any that has so many lanes.
        """
        if name not in self.workers:
            return WorkerCost(lanes, kind=kind, layout=layout or ONE_LANE.name)
        found = (w for w in self.workers[name] if w.lanes == lanes and w.kind == kind)
        return next((w for w in found if layout in (None, w.layout)), None)

    def publish_seconds(
        self,
        source: str,
        target: str,
        place: str,
        source_lanes: int,
        target_lanes: int,
        kinds: tuple[str, str] = ("cpu", "cpu"),
    ) -> Seconds:
        """The price of a weight edge; of several entries that match, the dearest.

        A place that was not measured costs what the next farther one does, else the next nearer;
        replicas that were not measured cost what those do which have most in common with them.

        Args:
            source, target: workers.
            place: one of PLACES.
            source_lanes, target_lanes: of their replicas.
            kinds: of the lanes of the source and of the target.
        """
        start = PLACES.index(place)

        def likeness(one: PublishCost) -> tuple[bool, int, int, Seconds]:
            away = PLACES.index(one.place) - start
            alike = one.alike(source_lanes, target_lanes, *kinds)
            return away >= 0, alike, -abs(away), one.seconds

        known = [one for one in self.publish if (one.source, one.target) == (source, target)]
        return max(known, key=likeness).seconds if known else Seconds(0.0)


def differences(
    ours: Mapping[str, Mapping[str, object]], theirs: Mapping[str, Mapping[str, object]]
) -> list[str]:
    """What differs between two keys, one phrase each: `hardware.gpu is H100 here and A100 there`.

    Args:
        ours: the key of what is to be planned.
        theirs: the key of a stored profile.
    """
    phrases = []
    for part in KEY_PARTS:
        known = ours.get(part, {}), theirs.get(part, {})
        for name in sorted({name for one in known for name in one}):
            here, there = (one.get(name, "absent") for one in known)
            if here != there:
                phrases.append(f"{part}.{name} is {here} here and {there} there")
    return phrases
