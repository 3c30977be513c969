"""Keys and values of the running sequences: one slot per row of the batch, dense from row 0.

Token p of a sequence lies in column p of its slot. The tensor grows with the need, in rows and in
columns; what is beyond a sequence's length is finite and masked. With a budget its memory is taken
once and laid out anew where it lies, so that never more is held. Knows rows and columns, not
requests.

Keys lie apart from values, T = 2: over keys alone, one after the other, a product on the CPU takes
a third of the time that it takes where a value lies between each two.

Legend: L layers, R slots, B running rows, K key-value heads, X = B K the heads of all rows, row by
row, S those of a span of rows, C columns, D channels of a head, W = 2 D the key and the value of a
head side by side, U prompts, P prompt tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from m2flow.generation.architecture import Architecture
from m2flow.generation.attention import decode_attention
from m2flow.generation.captured import Places, padded_columns, padded_count
from m2flow.generation.kernels import Rotation

_ROUND_COLUMNS = 64

CPU_SPAN = 16
"""Rows on the CPU that can attend by themselves, over the columns of the longest of them."""

WORTH = 1 << 14
"""Numbers of keys that must be left out, for rows to attend by themselves: the cost of a call."""

Band = tuple[int, Tensor]
"""The first column that rows read, and a mask [S, 1, C] of it and those after it: 0 where the row
sees a token, and -inf elsewhere."""


class RowSpan(NamedTuple):
    """Neighbouring rows that attend together.

    Attributes:
        rows: how many.
        shortest: columns that each of them attends to in this step, where there is no window.
        longest: columns that the longest attends to.
    """

    rows: int
    shortest: int
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> RowSpan:
        """Rows of so many columns."""
        return cls(len(lengths), min(lengths), max(lengths))

    def joined(self, other: RowSpan) -> RowSpan:
        """These rows and others after them."""
        shortest, longest = min(self.shortest, other.shortest), max(self.longest, other.longest)
        return RowSpan(self.rows + other.rows, shortest, longest)

    @property
    def cells(self) -> int:
        """Rows times columns that are read."""
        return self.rows * self.longest


class KVCache:
    """The slots. Empty until `ensure`, and again after `free`.

    Args:
        architecture: the decoder's sizes.
        dtype, device: of keys and values.
        budget: bytes that they may take; None for what is needed.
        padded: how many slots there are to be for a number of rows.

    Attributes:
        layout: number of the present layout: where a slot lies is the same while it is.
        span: so many rows can attend by themselves, over the columns of the longest of them, so
            that it pays to have rows of like length side by side; None: all attend together. On
            the CPU, where the launch of a kernel is cheap.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        dtype: torch.dtype,
        device: torch.device,
        budget: int | None = None,
        padded: Callable[[int], int] = int,
    ) -> None:
        self._architecture, self._dtype, self._device = architecture, dtype, device
        self._padded, self.layout = padded, 0
        self.span = CPU_SPAN if device.type == "cpu" else None
        a = architecture
        cell_bytes = 2 * a.layers * a.kv_heads * a.head_dim * dtype.itemsize
        self.max_cells = None if budget is None else budget // cell_bytes
        """Slots times columns at most: a cell has a token's keys and values in all layers."""
        self._column = torch.arange(architecture.max_position, device=device)
        self._present = torch.zeros((), dtype=dtype, device=device)
        self._absent = torch.full((), -torch.inf, dtype=dtype, device=device)
        self.free()

    def free(self) -> None:
        """Gives the memory back; all content is lost."""
        self._memory = torch.empty(0, dtype=self._dtype, device=self._device)
        self._shape(0, 0)

    @property
    def has_windows(self) -> bool:
        """Whether rows do not see all columns in some layer."""
        return any(window is not None for window in self._architecture.windows)

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether slots for sequences of so many tokens are within the budget."""
        if self.max_cells is None or not lengths:
            return True
        return self._padded(len(lengths)) * max(lengths) <= self.max_cells

    def places(self) -> Places:
        """Where all of it lies: in a new layout, elsewhere."""
        return (self.layout, *(tensor.data_ptr() for tensor in self.tensors()))

    def tensors(self) -> tuple[Tensor, ...]:
        """All that takes memory."""
        return self._kv_LTRKCD, self._first_index_XT

    def tensors_of(self, kv_LUKPW: Tensor) -> tuple[Tensor, ...]:
        """All that a prefill left behind."""
        return (kv_LUKPW,)

    def ensure(self, lengths: Sequence[int], *, keep: int) -> None:
        """Make room for so many tokens in each of the first slots; keep the first `keep` slots.

        Slots grow to what is needed, columns to twice what they were or to what the budget leaves.
        More columns for fewer slots give the other slots back.
        """
        rows, columns = len(lengths), max(lengths)
        if rows <= self.rows and columns <= self.columns:
            return
        assert self.fits(lengths), f"{rows} x {columns} of {self.max_cells} cells"
        rows = self._padded(rows)
        new_columns = self.columns
        if columns > self.columns:
            grown = -(-max(columns, 2 * self.columns) // _ROUND_COLUMNS) * _ROUND_COLUMNS
            new_columns = min(grown, self._architecture.max_position)
        if self.max_cells is not None:
            new_columns = max(columns, min(new_columns, self.max_cells // rows))
        old_LTRKCD, kept = self._kv_LTRKCD, slice(min(self.columns, new_columns))
        memory = self._memory
        self._shape(rows, new_columns)
        new_LTRKCD = self._kv_LTRKCD
        # Where both lie in the same memory, no layer may be written before it was read.
        grows = new_LTRKCD[0].numel() > old_LTRKCD[0].numel()
        for layer in range(len(new_LTRKCD))[:: -1 if grows else 1]:
            content = old_LTRKCD[layer, :, :keep, :, kept]
            if self._memory is memory:
                content = content.clone()
            # Zeros: a masked column must not hold a NaN, which 0 * NaN would let through.
            new_LTRKCD[layer].zero_()
            new_LTRKCD[layer, :, :keep, :, kept] = content

    def write_prompts(self, rows: Tensor, kv_LUKPW: Tensor, prompts: Tensor, columns: int) -> None:
        """Copies the first columns of prompt `prompts[i]` into slot `rows[i]`; both int64."""
        source = kv_LUKPW[:, :, :, :columns].index_select(1, prompts)
        for kind, half in enumerate(source.chunk(2, dim=-1)):
            self._kv_LTRKCD[:, kind, :, :, :columns].index_copy_(1, rows, half)

    def move(self, sources: Sequence[int], targets: Sequence[int], columns: int) -> None:
        """Copies the first columns of slots over other slots, one after the other."""
        used = self._kv_LTRKCD[:, :, :, :, :columns]
        for source, target in zip(sources, targets, strict=True):
            used[:, :, target] = used[:, :, source]

    def keep(self, rows: int) -> None:
        """Slots from this one on are free; their content is written over."""

    def view(self, position_B: Tensor, spans: Sequence[RowSpan]) -> CacheView:
        """What one decode step needs: where each row's next token goes, and what rows attend to.

        Args:
            position_B: int64, tokens in each slot so far: the column that this step fills.
            spans: of these rows, in their order.
        """
        kv_heads = self._architecture.kv_heads
        position_X = position_B.repeat_interleave(kv_heads)
        index_XT = self._first_index_XT.narrow(0, 0, len(position_X)) + position_X.unsqueeze(1)
        heads = position_X.split([span.rows * kv_heads for span in spans])
        bands = [self._bands(*one) for one in zip(spans, heads, strict=True)]
        return CacheView(self._kv_LTRKCD, index_XT.flatten(), bands)

    def padded_columns(self, columns: int) -> int:
        """As many as are read in a step that is recorded."""
        return padded_columns(columns)

    def padded_rows(self, rows: int) -> int:
        """As many as are computed in a step that is recorded."""
        return padded_count(rows)

    def spans(self, lengths: Sequence[int]) -> list[RowSpan]:
        """How rows of so many columns attend: as few spans as are worth their calls."""
        rows = self.span or len(lengths)
        worth = WORTH // (self._architecture.kv_heads * self._architecture.head_dim)
        found: list[RowSpan] = []
        for start in range(0, len(lengths), rows):
            further = RowSpan.of(lengths[start : start + rows])
            if found:
                both = found[-1].joined(further)
                if both.cells - found[-1].cells - further.cells < worth:
                    further = both
                    found.pop()
            found.append(further)
        return found

    def _bands(self, span: RowSpan, position_S: Tensor) -> dict[int | None, Band]:
        """What a span's rows see, for each window of a layer."""
        column_C = self._column.narrow(0, 0, span.longest)
        position_S1 = position_S.unsqueeze(1)
        absent_SC = column_C > position_S1
        bands: dict[int | None, Band] = {}
        for window in set(self._architecture.windows):
            first, hidden_SC = 0, absent_SC
            if window is not None and window < span.longest:
                # The columns that no row sees any more are not read.
                first = max(0, span.shortest - window)
                hidden_SC = (absent_SC | (column_C <= position_S1 - window))[:, first:]
            mask_SC = torch.where(hidden_SC, self._absent, self._present)
            bands[window] = first, mask_SC.unsqueeze(1)
        return bands

    def _shape(self, rows: int, columns: int) -> None:
        """Lay the slots out, in the memory at hand where there is a budget and in new otherwise."""
        a = self._architecture
        shape = (a.layers, 2, rows, a.kv_heads, columns, a.head_dim)
        size = math.prod(shape)
        if size > self._memory.numel() or self.max_cells is None:
            cells = rows * columns if self.max_cells is None else self.max_cells
            size_in_all = size // max(1, rows * columns) * cells
            self._memory = torch.empty(size_in_all, dtype=self._dtype, device=self._device)
        self._kv_LTRKCD = self._memory[:size].view(shape)
        self.rows, self.columns = rows, columns
        self.layout += 1
        heads = rows * a.kv_heads
        first_TX = torch.arange(2 * heads, device=self._device).view(2, heads) * columns
        self._first_index_XT = first_TX.T.contiguous()


class CacheView:
    """The cache during one decode step.

    Args:
        kv_LTRKCD: its content.
        index_Y: where in a layer this step's key and value of each head go, one after the other.
        bands: of each span of rows, for each window of a layer.
    """

    def __init__(
        self,
        kv_LTRKCD: Tensor,
        index_Y: Tensor,
        bands: Sequence[Mapping[int | None, Band]],
    ) -> None:
        self._kv_LTRKCD, self._index_Y, self._bands = kv_LTRKCD, index_Y, bands
        self._flat_LZD = kv_LTRKCD.flatten(1, 4)

    def append(self, layer: int, qkv_YSD: Tensor, rotation: Rotation) -> None:
        """Rotate this step's queries and keys of a layer in place; write keys and values."""
        rotation.turn(qkv_YSD)
        kv_XTD = qkv_YSD[: len(self._index_Y) // 2, -2:]
        self._flat_LZD[layer].index_copy_(0, self._index_Y, kv_XTD.flatten(0, 1))

    def attend(
        self,
        layer: int,
        query_XGD: Tensor,
        *,
        window: int | None,
        scale: float,
        cap: float | None,
        out_XGD: Tensor,
    ) -> None:
        """Write what each row's new token makes of the tokens that it sees."""
        for heads, key_SCD, value_SCD, mask_S1C in self._seen(layer, window):
            decode_attention(
                query_XGD[heads],
                key_SCD,
                value_SCD,
                mask_S1C,
                scale=scale,
                cap=cap,
                out_XGD=out_XGD[heads],
            )

    def _seen(
        self, layer: int, window: int | None
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Of each span its heads, the keys and values that they attend over, and the mask."""
        # One strided view where indexing would take half a dozen: at this rate they cost.
        kv_LTRKCD = self._kv_LTRKCD
        layer_stride, kind_stride, _, head_stride, column_stride, _ = kv_LTRKCD.stride()
        stride, end = (head_stride, column_stride, 1), 0
        for bands in self._bands:
            first, mask_S1C = bands[window]
            start, end = end, end + len(mask_S1C)
            shape = (len(mask_S1C), mask_S1C.shape[2], kv_LTRKCD.shape[-1])
            offset = layer * layer_stride + start * head_stride + first * column_stride
            key_SCD = kv_LTRKCD.as_strided(shape, stride, offset)
            value_SCD = kv_LTRKCD.as_strided(shape, stride, offset + kind_stride)
            yield slice(start, end), key_SCD, value_SCD, mask_S1C
