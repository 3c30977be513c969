"""`Tape`: on a CPU what a CUDA graph is on an accelerator, and as strict.

It holds the operations of one run, with the numbers and the memory that they had, and does them
again: what Python would decide otherwise by now is not asked. It refuses what a graph could not
hold, and to run where memory has moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from m2flow.generation.captured import Step

WAITING = ("_local_scalar_dense", "nonzero", "bincount")
"""Operations whose result, or the size of it, the host waits for."""


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        moves = name == "_to_copy" and kwargs.get("device") is not None
        if name in WAITING or moves:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result


class Tape:
    """Records steps; counts how often it was told to forget."""

    def __init__(self) -> None:
        self.forgotten = 0

    def record(self, step: Step, *, again: bool = False) -> Step:
        if not again:
            step()  # a graph's warm-up has no effect of its own either
        recording = _Recording()
        with recording:
            result = step()
        calls = recording.calls
        places = dict(_places(calls))

        def replay() -> Tensor:
            assert dict(_places(calls)) == places, "memory has moved under a recorded step"
            for func, args, kwargs, kept in calls:
                for new, old in zip(_tensors(func(*args, **kwargs)), _tensors(kept), strict=True):
                    if new.untyped_storage().data_ptr() != old.untyped_storage().data_ptr():
                        old.copy_(new)
            return result

        return replay

    def forget(self) -> None:
        self.forgotten += 1


def _places(calls: list[tuple[Any, Any, Any, Any]]) -> Iterator[tuple[int, int]]:
    """Of every tensor that a call read or made, where its memory is."""
    for number, (_, args, kwargs, result) in enumerate(calls):
        for place, tensor in enumerate(_tensors((args, kwargs, result))):
            yield 1000 * number + place, tensor.untyped_storage().data_ptr()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
