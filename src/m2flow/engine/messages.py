"""What goes into the engine (events) and what comes out of it (commands).

Items are integers: an item's index within its step. Payloads never pass through here; a `Part`
says which stage made the items that a call is to read, and which lane holds them.

What a lane reports carries the lane's epoch, which counts the processes that the lane has had. The
engine drops reports of an earlier epoch, and those of a call that has ended: call numbers are never
used twice. The reports of one lane must come in the order in which the lane made them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recalled:
    """Items of a stage that were made when the step was run before; the launcher holds them.

    Attributes:
        node: the stage; of items that have left a loop its first member.
        version: of the weights that made them.
        items: indices in the item space of the stage's output. Of a unit some may be left out if
            the stage streams.
        lengths: as in ItemsProduced.
    """

    node: int
    version: int
    items: tuple[int, ...]
    lengths: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepSubmitted:
    """The source items 0 ... num_items-1 of a step are there.

    Attributes:
        lengths: as in ItemsProduced.
        recalled: what need not be made, because it is there already.
    """

    step: int
    num_items: int
    lengths: tuple[float, ...] = ()
    recalled: tuple[Recalled, ...] = ()


@dataclass(frozen=True, slots=True)
class ItemsProduced:
    """A call has handed on finished output items; without any it is a sign of life of any call.

    Attributes:
        call: number of the call.
        lane: the lane that holds the items.
        items: indices in the item space of the stage's output.
        num_bytes: their size, all together.
        leaving: those that leave the loop the stage stands in.
        judged: for a stage in a loop, whether its output says of each item if it leaves.
        lengths: how long each of the items is expected to take in a stage that declares `length`;
            empty if nothing is known.
    """

    call: int
    lane: int
    items: tuple[int, ...]
    num_bytes: int = 0
    leaving: tuple[int, ...] = ()
    lengths: tuple[float, ...] = ()
    judged: bool = True
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class CallFinished:
    """One lane has finished its part of a call."""

    call: int
    lane: int
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A call raised.

    Attributes:
        begun: whether the stage had been called; if not, its worker is as it was before.
    """

    call: int
    lane: int
    error: BaseException
    epoch: int = 0
    begun: bool = True


@dataclass(frozen=True, slots=True)
class CallAborted:
    """One lane has stopped its part of a call that was withdrawn."""

    call: int
    lane: int
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class MoveFailed:
    """Offloading or onloading a worker raised."""

    lane: int
    worker: str
    what: Literal["offload", "onload"]
    error: BaseException
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class LaneLost:
    """A lane's process is gone, and with it all payloads that it held.

    Attributes:
        comes_back: whether it is started again while the steps go on; if not, the run stops.
    """

    lane: int
    reason: str
    epoch: int = 0
    comes_back: bool = True


@dataclass(frozen=True, slots=True)
class LaneRestarted:
    """A lost lane is up again, with its workers as they were when the last mini-batch ended, and
    the weights installed that it had, unless newer ones are about to be.

    Attributes:
        epoch: of the new process; larger than those of the processes before it.
    """

    lane: int
    epoch: int


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


LaneReport: TypeAlias = (
    ItemsProduced | CallFinished | CallFailed | CallAborted | MoveFailed | LaneLost
)
"""What is said of a lane in one of its epochs."""

Event: TypeAlias = StepSubmitted | LaneReport | LaneRestarted | Tick

# --- commands ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """Items to read from the output of one stage (or SOURCE).

    Attributes:
        lane: the lane that holds them; LAUNCHER for source items and recalled ones, which come with
            the command. Where it is the reading lane, they are there already.
    """

    producer: int
    items: tuple[int, ...]
    lane: int


LAUNCHER = -1
"""Stands for a lane where the launcher holds the items: the step's source, or recalled ones."""

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
        group: in a fused loop with a stage that waits, so many items go around together, and the
            groups take turns on the lane; None for all.
        without: for a streaming stage, the outputs in the step that are recalled while others of
            their unit are not: the call need not make them, and hands none of them on.
    """

    call: int
    node: int
    step: int
    lanes: tuple[int, ...]
    inputs: tuple[Inputs, ...]
    fused: bool = False
    group: int | None = None
    without: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FeedCall:
    """Give more items to a streaming call while it runs; lane k reads them from `inputs[k]`.

    All lanes of the call get all of them, and the commands of a call in the same sequence.
    """

    call: int
    node: int
    step: int
    lanes: tuple[int, ...]
    inputs: tuple[Inputs, ...]


@dataclass(frozen=True, slots=True)
class AbortCall:
    """Withdraw a call: each of these lanes stops its part and answers with CallAborted.

    A lane that has answered CallFinished or CallFailed meanwhile need not answer again. A `finish`
    that is withdrawn must leave the worker as it was before.
    """

    call: int
    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropFolded:
    """What these lanes have folded into a stage since its last mini-batch is void: drop it.

    It belongs to units that another lane of the replica has lost its part of, and that are folded
    in once more.
    """

    node: int
    step: int
    lanes: tuple[int, ...]


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
    """Offload or onload a worker on a lane; done before any later command to that lane."""

    what: Literal["offload", "onload"]
    worker: str
    lane: int


@dataclass(frozen=True, slots=True)
class ReleaseItems:
    """No stage will read these items any more; their payload may go from these lanes."""

    step: int
    producer: int
    items: tuple[int, ...]
    lanes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompleteStep:
    """Everything of a step is done, its weights are installed, its payloads may go.

    Attributes:
        staleness: for each version lag, how many items were leased to a stage that runs on
            published weights with that lag.
        output: where the items lie that the step returns; their payloads may go once they are read.
    """

    step: int
    version: int
    staleness: Mapping[int, int] = field(default_factory=dict)
    output: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class FailRun:
    """Stop the run; `cause` is the first thing that went wrong."""

    message: str
    cause: BaseException | None = None


CallCommand: TypeAlias = RunCall | RunFinish | ExportWeights | InstallWeights
LaneCommand: TypeAlias = CallCommand | FeedCall | AbortCall | DropFolded | MoveState
Command: TypeAlias = LaneCommand | ReleaseItems | CompleteStep | FailRun
