"""A model in training as whole tensors, for lanes on which it may be divided otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from m2flow.training.sharded import Shards, whole_weights

MODEL, TRAINER = "model/", "trainer/"


class TrainerState(Protocol):
    """What goes on from its state, such as `SumOptimizer`."""

    def state_items(self) -> Iterator[tuple[str, Tensor]]:
        """The state's whole tensors by name. Collective in a gang."""

    def load_state_dict(self, state: dict[str, Tensor], /) -> None:
        """Take over a copy of what `state_items` gave."""


@torch.no_grad()
def gathered(model: nn.Module, trainer: TrainerState, *, first: bool) -> dict[str, Tensor]:
    """The model's parameters and buffers and the trainer's state by name, on the CPU.

    Collective in a gang: every lane takes part in gathering each tensor. The first lane keeps them;
    the others hold one at a time, and get an empty mapping. What is whole already is not copied.
    """
    names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    tensors: dict[str, Tensor] = {}
    for name, x in whole_weights(model):
        if first and name in names:
            tensors[MODEL + name] = x.cpu()  # of tied ones the first
    for name, x in trainer.state_items():
        if first:
            tensors[TRAINER + name] = x.cpu()
    return tensors


@torch.no_grad()
def take_over(
    state: Mapping[str, Tensor], model: nn.Module, trainer: TrainerState, shards: Shards
) -> None:
    """Copy what `gathered` gave into a model with the same parameters, and its trainer."""
    for name, parameter in model.named_parameters():
        part = shards.placed(shards.piece(parameter), parameter)
        part.tensor.copy_(part.box.of(state[MODEL + name]))
    for name, buffer in model.named_buffers():
        if MODEL + name in state:  # others follow from the configuration
            buffer.copy_(state[MODEL + name])
    trainer.load_state_dict(
        {name[len(TRAINER) :]: x for name, x in state.items() if name.startswith(TRAINER)}
    )
