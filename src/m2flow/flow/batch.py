"""`Batch`: columns of values for many items; what a stage receives and what it returns.

A column is one of three things, each with one entry per item:
  * a tensor (torch or NumPy) whose first dimension counts the items;
  * a `Ragged`: rows of different lengths over one flat tensor (token ids, log-probabilities);
  * a list of Python values.

Rows are named by `ids`, the items' indices within the step, so that a piece of a step can be cut
out, sent anywhere and put back. A Batch is immutable: every method returns a new one and shares
the columns that it did not change. Standard library only: tensors are handled by duck typing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, TypeAlias

from m2flow.errors import UserError, suggestion

Tensor: TypeAlias = Any
"""A torch.Tensor or a numpy.ndarray; this floor imports neither."""


class Ragged:
    """Rows of different lengths, stored as one flat tensor.

    Args:
        values: tensor of shape [sum(lengths), ...].
        lengths: the number of entries of each row.

    Raises:
        UserError: the values are no tensor, or are not as many as the lengths say.
    """

    __slots__ = ("lengths", "values")

    def __init__(self, values: Tensor, lengths: Sequence[int]) -> None:
        _check_tensor(values)
        self.values = values
        self.lengths = tuple(_listed(lengths))
        if len(values) != sum(self.lengths):
            raise UserError(
                "a ragged column's lengths must add up to its number of values",
                value=(sum(self.lengths), len(values)),
            )

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor]) -> Ragged:
        """Join rows (tensors that agree in all but the first dimension); at least one row.

        Raises:
            UserError: there is none, or the first is no tensor.
        """
        if not len(rows):
            raise UserError(
                "needs at least one row to know what they are",
                key="Ragged",
                hint="Ragged(values[:0], []) has none",
            )
        _check_tensor(rows[0])
        return cls(_concatenate(list(rows)), [len(row) for row in rows])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Tensor:
        start = sum(self.lengths[:row]) if row >= 0 else sum(self.lengths[: len(self) + row])
        return self.values[start : start + self.lengths[row]]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.rows())

    def rows(self) -> list[Tensor]:
        """Views of the rows, in order."""
        views, offset = [], 0
        for length in self.lengths:
            views.append(self.values[offset : offset + length])
            offset += length
        return views

    def select(self, rows: Sequence[int]) -> Ragged:
        """The rows at these positions, in this order; neighbours are copied together."""
        if not rows:
            return Ragged(self.values[:0], ())
        if min(rows) < 0:  # from the end, as all other columns take them
            rows = [range(len(self.lengths))[row] for row in rows]
        offsets = [0, *accumulate(self.lengths)]
        pieces = []
        first = last = rows[0]
        for row in rows[1:]:
            if row != last + 1:
                pieces.append(self.values[offsets[first] : offsets[last + 1]])
                first = row
            last = row
        pieces.append(self.values[offsets[first] : offsets[last + 1]])
        values = pieces[0] if len(pieces) == 1 else _concatenate(pieces)
        return Ragged(values, [self.lengths[row] for row in rows])

    @property
    def nbytes(self) -> int:
        return _nbytes(self.values)

    def __repr__(self) -> str:
        return f"Ragged(rows={len(self.lengths)}, values={len(self.values)})"


Column: TypeAlias = Any
"""A tensor, a Ragged, or a list of Python values."""


class Batch:
    """Columns for `len(ids)` items.

    Args:
        columns: name to column; every column has one entry per item.
        ids: the items' indices within the step; 0, 1, 2, ... when left out.

    Raises:
        UserError: a column is none, or has more or fewer entries than there are items.
    """

    __slots__ = ("columns", "ids")

    def __init__(self, columns: Mapping[str, Column], ids: Iterable[int] | None = None) -> None:
        if not isinstance(columns, Mapping):
            raise UserError(
                "takes columns by name",
                key="Batch",
                value=type(columns).__name__,
                expected="{name: column, ...}, each with one entry per item",
            )
        self.columns: dict[str, Column] = dict(columns)
        lengths = {name: _length(name, column) for name, column in self.columns.items()}
        if ids is None:
            ids = range(next(iter(lengths.values()), 0))
        self.ids: tuple[int, ...] = tuple(_listed(ids))
        for name, length in lengths.items():
            if length != len(self.ids):
                raise UserError(
                    "column has the wrong length",
                    key=name,
                    value=length,
                    expected=f"{len(self.ids)}, one entry per item",
                )

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Column:
        try:
            return self.columns[name]
        except (KeyError, TypeError):  # a slice has no hash
            if not isinstance(name, str):
                raise UserError(
                    "columns have names",
                    key="Batch",
                    value=type(name).__name__,
                    hint="batch.row(i) is an item, and batch.select(rows) are some",
                ) from None
            raise UserError(
                "no such column", key=name, hint=suggestion(name, self.columns)
            ) from None

    def __repr__(self) -> str:
        return f"Batch({len(self)} items: {', '.join(self.columns)})"

    def with_columns(self, **columns: Column) -> Batch:
        """A batch of these items with columns added or replaced."""
        return self._with({**self.columns, **Batch(columns, self.ids).columns})

    def without(self, *names: str) -> Batch:
        """A batch of these items less the named columns; a name that is not there is no error."""
        return self._with({k: v for k, v in self.columns.items() if k not in names})

    def only(self, *names: str) -> Batch:
        """A batch of these items with the named columns alone."""
        return self._with({name: self[name] for name in names})

    def _with(self, columns: dict[str, Column]) -> Batch:
        """A batch of these items with columns whose lengths are known to be right."""
        made = Batch.__new__(Batch)
        made.columns, made.ids = columns, self.ids
        return made

    def select(self, rows: Sequence[int]) -> Batch:
        """The items at these row positions, in this order.

        Raises:
            UserError: they are truth values.
        """
        rows = _listed(rows)
        if rows and type(rows[0]).__name__ in ("bool", "bool_"):
            raise UserError(
                "are positions, and not truth values",
                key="rows",
                hint="select([i for i in range(len(mask)) if mask[i]])",
            )
        if len(rows) == len(self) and rows == list(range(len(self))):
            return self
        picked = {name: _select(column, rows) for name, column in self.columns.items()}
        return Batch(picked, [self.ids[row] for row in rows])

    def take(self, ids: Iterable[int]) -> Batch:
        """The items with these ids, in this order.

        Raises:
            UserError: there is no such item.
        """
        where = {item: row for row, item in enumerate(self.ids)}
        try:
            return self.select([where[item] for item in _listed(ids)])
        except KeyError as error:
            raise UserError("no such item", key="ids", value=error.args[0]) from None

    def repeat(self, n: int) -> Batch:
        """Every item n times, side by side; item i becomes items i*n ... i*n + n-1."""
        rows = [row for row in range(len(self)) for _ in range(n)]
        picked = {name: _select(column, rows) for name, column in self.columns.items()}
        return Batch(picked, [item * n + k for item in self.ids for k in range(n)])

    def row(self, index: int) -> dict[str, Any]:
        """One item as a dictionary of its values."""
        return {name: column[index] for name, column in self.columns.items()}

    @property
    def nbytes(self) -> int:
        """Bytes held by the columns; for Python values an estimate from a few of them."""
        return sum(_nbytes(column) for column in self.columns.values())

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """The items of several batches with the same columns, one batch after the other.

        One with neither items nor columns adds nothing.

        Raises:
            UserError: they have different columns, or a column is not of one kind or row shape.
        """
        batches = [batch for batch in batches if batch.columns or batch.ids] or batches[:1]
        if len(batches) == 1:
            return batches[0]
        names = batches[0].columns.keys()
        for batch in batches[1:]:
            if batch.columns.keys() != names:
                raise UserError(
                    "batches to be joined have different columns",
                    value=sorted(batch.columns.keys() ^ names),
                )
        joined = {name: _join(name, [batch.columns[name] for batch in batches]) for name in names}
        return Batch(joined, [item for batch in batches for item in batch.ids])


def _length(name: str, column: Column) -> int:
    """Entries of a column; a number, a text or a tensor of no dimension is none."""
    try:
        if not _kind(column):
            raise TypeError
        shape = getattr(column, "shape", None)
        if shape:  # a tensor, whose `len` takes ten times as long
            return int(shape[0])
        return len(column)
    except TypeError:
        raise UserError(
            "is not a column",
            key=name,
            value=type(column).__name__,
            expected="a tensor, a Ragged or a list, with one entry per item",
        ) from None


def _check_tensor(values: object) -> None:
    if _kind(values) not in _LIBRARIES:
        raise UserError(
            "holds its rows in one tensor",
            key="Ragged",
            value=type(values).__name__,
            expected="a tensor of torch or NumPy",
        )


def _listed(numbers: Iterable[int]) -> list[int]:
    """Numbers of Python: those that a tensor of torch holds are equal to none in a set."""
    tolist = getattr(numbers, "tolist", None)
    return list(numbers) if tolist is None else list(tolist())


def _select(column: Column, rows: list[int]) -> Column:
    if isinstance(column, Ragged):
        return column.select(rows)
    if isinstance(column, list | tuple | range):
        return [column[row] for row in rows]
    return column[rows]


def _join(name: str, columns: list[Column]) -> Column:
    _check_kinds(name, columns)
    first = columns[0]
    if isinstance(first, Ragged):
        lengths = [length for column in columns for length in column.lengths]
        values = [column.values for column in columns]
        _check_kinds(name, values)
        _check_rows(name, values)
        return Ragged(_concatenate(values), lengths)
    if isinstance(first, list | tuple | range):
        return [value for column in columns for value in column]
    _check_rows(name, columns)
    return _concatenate(columns)


def _check_kinds(name: str, columns: list[Column]) -> None:
    """Refuse to join lists, Raggeds, and tensors of torch and NumPy with each other."""
    types: set[Any] = {type(column) for column in columns}
    kinds = {_kind_of_type(one) for one in types} if len(types) > 1 else ()
    if len(kinds) > 1:
        raise UserError(
            "batches to be joined have columns of different kinds",
            key=name,
            value=sorted(kinds),
            hint="make it the same kind in every batch",
        )


_LIBRARIES = ("torch", "numpy")


def _kind(column: object) -> str:
    """`list`, `Ragged`, or the library of a tensor; "" for what is no column."""
    column_type: Any = type(column)
    return _kind_of_type(column_type)


@cache
def _kind_of_type(column_type: type) -> str:
    if issubclass(column_type, list | tuple | range):
        return "list"
    if issubclass(column_type, Ragged):
        return "Ragged"
    libraries = (base.__module__.partition(".")[0] for base in column_type.__mro__)
    return next((library for library in libraries if library in _LIBRARIES), "")


def _check_rows(name: str, parts: list[Tensor]) -> None:
    """Refuse tensors whose rows differ in shape; one of shape [0] has none."""
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) > 1:
        shapes = {tuple(part.shape[1:]) for part in parts if tuple(part.shape) != (0,)}
    if len(shapes) > 1:
        raise UserError(
            "batches to be joined have rows of different shapes",
            key=name,
            value=sorted(shapes),
            hint="use a Ragged, or pad to a fixed width: which items share a call is the plan's",
        )


def _concatenate(parts: list[Tensor]) -> Tensor:
    """`torch.concatenate` or `numpy.concatenate`, whichever made the parts.

    One of shape [0] adds nothing, nor does its dtype: that of an empty list is a float's.
    """
    some = [part for part in parts if tuple(part.shape) != (0,)] or parts[:1]
    return importlib.import_module(_kind(some[0])).concatenate(some)


def _nbytes(column: Column) -> int:
    size = getattr(column, "nbytes", None)
    if isinstance(size, int):
        return size
    some = column[:: max(1, len(column) // 8)]
    return sum(map(_nbytes_of_value, some)) * len(column) // max(1, len(some))


def _nbytes_of_value(value: Any) -> int:
    size = getattr(value, "nbytes", None)
    return size if isinstance(size, int) else sys.getsizeof(value)
