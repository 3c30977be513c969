"""Pieces back to tensors: as they are where one piece is all, else copied once into a buffer.

A buffer is kept from version to version, because fresh memory costs several times what the copy
does. So what `assemble` returns is good until it is called again: it belongs between calls, on the
lane that installs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from m2flow.runtime.weights.boxes import Box
from m2flow.runtime.weights.manifest import TensorManifest
from m2flow.runtime.weights.transfers import TensorTransfer


class Assembler:
    """Puts together what one target gets."""

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
