"""What was seen of real steps: the spans of a run under one plan, and single calls in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

from m2flow.engine.plan import Plan
from m2flow.engine.spans import Span


class Step(Protocol):
    """A step that ran: what its lanes did, when it was submitted, and how long it took."""

    @property
    def spans(self) -> Sequence[Span]: ...
    @property
    def started(self) -> float: ...
    @property
    def seconds(self) -> float: ...


@dataclass(frozen=True)
class Observed:
    """Steps of a flow under one plan.

    Attributes:
        plan: with the sizes of the workers' states, where they are known.
        num_items: source items of each step.
        spans: everything that the lanes did, of all steps.
        steps: of each step when it was submitted, and how long it took.
        warm: whether steps before these have warmed the lanes up. If not, the first call of each
            stage on each lane does not count.
        moves: (worker, "onload" or "offload", seconds) of moves that were made beside the steps.
        gauged: spans of a step that say what calls took of memory; their seconds do not count.
    """

    plan: Plan
    num_items: int
    spans: tuple[Span, ...]
    steps: tuple[tuple[float, float], ...] = ()
    warm: bool = False
    moves: tuple[tuple[str, str, float], ...] = ()
    gauged: tuple[Span, ...] = ()

    @classmethod
    def of(
        cls,
        plan: Plan,
        num_items: int,
        results: Iterable[Step],
        *,
        warm: bool = False,
        moves: Iterable[tuple[str, str, float]] = (),
        gauged: Iterable[Span] = (),
    ) -> Self:
        """The steps with these results."""
        results = list(results)
        spans = tuple(span for result in results for span in result.spans)
        steps = tuple((result.started, result.seconds) for result in results)
        return cls(plan, num_items, spans, steps, warm, tuple(moves), tuple(gauged))


@dataclass(frozen=True)
class Call:
    """A call of one replica.

    Attributes:
        items: that it took.
        seconds: until its end.
        beside: how busy the other lanes were meanwhile, from 0 (all idle) to 1.
        effort: seconds of processors that the lane's process had in each second of it; 0 if that is
            not known.
        pieces: of a streaming call, when items were handed on, and the length of each (empty where
            there are none).
        counts: how many items each piece had.
    """

    items: float
    seconds: float
    beside: float = 1.0
    effort: float = 0.0
    pieces: tuple[tuple[float, tuple[float, ...]], ...] = ()
    counts: tuple[int, ...] = ()

    def slowed(self, factor: float) -> Call:
        """The same call, had everything in it taken so many times as long."""
        pieces = tuple((when * factor, lengths) for when, lengths in self.pieces)
        return replace(self, seconds=self.seconds * factor, pieces=pieces)

    @property
    def outputs(self) -> int:
        """Items handed on."""
        return sum(self.counts)

    @property
    def has_lengths(self) -> bool:
        """Whether the length of every item is known."""
        return all(
            len(lengths) == n for (_, lengths), n in zip(self.pieces, self.counts, strict=True)
        )
