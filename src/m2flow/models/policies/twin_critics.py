"""Two critics of state and action, for algorithms that learn from a replay buffer.

Legend: B batch, S state size, A size of a chunk of actions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from m2flow.models.policies.actor_critic import RunningNorm


class TwinCritics(nn.Module):
    """Two MLPs from a state and an action in [-1, 1] to what is to be expected.

    Args:
        state_size, action_size: figures of each.
        hidden: widths of the layers.
        normalise: bring states to mean 0 and deviation 1, by `norm`.
    """

    def __init__(
        self, state_size: int, action_size: int, hidden: Sequence[int], normalise: bool
    ) -> None:
        super().__init__()
        self.norm = RunningNorm(state_size) if normalise else None
        self.critics = nn.ModuleList()
        for _ in range(2):
            layers: list[nn.Module] = []
            width = state_size + action_size
            for size in hidden:
                layers += [nn.Linear(width, size), nn.ReLU()]
                width = size
            self.critics.append(nn.Sequential(*layers, nn.Linear(width, 1)))

    def forward(self, state_BS: Tensor, action_BA: Tensor) -> Tensor:
        """[2, B]."""
        if self.norm is not None:
            state_BS = self.norm(state_BS)
        seen = torch.cat([state_BS, action_BA], dim=-1)
        return torch.stack([critic(seen)[:, 0] for critic in self.critics])
