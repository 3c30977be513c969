"""`Worker`: a stateful component of a flow, and `Place`, what it is told about where it stands.

A Worker object is cheap: its `__init__` keeps settings and starts nothing, so that a flow can be
traced, planned and sent to lanes. What is heavy happens in `load`. A Worker never mentions another
worker's placement, and needs no lock and no flag: the engine decides when it is loaded, offloaded
and called, and calls it from one thread at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m2flow.flow.progress import goes_on
from m2flow.flow.trace import record_publish


def _alone(tensors: Sequence[Any]) -> None:
    """Summing over one replica changes nothing."""


def _no_mesh() -> Any:
    raise RuntimeError("a worker on a single lane has no device mesh")


@dataclass(frozen=True, slots=True)
class Layout:
    """One way in which a replica of a worker can lie on its lanes.

    Whoever plans knows a layout's name, its number of lanes, its price and its memory; what the
    name means only the worker knows.

    Attributes:
        name: unique among the layouts of the worker, such as "one", "fsdp4" or "tp2.fsdp2". A name
            of two parts lays the lanes out in a grid, see `grid_of`.
        lanes: lanes of one replica; they take part together in each of its calls.
        divisions: (quantity, count, divisor) for each quantity of the model that the layout
            divides, such as ("key-value heads", 8, 2). The layout is possible if every divisor
            divides its count.
    """

    name: str = "one"
    lanes: int = 1
    divisions: tuple[tuple[str, int, int], ...] = ()

    def obstacle(self) -> str | None:
        """Say which quantity cannot be divided as the layout needs it; None if all can."""
        for quantity, count, divisor in self.divisions:
            if count % divisor:
                return f"{count} {quantity} cannot be divided by {divisor}"
        return None


ONE_LANE = Layout()
"""The layout that every worker has: a whole copy on one lane."""


def grid_of(layout: str) -> tuple[int, int] | None:
    """The grid in which a layout of two parts lays out a replica's lanes; None for any other.

    `tp2.fsdp3` is 3 rows of 2 lanes: neighbouring lanes make a row, which is the first part's, and
    lanes at the same place in their rows make a column, which is the second part's.
    """
    parts = re.fullmatch(r"[a-z]+(\d+)\.[a-z]+(\d+)", layout)
    return None if parts is None else (int(parts[2]), int(parts[1]))


@dataclass(frozen=True, slots=True)
class Gang:
    """The lanes that take part together in each call of a replica.

    Attributes:
        rank: this lane's position in its gang.
        size: lanes of the gang; 1 where each replica is a single lane.
        replica: which replica the gang is.
        num_replicas: how many there are.
        mesh: makes the `torch.distributed.DeviceMesh` of shape (num_replicas, size), with the
            dimensions "replicate" and "shard". Collective: the worker's lanes call it in `load`.
        grid: makes, where `grid_of(layout)` is a grid, the mesh of this gang alone, with the
            dimensions "column" and "row". Collective as `mesh` is.
        layout: name of the layout in which the replica lies on its lanes.
    """

    rank: int = 0
    size: int = 1
    replica: int = 0
    num_replicas: int = 1
    mesh: Callable[[], Any] = _no_mesh
    grid: Callable[[], Any] = _no_mesh
    layout: str = ONE_LANE.name


@dataclass(frozen=True, slots=True)
class Isolation:
    """A process of its own for a worker: its own interpreter, its own crash.

    Attributes:
        python: the interpreter to run, with m2flow and Ray installed; None for the same one.
        environment: environment variables to set there.
    """

    python: str | None = None
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker's shard stands.

    Attributes:
        lane: the lane's number.
        rank: this lane's position among the lanes that hold the worker.
        size: how many lanes hold the worker.
        device: "cpu" or "cuda:0".
        num_threads: threads the worker may use.
        version: number of the weights that the run begins with.
        all_reduce: sums a list of tensors in place over the worker's lanes. It is collective: to be
            called in `finish` only, which runs on all of them.
        gang: the lanes that take part in each call with this one.
        spill: folder for state that is put away on a lane without an accelerator; None for the
            system's temporary folder.
        memory_bytes: what states and calls may take on the lane; None for no limit.
        goes_on: says that the call at hand makes progress, so that its deadline counts from now:
            for a stage, `finish`, `save` or other method that works for long before it returns,
            between two parts of its work. It does nothing outside of a call, while a worker is
            loaded, and on a thread that is not the call's.
    """

    lane: int = 0
    rank: int = 0
    size: int = 1
    device: str = "cpu"
    num_threads: int = 1
    version: int = 0
    all_reduce: Callable[[Sequence[Any]], None] = _alone
    gang: Gang = Gang()
    spill: Path | None = None
    memory_bytes: int | None = None
    goes_on: Callable[[], None] = goes_on


class Worker:
    """Base class of stateful components; see the module docstring for the contract."""

    place: Place = Place()
    """Where it stands; set before `load` is called."""

    isolation: Isolation | None = None
    """Set by a worker that must have a process of its own, such as a simulator that may crash."""

    collective: bool = False
    """Set by a worker whose lanes communicate within a call on a gang, as those of a sharded model
    do. A lane takes part in each call then, if need be with a Batch of no items. A streaming stage
    gets the same items on all of them, and must do the same with them."""

    def layouts(self, kind: str, lanes: int) -> Sequence[Layout]:
        """Layouts that this worker knows for replicas of at most `lanes` lanes of one kind.

        Asked of a worker that is not loaded, in the process that plans. A layout with an obstacle
        is listed as well, so that a refusal can name the obstacle.

        Args:
            kind: kind of the lanes, such as "cpu", "gpu" or "h100".
            lanes: the most lanes a replica may have.
        """
        return (ONE_LANE,)

    def load(self, place: Place) -> None:
        """Bring up what is heavy (model, simulator, connections). Called once on each lane."""
        self.place = place  # of a worker that is loaded by hand

    def take_note(self) -> str:
        """What people should know of the `finish` that has just returned, once; "" for nothing."""
        return ""

    def discard(self) -> None:
        """Drop what the step has left here so far, such as what was folded in: its items will come
        again, here or on other lanes.

        A worker that accumulates and does not define this cannot take a step again that has failed.
        """

    def offload(self) -> None:
        """Give up the accelerator's memory, keeping the state elsewhere."""

    def onload(self) -> None:
        """Take the state back that `offload` put away."""

    def state_bytes(self) -> int:
        """Bytes of accelerator memory that the state takes while it is onloaded."""
        return 0

    def beside_bytes(self) -> int:
        """Bytes of that memory in processes of this worker that `offload` does not give back."""
        return 0

    def publish(self, *targets: Worker) -> None:
        """Declare, inside `Flow.sync`, that the targets run on this worker's weights.

        A target publishes none itself.
        """
        record_publish(self, targets)

    def weights(self) -> Mapping[str, Any]:
        """Name to tensor: what `publish` sends. The tensors are read before the next call."""
        raise NotImplementedError(f"{type(self).__name__} publishes weights but has none")

    def install(self, weights: Mapping[str, Any], version: int) -> None:
        """Take weights over. Called between calls, so no item sees half of them.

        The tensors may be the source's own, where both stand on one lane: copy what is kept.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot install published weights")

    def weight_boxes(self, layout: Any) -> Mapping[str, Any] | None:
        """The parts of the published tensors that this lane wants; None for all of them, whole.

        Args:
            layout: names, shapes and dtypes of what is published: a
                `m2flow.runtime.weights.TensorManifest`.

        Returns:
            Name to `m2flow.runtime.weights.Box`, for a worker that is itself sharded.
        """
        return None

    def save(self) -> Mapping[str, Any]:
        """All that `restore` needs to go on from, as tensors by name.

        Asked for where the state moves to other lanes, or is kept in case this one is lost. Called
        between calls, on every lane of a replica; what its first lane gives counts, and is copied
        before the next call. A worker that accumulates or publishes and does not define both
        methods stays where it is. Any other is loaded anew elsewhere, without what its stages have
        changed.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what its state is")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `save` gave on another lane, after `load`.

        The tensors, which are on the CPU, belong to somebody else: copy what is kept.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot take a state over")

    def close(self) -> None:
        """Let go of what `load` brought up."""


def declares_layouts(worker: Worker) -> bool:
    """Whether a worker says itself in which layouts it can stand. The lanes of any other's gang,
    however many, share the items of each call."""
    return type(worker).layouts is not Worker.layouts


def saves(worker: Worker) -> bool:
    """Whether a worker's state can be moved: it says how to save it, and how to restore it."""
    kind = type(worker)
    return kind.save is not Worker.save and kind.restore is not Worker.restore
