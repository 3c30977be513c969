"""Names of the columns that pass between the workers, and observations as columns.

A part of an observation is the column `observation.NAME`. What a rollout leaves behind are ragged
columns with a row for each of its turns, `turn.NAME`; its observations among them are
`turn.observation.NAME`. Observations at which an episode was cut off, whose value has to be asked
for, are `cut.observation.NAME`, with a row for each cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from m2flow.flow import Batch, Ragged

OBSERVATION, TURN, CUT = "observation.", "turn.", "cut."
INSTRUCTION = "instruction"

WHO = ("rollout", "seed", "greedy", "turn")
"""Columns that a rollout carries around the loop: its number, its seed, how it draws, its turn."""

ACTED = ("action", "tokens", "logprobs", "values")
"""What a policy decided; `values` only where it has a critic."""

NO_FILM, FILM, OPTIONAL_FILM = range(3)
"""Whether the first episode of a start is filmed, its column `film`: an optional film is given up
where drawing takes long."""


def observations_of(batch: Batch, prefix: str = "") -> dict[str, Any]:
    """The observations in a batch: of ragged columns the rows of all items, one after another.

    Sentences lie in lists, one for each row.
    """
    start = f"{prefix}{OBSERVATION}"
    found: dict[str, Any] = {}
    for name, column in batch.columns.items():
        if name.startswith(start):
            part = column
            if isinstance(column, Ragged):
                part = column.values
            elif prefix:  # lists of sentences, a list for each item
                part = [sentence for sentences in column for sentence in sentences]
            found[name.removeprefix(start)] = part
    return found


def lengths_of(batch: Batch) -> Sequence[int]:
    """Turns of each rollout in a batch."""
    return batch[f"{TURN}steps"].lengths
