"""A model in training as one file, on its way to other lanes; however it is divided there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from m2flow.training.sharded import Shards, whole_weights

NAME = "training.safetensors"
MODEL, TRAINER = "model/", "trainer/"


class Trainer(Protocol):
    """What has a state beside the model's."""

    def state_items(self) -> Iterator[tuple[str, Tensor]]:
        """All of it, whole, gathered one at a time; collective in a gang."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take it over, however that model was divided."""
        ...


def write(folder: Path, model: nn.Module, trainer: Trainer, *, first: bool) -> None:
    """Write the model's parameters and the trainer's state.

    Collective in a gang: every lane takes part in gathering each tensor. The first lane keeps them
    and writes; the others hold one at a time.
    """
    from safetensors.torch import save_file

    names = {name for name, _ in model.named_parameters()}  # of tied ones the first
    tensors: dict[str, Tensor] = {}
    for name, x in whole_weights(model):
        if first and name in names:
            tensors[MODEL + name] = x.contiguous()
    for name, x in trainer.state_items():
        if first:
            tensors[TRAINER + name] = x.contiguous()
    if first:
        save_file(tensors, folder / NAME)


def read(folder: Path, model: nn.Module, trainer: Trainer, shards: Shards) -> None:
    """Take over what `write` has written, into a model with the same parameters."""
    from safetensors.torch import load_file

    tensors = load_file(folder / NAME)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shards.piece(parameter).copy_(shards.cut(tensors[MODEL + name], parameter))
    state = {name[len(TRAINER) :]: x for name, x in tensors.items() if name.startswith(TRAINER)}
    trainer.load_state_dict(state)
