"""Item ids, moments and lengths recorded in the spans of calls; profiles are learned from them.

The span of a call names the items it took (`ids`). The span of a streaming call also says when
items came in (`taken`) and when items were handed on (`pieces`), in seconds from the start of the
span. The values are plain, so that JSON carries them; items are written as ranges, which people can
read in a trace viewer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from m2flow.flow.batch import Batch, Ragged


def ids_text(items: Iterable[int]) -> str:
    """Write items as ranges, in their order: `0-15,18`."""
    runs: list[list[int]] = []
    for item in items:
        if runs and item == runs[-1][1] + 1:
            runs[-1][1] = item
        else:
            runs.append([item, item])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in runs)


def ids_of(text: str) -> tuple[int, ...]:
    """Read the items that `ids_text` has written.

    Raises:
        ValueError: the text is no list of ranges.
    """
    items: list[int] = []
    for run in text.split(",") if text else ():
        first, _, last = run.partition("-")
        items += range(int(first), int(last or first) + 1)
    return tuple(items)


@dataclass(slots=True)
class StreamLog:
    """Records what a streaming call takes in and hands on, and when.

    Attributes:
        began: seconds of the lane's clock at the start of the call.
        columns: columns of the items that the call has taken in.
        taken: [seconds since `began`, items].
        pieces: [seconds since `began`, items, length of each item]. The lengths are those of the
            first ragged column that the stage has added; without such a column there are none.
        items: number of items that the call has taken in.
    """

    began: float
    columns: set[str] = field(default_factory=set)
    taken: list[list[object]] = field(default_factory=list)
    pieces: list[list[object]] = field(default_factory=list)
    items: int = 0

    def take(self, now: float, batch: Batch) -> None:
        """Record items that have come in."""
        self.columns.update(batch.columns)
        self.items += len(batch)
        self.taken.append([round(now - self.began, 6), ids_text(batch.ids)])

    def hand_on(self, now: float, output: Batch) -> None:
        """Record items that are finished."""
        self.pieces.append(self._entry(now, output))

    def _entry(self, now: float, output: Batch) -> list[object]:
        added = (output[name] for name in output.columns if name not in self.columns)
        ragged = next((column for column in added if isinstance(column, Ragged)), None)
        lengths = [] if ragged is None else list(ragged.lengths)
        return [round(now - self.began, 6), ids_text(output.ids), lengths]

    def facts(self) -> dict[str, object]:
        """Return the facts for the span of the call."""
        return {"items": self.items, "taken": self.taken, "pieces": self.pieces}
