"""Actions as token ids: 256 bins of [-1, 1] at the end of the vocabulary, and their scale.

Kim et al., "OpenVLA" (2024), section 3.2: an action coordinate, scaled so that the 1st and 99th
percentile of the data set are -1 and 1, falls into a bin b = 1 ... 256 between 256 evenly spaced
edges; its token id is `vocabulary - b`. There are 255 centres between the edges; bin 256 (exactly
1.0) has the last centre.

Legend: K actions of a chunk, A action size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from m2flow.errors import UserError

Gripper = Literal["as_it_is", "libero", "widowx"]


class ActionBins:
    """Between token ids and actions in [-1, 1]."""

    def __init__(self, vocabulary: int, bins: int = 256) -> None:
        self.vocabulary, self.bins = vocabulary, bins
        self.first_token = vocabulary - bins
        self.edges = torch.from_numpy(np.linspace(-1.0, 1.0, bins))
        self.centres = (self.edges[:-1] + self.edges[1:]) / 2

    def decode(self, tokens: Tensor) -> Tensor:
        """Return the bin centres, float32; ids outside the bins take the nearest one."""
        index = (self.vocabulary - tokens - 1).clamp(0, self.bins - 2)
        return self.centres.to(tokens.device)[index].float()

    def encode(self, actions: Tensor) -> Tensor:
        """Return int64 token ids of actions, clamped to [-1, 1]."""
        edges = self.edges.to(actions.device)
        clamped = actions.to(torch.float64).clamp(-1.0, 1.0).contiguous()
        return self.vocabulary - torch.bucketize(clamped, edges, right=True)


class ActionScale(nn.Module):
    """From [-1, 1] to what the robot takes, by percentiles of the data set.

    Coordinates that `mask` leaves out (the gripper) pass unchanged. The gripper is then put into
    the convention of the simulator: "libero" wants -1 open and 1 closed where the data has 1 open
    and 0 closed; "widowx" (ManiSkill's bridge tasks) wants 1 open and -1 closed.
    """

    low_A: Tensor
    high_A: Tensor
    mask_A: Tensor

    def __init__(self, statistics: Mapping[str, Any], gripper: Gripper = "as_it_is") -> None:
        super().__init__()
        if gripper not in ("as_it_is", "libero", "widowx"):
            raise UserError(
                "unknown convention of the gripper",
                key="gripper",
                value=gripper,
                expected="as_it_is, libero or widowx",
            )
        self.gripper = gripper
        action = statistics["action"]
        low, high = torch.tensor(action["q01"]), torch.tensor(action["q99"])
        mask = torch.tensor(action.get("mask", [True] * len(low)))
        self.register_buffer("low_A", low, persistent=False)
        self.register_buffer("high_A", high, persistent=False)
        self.register_buffer("mask_A", mask, persistent=False)

    @property
    def size(self) -> int:
        """Number of coordinates of an action."""
        return self.low_A.numel()

    def forward(self, scaled: Tensor) -> Tensor:
        """Return actions [..., A] as the environment takes them."""
        span_A = self.high_A - self.low_A
        actions = torch.where(self.mask_A, 0.5 * (scaled + 1) * span_A + self.low_A, scaled)
        if self.gripper == "as_it_is":
            return actions
        opened = torch.where(actions[..., -1:] > 0.5, 1.0, -1.0)
        return torch.cat([actions[..., :-1], -opened if self.gripper == "libero" else opened], -1)

    def inverse(self, actions: Tensor) -> Tensor:
        """Return environment actions scaled to [-1, 1] again, clamped; for demonstrations."""
        if self.gripper != "as_it_is":
            sign = -1.0 if self.gripper == "libero" else 1.0
            opened = (sign * actions[..., -1:] > 0).to(actions.dtype)
            actions = torch.cat([actions[..., :-1], opened], dim=-1)
        span_A = self.high_A - self.low_A + 1e-8
        scaled = 2 * (actions - self.low_A) / span_A - 1
        return torch.where(self.mask_A, scaled.clamp(-1, 1), actions)


def scale_proprioception(state: Tensor, statistics: Mapping[str, Any]) -> Tensor:
    """Return robot states [B, S] scaled to [-1, 1] by the percentiles, clamped."""
    if "proprio" not in statistics:
        raise UserError(
            "the statistics have no proprioception", key="norm_stats", expected="a field proprio"
        )
    low = torch.tensor(statistics["proprio"]["q01"], device=state.device)
    high = torch.tensor(statistics["proprio"]["q99"], device=state.device)
    if state.shape[-1] != low.numel():
        raise UserError(
            "the robot state has another size than the checkpoint's statistics",
            key="state",
            value=state.shape[-1],
            expected=str(low.numel()),
        )
    return (2 * (state - low) / (high - low + 1e-8) - 1).clamp(-1, 1)
