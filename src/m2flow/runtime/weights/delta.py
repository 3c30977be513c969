"""Sparse deltas: from version to version only the elements whose bits have changed.

A `DeltaEncoder` stands at the sender and keeps a copy of what it sent last; a `DeltaDecoder` stands
at each receiver and keeps the same. The first message, the bootstrap, is everything. After that a
tensor is left out, sent as indices and new values, or sent whole where that is smaller. A delta
says which version it builds on and the checksums of what must come of it. `apply` does all of it or
nothing; a receiver that cannot go on raises `NeedsBootstrap`, and `DeltaEncoder.bootstrap` makes
the message that helps. How deltas travel is not known here.

Indices are sent as the gaps between them, in the narrowest integers that hold the widest gap.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from m2flow.errors import M2FlowError
from m2flow.runtime.weights.bits import as_integers, changed_elements, checksum

SAMPLE = 1 << 16
"""Elements looked at to find out that a tensor has changed nearly everywhere."""

DENSE = 0.9
"""Share of changed elements from which a tensor is sent whole without listing them."""

SCATTER = 200
"""Writing an element where it belongs takes about as long as copying this many in a row."""


class NeedsBootstrap(M2FlowError):
    """The receiver cannot go on from what it has: send it `DeltaEncoder.bootstrap()`."""


class MissedVersion(NeedsBootstrap):
    """A delta builds on a version that the receiver does not have."""


class CorruptDelta(NeedsBootstrap):
    """A delta does not lead to what it says it leads to; nothing of it was taken over."""


@dataclass(frozen=True)
class Change:
    """What becomes of one tensor.

    Attributes:
        name: the tensor.
        values: the whole tensor; or, with `gaps`, the changed elements' new values, flat.
        gaps: the first changed index and then the distance from each to the next; uint8, int16 or
            int32 read as unsigned, or int64. None where `values` is everything.
        checksum: of the tensor as it must be afterwards.
    """

    name: str
    values: Tensor
    gaps: Tensor | None
    checksum: int

    @property
    def num_bytes(self) -> int:
        """Bytes that travel."""
        gaps = 0 if self.gaps is None else self.gaps.numel() * self.gaps.element_size()
        return gaps + self.values.numel() * self.values.element_size()


@dataclass(frozen=True)
class Delta:
    """One message.

    Attributes:
        base: the version it builds on; None for a bootstrap, which builds on nothing.
        version: the version it leads to.
        changes: the tensors that change; of a bootstrap all of them.
        state: checksum over the names and checksums of all tensors, changed or not.
        fraction_changed: elements that changed over all elements; 1.0 for a bootstrap.
        full_bytes: bytes of all the weights.
    """

    base: int | None
    version: int
    changes: tuple[Change, ...]
    state: int
    fraction_changed: float
    full_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of tensors that travel."""
        return sum(change.num_bytes for change in self.changes)

    def to_payload(self) -> dict[str, Any]:
        """The message as plain containers of tensors and numbers, for any link."""
        changes = [(c.name, c.values, c.gaps, c.checksum) for c in self.changes]
        fields = {name: getattr(self, name) for name in _HEADER}
        return {**fields, "changes": changes}

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> Delta:
        """What `to_payload` made."""
        changes = tuple(Change(*change) for change in payload["changes"])
        return cls(**{name: payload[name] for name in _HEADER}, changes=changes)


_HEADER = ("base", "version", "state", "fraction_changed", "full_bytes")


class DeltaEncoder:
    """Turns one version after another into deltas; keeps a copy of the last, where it lies."""

    def __init__(self) -> None:
        self.version: int | None = None
        self._kept: dict[str, Tensor] = {}
        self._sums: dict[str, int] = {}

    @torch.no_grad()
    def encode(self, weights: Mapping[str, Tensor], version: int) -> Delta:
        """The delta from the last version to this one; a bootstrap where there was no last.

        Also where names, shapes, dtypes or devices are not what they were. The message holds views
        of the encoder's copies: it must have been sent when the next version is encoded.

        Args:
            weights: name -> what this lane holds of the tensor; tied ones once.
            version: greater than the last.
        """
        base = self.version
        assert base is None or version > base, (base, version)
        if base is None or _kinds(weights) != _kinds(self._kept):
            self._kept = {name: _copy(tensor) for name, tensor in weights.items()}
            self._sums = {name: checksum(tensor) for name, tensor in self._kept.items()}
            self.version = version
            return self.bootstrap()
        changes, changed = [], 0.0
        for name, tensor in weights.items():
            change, count = self._change(name, tensor.detach())
            changed += count
            if change is not None:
                changes.append(change)
        self.version = version
        total = sum(tensor.numel() for tensor in self._kept.values())
        return self._message(base, changes, changed / max(1, total))

    def bootstrap(self) -> Delta:
        """Everything as of the version encoded last, for a receiver that starts or has lost it."""
        assert self.version is not None, "nothing has been encoded"
        changes = [Change(n, t, None, self._sums[n]) for n, t in self._kept.items()]
        return self._message(None, changes, 1.0)

    def _message(self, base: int | None, changes: list[Change], fraction: float) -> Delta:
        assert self.version is not None
        full_bytes = sum(t.numel() * t.element_size() for t in self._kept.values())
        state = _state(self._sums)
        return Delta(base, self.version, tuple(changes), state, fraction, full_bytes)

    def _change(self, name: str, new: Tensor) -> tuple[Change | None, float]:
        """What has become of a tensor, and how many of its elements changed; keeps the new one."""
        kept = self._kept[name]
        estimate = _sampled_fraction(kept, new)
        if estimate >= DENSE:
            kept.copy_(new)
            return self._whole(name), estimate * new.numel()
        index = changed_elements(kept, new)
        if not index.numel():
            return None, 0.0
        if index.numel() * (1 + new.element_size()) >= new.numel() * new.element_size():
            kept.copy_(new)
            return self._whole(name), index.numel()
        gaps = _gaps(index)
        values = new.take(index)
        if index.numel() * SCATTER > new.numel():
            kept.copy_(new)
        else:
            kept.view(-1)[index] = values
        self._sums[name] = checksum(kept)
        change = Change(name, values, gaps, self._sums[name])
        if change.num_bytes >= new.numel() * new.element_size():
            change = Change(name, kept, None, self._sums[name])
        return change, index.numel()

    def _whole(self, name: str) -> Change:
        self._sums[name] = checksum(self._kept[name])
        return Change(name, self._kept[name], None, self._sums[name])


class DeltaDecoder:
    """Follows an encoder from version to version.

    Args:
        device: where the weights are kept; None for where a bootstrap brings them.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.version: int | None = None
        self._device = device
        self._tensors: dict[str, Tensor] = {}
        self._sums: dict[str, int] = {}

    @torch.no_grad()
    def apply(self, delta: Delta) -> Mapping[str, Tensor]:
        """Name -> tensor of the new version: the decoder's own, changed in place by the next.

        So it is to be called between calls. A version that is here already is not applied again.

        Raises:
            MissedVersion: the delta builds on another version than the one here.
            CorruptDelta: something does not add up. The tensors are as they were.
        """
        if delta.base is None:
            self._start(delta)
        elif delta.version != self.version:
            if delta.base != self.version:
                have = "none" if self.version is None else self.version
                raise MissedVersion(
                    f"version {delta.version} builds on version {delta.base}, here is {have}"
                )
            self._go_on(delta)
        return dict(self._tensors)

    def _start(self, delta: Delta) -> None:
        sums = {change.name: change.checksum for change in delta.changes}
        if _state(sums) != delta.state:
            raise CorruptDelta(f"version {delta.version}: tensors are missing or renamed")
        for change in delta.changes:
            _verify(change, change.values)
        tensors = {}
        for change in delta.changes:
            old = self._tensors.get(change.name)
            new = change.values
            if old is not None and (old.shape, old.dtype) == (new.shape, new.dtype):
                tensors[change.name] = old.copy_(new)
            else:
                tensors[change.name] = _copy(new, self._device)
        self._tensors, self._sums, self.version = tensors, sums, delta.version

    def _go_on(self, delta: Delta) -> None:
        sums = self._sums | {change.name: change.checksum for change in delta.changes}
        if sums.keys() != self._sums.keys() or _state(sums) != delta.state:
            raise CorruptDelta(f"version {delta.version} is of other weights than those here")
        whole = [change for change in delta.changes if change.gaps is None]
        for change in whole:
            here = self._tensors[change.name]
            if (change.values.shape, change.values.dtype) != (here.shape, here.dtype):
                raise CorruptDelta(f"{change.name}: came as another kind of tensor")
            _verify(change, change.values)
        undo: list[tuple[Tensor, Tensor, Tensor]] = []
        try:
            for change in delta.changes:
                if change.gaps is not None:
                    here = self._tensors[change.name]
                    index, values = _checked(change, here)
                    undo.append((here.view(-1), index, here.view(-1)[index]))
                    here.view(-1)[index] = values
                    _verify(change, here)
        except CorruptDelta:
            for flat, index, values in reversed(undo):
                flat[index] = values
            raise
        for change in whole:
            self._tensors[change.name].copy_(change.values)
        self._sums, self.version = sums, delta.version


def _checked(change: Change, here: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a sparse change, on the tensor's device."""
    assert change.gaps is not None
    index = _indices(change.gaps.to(here.device))
    values = change.values.to(here.device)
    if values.dtype != here.dtype or values.shape != index.shape:
        raise CorruptDelta(f"{change.name}: values do not match the indices")
    lowest, highest = (int(x) for x in index.aminmax()) if index.numel() else (0, -1)
    if lowest < 0 or highest >= here.numel():
        raise CorruptDelta(f"{change.name}: indices {lowest} to {highest} of {here.numel()}")
    return index, values


def _verify(change: Change, tensor: Tensor) -> None:
    found = checksum(tensor)
    if found != change.checksum:
        raise CorruptDelta(f"{change.name}: checksum {found:08x}, not {change.checksum:08x}")


def _gaps(index: Tensor) -> Tensor:
    """Ascending indices as gaps in the narrowest integers, unsigned but for the widest."""
    gaps = torch.cat([index[:1], index[1:] - index[:-1]])
    widest = int(gaps.max())
    for bits, dtype in ((8, torch.uint8), (16, torch.int16), (32, torch.int32)):
        if widest < 1 << bits:
            return gaps.to(dtype)  # keeps the low bits
    return gaps


def _indices(gaps: Tensor) -> Tensor:
    """What `_gaps` was given, as int64."""
    wide = gaps.to(torch.int64)
    if gaps.dtype in (torch.int16, torch.int32):
        wide &= (1 << 8 * gaps.element_size()) - 1
    return wide.cumsum(0)


def _sampled_fraction(old: Tensor, new: Tensor) -> float:
    """Share of changed elements in a sample spread over a tensor."""
    count = old.numel()
    if count <= SAMPLE or not new.is_contiguous():
        return 0.0
    step = count // SAMPLE
    a, b = as_integers(old)[::step], as_integers(new)[::step]
    return float(a.ne(b).float().mean())


def _copy(tensor: Tensor, device: torch.device | str | None = None) -> Tensor:
    return torch.empty(
        tensor.shape, dtype=tensor.dtype, device=tensor.device if device is None else device
    ).copy_(tensor.detach())


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _kinds(weights: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    return {name: _kind(tensor) for name, tensor in weights.items()}


def _state(sums: Mapping[str, int]) -> int:
    """One checksum over all names and checksums."""
    items: Iterable[tuple[str, int]] = sorted(sums.items())
    return zlib.crc32("\n".join(f"{name} {value}" for name, value in items).encode())
