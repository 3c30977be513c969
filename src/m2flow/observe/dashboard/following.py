"""`FollowedRun`: the figures of a run directory, read on as they are written.

Promises: `refresh` reads only what was added since; a file that was cut back (a run that is
resumed) is read again as a whole; a last line that is still being written waits for its end. Knows
no HTTP.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from m2flow.errors import UserError, reading
from m2flow.observe.jsonl import parse_line
from m2flow.observe.run_directory import MARKS, RunDirectory, read_document, step_of_row


class FollowedRun:
    """A run directory, and what its `metrics.jsonl` has held so far.

    Attributes:
        directory: the run's files.
        rows: step to its figures.

    Raises:
        UserError: there is no such directory, or its figures may not be read.
    """

    def __init__(self, path: Path | str) -> None:
        self.directory = RunDirectory(path)
        self.rows: dict[int, dict[str, Any]] = {}
        self._offset, self._seen = 0, (0, 0)
        self._lock = threading.Lock()
        with reading(path):
            if not self.directory.path.is_dir():
                raise UserError("no such run directory", value=str(path), hint="see ls runs/")
            self.refresh()

    def refresh(self) -> None:
        """Read what was added to the run's figures."""
        with self._lock:
            try:
                seen = _size_and_place(self.directory.metrics)
                if seen[1] != self._seen[1] or seen[0] < self._offset:  # another file, or cut back
                    self.rows, self._offset = {}, 0
                self._seen = seen
                with self.directory.metrics.open("rb") as file:
                    file.seek(self._offset)
                    content = file.read()
            except FileNotFoundError:
                return
            whole = content[: content.rfind(b"\n") + 1]
            self._offset += len(whole)
            rows = dict(self.rows)  # whoever reads the old ones goes on undisturbed
            for line in whole.splitlines():
                row = parse_line(line)
                if row is not None and (step := step_of_row(row)) is not None:
                    rows[step] = {**rows.get(step, {}), **row}
            self.rows = dict(sorted(rows.items()))

    def signature(self) -> tuple[object, ...]:
        """Something that changes whenever figures or facts of the run do."""
        return tuple(
            (stat.st_mtime_ns, stat.st_size)
            for file in (self.directory.metrics, self.directory.run, self.directory.timeline)
            if (stat := _stat(file)) is not None
        )

    def described(self) -> dict[str, object]:
        """How far the run is, for the page."""
        facts = _document(self.directory.run)
        last, planned = max(self.rows, default=0), facts.get("steps")
        of = f" of {planned:,}" if isinstance(planned, int) else ""
        finished = facts.get("finished") is not None
        state = f"finished, {last:,} steps" if finished else f"step {last:,}{of}"
        return {"state": state, "finished": finished}

    def configuration(self) -> dict[str, str]:
        """Each key of the resolved recipe, dotted, with its value as text."""
        return dict(_flat(_document(self.directory.config), ""))


def differing_keys(configurations: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Keys whose values are not the same in all runs, each with the value in each run."""
    keys = dict.fromkeys(key for one in configurations for key in one)
    rows = {key: [one.get(key, "–") for one in configurations] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def check_holds_a_run(folder: Path) -> None:
    """Refuse a folder that is no run's, such as the one above several runs.

    Raises:
        UserError: names the newest run in it, if there is one.
    """
    if not _holds_a_run(folder):
        inside = runs_in(folder, most=1)
        raise UserError(
            "holds no run",
            key=str(folder),
            expected="a directory that m2flow train wrote",
            hint=f"such as {inside[0]}, which is in it" if inside else None,
        )


def _holds_a_run(folder: Path) -> bool:
    try:
        return any((folder / name).exists() for name in MARKS)
    except OSError:  # another user has closed it
        return False


def runs_in(folder: Path, most: int) -> list[Path]:
    """The run directories in a folder, the newest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.is_dir() and _holds_a_run(path)]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)[:most]


def _document(path: Path) -> Mapping[str, Any]:
    """What a file says, as far as it can be read at this moment."""
    try:
        return read_document(path) or {}
    except UserError:  # said by the report, with the file's name
        return {}


def _flat(document: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in document.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def _stat(path: Path) -> Any:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _size_and_place(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_ino
