"""`Span`: one thing that a lane did, from start to end. The timeline is made of these.

The span of a call names the items it took (`ids`). The span of a streaming call also says when
items came in (`taken`) and when items were handed on (`pieces`), in seconds from the start of the
span. Profiles are learned from that. The values are plain, so that JSON carries them; items are
written as ranges, which people can read in a trace viewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

SpanKind: TypeAlias = Literal["call", "switch", "transfer", "wait", "publish", "finish"]


@dataclass(frozen=True, slots=True)
class Span:
    """What a lane did between two moments of one clock.

    Attributes:
        lane: the lane's number.
        name: the stage of a call or a finish, the worker of a publish (of a switch, with what is
            done to it), what is moved by a transfer, or what a wait is for.
        kind: what sort of thing it was.
        start, end: seconds.
        args: further facts, such as the step and the number of items.
    """

    lane: int
    name: str
    kind: SpanKind
    start: float
    end: float
    args: Mapping[str, object] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.start


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
