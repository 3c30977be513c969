"""A model in training as whole tensors: who keeps what while they are gathered."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from m2flow.training import learner_state
from m2flow.training.sharded import WHOLE


class Gathered:
    """Tensors gathered one at a time, and how many of them were alive at once."""

    def __init__(self) -> None:
        self.alive: list[weakref.ref[Tensor]] = []
        self.most = 0

    def items(self, *names: str) -> Iterator[tuple[str, Tensor]]:
        for number, name in enumerate(names):
            tensor = torch.full((2,), float(number))
            self.alive.append(weakref.ref(tensor))
            yield name, tensor
            gc.collect()
            self.most = max(self.most, sum(one() is not None for one in self.alive))


class Trainer:
    """Its state is two tensors."""

    def __init__(self, gathered: Gathered) -> None:
        self.gathered = gathered
        self.state: dict[str, Tensor] = {}

    def state_items(self) -> Iterator[tuple[str, Tensor]]:
        return self.gathered.items("exp_avg/weight", "exp_avg/bias", "num_steps")

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.state = state


@pytest.mark.parametrize("first", [True, False])
def test_only_the_first_lane_keeps_what_is_gathered(
    monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Every lane of a gang once held the whole model with its optimizer in memory."""
    model, gathered = nn.Linear(2, 2), Gathered()
    monkeypatch.setattr(
        learner_state, "whole_weights", lambda _: gathered.items("weight", "bias", "buffer")
    )
    state = learner_state.gathered(model, Trainer(gathered), first=first)
    assert (gathered.most > 1) == first
    assert bool(state) == first


def test_what_is_gathered_is_taken_over() -> None:
    model, other, trainer = nn.Linear(2, 2), nn.Linear(2, 2), Trainer(Gathered())
    state = learner_state.gathered(model, trainer, first=True)
    learner_state.take_over(state, other, trainer, WHOLE)
    assert torch.equal(model.weight, other.weight)
    assert set(trainer.state) == {"exp_avg/weight", "exp_avg/bias", "num_steps"}
