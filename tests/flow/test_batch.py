"""`Batch` and `Ragged` against a list of rows, handled one by one."""

from __future__ import annotations

import array
import itertools
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.errors import UserError
from m2flow.flow import Batch, Ragged

KINDS = ("list", "torch", "numpy", "matrix", "ragged", "ragged numpy", "range", "tuple")
Row = dict[str, Any]


def column(kind: str, values: list[int]) -> Any:
    """A column of this kind whose row k is made of `values[k]`."""
    match kind:
        case "list":
            return [f"row {value}" for value in values]
        case "torch":
            return torch.tensor(values)
        case "numpy":
            return np.array(values)
        case "matrix":
            return torch.tensor(values, dtype=torch.float32)[:, None] * torch.tensor([1.0, 0.5])
        case "ragged":
            return Ragged.from_rows([torch.arange(v % 4) + v for v in values])
        case "ragged numpy":
            return Ragged.from_rows([np.arange(v % 3) * v for v in values])
        case "range":
            return range(len(values))
        case _:
            return tuple(values)


def plain(value: Any) -> Any:
    """A row's value as something that can be compared."""
    return value.tolist() if hasattr(value, "tolist") else value


def rows_of(batch: Batch) -> list[Row]:
    """What a batch holds, item by item."""
    rows = []
    for k, item in enumerate(batch.ids):
        row = {name: plain(value) for name, value in batch.row(k).items()}
        rows.append({"id": item, **row})
    return rows


def kinds_of(batch: Batch) -> dict[str, type]:
    return {name: type(col) for name, col in batch.columns.items()}


@st.composite
def batches(draw: Any, min_size: int = 1) -> Batch:
    values = draw(st.lists(st.integers(0, 30), min_size=min_size, max_size=6))
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4, unique=True))
    ids = draw(st.permutations(range(2 * len(values))))[: len(values)]
    return Batch({kind: column(kind, values) for kind in kinds}, ids)


fast = settings(deadline=None, max_examples=150)


@given(batches(), st.data())
@fast
def test_select(batch: Batch, data: Any) -> None:
    rows = data.draw(st.lists(st.integers(0, len(batch) - 1), max_size=8))
    picked = batch.select(rows)
    assert rows_of(picked) == [rows_of(batch)[row] for row in rows]
    assert len(picked) == len(rows)


@given(batches(), st.data())
@fast
def test_take(batch: Batch, data: Any) -> None:
    ids = data.draw(st.lists(st.sampled_from(batch.ids), unique=True))
    by_id = {row["id"]: row for row in rows_of(batch)}
    assert rows_of(batch.take(ids)) == [by_id[item] for item in ids]


@given(batches(), st.integers(1, 4))
@fast
def test_repeat(batch: Batch, n: int) -> None:
    wanted = [{**row, "id": row["id"] * n + k} for row in rows_of(batch) for k in range(n)]
    assert rows_of(batch.repeat(n)) == wanted


@given(batches(), st.data())
@fast
def test_concat_of_pieces_gives_the_whole_back(batch: Batch, data: Any) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(batch)), max_size=3).map(sorted))
    bounds = [0, *cuts, len(batch)]
    pieces = [batch.select(range(start, end)) for start, end in itertools.pairwise(bounds)]
    whole = Batch.concat(pieces)
    assert rows_of(whole) == rows_of(batch)
    for name, kind in kinds_of(whole).items():
        assert kind is kinds_of(batch)[name] or kind is list


@given(batches())
@fast
def test_with_without_and_only(batch: Batch) -> None:
    names = list(batch.columns)
    more = batch.with_columns(new=list(range(len(batch))), **{names[0]: [None] * len(batch)})
    assert list(more.columns) == [*names, "new"]
    assert more.columns[names[-1]] is batch.columns[names[-1]] or len(names) == 1
    assert more[names[0]] == [None] * len(batch)
    assert list(more.without("new", "not there").columns) == names
    assert list(more.only("new").columns) == ["new"]
    assert more.ids == batch.ids
    assert "new" in more
    assert "new" not in batch  # a Batch is immutable


@given(batches())
@fast
def test_nbytes(batch: Batch) -> None:
    assert batch.nbytes > 0 or any("ragged" in name for name in batch.columns)
    assert batch.nbytes == sum(batch.only(name).nbytes for name in batch.columns)


def test_nbytes_of_tensors_is_exact() -> None:
    batch = Batch({"t": torch.zeros(3, 2), "r": Ragged(np.zeros(5, dtype=np.int16), [1, 0, 4])})
    assert batch.nbytes == 24 + 10
    assert Batch({"rows": [torch.zeros(4), torch.zeros(2)]}).nbytes == 24


def test_nothing_is_copied_that_need_not_be() -> None:
    batch = Batch({"x": torch.arange(3)})
    assert batch.select([0, 1, 2]) is batch
    assert Batch.concat([batch]) is batch
    assert batch.with_columns(y=[1, 2, 3])["x"] is batch["x"]


def test_empty_batches() -> None:
    empty = Batch({"x": torch.zeros(0), "r": Ragged(torch.zeros(0), []), "l": []})
    assert len(empty) == len(empty.repeat(3)) == len(empty.select([])) == 0
    assert len(Batch({})) == 0
    full = Batch({"x": torch.ones(2), "r": Ragged(torch.ones(3), [1, 2]), "l": [1, 2]})
    assert len(full.select([])) == 0
    assert rows_of(Batch.concat([full.select([]), full, full.select([])])) == rows_of(full)


def test_a_column_of_the_wrong_length_is_named() -> None:
    with pytest.raises(
        UserError, match=r"^reward: column has the wrong length \(got 2\); expected 3"
    ):
        Batch({"x": [1, 2, 3], "reward": torch.zeros(2)})
    batch = Batch({"x": [1, 2, 3]}, ids=[4, 5, 6])
    for wrong in ([1], Ragged(torch.zeros(4), [4]), np.zeros(4)):
        with pytest.raises(UserError, match=r"^reward: "):
            batch.with_columns(reward=wrong)


NO_COLUMNS = [
    1.0, None, "abc", b"abc", {"a": 1, "b": 2, "c": 3}, {1, 2, 3}, deque([1, 2, 3]),
    {1: 1, 2: 2, 3: 3}.keys(), bytearray(b"abc"), array.array("i", [1, 2, 3]), iter([1, 2, 3]),
]  # fmt: skip
"""The later ones have a length, and cannot be cut by positions."""


@pytest.mark.parametrize("wrong", NO_COLUMNS, ids=lambda wrong: type(wrong).__name__)
def test_what_is_no_column_is_named(wrong: object) -> None:
    batch = Batch({"x": [1, 2, 3]})
    with pytest.raises(UserError, match=r"^reward: is not a column"):
        batch.with_columns(reward=wrong)
    with pytest.raises(UserError, match=r"^reward: is not a column"):
        Batch({"reward": wrong})
    with pytest.raises(UserError, match=r"^reward: is not a column"):
        batch.with_columns(reward=torch.tensor(1.0))


def test_a_column_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"rewards: no such column; did you mean 'reward'"):
        Batch({"reward": [1], "text": ["a"]})["rewards"]
    with pytest.raises(UserError, match=r"^z: no such column"):
        Batch({"reward": [1]}).only("z")


def test_items_are_read_by_row_and_columns_by_name() -> None:
    """Going through a Batch by position was a TypeError of the search for like names."""
    batch = Batch({"x": [1, 2]})
    for use in (lambda: batch[0], lambda: list(batch), lambda: batch[1:]):  # type: ignore[call-overload]
        with pytest.raises(UserError, match=r"^Batch: columns have names .*batch\.row\(i\)"):
            use()
    for rows in ([{"x": 1, "y": 2}, {"x": 3, "y": 4}], [1, 2], torch.ones(2), None):
        with pytest.raises(UserError, match=r"^Batch: takes columns by name .*\{name: column"):
            Batch(rows)  # type: ignore[arg-type]


def test_truth_values_are_no_positions() -> None:
    """They were taken for rows 0 and 1, without a word."""
    batch = Batch({"l": [1, 2, 3], "t": torch.arange(3), "r": Ragged(torch.arange(3), [1, 1, 1])})
    mask = [True, False, True]
    for rows in (mask, tuple(mask), np.array(mask), torch.tensor(mask), [np.True_, np.False_]):
        with pytest.raises(UserError, match=r"^rows: are positions, and not truth values; .*range"):
            batch.select(rows)  # type: ignore[arg-type]
    for rows in ([2, 0], np.array([2, 0]), torch.tensor([2, 0]), range(2, -1, -2)):
        picked = batch.select(rows)  # type: ignore[arg-type]
        assert (picked.ids, picked["l"]) == ((2, 0), [3, 1])
        assert picked["t"].tolist() == [2, 0]
        assert picked["r"].values.tolist() == [2, 0]


def test_ids_of_a_tensor_are_numbers() -> None:
    """Tensors are equal to no number in a set: a stage had `returned items it was not given`."""
    for ids in (torch.tensor([3, 4]), np.array([3, 4])):
        batch = Batch({"x": [1, 2]}, ids)
        assert {type(item) for item in batch.ids} == {int}
        assert batch.take([4])["x"] == [2]


class Marked(torch.Tensor):
    """A tensor of a class that belongs to neither library."""


def test_a_tensor_of_a_class_of_ones_own_joins() -> None:
    marked = torch.ones(2).as_subclass(Marked)  # type: ignore[arg-type]
    joined = Batch.concat([Batch({"x": marked}), Batch({"x": torch.zeros(1)})])
    assert joined["x"].tolist() == [1, 1, 0]


def test_batches_with_different_columns_do_not_join() -> None:
    one, two = Batch({"x": [1], "y": [1]}), Batch({"x": [1], "z": [1]})
    with pytest.raises(UserError, match=r"different columns \(got \['y', 'z'\]\)"):
        Batch.concat([one, two])


def test_columns_whose_shape_or_kind_follows_the_call_are_named() -> None:
    """One is padded to the longest of its batch; another is a list where nothing was found."""
    wide, narrow = Batch({"text": torch.zeros(2, 7)}), Batch({"text": torch.zeros(1, 5)})
    with pytest.raises(
        UserError, match=r"^text: .*different shapes \(got \[\(5,\), \(7,\)\]\).*Ragged"
    ):
        Batch.concat([wide, narrow])
    ragged = [Batch({"rows": Ragged(torch.zeros(2, n), [2])}) for n in (3, 4)]
    with pytest.raises(UserError, match=r"^rows: .*different shapes"):
        Batch.concat(ragged)
    columns = [[1.0], torch.ones(1), np.ones(1), Ragged(torch.ones(1), [1])]
    for one, other in itertools.permutations(columns, 2):
        with pytest.raises(UserError, match=r"^score: .*different kinds \(got \['.*', '.*'\]\)"):
            Batch.concat([Batch({"score": one}), Batch({"score": other})])
    joined = Batch.concat([Batch({"x": (1,)}), Batch({"x": range(1)}), Batch({"x": [2]})])
    assert joined["x"] == [1, 0, 2]
    joined = Batch.concat([Batch({"x": torch.ones(1)}), Batch({"x": torch.ones(1, dtype=int)})])
    assert joined["x"].dtype == torch.float32
    nothing = Batch({"x": Ragged(torch.zeros(0), [0])})
    assert len(Batch.concat([nothing, Batch({"x": Ragged(torch.zeros(1, 3), [1])})])) == 2


# --- Ragged -----------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=6), st.data())
@fast
def test_ragged_against_lists(rows: list[list[int]], data: Any) -> None:
    for make in (torch.tensor, np.array):
        ragged = Ragged.from_rows([make(row or [0])[: len(row)] for row in rows])
        assert [row.tolist() for row in ragged] == rows
        assert [row.tolist() for row in ragged.rows()] == rows
        assert len(ragged) == len(rows)
        assert ragged.lengths == tuple(len(row) for row in rows)
        assert ragged[len(rows) - 1].tolist() == rows[-1]
        picks = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6))
        assert [row.tolist() for row in ragged.select(picks)] == [rows[k] for k in picks]


def test_ragged_lengths_must_add_up() -> None:
    with pytest.raises(UserError, match=r"lengths must add up .*\(got \(3, 4\)\)"):
        Ragged(torch.zeros(4), [1, 2])


def test_a_ragged_column_is_made_of_tensors() -> None:
    for make in (lambda: Ragged([1, 2, 3], [1, 2]), lambda: Ragged.from_rows([[1], [2, 3]])):
        with pytest.raises(UserError, match=r"^Ragged: .*\(got 'list'\); expected .*tensor"):
            make()
    with pytest.raises(UserError, match=r"^Ragged: .*at least one row.*Ragged\(values\[:0\]"):
        Ragged.from_rows([])
    for lengths in (torch.tensor([1, 2]), np.array([1, 2])):
        ragged = Ragged(torch.arange(3), lengths)
        assert ragged.lengths == (1, 2)
        assert {type(length) for length in ragged.lengths} == {int}


def test_ragged_rows_of_matrices() -> None:
    ragged = Ragged.from_rows([torch.ones(2, 3), torch.zeros(1, 3)])
    assert [tuple(row.shape) for row in ragged.select([1, 0, 1])] == [(1, 3), (2, 3), (1, 3)]
    assert ragged.nbytes == 36
    assert repr(ragged) == "Ragged(rows=2, values=3)"
    assert repr(Batch({"r": ragged})) == "Batch(2 items: r)"


def test_a_batch_of_nothing_adds_nothing() -> None:
    """A streaming stage yields one to hear if anything has come."""
    some, nothing = Batch({"x": [1, 2]}, [4, 7]), Batch({}, [])
    assert Batch.concat([nothing, some, nothing, nothing]) is some
    assert Batch.concat([some, nothing, some.select([0])]).ids == (4, 7, 4)
    assert len(Batch.concat([nothing, nothing])) == 0


@pytest.mark.parametrize("make", [torch.tensor, np.array])
def test_rows_of_nothing_do_not_change_the_dtype(make: Any) -> None:
    """Token ids were floats wherever an empty row shared the call."""
    whole = make([5, 6]).dtype
    assert Ragged.from_rows([make([]), make([5, 6])]).values.dtype == whole
    pieces = [Batch({"x": Ragged(make([]), [0])}), Batch({"x": Ragged(make([5, 6]), [2])})]
    assert Batch.concat(pieces)["x"].values.dtype == whole
    rows = Ragged.from_rows([make([]), make([[1, 2, 3]])])
    assert [row.tolist() for row in rows] == [[], [[1, 2, 3]]]


def test_positions_count_from_the_end_in_every_column() -> None:
    """A Ragged column gave the last item's row beside what belongs to the one before it."""
    batch = Batch({"l": [1, 2, 3], "t": torch.arange(3), "r": Ragged(torch.arange(6), [2, 2, 2])})
    for rows in ([-2], [-1], [-1, 0], [-3, -2]):
        assert rows_of(batch.select(rows)) == rows_of(batch.select([row % 3 for row in rows]))
    assert batch.take(torch.tensor([2, 0])).ids == (2, 0)
    with pytest.raises(UserError, match=r"^ids: no such item \(got 7\)"):
        batch.take([7])
