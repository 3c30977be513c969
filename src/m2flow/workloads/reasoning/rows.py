"""Rows of a data set as it lies on disk: JSON lines, CSV, Parquet, or a folder of such files.

A folder is what `hf download` leaves (files of either kind, in subfolders too) or what
`datasets.save_to_disk` writes (Arrow streams). Files are read in the order of their names. Of a
folder whose files or subfolders are named after splits, one is read: which, the caller says. Knows
nothing of what the columns mean.
"""

from __future__ import annotations

import csv
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from m2flow.errors import UserError, nearest, reading

_log = logging.getLogger(__name__)

KINDS = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
"""Endings of the files that are looked for in a folder; one that is named may have any ending, and
is read as JSON lines unless it says that it is CSV, Parquet or Arrow."""

BESIDE = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files that stand beside the rows in a data set's folder, and hold none."""

SPLITS = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
"""Words of names of files and folders that tell a split."""

TRAIN = "train"
TO_TRAIN_ON, TO_HOLD_OUT = (TRAIN,), ("test", "validation")
"""Splits of which the first that is there is read."""

BATCH_ROWS = 1024

COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")
"""How files of gzip, bzip2, xz, zstd and zip begin."""

LONGEST_CELL = 1 << 30
"""Characters of a cell of a CSV file, where Python's own limit is 131,072."""


class BadRowError(Exception):
    """Why one row cannot be used."""


class FileRow(NamedTuple):
    """One row.

    Attributes:
        file: where it stands.
        line: its number there, from 1.
        read: gives its columns, or raises `BadRowError`.
    """

    file: Path
    line: int
    read: Callable[[], dict[str, Any]]


def rows_of(path: Path, splits: Sequence[str] = TO_TRAIN_ON) -> Iterator[FileRow]:
    """All rows, in order; blank lines do not count.

    Args:
        path: a file, or a folder of files.
        splits: which is read of a folder that has several: the first of these that is there.

    Raises:
        UserError: there is no such file, it cannot be read, or a folder holds none, or several data
            sets, or splits and none of those.
    """
    with reading(path):
        files = _files(path, splits)
    for file in files:
        with reading(file):
            if file.suffix in (".parquet", ".arrow"):
                yield from _columnar(file)
            elif file.suffix == ".csv":
                yield from _commas(file)
            else:
                yield from _json_lines(file)


def _files(path: Path, splits: Sequence[str]) -> list[Path]:
    if not path.exists():
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        close = nearest(path.name, names)
        hint = f"did you mean {str(path.parent / close)!r}?" if close else None
        if not path.parent.is_dir():
            hint = f"there is no folder {str(path.parent)!r}"
        raise UserError("no such file", key=str(path), hint=hint)
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.suffix in KINDS and file.is_file())
    found = [file for file in found if not _is_beside(file.relative_to(path))]
    kinds = {file.suffix for file in found}
    if not found or len(kinds) > 1:
        raise UserError(
            f"holds files of {', '.join(sorted(kinds))}" if kinds else "holds no data",
            key=str(path),
            expected=f"files of one kind of {', '.join(KINDS)}",
            hint="name one of its files or subfolders",
        )
    return _of_a_split(path, found, splits)


def _is_beside(file: Path) -> bool:
    """Whether a file of a data set's folder holds none of its rows: it is about them, is hidden, or
    is what `datasets` has made of them and keeps there."""
    hidden = any(part.startswith(".") for part in file.parts)
    return hidden or file.name in BESIDE or file.match("cache-*.arrow")


def _of_a_split(path: Path, files: list[Path], wanted: Sequence[str]) -> list[Path]:
    """Of files in a folder those of one split, where their names tell splits apart.

    A file that names none is one to train on, where others than `train` are named and it is not.
    """
    named = {file: _split(file.relative_to(path)) for file in files}
    splits = sorted({found[0] for found in named.values() if found})
    if splits in ([], [TRAIN]):
        return files
    rest = None if TRAIN in splits else (TRAIN, Path())
    found_in = {file: found or rest for file, found in named.items()}
    splits = sorted({found[0] for found in found_in.values() if found})
    if len(splits) == 1:
        return files
    split = next((name for name in wanted if name in splits), None)
    if split is None:
        raise UserError(
            f"holds the splits {', '.join(splits)}",
            key=str(path),
            expected=f"one split, or {' or '.join(wanted)} among them",
            hint="name one of its files or subfolders",
        )
    chosen = {file: found for file, found in found_in.items() if found and found[0] == split}
    folders = sorted({str(found[1]) for found in chosen.values()})
    if len(folders) > 1:
        raise UserError(
            f"holds several data sets: {', '.join(folders)}",
            key=str(path),
            expected="one",
            hint="name one of its subfolders",
        )
    _log.warning("%s: the split %r is read, %d of %d files", path, split, len(chosen), len(files))
    return list(chosen)


def _split(file: Path) -> tuple[str, Path] | None:
    """The split that a folder or else the file is named after, and the folder that is in."""
    for folder in file.parents:
        if folder.name.lower() in SPLITS:
            return SPLITS[folder.name.lower()], folder.parent
    for part in (file.with_suffix(""), *file.parents):
        words = re.split(r"[^a-z]+", part.name.lower())
        if found := [SPLITS[word] for word in words if word in SPLITS]:
            return found[-1], part.parent
    return None


def _json_lines(file: Path) -> Iterator[FileRow]:
    with file.open("rb") as opened:
        if opened.peek(8).startswith(COMPRESSED):
            raise UserError("is compressed", key=str(file), hint="unpack it first")
        for number, line in enumerate(opened, start=1):
            if line.strip():
                content = line.removeprefix(b"\xef\xbb\xbf")
                yield FileRow(file, number, partial(_parsed, content))


def _commas(file: Path) -> Iterator[FileRow]:
    """Rows below a line of column names; a cell may hold lines of its own."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as opened:
            csv.field_size_limit(LONGEST_CELL)
            reader = csv.DictReader(opened, strict=True)
            _check_names(file, reader.fieldnames or ())
            for row in reader:
                yield FileRow(file, reader.line_num, partial(_complete, row))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"is no CSV in UTF-8 ({error})", key=str(file)) from error


def _complete(row: dict[str | Any, str | Any]) -> dict[str, Any]:
    if None in row or None in row.values():
        raise BadRowError("has another number of cells than the first line")
    return row


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise BadRowError("is not UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        if line.strip() == b"[":
            raise BadRowError("begins a JSON list, and not an object of one line") from error
        raise BadRowError(f"is not valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise BadRowError(f"is a JSON {type(row).__name__}, not an object")
    return row


def _columnar(file: Path) -> Iterator[FileRow]:
    pyarrow = _pyarrow(file)
    try:
        if file.suffix == ".parquet":
            batches = pyarrow.parquet.ParquetFile(file).iter_batches(BATCH_ROWS)
        else:
            batches = pyarrow.ipc.open_stream(pyarrow.memory_map(str(file)))
        number = 0
        for batch in batches:
            names = batch.schema.names
            _check_names(file, names)
            columns = [_listed(file, *named) for named in zip(names, batch.columns, strict=True)]
            for cells in zip(*columns, strict=True):
                number += 1
                yield FileRow(file, number, dict(zip(names, cells, strict=True)).copy)
    except pyarrow.ArrowInvalid as error:
        kind = file.suffix.removeprefix(".").capitalize()
        raise UserError(f"is no whole {kind} file ({error})", key=str(file)) from error


def _listed(file: Path, name: str, column: Any) -> list[Any]:
    """A column's values; of 32-bit numbers what was written, 0.1 and not 0.10000000149011612."""
    if str(column.type) == "float":
        column = column.cast("string").cast("double")
    try:
        values: list[Any] = column.to_pylist()
    except (ValueError, OverflowError) as error:  # such as a time beyond the year 9999
        raise UserError(
            f"its column {name!r} holds what Python cannot ({error})",
            key=str(file),
            hint="leave the column out, or write it as text",
        ) from error
    return values


def _check_names(file: Path, names: Sequence[str]) -> None:
    """Refuse columns of one name, of which one alone would count."""
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"has two columns {twice!r}", key=str(file), hint="rename one of them")


def _pyarrow(file: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            f"{file.suffix} files are read by pyarrow, which is not installed",
            key=str(file),
            hint='pip install "m2flow[data]"',
        ) from error
    return pyarrow
