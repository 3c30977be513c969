"""`WeightsIn`: brings a version of weights to a lane, as a worker there wants it.

What lanes hold and who sends what is worked out once, and again only where a manifest has changed.
Nothing is returned before all of a version is here: it is installed as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from m2flow.flow.worker import Worker
from m2flow.runtime.transport.shared_memory import SharedReader
from m2flow.runtime.weights.boxes import Box
from m2flow.runtime.weights.exports import Export, ManifestKey, WeightsKey
from m2flow.runtime.weights.manifest import TensorManifest, merged, wanted_boxes
from m2flow.runtime.weights.relay import Relay, RelayKey
from m2flow.runtime.weights.snapshot import Snapshot
from m2flow.runtime.weights.transfers import Assembler, TensorTransfer, transfers


@dataclass(slots=True)
class _Route:
    """The manifests and transfers between one source and one target on this lane."""

    tokens: dict[int, int] = field(default_factory=dict)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    whole: TensorManifest = field(default_factory=lambda: TensorManifest({}))
    wanted: dict[str, Box] = field(default_factory=dict)
    plan: list[TensorTransfer] = field(default_factory=list)
    assembler: Assembler = field(default_factory=Assembler)


class WeightsIn:
    """Takes weights over for the workers on a lane.

    Args:
        lane: its number.
        ask: how a lane is asked for something: its number, a key, seconds, and `own=True` to
            demand memory that nobody else reads.
        reader: of shared memory.
        relay: brings what several lanes of this node want from another.
    """

    def __init__(
        self, lane: int | None, ask: Callable[..., Any], reader: SharedReader, relay: Relay
    ) -> None:
        self._lane, self._ask, self._reader, self._relay = lane, ask, reader, relay
        self._routes: dict[tuple[str, str], _Route] = {}

    def collect(
        self,
        source: str,
        target: tuple[str, Worker],
        version: int,
        exports: Sequence[Export],
        seconds: float,
    ) -> tuple[Mapping[str, Tensor], int]:
        """A version as the target wants it, and the bytes that were taken over for it.

        What is returned is good until the next version is collected for the same target.

        Args:
            target: the worker's name, and the worker.
            exports: where the version lies, one for each lane that has laid out a part.
            seconds: longest that each of them may take.

        Raises:
            ManifestError: the lanes do not hold what the target wants.
        """
        name, worker = target
        route = self._routes.setdefault((source, name), _Route())
        self._know_manifests(route, source, worker, exports, seconds)
        tensors: dict[int, Mapping[str, Tensor]] = {}
        for export in exports:
            flat = self._snapshot(export, seconds)
            tensors[export.lane] = route.snapshots[export.lane].views(flat)
        pieces = [(move, move.source.of(tensors[move.lane][move.name])) for move in route.plan]
        total = sum(export.num_bytes for export in exports)
        return route.assembler.assemble(route.wanted, route.whole, pieces), total

    def drop(self) -> None:
        """Forget what was taken over in an earlier run."""
        self._routes = {}

    def _know_manifests(
        self,
        route: _Route,
        source: str,
        worker: Worker,
        exports: Sequence[Export],
        seconds: float,
    ) -> None:
        """Ask for manifests that are new here, and plan the transfers again if there are any."""
        tokens = {export.lane: export.manifest for export in exports}
        if tokens == route.tokens:
            return
        for lane, token in tokens.items():
            if route.tokens.get(lane) != token:
                manifest = self._ask(lane, ManifestKey(source, token), seconds)
                route.snapshots[lane] = Snapshot(manifest)
        route.snapshots = {lane: route.snapshots[lane] for lane in tokens}
        manifests = {lane: snapshot.manifest for lane, snapshot in route.snapshots.items()}
        route.whole = merged(manifests)
        route.wanted = wanted_boxes(route.whole, worker.weight_boxes(route.whole))
        route.plan = transfers(manifests, route.wanted)
        route.tokens = tokens

    def _snapshot(self, export: Export, seconds: float) -> Any:
        """All that a lane has laid out, as one uint8 tensor: from shared memory, from the lane, or
        by way of the one that brings it to this node."""
        if export.handle is not None:
            return self._reader.read(export.handle, export.reader)
        key = WeightsKey(export.source, export.version)
        if export.via is None:
            return self._ask(export.lane, key, seconds, own=export.method == "copy")
        relayed = RelayKey(export.lane, key, seconds)
        if export.via == self._lane:
            return self._relay.bring(relayed)
        return self._ask(export.via, relayed, seconds)
