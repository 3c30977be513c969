"""`StageStream`: a streaming call on a lane, between the engine's orders and the stage's generator.

It feeds the generator with what has come, checks that what it hands on is what it owes, and tells
it to give back. It knows no payload store and no other call.

On a gang every lane has a stream of the call, which gets the same orders in the same sequence, but
not at the same moments. So wherever a stream looks at what has come, the lanes agree on how many
orders all of them have, and each takes that many: their generators receive the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from m2flow.engine.facts import StreamLog
from m2flow.errors import UserError
from m2flow.flow.batch import Batch
from m2flow.flow.graph import StageNode
from m2flow.flow.streaming import GIVE_BACK, Arrived, Signal, Unfinished

Piece = Batch | Unfinished | None
"""What a stage has yielded: finished items, all that it gives back, or nothing for now."""

Agree = Callable[[int], int]
"""The least of the numbers that the lanes of a gang give; collective among them."""


def alone(count: int) -> int:
    """What a single lane agrees on."""
    return count


class StageStream:
    """A streaming call in progress.

    Args:
        node: the stage.
        stage: makes a generator of what a call begins with; the stage with its options.
        clock: seconds.
        agree: with the other lanes of the gang.

    Attributes:
        log: what was taken in and handed on, and when.
        told: when it was told to give back.
    """

    def __init__(
        self,
        node: StageNode,
        stage: Callable[..., object],
        clock: Callable[[], float],
        agree: Agree = alone,
    ) -> None:
        self.node, self.log = node, StreamLog(clock())
        self._stage, self._clock, self._agree = stage, clock, agree
        self._received: deque[Sequence[Batch] | Unfinished | Signal] = deque()
        self._inbox: deque[Sequence[Batch] | Unfinished] = deque()
        self._owed: set[int] = set()
        self._ending = False
        self.told = 0.0

    def feed(self, arrived: Sequence[Batch] | Unfinished) -> None:
        """Items have come: one Batch for each input of the stage, or unfinished outputs."""
        self._received.append(arrived)

    def give_back(self) -> None:
        """End as soon as the stage is heard of; what it has not been given yet stays here."""
        self._received.append(GIVE_BACK)
        self.told = self._clock()

    def run(self) -> Iterator[Piece]:
        """Run the stage, again and again while more comes, and give what it yields.

        Raises:
            UserError: the stage breaks its protocol.
        """
        self._look()
        while not self._ending and (first := self._next()) is not None:
            yield from self._generate(first)
            self._look()

    def _look(self) -> None:
        """Take in the orders that have come to all lanes."""
        for _ in range(self._agree(len(self._received))):
            order = self._received.popleft()
            if isinstance(order, Signal):
                self._ending = True
            else:
                self._inbox.append(order)

    def _generate(self, first: Sequence[Batch] | Unfinished) -> Iterator[Piece]:
        given = [first] * len(self.node.inputs) if isinstance(first, Unfinished) else first
        stage = self._stage(*given)
        if not isinstance(stage, Generator):
            raise UserError(
                "streams, so it must be a generator function that yields Batches",
                key=self.node.name,
                value=type(stage).__name__,
            )
        told = False
        sent: Arrived = None
        while True:
            try:
                output = stage.send(sent)
            except StopIteration:
                break
            except UserError as error:
                raise UserError(str(error), key=self.node.name) from error
            yield (
                self._unfinished(output, told)
                if isinstance(output, Unfinished)
                else (self._finished(output))
            )
            sent = None
            self._look()
            if self._ending:
                sent, told = (None if told else GIVE_BACK), True
            else:
                sent = self._arrived()
        if self._owed:
            raise UserError(
                f"ended with {len(self._owed)} items not handed on",
                key=self.node.name,
                value=sorted(self._owed)[:8],
            )

    def _finished(self, output: Any) -> Piece:
        if not isinstance(output, Batch):
            raise UserError(
                "must yield Batches",
                key=self.node.name,
                value=type(output).__name__,
                hint="yield an empty one, batch.select([]), to ask for more items",
            )
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

    def _unfinished(self, output: Unfinished, told: bool) -> Piece:
        """Check that all that is owed comes back, once the stage was told so."""
        items = output.items
        if not told or sorted(items.ids) != sorted(self._owed):
            different = self._owed.symmetric_difference(items.ids)
            raise UserError(
                "gave items back unasked, or other ones than all that it had not handed on",
                key=self.node.name,
                value=sorted(different or items.ids)[:8],
                hint="answer GIVE_BACK with one Unfinished of the rest",
            )
        self._owed.clear()
        if not len(items):
            return None
        self.log.give_back(self._clock(), items)
        return output

    def _arrived(self) -> Arrived:
        """What has come, for a generator that runs."""
        arrived = self._next()
        return arrived if arrived is None or isinstance(arrived, Unfinished) else arrived[0]

    def _next(self) -> Sequence[Batch] | Unfinished | None:
        """Join what lies first in the inbox, of one kind."""
        if not self._inbox:
            return None
        first = self._inbox.popleft()
        if isinstance(first, Unfinished):
            rows = [first.items]
            while self._inbox and isinstance(next_one := self._inbox[0], Unfinished):
                rows.append(next_one.items)
                self._inbox.popleft()
            back = Unfinished(Batch.concat(rows))
            self.log.resume(self._clock(), back.items)
            self._owed.update(back.items.ids)
            return back
        fresh = [first]
        while self._inbox and not isinstance(next_one := self._inbox[0], Unfinished):
            fresh.append(next_one)
            self._inbox.popleft()
        batches = [Batch.concat(some) for some in zip(*fresh, strict=True)]
        self.log.take(self._clock(), batches[0])
        n = self.node.expands
        self._owed.update(item * n + k for item in batches[0].ids for k in range(n))
        return batches
