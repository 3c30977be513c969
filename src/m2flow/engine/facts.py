"""What the spans of calls say beside their times, so that a run can be played again elsewhere.

A call's span names the items it took (`ids`); that of a streaming call also when it took them in
(`taken`) and when it handed them on (`pieces`), in seconds from the start of the span. Plain values
that JSON carries; items are written as ranges, which people can read in a trace viewer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from m2flow.flow.batch import Batch, Ragged


def ids_text(items: Iterable[int]) -> str:
    """Items in their order, as ranges: `0-15,18`."""
    runs: list[list[int]] = []
    for item in items:
        if runs and item == runs[-1][1] + 1:
            runs[-1][1] = item
        else:
            runs.append([item, item])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in runs)


def ids_of(text: str) -> tuple[int, ...]:
    """The items that `ids_text` has written.

    Raises:
        ValueError: it has not.
    """
    items: list[int] = []
    for run in text.split(",") if text else ():
        first, _, last = run.partition("-")
        items += range(int(first), int(last or first) + 1)
    return tuple(items)


@dataclass(slots=True)
class StreamLog:
    """What a streaming call took in and handed on, and when.

    Attributes:
        began: seconds of the lane's clock at the start of the call.
        columns: those that its items had when it took them in.
        taken: [seconds since it began, items].
        pieces: [seconds since it began, items, the length of each]; lengths are those of the first
            ragged column that the stage has added, and there are none if it has added none.
    """

    began: float
    columns: set[str] = field(default_factory=set)
    taken: list[list[object]] = field(default_factory=list)
    pieces: list[list[object]] = field(default_factory=list)
    items: int = 0

    def take(self, now: float, batch: Batch) -> None:
        """Items have come."""
        self.columns.update(batch.columns)
        self.items += len(batch)
        self.taken.append([round(now - self.began, 6), ids_text(batch.ids)])

    def hand_on(self, now: float, output: Batch) -> None:
        """Items are finished."""
        self.pieces.append(self._entry(now, output))

    def _entry(self, now: float, output: Batch) -> list[object]:
        added = (output[name] for name in output.columns if name not in self.columns)
        ragged = next((column for column in added if isinstance(column, Ragged)), None)
        lengths = [] if ragged is None else list(ragged.lengths)
        return [round(now - self.began, 6), ids_text(output.ids), lengths]

    def facts(self) -> dict[str, object]:
        """For the call's span."""
        return {"items": self.items, "taken": self.taken, "pieces": self.pieces}
