"""Installing weights into a module, all or nothing.

Everything is checked first: names, shapes, dtypes, devices. Only then is anything touched.
`swap_parameters` makes the module run on the received tensors themselves, such as views of shared
memory; `copy_parameters` copies into the module's own. Both leave tied parameters tied.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from m2flow.errors import UserError, suggestion
from m2flow.runtime.weights.bits import same_bits
from m2flow.runtime.weights.layout import is_dtensor, local_tensor


class WeightsDoNotFit(UserError):
    """Weights whose names, shapes, dtypes or devices are not the module's."""


def swap_parameters(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Let every parameter and persistent buffer stand on the received tensor. No copy.

    The module keeps the tensors' memory alive; when this returns it holds nothing of the version
    before. Nobody may write to the tensors while the module runs on them, training included.

    Args:
        module: its parameters keep their identity; their `.data` changes.
        weights: name in the module's `state_dict` -> tensor of the same shape, dtype and device.
            Of tied parameters one name is enough.

    Raises:
        WeightsDoNotFit: something is missing, unknown or of another kind; nothing was touched.
    """
    for target, tensor in _matched(module, weights, exact=True):
        target.data = tensor.detach()


@torch.no_grad()
def copy_parameters(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy the received tensors into every parameter and persistent buffer.

    Args:
        module: plain parameters, or DTensors, which take this rank's part.
        weights: name in the module's `state_dict` -> tensor of the same shape (the local part's
            for a DTensor), on any device and of any dtype that can be converted.

    Raises:
        WeightsDoNotFit: something is missing, unknown or of another shape; nothing was touched.
    """
    for target, tensor in _matched(module, weights, exact=False):
        target.copy_(tensor)


def _matched(
    module: nn.Module, weights: Mapping[str, Tensor], exact: bool
) -> list[tuple[Tensor, Tensor]]:
    """`(what the module has, what was received)`, each parameter once; raises if they differ."""
    state = {n: t for n, t in module.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    for name in weights:
        if name not in state:
            hint = suggestion(name, state)
            raise WeightsDoNotFit("the module has no such parameter", key=name, hint=hint)
    pairs: dict[int, tuple[Tensor, Tensor]] = {}
    names: dict[int, str] = {}
    for name, target in state.items():
        if name not in weights:
            continue
        tensor = weights[name]
        _check(name, target, tensor, exact)
        first = pairs.setdefault(id(target), (target, tensor))[1]
        names.setdefault(id(target), name)
        if first is not tensor and not _same(first, tensor):
            raise WeightsDoNotFit(
                f"is tied to {names[id(target)]!r}, but other values came for it", key=name
            )
    missing = [name for name, target in state.items() if id(target) not in pairs]
    if missing:
        raise WeightsDoNotFit(
            f"{len(missing)} of {len(state)} parameters did not come, first {missing[0]!r}"
        )
    return [
        (local_tensor(target) if is_dtensor(target) else target, tensor)
        for target, tensor in pairs.values()
    ]


def _check(name: str, target: Tensor, tensor: Tensor, exact: bool) -> None:
    if is_dtensor(target):
        if exact:
            raise WeightsDoNotFit(
                "is sharded, and cannot stand on a received tensor",
                key=name,
                hint="use copy_parameters",
            )
        target = local_tensor(target)
    if target.shape != tensor.shape:
        raise WeightsDoNotFit(
            f"has shape {list(tensor.shape)}", key=name, expected=str(list(target.shape))
        )
    if not exact:
        return
    if target.dtype != tensor.dtype:
        raise WeightsDoNotFit(f"is {tensor.dtype}", key=name, expected=str(target.dtype))
    if target.device != tensor.device:
        raise WeightsDoNotFit(f"is on {tensor.device}", key=name, expected=str(target.device))


def _same(a: Tensor, b: Tensor) -> bool:
    there = a.data_ptr(), a.shape, a.stride(), a.dtype
    return there == (b.data_ptr(), b.shape, b.stride(), b.dtype) or same_bits(a, b)
