"""Pieces back to tensors: as they are where one piece is all, else copied once into a buffer.

A buffer is kept from version to version, because fresh memory costs several times what the copy
does. So what `assemble` returns is good until it is called `buffers` times more: it belongs between
calls, on the lane that installs. Everything is checked before the first element is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from m2flow.runtime.weights.boxes import Box, uncovered
from m2flow.runtime.weights.manifest import ManifestError, TensorManifest
from m2flow.runtime.weights.transfers import TensorTransfer


class Assembler:
    """Puts together what one target gets.

    Args:
        device: where assembled tensors lie; None for where their first piece lies.
        buffers: sets of buffers to go round. With 1 a new version overwrites the last, for workers
            that copy what they install; with 2 the last stays whole beside it, for workers that
            run on the tensors themselves while the next version comes in.
    """

    def __init__(self, device: torch.device | str | None = None, buffers: int = 1) -> None:
        assert buffers >= 1, buffers
        # "cuda" is not equal to "cuda:0": ask where such a tensor lands.
        self._device = None if device is None else torch.empty(0, device=device).device
        self._sets: list[dict[str, Tensor]] = [{} for _ in range(buffers)]
        self._turn = 0
        self._tilings: dict[str, tuple[Box, tuple[Box, ...]]] = {}

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
            pieces: each transfer and what came of it.

        Raises:
            ManifestError: pieces are missing or overlap, or one has another shape or dtype than the
                plan and the manifest say; no buffer has been touched.
        """
        by_name: dict[str, list[tuple[Box, Tensor]]] = {name: [] for name in wanted}
        for transfer, tensor in pieces:
            if transfer.name not in by_name:
                raise ManifestError("a piece came that nobody asked for", key=transfer.name)
            by_name[transfer.name].append((transfer.target, tensor))
        for name, parts in by_name.items():
            _check_pieces(name, manifest, parts)
            self._check_tiling(name, wanted[name], tuple(part for part, _ in parts))
        buffers = self._sets[self._turn]
        self._turn = (self._turn + 1) % len(self._sets)
        out: dict[str, Tensor] = {}
        for name, parts in by_name.items():
            box = wanted[name]
            if len(parts) == 1 and self._device in (None, parts[0][1].device):
                out[name] = parts[0][1]
            else:
                dtype: torch.dtype = getattr(torch, manifest.held[name].dtype)
                device = self._device or (parts[0][1].device if parts else torch.device("cpu"))
                out[name] = buffer = _buffer(buffers, name, box, dtype, device)
                for part, tensor in parts:
                    part.of(buffer).copy_(tensor)
        for name, first in manifest.tied.items():
            if first in out:
                out[name] = out[first]
        return out

    def _check_tiling(self, name: str, box: Box, parts: tuple[Box, ...]) -> None:
        """Each element of the box is there exactly once; what was right last time is right now."""
        if self._tilings.get(name) == (box, parts):
            return
        got = sum(part.numel for part in parts)
        if got != box.numel or uncovered(Box.whole(box.shape), parts):
            raise ManifestError(f"{got} of {box.numel} elements came", key=name, value=parts)
        self._tilings[name] = box, parts


def _buffer(
    buffers: dict[str, Tensor], name: str, box: Box, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The buffer of this name; a new one where there is none, or one of another kind."""
    old = buffers.get(name)
    if old is not None and (tuple(old.shape), old.dtype, old.device) == (box.shape, dtype, device):
        return old
    buffers[name] = torch.empty(box.shape, dtype=dtype, device=device)
    return buffers[name]


def _check_pieces(name: str, manifest: TensorManifest, parts: Sequence[tuple[Box, Tensor]]) -> None:
    """Each piece has the shape that the plan says and the dtype that the manifest says."""
    held = manifest.get(name)
    assert held is not None, name
    for part, tensor in parts:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != part.shape or dtype != held.dtype:
            raise ManifestError(
                f"a piece is {dtype} {tuple(tensor.shape)}",
                key=name,
                expected=f"{held.dtype} {part.shape}",
            )
