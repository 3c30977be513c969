"""A model in training as one file, on its way to other lanes; however it is divided there."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from m2flow.training.optimizer import SumOptimizer
from m2flow.training.sharded import Shards, whole_weights

NAME = "training.safetensors"
MODEL, TRAINER = "model/", "trainer/"


def write(folder: Path, model: nn.Module, optimizer: SumOptimizer, *, first: bool) -> None:
    """Write the model's parameters and the optimizer's state.

    Collective in a gang: every lane takes part in gathering each tensor. The first lane keeps them
    and writes; the others hold one at a time.
    """
    from safetensors.torch import save_file

    names = {name for name, _ in model.named_parameters()}  # of tied ones the first
    tensors: dict[str, Tensor] = {}
    for name, x in whole_weights(model):
        if first and name in names:
            tensors[MODEL + name] = x.contiguous()
    for name, x in optimizer.state_items():
        if first:
            tensors[TRAINER + name] = x.contiguous()
    if first:
        save_file(tensors, folder / NAME)


def read(folder: Path, model: nn.Module, optimizer: SumOptimizer, shards: Shards) -> None:
    """Take over what `write` has written, into a model with the same parameters."""
    from safetensors.torch import load_file

    tensors = load_file(folder / NAME)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = shards.placed(shards.piece(parameter), parameter)
            part.tensor.copy_(part.box.of(tensors[MODEL + name]))
    state = {name[len(TRAINER) :]: x for name, x in tensors.items() if name.startswith(TRAINER)}
    optimizer.load_state_dict(state)
