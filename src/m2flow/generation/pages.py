"""Keys and values of the running sequences in pages: each sequence has as many as it needs.

Slots (`kv_cache`) are all as long as the longest sequence, which is what products of matrices want;
where answers have a long tail, most of that memory is empty. Here a sequence takes a page when it
has filled the one before, and gives all of them back when it goes; rows that move take their pages
along without a copy. Page 0 belongs to nobody: rows that are computed beside the running ones write
there. What reads the pages is a `PageReader`.

Legend: L layers, P pages, S tokens of a page, N = P S tokens in all, K key-value heads, W = 2 D the
key and the value of a head side by side, Z = K W; R rows of the table, M pages of a row at most,
B running rows, X = B K the heads of all rows, G query heads of a key-value head, U prompts, C
columns: tokens of a row; T teams, A what is known of one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from m2flow.generation.architecture import Architecture
from m2flow.generation.captured import Places, padded_to_pages
from m2flow.generation.kernels import Rotation, on_device
from m2flow.generation.kv_cache import RowSpan
from m2flow.generation.paged_attention import PAGE, PageReader, attend
from m2flow.generation.shared_prefix import TEAM, SharedPrefixes, Team, teams_of

NOBODY = 0
"""The page of rows that do not run."""

COPIED_BYTES = 1 << 26
"""Keys and values of prompts that are copied to pages at once: of as many layers as that holds, one
at least. They lie in memory twice meanwhile."""


class PagedCache:
    """The pages, in the place of a `KVCache`. Empty until `ensure`, and again after `free`.

    Args:
        architecture: the decoder's sizes.
        dtype, device: of keys and values.
        read: attends over pages.
        rows: that are computed at most.
        budget: bytes that the pages may take, which are taken at once; None for what is needed.

    Attributes:
        layout: number of the present layout: addresses are the same while it is.
        columns: tokens that a row can have.
        teams: a power of 2 that is not below the number of teams that read prompts together; 0 for
            none.
    """

    has_windows = False
    """Rows of one step may have windows: the reader leaves out what is not seen."""

    span: int | None = None
    """All rows attend together, and each reads its own pages."""

    def __init__(
        self,
        architecture: Architecture,
        *,
        dtype: torch.dtype,
        device: torch.device,
        read: PageReader,
        rows: int,
        budget: int | None = None,
    ) -> None:
        a = architecture
        self._architecture, self._dtype, self._device = a, dtype, device
        self._read, self._rows, self._page = read, rows, PAGE
        self._together = read is not attend  # torch's kernel would not heed teams
        page_bytes = 2 * a.layers * a.kv_heads * a.head_dim * dtype.itemsize * PAGE
        self._most_pages = None if budget is None else budget // page_bytes
        self._row_pages = -(-a.max_position // PAGE)
        self.columns, self.layout = self._row_pages * PAGE, 0
        self._table_RM, self._table_TA, self._shared_R = (
            torch.empty(shape, dtype=torch.int32, device=device)
            for shape in ((rows, self._row_pages), (rows, 1 + TEAM), (rows,))
        )
        self.free()

    @property
    def max_cells(self) -> int | None:
        """Tokens at most; None for no limit."""
        return None if self._most_pages is None else max(0, self._most_pages - 1) * self._page

    def free(self) -> None:
        """Give the memory back; all content is lost."""
        self._pages_of: list[list[int]] = []
        self._table_RM.fill_(NOBODY)
        self._table_TA.fill_(-1)
        self._shared_R.fill_(0)
        self.teams = 0
        self._take(0)

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether sequences of so many tokens are within the budget together."""
        return self._most_pages is None or sum(map(self._needed, lengths)) < self._most_pages

    def tensors(self) -> tuple[Tensor, ...]:
        """All that takes memory."""
        return self._kv_LPSKW, self._table_RM, self._table_TA, self._shared_R

    def places(self) -> Places:
        """Where all of it lies."""
        tensors = self.tensors()
        return (*self._kv_LPSKW.shape, *(tensor.data_ptr() for tensor in tensors))

    def tensors_of(self, kv_LUKPW: Tensor) -> tuple[Tensor, ...]:
        """All that a prefill left behind."""
        return (kv_LUKPW,)

    def ensure(self, lengths: Sequence[int], *, keep: int) -> None:
        """Make room for so many tokens in each of the first rows; keep the first `keep` rows."""
        self.keep(keep)
        self._pages_of += [[] for _ in range(len(lengths) - len(self._pages_of))]
        missing = [
            (row, place)
            for row, (length, own) in enumerate(zip(lengths, self._pages_of, strict=True))
            if length > len(own) * self._page
            for place in range(len(own), self._needed(length))
        ]
        if not missing:
            return
        if len(missing) > len(self._free):
            self._grow(len(missing) - len(self._free))
        pages = [self._free.pop() for _ in missing]
        for (row, _), page in zip(missing, pages, strict=True):
            self._pages_of[row].append(page)
        rows, places = zip(*missing, strict=True)
        row, place, page = on_device([rows, places, pages], self._device)
        self._table_RM[row, place] = page.int()

    def keep(self, rows: int) -> None:
        """Take the pages of rows from this one on."""
        had = len(self._pages_of)
        for own in self._pages_of[rows:]:
            self._free += own
        del self._pages_of[rows:]
        if had > rows:
            self._table_RM[rows:had] = NOBODY

    def move(self, sources: Sequence[int], targets: Sequence[int], columns: int) -> None:
        """Give rows the pages of other rows, which have none from then on; no row is both."""
        for source, target in zip(sources, targets, strict=True):
            self._free += self._pages_of[target]
            self._pages_of[target], self._pages_of[source] = self._pages_of[source], []
        source, target = on_device([sources, targets], self._device)
        self._table_RM[target] = self._table_RM[source]
        self._table_RM.index_fill_(0, source, NOBODY)  # an assignment would wait for the device

    def write_prompts(self, rows: Tensor, kv_LUKPW: Tensor, prompts: Tensor, columns: int) -> None:
        """Copy the first columns of prompt `prompts[i]` into row `rows[i]`; both int64.

        What a row has no page for goes to nobody's.
        """
        column_C = torch.arange(columns, device=self._device)
        page_UC = self._table_RM.index_select(0, rows)[:, column_C // self._page]
        token_N = (page_UC.long() * self._page + column_C % self._page).flatten()
        flat_LNZ = self._kv_LPSKW.flatten(1, 2).flatten(2)
        layer_bytes = len(token_N) * flat_LNZ.shape[2] * flat_LNZ.itemsize
        together = max(1, COPIED_BYTES // max(1, layer_bytes))
        pieces = kv_LUKPW[..., :columns, :].split(together)
        for layers_LNZ, some_LUKCW in zip(flat_LNZ.split(together), pieces, strict=True):
            some_LUCKW = some_LUKCW.index_select(1, prompts).transpose(2, 3)
            layers_LNZ.index_copy_(1, token_N, some_LUCKW.flatten(1, 2).flatten(2))

    def share(self, prefixes: Sequence[tuple[int, int]]) -> None:
        """Have rows that began alike read that together; see `teams_of`."""
        teams = teams_of(prefixes) if self._together else []
        if not teams and not self.teams:
            return
        self.teams = 1 << (len(teams) - 1).bit_length() if teams else 0
        table = [
            [team.tokens, *team.rows, *[-1] * (TEAM - len(team.rows))]
            for team in [*teams, *[Team((), 0)] * (self.teams - len(teams))]
        ]
        shared = [0] * self._rows
        for team in teams:
            for row in team.rows:
                shared[row] = team.tokens
        if table:
            self._table_TA[: len(table)] = on_device(table, self._device).int()
        self._shared_R.copy_(on_device(shared, self._device))

    def view(self, position_B: Tensor, spans: Sequence[RowSpan]) -> PagedView:
        """What one decode step needs: where each row's next token goes, and what rows attend to.

        Args:
            position_B: int64, tokens in each row so far: the column that this step fills.
            spans: that no row has more columns than the longest of after this step.
        """
        table_BM = self._table_RM.narrow(0, 0, len(position_B))
        place_B1 = (position_B // self._page).unsqueeze(1)
        page_B = table_BM.gather(1, place_B1).squeeze(1).long()
        token_B = page_B * self._page + position_B % self._page
        columns = max(span.longest for span in spans)
        shared = None
        if self.teams:
            tokens_B = self._shared_R.narrow(0, 0, len(position_B))
            shared = SharedPrefixes(self._table_TA.narrow(0, 0, self.teams), tokens_B)
        return PagedView(self._kv_LPSKW, self._read, table_BM, position_B, token_B, columns, shared)

    def spans(self, lengths: Sequence[int]) -> list[RowSpan]:
        """One, of all rows."""
        return [RowSpan.of(lengths)]

    def padded_columns(self, columns: int) -> int:
        """The smallest power of 2 that is not below: it costs nothing, as each row reads its own
        pages alone, and the fewer sizes there are the fewer steps are recorded."""
        return 1 << max(self._page - 1, columns - 1).bit_length()

    def padded_rows(self, rows: int) -> int:
        """As many as are computed in a step that is recorded."""
        return padded_to_pages(rows)

    def _needed(self, length: int) -> int:
        return -(-length // self._page)

    def _grow(self, more: int) -> None:
        """Have so many further pages at least, those that are in use where they were."""
        had = self._kv_LPSKW.shape[1]
        pages = max(had + more, 2 * had, 1 + more)
        if self._most_pages is not None:
            assert had + more + (had == 0) <= self._most_pages, f"{self._most_pages} pages in all"
            pages = self._most_pages
        old_LPSKW = self._kv_LPSKW
        self._take(pages)
        self._kv_LPSKW[:, :had] = old_LPSKW

    def _take(self, pages: int) -> None:
        """Take memory for so many pages; those that nobody has are free."""
        a = self._architecture
        shape = (a.layers, pages, self._page, a.kv_heads, 2 * a.head_dim)
        # Zeros: what is masked must not hold a NaN, which 0 * NaN would let through.
        self._kv_LPSKW = torch.zeros(shape, dtype=self._dtype, device=self._device)
        taken = {NOBODY, *(page for own in self._pages_of for page in own)}
        self._free = [page for page in reversed(range(pages)) if page not in taken]
        self.layout += 1


class PagedView:
    """The pages during one decode step.

    Args:
        kv_LPSKW: their content.
        read: attends over them.
        table_BM: pages of each row.
        position_B: of each row's new token, and `token_B` where in a layer it lies.
        columns: that no row has more of.
        shared: what rows have in common.
    """

    def __init__(
        self,
        kv_LPSKW: Tensor,
        read: PageReader,
        table_BM: Tensor,
        position_B: Tensor,
        token_B: Tensor,
        columns: int,
        shared: SharedPrefixes | None,
    ) -> None:
        self._kv_LPSKW, self._read, self._shared = kv_LPSKW, read, shared
        self._table_BM, self._token_B, self._columns = table_BM, token_B, columns
        self._length_B = (position_B + 1).int()

    def append(self, layer: int, qkv_YSD: Tensor, rotation: Rotation) -> None:
        """Rotate this step's queries and keys of a layer in place; write keys and values."""
        rotation.turn_and_keep(qkv_YSD, self._kv_LPSKW[layer].flatten(0, 1), self._token_B)

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
        rows = len(self._token_B)
        key_PSKD, value_PSKD = self._kv_LPSKW[layer].chunk(2, dim=-1)
        self._read(
            query_XGD.unflatten(0, (rows, -1)),
            key_PSKD,
            value_PSKD,
            self._table_BM,
            self._length_B,
            longest=self._columns,
            scale=scale,
            window=window,
            cap=cap,
            shared=self._shared if window is None else None,
            out_BKGD=out_XGD.unflatten(0, (rows, -1)),
        )
