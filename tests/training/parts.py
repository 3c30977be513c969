"""Parts of a checkpoint as one lane writes them, and a trainer's state as it was written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from m2flow.runtime.weights.boxes import Box
from m2flow.runtime.weights.manifest import Shard
from m2flow.training import checkpoint, trainer_state


def whole_parts(tensors: Mapping[str, Tensor]) -> dict[str, Shard]:
    """Whole tensors, as the parts of one lane."""
    return {
        name: Shard(tensor, Box.whole(tensor.shape), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def write_part(folder: Path, model: Any, tokenizer: Any, state: Mapping[str, Tensor]) -> None:
    """Write a model and the state of its trainer."""
    checkpoint.clear_part(folder)
    trainer_state.write(folder / checkpoint.TRAINER, whole_parts(state))
    checkpoint.write_model(folder, model, tokenizer)


def state_in(path: Path | str, part: str = "") -> dict[str, Tensor]:
    """A trainer's state that one lane has written, by name."""
    files = sorted(checkpoint.trainer_folder(path, part).iterdir())
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
