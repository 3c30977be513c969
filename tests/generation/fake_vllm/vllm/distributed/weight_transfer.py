"""Its weight transfer over CUDA IPC, packed, as its worker has it: order, checks, and what fails.

A handle opens a file in place of a GPU's memory: (path, bytes).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

UUID = "GPU-0"


class WeightTransfer:
    def __init__(
        self,
        config: dict[str, str] | None,
        load_weights: Callable[[list[tuple[str, Tensor]]], None],
    ) -> None:
        assert config in (None, {"backend": "ipc"})
        self.config, self.load_weights = config, load_weights
        self.active = self.packed = False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._check()
        self.packed = init_info["packed"]

    def start_weight_update(self) -> None:
        self._check()
        if self.active:
            raise RuntimeError("start_weight_update called while a weight update is active.")
        self.active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._check()
        if not self.active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        try:
            self.load_weights(self._received(**update_info))
        except BaseException:
            self.active = False
            raise

    def finish_weight_update(self) -> None:
        self._check()
        if not self.active:
            raise RuntimeError("finish_weight_update called without a start_weight_update.")
        self.active = False

    def _check(self) -> None:
        if self.config is None:
            raise RuntimeError("Weight transfer not configured.")

    def _received(
        self,
        names: list[str],
        dtype_names: list[str],
        shapes: list[list[int]],
        tensor_sizes: list[int],
        ipc_handles: dict[str, tuple[str, int]],
    ) -> list[tuple[str, Tensor]]:
        assert self.packed, "the engine was not told how weights come"
        assert len(names) == len(dtype_names) == len(shapes) == len(tensor_sizes)
        path, size = ipc_handles[UUID]
        memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        parts = memory[: sum(tensor_sizes)].split(tensor_sizes)
        described = zip(names, dtype_names, shapes, parts, strict=True)
        return [
            (name, part.view(getattr(torch, dtype)).view(shape).clone())
            for name, dtype, shape, part in described
        ]
