"""Transitions of rollouts, and the buffer that keeps the newest of them.

A transition is one row of float32: state, tokens of the chunk, reward, discount, next state. Its
reward is that of the whole turn. Its discount is 0 where the episode terminated; where it was cut
off the next state is the one at which it was cut.

Legend: T transitions, W width of a row, S state size, K steps of a chunk, D coordinates of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from m2flow.algorithms.sampling import uniform
from m2flow.algorithms.segments import discounted_rewards
from m2flow.flow import Batch
from m2flow.workloads.embodied.workers.columns import CUT, OBSERVATION, TURN, lengths_of

STATE = f"{OBSERVATION}state"


@dataclass(frozen=True)
class Transitions:
    """Rows [T, W], seen as their parts."""

    rows_TW: Tensor
    state_size: int

    @property
    def state_TS(self) -> Tensor:
        return self.rows_TW[:, : self.state_size]

    @property
    def token_TA(self) -> Tensor:
        """Of all steps of the chunk, one after another."""
        return self.rows_TW[:, self.state_size : -self.state_size - 2]

    @property
    def reward_T(self) -> Tensor:
        return self.rows_TW[:, -self.state_size - 2]

    @property
    def discount_T(self) -> Tensor:
        return self.rows_TW[:, -self.state_size - 1]

    @property
    def next_TS(self) -> Tensor:
        return self.rows_TW[:, -self.state_size :]


def transitions_of(rollouts: Batch, gamma: float) -> Transitions:
    """The transitions of whole rollouts, one after another."""
    lengths = torch.tensor(lengths_of(rollouts))

    def turns(name: str) -> Tensor:
        found: Tensor = rollouts[f"{TURN}{name}"].values
        return found

    state_TS, cut_T, ends_T = turns(STATE), turns("cut"), turns("ends")
    # The last turn of a rollout ends an episode or is cut, so that its successor is not looked at.
    next_TS = torch.cat([state_TS[1:], state_TS[:1]])
    next_TS[cut_T] = rollouts[f"{CUT}{STATE}"].values.to(next_TS.dtype)
    discount_T = gamma ** turns("steps").double()
    discount_T[ends_T & ~cut_T] = 0.0
    assert not len(cut_T) or bool((cut_T | ends_T)[lengths[lengths > 0].cumsum(0) - 1].all())
    figures = torch.stack([discounted_rewards(turns("reward"), gamma), discount_T], dim=1)
    rows = [state_TS, turns("tokens").flatten(1), figures, next_TS]
    return Transitions(torch.cat([part.float() for part in rows], dim=1), state_TS.shape[1])


class Replay:
    """The newest transitions, at most `capacity` of them.

    Attributes:
        total: how many there have ever been.
    """

    def __init__(self, capacity: int, width: int) -> None:
        self.total = 0
        self._rows = torch.zeros(capacity, width)

    def __len__(self) -> int:
        return min(self.total, len(self._rows))

    def add(self, rows_TW: Tensor) -> None:
        """Take rows in; they replace the oldest ones."""
        capacity = len(self._rows)
        places_T = (self.total + torch.arange(len(rows_TW))) % capacity
        self._rows[places_T[-capacity:]] = rows_TW[-capacity:]
        self.total += len(rows_TW)

    def sample(self, seed: int, place_B: Tensor) -> Tensor:
        """[B, W] the rows at some places of the batch that a seed draws, with replacement."""
        drawn_B = uniform(torch.tensor(seed), place_B) * len(self)
        return self._rows[drawn_B.long()]

    def state(self) -> dict[str, Tensor]:
        """All that `restore` needs."""
        return {"rows": self._rows[: len(self)].clone(), "total": torch.tensor(self.total)}

    def restore(self, rows_TW: Tensor, total: int) -> None:
        """Go on from what `state` gave, with a buffer of the same capacity."""
        self._rows[: len(rows_TW)] = rows_TW
        self.total = total
