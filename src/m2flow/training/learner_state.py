"""A model in training as whole tensors, for lanes on which it may be divided otherwise."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from m2flow.training.optimizer import SumOptimizer
from m2flow.training.sharded import Shards, whole_weights

MODEL, TRAINER = "model/", "trainer/"


@torch.no_grad()
def gathered(model: nn.Module, optimizer: SumOptimizer, *, first: bool) -> dict[str, Tensor]:
    """The model's parameters and the optimizer's state by name, on the CPU.

    Collective in a gang: every lane takes part in gathering each tensor. The first lane keeps them;
    the others hold one at a time, and get an empty mapping. What is whole already is not copied.
    """
    names = {name for name, _ in model.named_parameters()}  # of tied ones the first
    tensors: dict[str, Tensor] = {}
    for name, x in whole_weights(model):
        if first and name in names:
            tensors[MODEL + name] = x.cpu()
    for name, x in optimizer.state_items():
        if first:
            tensors[TRAINER + name] = x.cpu()
    return tensors


@torch.no_grad()
def take_over(
    state: Mapping[str, Tensor], model: nn.Module, optimizer: SumOptimizer, shards: Shards
) -> None:
    """Copy what `gathered` gave into a model with the same parameters, and its optimizer."""
    for name, parameter in model.named_parameters():
        part = shards.placed(shards.piece(parameter), parameter)
        part.tensor.copy_(part.box.of(state[MODEL + name]))
    optimizer.load_state_dict(
        {name[len(TRAINER) :]: x for name, x in state.items() if name.startswith(TRAINER)}
    )
