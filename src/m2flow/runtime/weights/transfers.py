"""Which part of which tensor a target takes from which lane's snapshot, and the parts put together.

Every element of every box that the target wants comes from exactly one lane, and a region in as few
pieces as possible. The plan is a function of manifests alone, the same wherever it is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from m2flow.runtime.weights.boxes import Box
from m2flow.runtime.weights.manifest import ManifestError, TensorManifest


@dataclass(frozen=True, slots=True)
class TensorTransfer:
    """One piece on its way.

    Attributes:
        name: the tensor, by its name in the manifests.
        lane: who has it.
        source: the piece, counted from where that lane's part of the tensor begins.
        target: the piece, counted from where the box that the target wants begins.
    """

    name: str
    lane: int
    source: Box
    target: Box


def transfers(
    sources: Mapping[int, TensorManifest], wanted: Mapping[str, Box]
) -> list[TensorTransfer]:
    """Return the pieces that one target takes from each lane, in the order of `wanted`.

    Args:
        sources: lane -> what it holds; `merged` has found that they agree.
        wanted: name -> the part of the tensor that the target needs, from `wanted_boxes`.

    Raises:
        ManifestError: elements are wanted that no lane holds.
    """
    plan = []
    for name, box in wanted.items():
        parts = [
            (lane, held.box, part)
            for lane, manifest in sources.items()
            if (held := manifest.get(name)) is not None and (part := box.intersect(held.box))
        ]
        rest = [box] if box.numel else []
        for lane, held_box, part in sorted(parts, key=lambda one: (-one[2].numel, one[0])):
            for region in rest[:]:
                common = region.intersect(part)
                if common is not None:
                    rest.remove(region)
                    rest += region.minus(common)
                    here = common.inside(box)
                    plan.append(TensorTransfer(name, lane, common.inside(held_box), here))
        if rest:
            missing = sum(region.numel for region in rest)
            raise ManifestError(
                f"{missing} of the {box.numel} elements wanted are on no lane, first {rest[0]}",
                key=name,
                hint=f"lanes {sorted(sources)} have to hold all of it between them",
            )
    return plan


class Assembler:
    """Puts together what one target gets: pieces as they are where one is all, else copied once.

    A buffer is kept from version to version, because fresh memory costs several times what the copy
    does. So what `assemble` returns is good until it is called again: it belongs between calls, on
    the lane that installs.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def assemble(
        self,
        wanted: Mapping[str, Box],
        manifest: TensorManifest,
        pieces: Iterable[tuple[TensorTransfer, Tensor]],
    ) -> dict[str, Tensor]:
        """Name -> tensor of the wanted box's shape; tied names get the same tensor.

        Args:
            wanted: name -> box, as the transfers were planned for.
            manifest: of all lanes of the source together, from `merged`.
            pieces: all of these transfers, and what came of each.
        """
        by_name: dict[str, list[tuple[Box, Tensor]]] = {name: [] for name in wanted}
        for transfer, tensor in pieces:
            by_name[transfer.name].append((transfer.target, tensor))
        out: dict[str, Tensor] = {}
        for name, parts in by_name.items():
            if len(parts) == 1:
                out[name] = parts[0][1]
                continue
            device = parts[0][1].device if parts else torch.device("cpu")
            dtype: torch.dtype = getattr(torch, manifest.held[name].dtype)
            out[name] = buffer = self._buffer(name, wanted[name], dtype, device)
            for part, tensor in parts:
                part.of(buffer).copy_(tensor)
        for name, first in manifest.tied.items():
            if first in out:
                out[name] = out[first]
        return out

    def _buffer(self, name: str, box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer of this name; a new one where there is none, or one of another kind."""
        old = self._buffers.get(name)
        kind = (box.shape, dtype, device)
        if old is None or (tuple(old.shape), old.dtype, old.device) != kind:
            old = self._buffers[name] = torch.empty(box.shape, dtype=dtype, device=device)
        return old
