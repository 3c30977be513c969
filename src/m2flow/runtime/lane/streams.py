"""`StageStream`: a streaming call on a lane, between the engine and the generator of the stage.

A stream feeds the generator with the items that have come and checks what the generator hands on.
It knows no payload store and no other call.

On a gang every lane has a stream of the call, which gets the same items in the same sequence, but
not at the same moments. Wherever a stream looks at what has come, the lanes agree on how many
Batches all of them have, and each takes that many: their generators receive the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from m2flow.engine.spans import ids_text
from m2flow.errors import UserError
from m2flow.flow.batch import Batch, Ragged
from m2flow.flow.graph import StageNode

Agree = Callable[[int], int]
"""The least of the numbers that the lanes of a gang give; collective among them."""


def alone(count: int) -> int:
    """What a single lane agrees on."""
    return count


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


class StageStream:
    """A streaming call in progress.

    Args:
        node: the stage.
        stage: makes a generator of what a call begins with; the stage with its options.
        clock: seconds.
        agree: with the other lanes of the gang.
        without: outputs that are there already: a stage that makes them again does so in vain.

    Attributes:
        log: what was taken in and handed on, and when.
    """

    def __init__(
        self,
        node: StageNode,
        stage: Callable[..., object],
        clock: Callable[[], float],
        agree: Agree = alone,
        without: frozenset[int] = frozenset(),
    ) -> None:
        self.node, self.log = node, StreamLog(clock())
        self._without = without
        self._stage, self._clock, self._agree = stage, clock, agree
        self._received: deque[Sequence[Batch]] = deque()
        self._inbox: deque[Sequence[Batch]] = deque()
        self._owed: set[int] = set()

    def feed(self, arrived: Sequence[Batch]) -> None:
        """Items have come: one Batch for each input of the stage."""
        self._received.append(arrived)

    def run(self) -> Iterator[Batch | None]:
        """Run the stage, again and again while more comes.

        Yields:
            Finished items; None where the stage has only stopped to ask for more.

        Raises:
            UserError: the stage breaks its protocol.
        """
        self._look()
        while (first := self._next()) is not None:
            yield from self._generate(first)
            self._look()

    def _look(self) -> None:
        """Take in the items that have come to all lanes."""
        for _ in range(self._agree(len(self._received))):
            self._inbox.append(self._received.popleft())

    def _generate(self, first: Sequence[Batch]) -> Iterator[Batch | None]:
        stage = self._stage(*first)
        if not isinstance(stage, Generator):
            raise UserError(
                "streams, so it must be a generator function that yields Batches",
                key=self.node.name,
                value=type(stage).__name__,
            )
        sent: Batch | None = None
        while True:
            try:
                output = stage.send(sent)
            except StopIteration:
                break
            except UserError as error:
                raise UserError(str(error), key=self.node.name) from error
            yield self._finished(output)
            self._look()
            arrived = self._next()
            sent = None if arrived is None else arrived[0]
        if self._owed:
            raise UserError(
                f"ended with {len(self._owed)} items not handed on",
                key=self.node.name,
                value=sorted(self._owed)[:8],
            )

    def _finished(self, output: Any) -> Batch | None:
        if not isinstance(output, Batch):
            raise UserError(
                "must yield Batches",
                key=self.node.name,
                value=type(output).__name__,
                hint="yield an empty one, batch.select([]), to ask for more items",
            )
        if self._without and not self._without.isdisjoint(output.ids):
            output = output.take(item for item in output.ids if item not in self._without)
        unknown = set(output.ids) - self._owed
        if unknown or len(set(output.ids)) != len(output):
            raise UserError(
                "handed on items it was not given, or handed on before",
                key=self.node.name,
                value=sorted(unknown or output.ids)[:8],
                hint="keep the ids: make outputs with Batch.repeat, select and take",
            )
        self._owed.difference_update(output.ids)
        if not len(output):
            return None
        self.log.hand_on(self._clock(), output)
        return output

    def _next(self) -> Sequence[Batch] | None:
        """Join all that lies in the inbox."""
        if not self._inbox:
            return None
        batches = [Batch.concat(some) for some in zip(*self._inbox, strict=True)]
        self._inbox.clear()
        self.log.take(self._clock(), batches[0])
        n = self.node.expands
        made = (item * n + k for item in batches[0].ids for k in range(n))
        self._owed.update(item for item in made if item not in self._without)
        return batches
