"""JSON that any reader accepts, and files of one JSON object per line that survive a crash.

Promises: a number that is not finite is written as null; a line is handed to the operating system
whole and at once; a file can be cut back to a step, without a last line that a crash has torn, and
without all of it in memory.
Where the disk is full, `CannotWrite` names the file, which stays as it was. Knows rows and steps,
not what the columns mean.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from m2flow.errors import writing


class JsonlRows(NamedTuple):
    """The rows of a file, and the 1-based numbers of lines that are no JSON object."""

    rows: list[dict[str, Any]]
    unreadable: tuple[int, ...]


def json_safe(value: object) -> Any:
    """`value` in terms of what JSON knows.

    NaN and infinities become None. Scalars and arrays of numeric libraries are recognised by their
    `tolist` method, so none of those libraries is imported.

    Raises:
        TypeError: the value has no JSON form.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [json_safe(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return json_safe(dataclasses.asdict(value))
    to_list = getattr(value, "tolist", None)
    if callable(to_list):
        return json_safe(to_list())
    raise TypeError(f"{type(value).__name__} has no JSON form: {value!r}")


def encode(value: object, *, indent: int | None = None) -> bytes:
    """UTF-8 JSON of `json_safe(value)`; a lone surrogate is kept as its \\u escape."""
    try:  # most of what is written is plain, and need not be walked through twice
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    except (TypeError, ValueError):
        text = json.dumps(json_safe(value), ensure_ascii=False, allow_nan=False, indent=indent)
    return text.encode("utf-8", "backslashreplace")


def write_atomically(path: Path, content: bytes | Iterator[bytes]) -> None:
    """Replace the file at `path`: a reader sees the old content or the new, never a part.

    Args:
        path: the file.
        content: all of it, or one piece after another.

    Raises:
        CannotWrite: there is no room for it, or no permission.
    """
    with writing(path.name, path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.writelines([content] if isinstance(content, bytes) else content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
        synchronise(path.parent)


def write_in_place(path: Path, content: bytes) -> None:
    """Write over a file, which takes no room if it is as large: for a disk that is full.

    Raises:
        CannotWrite: the room that the file has does not suffice, and it is as it was.
    """
    with writing(path.name, path), path.open("r+b", buffering=0) as file:
        status = os.fstat(file.fileno())
        if len(content) > 512 * status.st_blocks:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.write(content.ljust(status.st_size))  # in one call: all of it or nothing
        file.truncate(len(content))
        os.fsync(file.fileno())


def synchronise(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write rows at a file's end; the operating system has them when this returns.

    Raises:
        CannotWrite: there is no room for them, or no permission; none of them is in the file.
    """
    content = b"".join(encode(row) + b"\n" for row in rows)
    with writing(path.name, path), path.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            while content:
                content = content[file.write(content) :]
        except OSError:
            file.truncate(end)
            raise


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The object on a line, or None where the line holds none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def read_rows(path: Path) -> JsonlRows:
    """The rows of a file; a missing file has none.

    A last line without an end is being written at this moment, or was torn by a crash: it counts
    as a row if it is whole, else it is left out without complaint.
    """
    rows: list[dict[str, Any]] = []
    unreadable: list[int] = []
    for number, _, row in each_line(path):
        if row is not None:
            rows.append(row)
        else:
            unreadable.append(number)
    return JsonlRows(rows, tuple(unreadable))


def each_line(path: Path) -> Iterator[tuple[int, int, dict[str, Any] | None]]:
    """The lines that `read_rows` counts, one after the other.

    Yields:
        The 1-based number of a line, the byte where it begins, and its row; None if it has none.
    """
    if not path.exists():
        return
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            begin, end = end, end + len(line)
            row = parse_line(line)
            if row is not None or (line.endswith(b"\n") and line.strip()):
                yield number, begin, row


def rows_at(path: Path, places: Iterable[int]) -> list[dict[str, Any]]:
    """The rows that begin at some bytes of a file, without those that have gone meanwhile."""
    rows = []
    with path.open("rb") as file:
        for place in places:
            file.seek(place)
            row = parse_line(file.readline())
            if row is not None:
                rows.append(row)
    return rows


def cut_after_step(path: Path, last_step: int) -> int:
    """Remove every row with `step` > `last_step` and every unreadable line.

    Returns:
        The number of lines removed. The file is replaced at once or not at all.
    """
    whole = _lines_to_leave(path, last_step)
    if whole is None:
        return 0
    removed = 0

    def kept() -> Iterator[bytes]:
        nonlocal removed
        with path.open("rb") as file:
            yield from islice(file, whole)
            for line in file:
                if _is_until(line, last_step):
                    yield line.rstrip(b"\r\n") + b"\n"
                else:
                    removed += 1

    write_atomically(path, kept())
    return removed


def _lines_to_leave(path: Path, last_step: int) -> int | None:
    """How many lines there are before the first that has to change; None if none has."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if not (line.endswith(b"\n") and _is_until(line, last_step)):
                return number
    return None


def _is_until(line: bytes, last_step: int) -> bool:
    """Whether a line holds a row, and none of a later step."""
    row = parse_line(line)
    step = None if row is None else row.get("step", 0)
    return isinstance(step, int | float) and step <= last_step
