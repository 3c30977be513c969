"""Errors by audience: what the user got wrong, and what went wrong while running.

`UserError` is for input that a person can mend: it becomes one line on the terminal and exit
code 2. Everything else keeps its traceback. This module imports only the standard library and
is known to every floor.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name closest to `name`, or None where nothing is close."""
    matches = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return matches[0] if matches else None


def suggestion(name: str, valid: Iterable[str]) -> str:
    """`did you mean 'x'?`, or the list of valid names where nothing is close."""
    names = sorted(valid)
    close = nearest(name, names)
    return f"did you mean {close!r}?" if close else f"valid names: {', '.join(names)}"
