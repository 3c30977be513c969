"""Keys and values of the running sequences: one slot per row of the batch, dense from row 0.

Token p of a sequence lies in column p of its slot. The tensor grows with the need, in rows and in
columns; what is beyond a sequence's length is finite and masked. With a budget its memory is taken
once and laid out anew where it lies, so that never more is held. Knows rows and columns, not
requests.

Legend: L layers, R slots, B running rows, K key-value heads, X = B K the heads of all rows, row by
row, C columns, W = 2 D the key and the value of a head side by side, U prompts, P prompt tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from m2flow.generation.architecture import Architecture
from m2flow.generation.attention import decode_attention

_ROUND_COLUMNS = 64


class KVCache:
    """The slots. Empty until `ensure`, and again after `free`.

    Args:
        architecture: the decoder's sizes.
        dtype, device: of keys and values.
        budget: bytes that they may take; None for what is needed.
        padded: how many slots there are to be for a number of rows.

    Attributes:
        layout: number of the present layout: where a slot lies is the same while it is.
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

    def tensors(self) -> tuple[Tensor, ...]:
        """All that takes memory."""
        return self._kv_LRKCW, self._first_index_X

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
        old_LRKCW, kept = self._kv_LRKCW, slice(min(self.columns, new_columns))
        memory = self._memory
        self._shape(rows, new_columns)
        new_LRKCW = self._kv_LRKCW
        # Where both lie in the same memory, no layer may be written before it was read.
        grows = new_LRKCW[0].numel() > old_LRKCW[0].numel()
        for layer in range(len(new_LRKCW))[:: -1 if grows else 1]:
            content = old_LRKCW[layer, :keep, :, kept]
            if self._memory is memory:
                content = content.clone()
            # Zeros: a masked column must not hold a NaN, which 0 * NaN would let through.
            new_LRKCW[layer].zero_()
            new_LRKCW[layer, :keep, :, kept] = content

    def write_prompts(self, rows: Tensor, kv_LUKPW: Tensor, prompts: Tensor, columns: int) -> None:
        """Copies the first columns of prompt `prompts[i]` into slot `rows[i]`; both int64."""
        source = kv_LUKPW[:, :, :, :columns].index_select(1, prompts)
        self._kv_LRKCW[:, :, :, :columns].index_copy_(1, rows, source)

    def move(self, sources: Sequence[int], targets: Sequence[int], columns: int) -> None:
        """Copies the first columns of slots over other slots; no slot is both."""
        used = self._kv_LRKCW[:, :, :, :columns]
        for source, target in zip(sources, targets, strict=True):
            used[:, target] = used[:, source]

    def keep(self, rows: int) -> None:
        """Slots from this one on are free; their content is written over."""

    def view(self, position_B: Tensor, columns: int, shortest: int = 0) -> CacheView:
        """What one decode step needs: where each row's next token goes, and what rows attend to.

        Args:
            position_B: int64, tokens in each slot so far: the column that this step fills.
            columns: that the longest row attends to in this step.
            shortest: columns that every row attends to in this step, where there is no window.
        """
        kv_heads, windows = self._architecture.kv_heads, set(self._architecture.windows)
        position_X = position_B.repeat_interleave(kv_heads)
        index_X = self._first_index_X.narrow(0, 0, position_X.shape[0]) + position_X
        column_C, position_X1 = self._column.narrow(0, 0, columns), position_X.unsqueeze(1)
        absent_XC = column_C > position_X1
        bands: dict[int | None, tuple[int, Tensor]] = {}
        for window in windows:
            first, hidden_XC = 0, absent_XC
            if window is not None and window < columns:
                # The columns that no row sees any more are not read.
                first = max(0, shortest - window)
                hidden_XC = (absent_XC | (column_C <= position_X1 - window))[:, first:]
            mask_XC = torch.where(hidden_XC, self._absent, self._present)
            bands[window] = first, mask_XC.unsqueeze(1)
        return CacheView(self._kv_LRKCW, index_X, bands)

    def _shape(self, rows: int, columns: int) -> None:
        """Lay the slots out, in the memory at hand where there is a budget and in new otherwise."""
        a = self._architecture
        shape = (a.layers, rows, a.kv_heads, columns, 2 * a.head_dim)
        size = math.prod(shape)
        if size > self._memory.numel() or self.max_cells is None:
            cells = rows * columns if self.max_cells is None else self.max_cells
            size_in_all = size // max(1, rows * columns) * cells
            self._memory = torch.empty(size_in_all, dtype=self._dtype, device=self._device)
        self._kv_LRKCW = self._memory[:size].view(shape)
        self.rows, self.columns = rows, columns
        self.layout += 1
        self._first_index_X = torch.arange(rows * a.kv_heads, device=self._device) * columns


class CacheView:
    """The cache during one decode step."""

    def __init__(
        self,
        kv_LRKCW: Tensor,
        index_X: Tensor,
        bands: Mapping[int | None, tuple[int, Tensor]],
    ) -> None:
        """Views a cache.

        Args:
            kv_LRKCW: its content.
            index_X: where in a layer each head's key and value of this step go.
            bands: for each window of a layer the first column that is read, and a mask
                [heads of all rows, 1, columns] of it and those after it: 0 where the row sees a
                token, and -inf elsewhere.
        """
        self._kv_LRKCW, self._index_X, self._bands = kv_LRKCW, index_X, bands
        self._flat_LYW = kv_LRKCW.flatten(1, 3)

    def append(self, layer: int, kv_XW: Tensor) -> None:
        """Writes this step's keys and values of a layer."""
        self._flat_LYW[layer].index_copy_(0, self._index_X, kv_XW)

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
        seen = self._window(layer, window)
        decode_attention(query_XGD, *seen, scale=scale, cap=cap, out_XGD=out_XGD)

    def _window(self, layer: int, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [heads of the rows, columns, D] that rows attend over, and the mask."""
        # One strided view where indexing would take half a dozen: at this rate they cost.
        kv_RKCW = self._kv_LRKCW
        head_dim = kv_RKCW.shape[-1] // 2
        layer_stride, _, head_stride, column_stride, _ = kv_RKCW.stride()
        first, mask_X1C = self._bands[window]
        shape = (mask_X1C.shape[0], mask_X1C.shape[2], head_dim)
        stride = (head_stride, column_stride, 1)
        offset = layer * layer_stride + first * column_stride
        return (
            kv_RKCW.as_strided(shape, stride, offset),
            kv_RKCW.as_strided(shape, stride, offset + head_dim),
            mask_X1C,
        )
