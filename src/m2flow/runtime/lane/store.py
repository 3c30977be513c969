"""`Store`: the payloads that a lane holds, by step, stage and item.

Outputs are kept as the Batches they came in; a call's inputs are cut out of them and joined again.
Where a call wants just what another call made, it gets that Batch itself: no copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from m2flow.flow.batch import Batch


@dataclass(slots=True, eq=False)
class _StoredBatch:
    batch: Batch
    rows: dict[int, int]


class Store:
    """Batches of items, cut out and joined on demand."""

    def __init__(self) -> None:
        self._chunks: dict[tuple[str, int, int], dict[int, _StoredBatch]] = {}

    def put(self, flow: str, step: int, producer: int, batch: Batch) -> None:
        """Keep the outputs of a stage; an item that is there already is replaced."""
        chunk = _StoredBatch(batch, {item: row for row, item in enumerate(batch.ids)})
        self._chunks.setdefault((flow, step, producer), {}).update(dict.fromkeys(batch.ids, chunk))

    def gather(self, flow: str, step: int, wanted: Sequence[tuple[int, Sequence[int]]]) -> Batch:
        """Join items of several stages, in ascending order of item.

        Args:
            flow, step: whose.
            wanted: (producer, items) pairs; an item stands in one of them only.
        """
        return _joined(self._cut_out(flow, step, wanted))

    def gather_alike(
        self, flow: str, step: int, wanted: Sequence[tuple[int, Sequence[int]]]
    ) -> list[Batch]:
        """Join items as `gather` does, into one Batch for each set of columns that they have."""
        alike: dict[frozenset[str], list[Batch]] = {}
        for piece in self._cut_out(flow, step, wanted):
            alike.setdefault(frozenset(piece.columns), []).append(piece)
        return [_joined(pieces) for pieces in alike.values()]

    def _cut_out(
        self, flow: str, step: int, wanted: Sequence[tuple[int, Sequence[int]]]
    ) -> list[Batch]:
        rows_of: dict[_StoredBatch, list[int]] = {}
        for producer, items in wanted:
            chunks = self._chunks[flow, step, producer]
            for item in items:
                chunk = chunks[item]
                rows_of.setdefault(chunk, []).append(chunk.rows[item])
        return [chunk.batch.select(rows) for chunk, rows in rows_of.items()]

    def release(self, flow: str, step: int, producer: int, items: Iterable[int]) -> None:
        """Let payloads go; items that are not here are no error."""
        chunks = self._chunks.get((flow, step, producer))
        if chunks:
            for item in items:
                chunks.pop(item, None)

    def drop_step(self, flow: str, step: int) -> None:
        """Let everything of a step go."""
        for key in [key for key in self._chunks if key[:2] == (flow, step)]:
            del self._chunks[key]


def _joined(pieces: Sequence[Batch]) -> Batch:
    joined = Batch.concat(pieces)
    return joined.select(sorted(range(len(joined)), key=joined.ids.__getitem__))
