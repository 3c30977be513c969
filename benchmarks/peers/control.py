"""What both sides of a comparison on control run: sizes of PPO, and the environment by its name.

Imports nothing that is not the standard library's: each side has an interpreter of its own.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class ControlSettings:
    """One side's run; the same for all but for `extra`.

    Attributes:
        environment: as m2flow's recipes name it; "gymnasium:ID" or another one.
        options: of the environment.
        seed: of weights, environments and draws.
        cores: processor cores that the side may use.
        environments: how many run beside each other.
        horizon: environment steps of each in a step of training.
        hidden: widths of actor and critic, which have layers of their own.
        extra: options of one side alone.
    """

    environment: str
    seed: int
    cores: int
    environments: int = 8
    horizon: int = 256
    epochs: int = 8
    minibatches: int = 16
    hidden: tuple[int, ...] = (64, 64)
    learning_rate: float = 3e-4
    gamma: float = 0.99
    lam: float = 0.95
    options: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Environment steps of a step of training."""
        return self.environments * self.horizon

    def to_json(self) -> str:
        """One line, as `Wire.settings` reads it."""
        return json.dumps(asdict(self))
