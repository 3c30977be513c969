"""The running batch: which sequence holds which slot, and what the device must know of each row.

Rows are dense from 0 and in step with the slots of the cache: wherever a row moves, its keys and
values move too. Knows nothing of the queue, of prompts, or of weights.

Legend: B running rows, N rows computed, which is B padded, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from m2flow.generation.captured import COLUMN_STEP, Size, padded_to_pages
from m2flow.generation.kernels import draw, on_device, padded_rows
from m2flow.generation.kv_cache import KVCache, RowSpan
from m2flow.generation.own_forward import OwnSlots
from m2flow.generation.pages import PagedCache
from m2flow.generation.sequence import RunningSequence
from m2flow.generation.tensor_parallel import WHOLE, TensorParallel

# Fields of a row, one int64 each: the token to feed and its position, how many tokens are drawn,
# and the seed.
_TOKEN, _POSITION, _DRAWN, _SEED = range(4)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that were drawn, on their way to the host.

    Attributes:
        sequences: whose next tokens they are.
        token_B, logprob_B: they and their log-probabilities, on the host once `arrived`.
        arrived: CUDA event after their copies; None where they are on the host already.
    """

    sequences: Sequence[RunningSequence]
    token_B: Tensor
    logprob_B: Tensor
    arrived: Any = None

    def read(self) -> list[float]:
        """Wait for the tokens and give them to their sequences; the log-probabilities of all."""
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens, logprobs = self.token_B.tolist(), self.logprob_B.tolist()
        for sequence, token, logprob in zip(self.sequences, tokens, logprobs, strict=True):
            sequence.take(token, logprob)
        return logprobs


class RunningBatch:
    """Rows and their slots.

    Args:
        cache: whose slots the rows hold.
        max_running: rows at most.
        device: of the rows' fields.
        parallel: the lanes that hold the same rows and draw the same tokens.
    """

    def __init__(
        self,
        cache: KVCache | PagedCache | OwnSlots,
        *,
        max_running: int,
        device: torch.device,
        parallel: TensorParallel = WHOLE,
    ) -> None:
        self.sequences: list[RunningSequence] = []
        self._parallel = parallel
        self._cache, self._device = cache, device
        self._teams_stand = True
        shape = (4, max(padded_rows(max_running), padded_to_pages(max_running)))
        self._state = torch.zeros(shape, dtype=torch.int64, device=device)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def lengths(self) -> list[int]:
        """Columns that each sequence needs in the next decode step."""
        return [sequence.length for sequence in self.sequences]

    @property
    def ends_by_length(self) -> bool:
        """Whether a sequence is as long as it may be, once what is in flight has come."""
        return any(sequence.at_limit for sequence in self.sequences)

    def add(self, sequences: Sequence[RunningSequence]) -> None:
        """Appends rows; their slots hold all of their tokens already."""
        first, end = len(self), len(self) + len(sequences)
        fields = [[0, s.length - 1, len(s.tokens), s.request.seed] for s in sequences]
        self._state[:, first:end] = on_device(fields, self._device).T
        self.sequences += sequences
        self._teams_stand = False

    def remove(self, rows: Sequence[int]) -> list[RunningSequence]:
        """Takes rows out; later ones move into the gaps, so that the batch stays dense."""
        if not rows:
            return []
        leaving = [self.sequences[row] for row in rows]
        order = closed(self.lengths, rows, self._cache.span or len(self))
        moved = [(source, target) for target, source in enumerate(order) if source != target]
        if moved:
            sources, targets = zip(*moved, strict=True)
            columns = max(self.sequences[row].length for row in sources)
            self._cache.move(sources, targets, min(columns, self._cache.columns))
            index = on_device([targets, sources], self._device)
            self._state[:, index[0]] = self._state[:, index[1]]
        self.sequences = [self.sequences[row] for row in order]
        self._teams_stand = False
        self._cache.keep(len(self))
        return leaving

    def decode_inputs(self) -> tuple[Tensor, Tensor, Any]:
        """token_N, position_N and the cache's view for one decode step.

        The next token of every sequence must fit the cache's capacity.
        """
        lengths = self.lengths
        self._cache.ensure(lengths, keep=len(self))
        self._team_up()
        token_N, position_N = self._state[: _POSITION + 1, : padded_rows(len(self))]
        position_B = position_N.narrow(0, 0, len(self))
        view = self._cache.view(position_B, self._cache.spans(lengths))
        return token_N, position_N, view

    def pad(self) -> Size:
        """Have the inputs of one decode step for a recorded size, and return that size.

        What is computed beside the running rows is the first row once more, into slots that nobody
        has.
        """
        assert isinstance(self._cache, KVCache | PagedCache)
        running, lengths = len(self), self.lengths
        self._cache.ensure(lengths, keep=running)
        teams = self._team_up()
        rows, passed = self._cache.padded_rows(running), 0
        if self._cache.has_windows:
            passed = min(lengths) // COLUMN_STEP * COLUMN_STEP
        if rows > running:
            self._state[: _POSITION + 1, running:rows] = self._state[: _POSITION + 1, :1]
            if isinstance(self._cache, PagedCache):  # where nobody's row reads what it has
                self._state[_POSITION, running:rows] = 0
        columns = self._cache.padded_columns(max(lengths))
        return Size(rows, min(columns, self._cache.columns), passed, teams)

    def _team_up(self) -> int:
        """Have the cache know which rows began alike; how many teams a step has room for."""
        if not isinstance(self._cache, PagedCache):
            return 0
        if not self._teams_stand:
            self._cache.share([sequence.prefix for sequence in self.sequences])
            self._teams_stand = True
        return self._cache.teams

    def padded_inputs(self, size: Size) -> tuple[Tensor, Tensor, Any]:
        """What `decode_inputs` gives, for a size that `pad` has made, at fixed addresses."""
        token_N, position_N = self._state[: _POSITION + 1, : size.rows]
        span = RowSpan(size.rows, size.passed, size.columns)
        return token_N, position_N, self._cache.view(position_N, [span])

    def draw(self, logits_BV: Tensor, first: int = 0) -> Drawn:
        """Samples the next token of the rows from `first` on; it is what they feed next."""
        token_B, position_B, drawn_B, seed_B = self._state[:, first : len(self)]
        params = self.sequences[0].request.params
        drawn = draw(logits_BV, seed_B, drawn_B, params)
        new_token_B, logprob_B = self._parallel.agree(*drawn)
        token_B.copy_(new_token_B)
        position_B.add_(1)
        drawn_B.add_(1)
        sequences = self.sequences[first:]
        for sequence in sequences:
            sequence.in_flight += 1
        if not new_token_B.is_cuda:
            return Drawn(sequences, new_token_B, logprob_B)
        on_host = [
            torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
            for x in (new_token_B, logprob_B)
        ]
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(self._device))
        return Drawn(sequences, on_host[0], on_host[1], arrived)


def closed(lengths: Sequence[int], gone: Sequence[int], span: int) -> list[int]:
    """Which row comes to stand at each place when some are gone, none later than it stood.

    New rows come last, so the spans stay in the order of age, and by it of length, when a gap is
    filled by the longest row of the next span: one move a span. In the last span the last row moves
    into the gap.
    """
    order = list(range(len(lengths)))
    for gap in sorted(gone, reverse=True):
        while (after := gap // span * span + span) < len(order):
            next_span = range(after, min(after + span, len(order)))
            source = max(next_span, key=lambda place: lengths[order[place]])
            order[gap], gap = order[source], source
        order[gap] = order[-1]
        order.pop()
    return order
