"""What the launcher and a lane say to each other over their control line. Plain data.

Orders go to the lane, which takes them up one after the other; answers come back. Payloads do not
travel here, but for small source items, and what lanes of other machines restore from a snapshot.
"""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, TypeAlias, get_args

from m2flow.engine.messages import Event, LaneCommand, Part
from m2flow.engine.spans import Span
from m2flow.runtime.lane.journal import JournalPlace
from m2flow.runtime.lane.reports import Published, Report
from m2flow.runtime.transport.peering import PeerAddress
from m2flow.runtime.weights.exports import Export, Sends

# --- orders -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placed:
    """One worker as it stands on this lane.

    Attributes:
        worker: the pickled Worker.
        replicas: its gangs, as positions of lanes.
        positions: all of its lanes, in order of rank.
        layout: name of the layout in which each replica lies on its lanes.
        sums: whether it may sum over its lanes.
        state: where that lies which it is to `restore` after it has been loaded, or None.
        saved: that itself, packed as source items are; None if `state` says where.
    """

    worker: bytes
    replicas: tuple[tuple[int, ...], ...]
    positions: tuple[int, ...]
    layout: str = "one"
    sums: bool = False
    state: Fetch | None = None
    saved: Any = None


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where lanes meet for collectives; see `LaneGroups.init`.

    Attributes:
        store: name of a file in the pool's folder if all lanes are on one machine; else host and
            port where one lane keeps the store.
    """

    number: int
    store: str | tuple[str, int]
    timeout_seconds: float
    world: tuple[int, ...]
    keeper: int


@dataclass(frozen=True, slots=True)
class Load:
    """Bring up workers, in place of those of an earlier run.

    Attributes:
        number: of the answer.
        graphs: the flow's traced methods by name, pickled.
        placed: the workers that stand here, by name.
        version: number of the weights that the run begins with.
        memory_bytes: the lane's limit; with one, each worker is offloaded as soon as it is loaded.
        deadline_seconds: longest that a payload, or a collective, may be waited for.
        meeting: how the lanes of the pool find each other for collectives; None if no worker
            needs any, and for a lane that has come back while the others have met.
        lane_sets: the sets of positions that need a process group, the same for every lane.
        keep: to go on under another plan: workers that stay as they are, while the others make
            way; payloads stay as well. None to begin anew.
    """

    number: int
    graphs: bytes
    placed: Mapping[str, Placed]
    version: int
    memory_bytes: int | None
    deadline_seconds: float
    meeting: Rendezvous | None = None
    lane_sets: tuple[tuple[int, ...], ...] = ()
    keep: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Save:
    """Have a worker `save` its state, and keep that for the lanes that will ask for it.

    Attributes:
        number: of the answer, a `SaveSeconds`.
        worker: whose state.
        producer: under which it is kept, as the one item of step `STATES` of no flow.
    """

    number: int
    worker: str
    producer: int


@dataclass(frozen=True, slots=True)
class SaveSeconds:
    """What saving a state took.

    Attributes:
        busy: for how long the lane was at it.
        held_up: for how long it held up what the lane had to do next, at most.
    """

    busy: float
    held_up: float


@dataclass(frozen=True, slots=True)
class Fetch:
    """Where what a worker has saved lies: on which lane, and as whose output."""

    lane: int
    producer: int


@dataclass(frozen=True, slots=True)
class Execute:
    """Carry out a command of the engine.

    Attributes:
        flow: name of the traced method.
        command: what to do.
        sources: what it reads that the launcher holds, packed: one for each such part, in order.
        released: payloads to let go of before: no stage will read them.
        in_pieces: report what a streaming call has finished at once, not at its end.
        sends: for an export, how it is to be laid out.
        exports: for an install, where the weights lie; empty if the source stands here.
    """

    flow: str
    command: LaneCommand
    sources: Sequence[Any] = ()
    released: Sequence[Release] = ()
    in_pieces: bool = True
    sends: Sends | None = None
    exports: Sequence[Export] = ()


@dataclass(frozen=True, slots=True)
class Release:
    """Payloads that a lane is to let go of."""

    flow: str
    step: int
    producer: int
    items: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropStep:
    """Let every payload of a step go."""

    flow: str
    step: int


@dataclass(frozen=True, slots=True)
class KeepRollouts:
    """Keep rollouts on disk as they are finished, from now on."""

    place: JournalPlace


@dataclass(frozen=True, slots=True)
class CallMethod:
    """Call a method of a worker that is no stage.

    Attributes:
        number: of the answer.
        worker, method: what to call.
        arguments: the pickled positional arguments.
    """

    number: int
    worker: str
    method: str
    arguments: bytes


@dataclass(frozen=True, slots=True)
class Probe:
    """Measure the ways from other lanes to this one; the answer is a LinkTable."""

    number: int
    peers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GaugeMemory:
    """Have spans say how far the lane's memory rose meanwhile, or no longer."""

    on: bool


@dataclass(frozen=True, slots=True)
class Prepare:
    """Import these modules now: workers will need them."""

    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Introduce:
    """Some lanes have new processes: the addresses of all lanes, by number."""

    peers: Mapping[int, PeerAddress]


@dataclass(frozen=True, slots=True)
class Close:
    """Close the workers and end the process."""


STATES = -1
"""The step to which states belong that were saved."""

REUSED_BYTES = 1 << 30
"""Memory of states is used again for the next ones up to so much: larger ones are rare."""

Order: TypeAlias = (
    Load
    | Save
    | Execute
    | DropStep
    | CallMethod
    | KeepRollouts
    | Probe
    | GaugeMemory
    | Prepare
    | Introduce
    | Close
)

# --- answers --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loaded:
    """The workers are up.

    Attributes:
        number: of the `Load`.
        state_bytes: what each worker's state takes, by name.
        error: what a worker raised, pickled, or None.
        at: when this was said, in seconds since the epoch.
    """

    number: int
    state_bytes: Mapping[str, int]
    error: bytes | None = None
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class MethodResult:
    """What a method returned, or raised; pickled."""

    number: int
    value: bytes
    raised: bool = False


@dataclass(frozen=True, slots=True)
class GoesOn:
    """What the lane was asked, and has not answered, makes progress; `number` is the answer's."""

    number: int


@dataclass(frozen=True, slots=True)
class Reports:
    """Reports for the engine; `exports` says where an ExportWeights has laid its weights."""

    reports: Sequence[Report]
    exports: tuple[Export, ...] = ()


@dataclass(frozen=True, slots=True)
class Loading:
    """A worker is about to be brought up: a sign of progress.

    Attributes:
        number: of the `Load`.
        worker: which worker.
    """

    number: int
    worker: str


@dataclass(frozen=True, slots=True)
class LaneEnded:
    """The lane's process is gone: the last that is heard of it. Made by the launcher's side."""

    reason: str


FromLane: TypeAlias = Loading | Loaded | MethodResult | GoesOn | Reports | LaneEnded


def _by_fields(kind: type) -> None:
    """Have pickle make objects of a data class by calling the class with their fields.

    What a data class with slots does by itself looks its fields up for each object, which takes
    several times as long: with a hundred lanes that is a good part of all control.
    """
    names = [one.name for one in fields(kind)]
    if len(names) > 1:
        values = attrgetter(*names)
        copyreg.pickle(kind, lambda one: (kind, values(one)))


for _kind in (*get_args(Order), *get_args(FromLane), *get_args(Event), *get_args(LaneCommand)):
    _by_fields(_kind)
for _kind in (Part, Span, Report, Published, Release):
    _by_fields(_kind)


def to_bytes(message: Order | FromLane) -> bytes:
    """A message as a frame for a line."""
    try:
        return pickle.dumps(message, protocol=5)
    except Exception:  # an exception whose class the other side cannot import, for one
        from ray import cloudpickle

        return bytes(cloudpickle.dumps(message))


def from_bytes(frame: bytes | memoryview) -> Any:
    """The message of a frame that `to_bytes` made."""
    return pickle.loads(frame)
