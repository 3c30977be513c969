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
from m2flow.runtime.weights.boxes import Box
from m2flow.runtime.weights.exports import Export, WeightsKey
from m2flow.runtime.weights.manifest import TensorManifest, merged, wanted_boxes
from m2flow.runtime.weights.relay import Relay, RelayKey
from m2flow.runtime.weights.transfers import Assembler, TensorTransfer, transfers


@dataclass(slots=True)
class _Route:
    """The manifests and transfers between one source and one target on this lane."""

    manifests: dict[int, TensorManifest] = field(default_factory=dict)
    whole: TensorManifest = field(default_factory=lambda: TensorManifest({}))
    wanted: dict[str, Box] = field(default_factory=dict)
    plan: list[TensorTransfer] = field(default_factory=list)
    assembler: Assembler = field(default_factory=Assembler)

    def know(self, manifests: dict[int, TensorManifest], worker: Worker) -> None:
        """Plan the transfers again if lanes hold something else than before."""
        if manifests == self.manifests:
            return
        self.whole = merged(manifests)
        self.wanted = wanted_boxes(self.whole, worker.weight_boxes(self.whole))
        self.plan = transfers(manifests, self.wanted)
        self.manifests = manifests


class WeightsIn:
    """Takes weights over for the workers on a lane.

    Args:
        lane: its number.
        ask: how a lane is asked for something: its number, a key, seconds.
        relay: brings what several lanes of this node want from another.
    """

    def __init__(
        self, lane: int | None, ask: Callable[[int, Any, float], Any], relay: Relay
    ) -> None:
        self._lane, self._ask, self._relay = lane, ask, relay
        self._routes: dict[tuple[str, str], _Route] = {}

    def collect(
        self, source: str, target: tuple[str, Worker], exports: Sequence[Export], seconds: float
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
        found = {export.lane: self._version(export, seconds) for export in exports}
        route.know({lane: manifest for lane, (manifest, _) in found.items()}, worker)
        tensors = {lane: manifest.views(flat) for lane, (manifest, flat) in found.items()}
        pieces = [(move, move.source.of(tensors[move.lane][move.name])) for move in route.plan]
        total = sum(export.num_bytes for export in exports)
        return route.assembler.assemble(route.wanted, route.whole, pieces), total

    def drop(self) -> None:
        """Forget what was taken over in an earlier run."""
        self._routes = {}

    def _version(self, export: Export, seconds: float) -> tuple[TensorManifest, Tensor]:
        """What a lane has laid out: from there, or by way of the lane that brings it here."""
        key = WeightsKey(export.source, export.version)
        relayed = RelayKey(export.lane, key, seconds)
        found: tuple[TensorManifest, Tensor]
        if export.via is None:
            found = self._ask(export.lane, key, seconds)
        elif export.via == self._lane:
            found = self._relay.bring(relayed)
        else:
            found = self._ask(export.via, relayed, seconds)
        return found
