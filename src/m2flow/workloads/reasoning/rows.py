"""Rows of a data set as it lies on disk: JSON lines, CSV, Parquet, or a folder of such files.

A folder is what `hf download` leaves (files of either kind, in subfolders too) or what
`datasets.save_to_disk` writes (Arrow streams). Files are read in the order of their names. Knows
nothing of what the columns mean.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from m2flow.errors import UserError, nearest

KINDS = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
"""Endings of the files that are looked for in a folder; one that is named may have any ending, and
is read as JSON lines unless it says that it is CSV, Parquet or Arrow."""

BATCH_ROWS = 1024

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


def rows_of(path: Path) -> Iterator[FileRow]:
    """All rows, in order; blank lines do not count.

    Raises:
        UserError: there is no such file, it cannot be read, or a folder holds none.
    """
    for file in _files(path):
        try:
            if file.suffix in (".parquet", ".arrow"):
                yield from _columnar(file)
            elif file.suffix == ".csv":
                yield from _commas(file)
            else:
                yield from _json_lines(file)
        except OSError as error:
            raise UserError(f"cannot be read: {error.strerror or error}", key=str(file)) from error


def _files(path: Path) -> list[Path]:
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
    # What stands beside the rows in a data set's folder, and is none.
    found = [file for file in found if file.name not in ("dataset_info.json", "state.json")]
    kinds = {file.suffix for file in found}
    if not found or len(kinds) > 1:
        raise UserError(
            f"holds files of {', '.join(sorted(kinds))}" if kinds else "holds no data",
            key=str(path),
            expected=f"files of one kind of {', '.join(KINDS)}",
            hint="name one of its files or subfolders",
        )
    return found


def _json_lines(file: Path) -> Iterator[FileRow]:
    with file.open("rb") as opened:
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
            for row in batch.to_pylist():
                number += 1
                yield FileRow(file, number, row.copy)
    except pyarrow.ArrowInvalid as error:
        kind = file.suffix.removeprefix(".").capitalize()
        raise UserError(f"is no whole {kind} file ({error})", key=str(file)) from error


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
