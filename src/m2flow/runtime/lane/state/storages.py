"""The storages behind tensors: each once, however many tensors, views or ties stand on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, UntypedStorage, nn

from m2flow.errors import RunFailed

_LOOKED_AT_FROM = 1 << 20
"""Bytes of a storage from which on it is worth a look whether all are zero."""

_FIRST_BYTES = 1 << 12
"""That are looked at before all of them."""


def module_tensors(module: nn.Module) -> Iterator[Tensor]:
    """A module's parameters, their gradients and its buffers."""
    for parameter in module.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from module.buffers()


def blank_storages(storages: Sequence[UntypedStorage]) -> list[bool]:
    """Of each whether all its bytes are zero; a small one is not looked at, and said not to be.

    Buffers of gradients are blank from one optimizer step to the first pass of the next. Most that
    are not show it in their first bytes.
    """
    found = [storage.nbytes() >= _LOOKED_AT_FROM for storage in storages]
    for end in (_FIRST_BYTES, None):
        numbers = [number for number, blank in enumerate(found) if blank]
        if numbers:  # one answer for all: each waits for the device
            some = torch.stack([as_bytes(storages[number])[:end].any() for number in numbers])
            for number, is_not in zip(numbers, some.tolist(), strict=True):
                found[number] = not is_not
    return found


def as_bytes(storage: UntypedStorage) -> Tensor:
    """A uint8 tensor over the whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def storages_of(tensors: Iterable[Tensor], device_type: str) -> list[UntypedStorage]:
    """The storages of those tensors that are on such a device, without empty ones."""
    return [group[0] for group in _by_storage(tensors, device_type)]


def movable_storages(tensors: Iterable[Tensor], device_type: str) -> list[UntypedStorage]:
    """The storages of those tensors that are on such a device, made fit to be resized.

    One that cannot be resized is replaced in all its tensors, empty ones are left out.

    A storage cannot be resized where its memory is not torch's own, and never again once it was
    given to NumPy (`Tensor.numpy`).

    Raises:
        RunFailed: a storage is seen by other processes, or lies over another one, or would have to
            be replaced under a shard; nothing was replaced.
    """
    groups = _by_storage(tensors, device_type)
    _check_own([s for s, _ in groups])
    for storage, users in groups:
        if not storage.resizable() and any(hasattr(user, "_local_tensor") for user in users):
            # FSDP2 gathers from a view of its own, which no parameter shows: it would stay behind,
            # and passes would go on with the weights of before.
            raise RunFailed(
                f"a shard of {storage.nbytes()} bytes lies in memory that NumPy or another library "
                "has a part in, so it cannot be put away: give it to others as a copy (clone)"
            )
    for number, (storage, users) in enumerate(groups):
        if not storage.resizable():
            groups[number] = (_replace(storage, users), users)
    return [storage for storage, _ in groups]


def _by_storage(
    tensors: Iterable[Tensor], device_type: str
) -> list[tuple[UntypedStorage, list[Tensor]]]:
    groups: dict[int, tuple[UntypedStorage, list[Tensor]]] = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)  # a DTensor's shard on this rank
        if local.device.type != device_type:
            continue
        storage = local.untyped_storage()
        if storage.nbytes():
            groups.setdefault(storage._cdata, (storage, []))[1].append(tensor)
    return list(groups.values())


def _check_own(storages: Sequence[UntypedStorage]) -> None:
    for storage in storages:
        # Of what is on an accelerator torch says always that it is shared.
        if storage.device.type == "cpu" and storage.is_shared():
            raise RunFailed(
                f"a tensor of {storage.nbytes()} bytes lies in memory that other processes or a "
                "file share, so it cannot be put away: give the worker a copy of its own"
            )
    foreign = [s for s in storages if not s.resizable()]
    spans = sorted((s.data_ptr(), s.data_ptr() + s.nbytes()) for s in foreign)
    if any(end > start for (_, end), (start, _) in pairwise(spans)):
        raise RunFailed(
            "two tensors see the same foreign memory through storages of their own, so they cannot "
            "be put away and stay the same: give the worker copies"
        )


def _replace(storage: UntypedStorage, users: Sequence[Tensor]) -> UntypedStorage:
    size = storage.nbytes()
    new = torch.empty(size, dtype=torch.uint8, device=storage.device).untyped_storage()
    new.copy_(storage, False)
    for tensor in users:
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        with torch.no_grad():
            tensor.data = empty.set_(new, tensor.storage_offset(), tensor.shape, tensor.stride())
    return new
