"""`Division`: what a training layout divides and by how much, and the layout's name.

The planner prices by it and the trainer divides by it, so both mean the same by a name. Torch is
not needed here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_PART = re.compile(r"(fsdp|tp|cp|ep)(\d+)")


@dataclass(frozen=True, slots=True)
class Division:
    """Lanes of a replica, by what they divide; 1 for what is not divided.

    Attributes:
        fsdp: state, gathered block by block for each pass; each lane has tokens of its own.
        tp: every layer, by heads, channels and rows of the vocabulary; lanes share tokens.
        cp: the tokens of a micro-batch, between lanes that have all of the model.
        ep: the experts of each mixture; each lane has tokens of its own, and all else of the model.
    """

    fsdp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def lanes(self) -> int:
        """Lanes of a replica."""
        return self.fsdp * self.tp * self.cp * self.ep

    @property
    def shares(self) -> int:
        """Into how many shares the rows of a call are divided that are computed side by side."""
        return self.fsdp * self.ep

    @property
    def layout(self) -> str:
        """The layout's name; lanes that share tokens are neighbours, so they are named first."""
        sizes = {"tp": self.tp, "cp": self.cp, "ep": self.ep, "fsdp": self.fsdp}
        return ".".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one"

    @classmethod
    def of(cls, layout: str, lanes: int) -> Division:
        """What a layout's name means on so many lanes; several lanes in "one" are `fsdpN`."""
        if layout == "one":
            return cls(fsdp=lanes)
        parts = [_PART.fullmatch(part) for part in layout.split(".")]
        assert all(parts), f"no layout of a trainer: {layout}"
        found = cls(**{part[1]: int(part[2]) for part in parts if part})
        assert found.lanes == lanes, f"{layout} on {lanes} lanes"
        return found
