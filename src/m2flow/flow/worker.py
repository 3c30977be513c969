"""`Worker`: a stateful component of a flow, and `Place`, what it is told about where it stands.

A Worker object is cheap: its `__init__` keeps settings and starts nothing, so that a flow can be
traced, planned and sent to lanes. What is heavy happens in `load`. A Worker never mentions another
worker's placement, and needs no lock and no flag: the engine decides when it is loaded, offloaded
and called, and calls it from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m2flow.flow.trace import record_publish


def _alone(tensors: Sequence[Any]) -> None:
    """Summing over one replica changes nothing."""


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
    """

    lane: int = 0
    rank: int = 0
    size: int = 1
    device: str = "cpu"
    num_threads: int = 1
    version: int = 0
    all_reduce: Callable[[Sequence[Any]], None] = _alone


class Worker:
    """Base class of stateful components; see the module docstring for the contract."""

    place: Place = Place()

    def load(self, place: Place) -> None:
        """Bring up what is heavy (model, simulator, connections). Called once on each lane."""
        self.place = place

    def offload(self) -> None:
        """Give up the accelerator's memory, keeping the state elsewhere."""

    def onload(self) -> None:
        """Take the state back that `offload` put away."""

    def state_bytes(self) -> int:
        """Bytes of accelerator memory that the state takes while it is onloaded."""
        return 0

    def publish(self, *targets: Worker) -> None:
        """Declare, inside `Flow.sync`, that the targets run on this worker's weights."""
        record_publish(self, targets)

    def weights(self) -> Mapping[str, Any]:
        """Name to tensor: what `publish` sends. The tensors are read before the next call."""
        raise NotImplementedError(f"{type(self).__name__} publishes weights but has none")

    def install(self, weights: Mapping[str, Any], version: int) -> None:
        """Take weights over. Called between calls, so no item sees half of them.

        The tensors may be the source's own, where both stand on one lane: copy what is kept.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot install published weights")

    def save(self, folder: Path) -> None:
        """Write this worker's part of a checkpoint into an existing folder."""

    def restore(self, folder: Path) -> None:
        """Read back what `save` wrote."""

    def close(self) -> None:
        """Let go of what `load` brought up."""
