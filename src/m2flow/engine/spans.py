"""`Span`: one thing that a lane did, from start to end. The timeline is made of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

SpanKind: TypeAlias = Literal["call", "switch", "transfer", "wait", "publish", "finish"]


@dataclass(frozen=True, slots=True)
class Span:
    """What a lane did between two moments of one clock.

    Attributes:
        lane: the lane's number.
        name: the stage of a call or a finish, the worker of a switch or a publish, what is moved
            by a transfer, or what a wait is for.
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
