"""What a resumable streaming stage and its lane say to each other beside Batches of items.

When the tail of a step begins, a call may be told `GIVE_BACK` where it would receive items. It
hands on what is finished, yields one `Unfinished` with all the rest, and ends. Another call of the
stage, on another lane, is given those items as an `Unfinished` in turn: in place of the Batch that
a call begins with, or of one that arrives while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from m2flow.flow.batch import Batch


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Output items that a call has not finished, with all that another one needs to go on.

    Attributes:
        items: named as outputs (with `expands=n`, item i becomes i*n ... i*n + n-1). Their columns
            are the stage's own affair: whoever goes on with an item gets its row as it is.
    """

    items: Batch


class Signal(Enum):
    """What a stage may be told; one object in every process, so that `is` can be asked."""

    GIVE_BACK = "give back"


GIVE_BACK: Final = Signal.GIVE_BACK
"""Received from a `yield`: give back what is unfinished, and end."""

Arrived: TypeAlias = Batch | Unfinished | Signal | None
"""What a resumable stage receives from a `yield`."""
