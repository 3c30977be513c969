"""What goes into the engine (events) and what comes out of it (commands).

Items are integers: an item's index within its step. Payloads never pass through here; a `Part`
says which stage made the items that a call is to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepSubmitted:
    """The source items 0 ... num_items-1 of a step are there; `lengths` as in ItemsProduced."""

    step: int
    num_items: int
    lengths: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ItemsProduced:
    """A call has handed on finished output items; without any it is a sign of life.

    Attributes:
        items: indices in the item space of the stage's output.
        num_bytes: their size, all together.
        leaving: those that leave the loop the stage stands in.
        judged: for a stage in a loop, whether its output says of each item if it leaves.
        lengths: how long each of the items is expected to take in a stage that declares `length`;
            empty if nothing is known.
    """

    call: int
    items: tuple[int, ...]
    num_bytes: int = 0
    leaving: tuple[int, ...] = ()
    lengths: tuple[float, ...] = ()
    judged: bool = True


@dataclass(frozen=True, slots=True)
class CallFinished:
    """One lane has finished its part of a call."""

    call: int
    lane: int


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A call raised."""

    call: int
    lane: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class MoveFailed:
    """Offloading or onloading a worker raised."""

    lane: int
    worker: str
    what: Literal["offload", "onload"]
    error: BaseException


@dataclass(frozen=True, slots=True)
class LaneLost:
    """A lane's process is gone."""

    lane: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """The time, in seconds of any one clock.

    Attributes:
        now: the time.
        judge: whether to look for calls that are past their deadline. A driver that has news which
            it has not told yet does not ask for it: a call may have ended in the meantime.
    """

    now: float
    judge: bool = True


Event: TypeAlias = (
    StepSubmitted | ItemsProduced | CallFinished | CallFailed | MoveFailed | LaneLost | Tick
)

# --- commands ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """Items to read from the output of one stage (or SOURCE)."""

    producer: int
    items: tuple[int, ...]


Inputs: TypeAlias = tuple[tuple[Part, ...], ...]
"""For each input stream of a stage, the parts that make up its items, aligned by item."""


@dataclass(frozen=True, slots=True)
class RunCall:
    """Run a stage on a gang of lanes; lane k works on `inputs[k]`.

    Of a streaming stage all lanes get all of the inputs, and work on each item together; the first
    lane hands it on.

    Attributes:
        fused: the stage is the first member of a loop whose members all stand on this lane: run
            the whole loop there, until each of the items has left it. What leaves it counts as
            made by this first member.
    """

    call: int
    node: int
    step: int
    lanes: tuple[int, ...]
    inputs: tuple[Inputs, ...]
    fused: bool = False


@dataclass(frozen=True, slots=True)
class FeedCall:
    """Give more items to a streaming call while it runs.

    All lanes of the call get them. Its orders come to each of its lanes in the same sequence.
    """

    call: int
    node: int
    step: int
    lanes: tuple[int, ...]
    inputs: Inputs


@dataclass(frozen=True, slots=True)
class RunFinish:
    """Every item of a mini-batch has been folded in: run `finish` on all lanes of the worker."""

    call: int
    node: int
    step: int
    minibatch: int
    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExportWeights:
    """Make the source worker's weights of this version readable from other lanes.

    `lanes` is one replica of the source: each lane exports the shard that it holds.
    """

    call: int
    source: str
    version: int
    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InstallWeights:
    """Install a version on one lane: from the source worker if it stands there, else its export."""

    call: int
    source: str
    target: str
    version: int
    lanes: tuple[int, ...]
    local: bool


@dataclass(frozen=True, slots=True)
class MoveState:
    """Offload or onload a worker on a lane; done before any later command to that lane.

    Attributes:
        early: an onload for a call to come: it runs beside the call in progress, after early ones
            before it; a later call of the worker, or an offload of it, waits for it.
    """

    what: Literal["offload", "onload"]
    worker: str
    lane: int
    early: bool = False


@dataclass(frozen=True, slots=True)
class ReleaseItems:
    """No stage will read these outputs any more; their payload may go."""

    step: int
    producer: int
    items: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompleteStep:
    """Everything of a step is done, its weights are installed, its payloads may go.

    Attributes:
        staleness: for each version lag, how many items were leased to a stage that runs on
            published weights with that lag.
    """

    step: int
    version: int
    staleness: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FailRun:
    """Stop the run; `cause` is the first thing that went wrong."""

    message: str
    cause: BaseException | None = None


LaneCommand: TypeAlias = RunCall | FeedCall | RunFinish | ExportWeights | InstallWeights | MoveState
Command: TypeAlias = LaneCommand | ReleaseItems | CompleteStep | FailRun
