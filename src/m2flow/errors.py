"""Errors by audience: what the user got wrong, and what went wrong while running.

`UserError` is for input that a person can mend: it becomes one line on the terminal and exit
code 2. `CannotWrite` and `Stopped` are one line too, with exit codes of their own. Everything else
keeps its traceback. This module imports only the standard library and is known to every floor.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import shutil
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class M2FlowError(Exception):
    """Base of all errors that m2flow raises on purpose."""


class UserError(M2FlowError, ValueError):
    """The user's input is wrong; the message is one line that says how to mend it.

    Args:
        message: what is wrong.
        key: the configuration key, column, file or stage concerned.
        value: the value found.
        expected: what would have been right.
        hint: what to do about it.
    """

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        value: object | None = None,
        expected: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.key, self.value, self.expected, self.hint = key, value, expected, hint
        self.message = message
        line = f"{key}: {message}" if key else message
        if value is not None:
            line += f" (got {value!r})"
        if expected:
            line += f"; expected {expected}"
        if hint:
            line += f"; {hint}"
        super().__init__(" ".join(line.split()))


class FlowError(UserError):
    """The macro flow makes no sense: names the stage and the reason."""


class PlanError(UserError):
    """A plan does not fit its graph or the lanes of the machine."""


class RunFailed(M2FlowError):
    """The run stopped; the first cause is chained as `__cause__` where there is one."""


class CannotHeal(RunFailed):
    """What a lost lane held cannot be made again, or brought back, while the step goes on."""


class NoPlanStands(CannotHeal):
    """Lanes hold the workers of no plan, or wait for one that has failed: all are started again."""


class NotLoaded(RunFailed):
    """Workers of another plan could not be brought up; the run stands under the plan before."""


class Stalled(TimeoutError):
    """Nothing was heard of a call for as long as a call may be silent. The cause of a `RunFailed`.

    A stage that raises a TimeoutError of its own has answered, and has not stalled.
    """


class ProcessEnded(RunFailed):
    """A process that a worker had started is gone, or answers no more; nobody else is to blame.

    A worker that is loaded again starts another one.

    Attributes:
        lane: on which the worker is; None while that is not known.
    """

    lane: int | None = None


class CannotWrite(RunFailed):
    """The file system takes no more: the message is one line that says what, where, what to do."""


class Stopped(KeyboardInterrupt):
    """A signal has ended the run; no `Exception`, so that nobody takes it for a failure.

    Args:
        number: the signal.
        message: how far the run has come, and how it goes on.
    """

    def __init__(self, number: int, message: str = "nothing was begun") -> None:
        super().__init__(number, message)
        self.number, self.message = number, message

    def __str__(self) -> str:
        return f"{signal.Signals(self.number).name}: {self.message}"

    @property
    def exit_code(self) -> int:
        """What a shell reports of a process that the signal has ended."""
        return 128 + self.number


_REMEDIES = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room within your quota there",
    errno.EFBIG: "raise the limit on the size of files (`ulimit -f`)",
    errno.EROFS: "mount it writable, or name another directory",
    errno.EACCES: "allow writing there",
    errno.EPERM: "allow writing there",
    errno.EIO: "the disk fails: see `dmesg`",
    errno.ENOENT: "something has deleted it during the run",
}
"""By error number of the system: what helps."""


@contextmanager
def writing(what: str, where: Path | str) -> Iterator[None]:
    """Name what the file system refuses within.

    Args:
        what: what is written, in words.
        where: the file or folder.

    Raises:
        CannotWrite: of what `OSError` or a library says of no room, quotas, limits, permissions.
    """
    try:
        yield
    except Exception as error:
        number = _error_number(error)
        if isinstance(error, CannotWrite) or number not in _REMEDIES:
            raise
        reason = os.strerror(number)
        if number == errno.ENOSPC:
            reason += f", {_free(Path(where))}"
        raise CannotWrite(
            f"{what} could not be written: {where}: {reason}; {_REMEDIES[number]}: "
            "what was saved before is whole"
        ) from error


@contextmanager
def reading(where: Path | str) -> Iterator[None]:
    """Name what the system refuses to show, such as another user's file.

    Args:
        where: what is read, if the system names no file.

    Raises:
        UserError: of what `OSError` says.
    """
    try:
        yield
    except OSError as error:
        key = str(error.filename or where)
        raise UserError(f"cannot be read: {error.strerror or error}", key=key) from error


def is_there(path: Path | str) -> bool:
    """Whether there is a file or a folder that the user names.

    Raises:
        UserError: the system does not say.
    """
    with reading(path):
        return Path(path).expanduser().exists()


def _error_number(error: Exception) -> int:
    """The system's number of an error; 0 if it has none. Libraries in Rust say it in words."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else 0


def _free(path: Path) -> str:
    """How much room is left on the file system of a path, in words."""
    while not path.exists():
        path = path.parent
    return f"{shutil.disk_usage(path).free / 1e6:.1f} MB free"


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name closest to `name`, or None where nothing is close."""
    matches = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return matches[0] if matches else None


def suggestion(name: str, valid: Iterable[str]) -> str:
    """`did you mean 'x'?`, or the list of valid names where nothing is close."""
    names = sorted(valid)
    close = nearest(name, names)
    return f"did you mean {close!r}?" if close else f"valid names: {', '.join(names)}"
