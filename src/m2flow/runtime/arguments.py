"""What a caller gives, refused in one line where it is of another kind, or out of bounds."""

from __future__ import annotations

import math
from typing import SupportsFloat

from m2flow.engine.plan import LONGEST_DEADLINE
from m2flow.errors import UserError


def check_kind(
    key: str,
    value: object,
    kind: type | tuple[type, ...],
    expected: str,
    hint: str | None = None,
) -> None:
    """Refuse what is of another kind.

    Raises:
        UserError: it is; names the value where that is short, and else its type.
    """
    if not isinstance(value, kind):
        short = isinstance(value, str | int | float | type)
        raise UserError(
            "is of the wrong type",
            key=key,
            value=value if short else type(value).__name__,
            expected=expected,
            hint=hint,
        )


def check_count(key: str, count: object, least: int = 1) -> None:
    """Refuse what is no whole number, or is less than the least.

    Raises:
        UserError: it is.
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < least:
        raise UserError(
            "is a number of things",
            key=key,
            value=count,
            expected=f"a whole number of at least {least}",
        )


def check_seconds(
    key: str, seconds: object, *, zero: bool = False, most: float = LONGEST_DEADLINE
) -> None:
    """Refuse what nobody can wait for.

    Args:
        key: the argument's name.
        seconds: its value.
        zero: whether it may be 0: not to wait.
        most: what timers hold; infinite where any time that ends will do.

    Raises:
        UserError: it is no number, is negative, or too long.
    """
    if isinstance(seconds, SupportsFloat) and not isinstance(seconds, bool):
        given = float(seconds)
        if (0 < given <= most and given < math.inf) or (zero and given == 0):
            return
    least = "0" if zero else "more than 0"
    bound = "finite" if most == math.inf else f"at most {most:,.0f}"
    raise UserError(
        "every wait has an end",
        key=key,
        value=seconds,
        expected=f"{least} and {bound} seconds",
    )
