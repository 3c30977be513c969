"""What stages ask of hardware, as workloads declare it and the planner prices it.

A workload hands over a `FlowWork`: for each stage and each declared layout the operations, bytes
and collectives of a call, and for each worker the bytes of its state. `analytic` beside this file
makes a profile of it for a device. The planner knows no model, simulator or reward: what a stage
computes is known to its workload alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from m2flow.flow.worker import ONE_LANE, Layout
from m2flow.plan.profile import Piecewise, Quantiles
from m2flow.plan.profile.hardware import SMALL_COLLECTIVE_SECONDS, Device


def rising(most: int) -> list[int]:
    """Return 1, 2, 4, ... and `most`: the counts for which work is priced."""
    return sorted({*(2**n for n in range(most.bit_length())), most})


def gang_sizes(lanes: int, device: Device) -> list[int]:
    """Return the sizes of gangs that are priced: those of `rising`, and all that divide a machine's
    lanes evenly, such as 3 of 6."""
    each = device.lanes_per_node
    return sorted({*rising(lanes), *(n for n in range(1, min(each, lanes) + 1) if each % n == 0)})


def curve(value: Callable[[int], float], counts: Sequence[int]) -> Piecewise:
    """Return the function at these counts, none below an earlier one."""
    reached, points = 0.0, []
    for count in counts:
        reached = max(reached, value(count))
        points.append((float(count), reached))
    return Piecewise(tuple(points))


@dataclass(frozen=True, slots=True)
class Work:
    """What a call, a round or a `finish` asks of each lane of a replica.

    Attributes:
        flops: floating-point operations, done at `arithmetic` of the device's peak.
        single_precision: whether that peak is the one in single precision.
        read_bytes: traffic to the device's memory, at `bandwidth` of its peak. It overlaps with the
            operations: the longer of both counts.
        sent_bytes: bytes that the lane sends in collectives over `span` lanes.
        apart: lanes from one member of a collective to the next, as of
            `Device.collective_bytes_per_second`.
        messages: collectives too small for their bytes to matter.
        overlapped: whether the bytes are sent while the lane computes.
        seconds: all else, such as launches, or the price of something that is no computation.
        then: work that follows, one after the other.
    """

    flops: float = 0.0
    read_bytes: float = 0.0
    sent_bytes: float = 0.0
    span: int = 1
    apart: int = 1
    messages: float = 0.0
    overlapped: bool = False
    seconds: float = 0.0
    arithmetic: float = 1.0
    bandwidth: float = 1.0
    single_precision: bool = False
    then: tuple[Work, ...] = ()

    def on(self, device: Device) -> float:
        """Return the seconds that a device takes for it."""
        peak = device.flops_per_second
        if self.single_precision:
            peak = device.single_flops_per_second
        lane = max(
            self.flops / (peak * self.arithmetic),
            self.read_bytes / (device.memory_bytes_per_second * self.bandwidth),
        )
        wires = self.sent_bytes / device.collective_bytes_per_second(self.span, self.apart)
        both = max(lane, wires) if self.overlapped else lane + wires
        own = both + self.messages * SMALL_COLLECTIVE_SECONDS + self.seconds
        return own + sum(work.on(device) for work in self.then)

    def times(self, count: float) -> Work:
        """Return the work of so many of these, one after the other."""
        return replace(
            self,
            flops=count * self.flops,
            read_bytes=count * self.read_bytes,
            sent_bytes=count * self.sent_bytes,
            messages=count * self.messages,
            seconds=count * self.seconds,
            then=tuple(work.times(count) for work in self.then),
        )


Held: TypeAlias = float | Mapping[str, float]
"""Bytes of memory, or bytes by what they are for."""


def total(held: Held) -> float:
    """Return all of the bytes."""
    return float(sum(held.values())) if isinstance(held, Mapping) else held


def by_purpose(held: Held, otherwise: str) -> dict[str, float]:
    """Return the bytes by what they are for; `otherwise` where that is not said, nothing if 0."""
    found = held if isinstance(held, Mapping) else {otherwise: held}
    return {what: size for what, size in found.items() if size}


def without(held: Held, purposes: Sequence[str]) -> float:
    """Return all of the bytes but those for some purposes."""
    return total(held) - sum(by_purpose(held, "").get(what, 0.0) for what in purposes)


@dataclass(frozen=True)
class Rounds:
    """How a streaming stage works on several output items at once: each grows by a unit a round.

    Attributes:
        admit: work of taking in so many items that come together.
        round: work of a round, by the output items at work and the units that they hold together.
        start: units that each output item holds when it begins, such as its prompt's tokens.
        longest: units that an output item holds at last, at most: a lane has room for them.
        unit_bytes: memory of each lane that a unit holds.
        what: units hold it for.
        reserved_bytes: memory of each lane that is taken for units at once, however many there are,
            or all that the lane has left if that is less; None for what they hold.
        in_state: whether the reserved bytes are a part of the worker's state, and not counted again
            as memory of calls.
        limits: numbers of output items that a replica may work on at once, to be offered to the
            planner. The largest is the stage's own limit.
    """

    admit: Callable[[int], Work]
    round: Callable[[float, float], Work]
    start: float
    longest: float
    unit_bytes: float
    limits: tuple[int, ...]
    what: str = "items at work"
    reserved_bytes: float | None = None
    in_state: bool = False


@dataclass(frozen=True)
class LayoutWork:
    """A stage on one replica of a declared layout.

    Attributes:
        layout: the layout, as the worker declares it.
        call: work of a call, by items; of a streaming stage without `rounds` too.
        finish: work of a `finish`, by the number of replicas.
        working_bytes: memory of each lane that a call takes beside the worker's state, by items; of
            `rounds` beside what their units hold.
        rounds: for a streaming stage, how its output items grow.
        elsewhere: for a stage that waits, the share of a call's seconds that passes elsewhere.
    """

    layout: Layout = ONE_LANE
    call: Callable[[int], Work] = lambda _items: Work()
    finish: Callable[[int], Work] | None = None
    working_bytes: Callable[[int], Held] = lambda _items: 0.0
    rounds: Rounds | None = None
    elsewhere: float = 0.0


@dataclass(frozen=True)
class StageWork:
    """A stage on each of its declared layouts.

    Attributes:
        layouts: ways to run it, none where this kind of lane cannot. Of several with the same name
            the first that fits counts.
        output_bytes: of an output item on a link.
        lengths: units that an output item grows to.
        turns: for the first member of a loop, how many turns an item stays in it.
    """

    layouts: tuple[LayoutWork, ...]
    output_bytes: float = 64.0
    lengths: Quantiles | None = None
    turns: Quantiles | None = None


@dataclass(frozen=True)
class WorkerWork:
    """A worker's state.

    Attributes:
        states: layouts, and the bytes on each lane of a replica that is laid out so.
        weight_bytes: of a whole copy of the weights that are published to the worker.
        hosted: layouts, and the bytes that each lane of a replica has in host memory, whether the
            state is on the lane or away.
        dealt: purposes of hosted bytes of the step's items, told for all lanes of the kind: on
            fewer lanes each has more of them.
        dropped: purposes of bytes of the state that are given up when it leaves the lane, and taken
            anew when it is back; nobody copies them.
    """

    states: Sequence[tuple[Layout, Held]]
    weight_bytes: float = 0.0
    hosted: Sequence[tuple[Layout, Held]] = ()
    dealt: Sequence[str] = ()
    dropped: Sequence[str] = ()


@dataclass(frozen=True)
class FlowWork:
    """All that a workload declares of a flow on one kind of lane.

    Attributes:
        stages: by stage name; a stage left out takes nothing.
        workers: by worker; a worker left out has no state.
        model: name of the model, for the profile's key.
        assumptions: what was taken for granted, a line each.
    """

    stages: Mapping[str, StageWork]
    workers: Mapping[str, WorkerWork] = field(default_factory=dict)
    model: str = ""
    assumptions: tuple[str, ...] = ()


Pricer: TypeAlias = Callable[[Device, int], FlowWork]
"""A workload's prices: asked once for each kind of lane, with the device and how many there are."""
