"""Heads beside the decoder: value, proprioception, and OpenVLA-OFT's L1 regression of actions.

Names of parameters are those of the published files `action_head--*.pt` and
`proprio_projector--*.pt`; the value head is m2flow's own.

Legend: B batch, K actions of a chunk, A action size, E embedding.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

_BLOCKS = 2


class ValueHead(nn.Module):
    """The critic of PPO on a hidden state: two GELU layers, the last one begins near zero."""

    def __init__(self, embedding: int) -> None:
        super().__init__()
        widths = [embedding, min(512, embedding), min(128, embedding)]
        layers: list[nn.Module] = []
        for width, following in pairwise(widths):
            layers += [nn.Linear(width, following), nn.GELU()]
        last = nn.Linear(widths[-1], 1)
        nn.init.normal_(last.weight, std=0.02)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(*layers, last)

    def forward(self, hidden_BE: Tensor) -> Tensor:
        """Return float32 [B]; the head is in float32 whatever the decoder is in."""
        return self.layers(hidden_BE.float()).squeeze(-1)


class ProprioProjector(nn.Module):
    """The robot's state as one more token."""

    def __init__(self, state_size: int, embedding: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(state_size, embedding)
        self.fc2 = nn.Linear(embedding, embedding)
        self.act_fn1 = nn.GELU()

    def forward(self, state_BS: Tensor) -> Tensor:
        """Return [B, 1, E]."""
        state_BS = state_BS.to(self.fc1.weight.dtype)
        return self.fc2(self.act_fn1(self.fc1(state_BS))).unsqueeze(1)


class L1Head(nn.Module):
    """Actions by regression from the hidden states of an action's tokens, side by side."""

    def __init__(self, embedding: int, action_size: int) -> None:
        super().__init__()
        self.model = _ResidualMLP(embedding * action_size, embedding, action_size)

    def forward(self, hidden_BKAE: Tensor) -> Tensor:
        """Return actions scaled to [-1, 1], float32 [B, K, A]."""
        flat = hidden_BKAE.flatten(2)
        return self.model(flat.to(self.model.fc1.weight.dtype)).float()


class _ResidualMLP(nn.Module):
    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(inputs)
        self.fc1 = nn.Linear(inputs, hidden)
        self.mlp_resnet_blocks = nn.ModuleList(_ResidualBlock(hidden) for _ in range(_BLOCKS))
        self.layer_norm2 = nn.LayerNorm(hidden)
        self.fc2 = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class _ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x)
