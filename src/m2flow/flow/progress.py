"""How a method of a worker says that it makes progress, so that its call is not taken for hung.

Whoever watches a call over its deadline wraps it in `heard_by`; what runs within it, on the same
thread, calls `goes_on`. A worker knows neither who watches nor whether anybody does, and keeps
nothing of them: `goes_on` is a function of this module, and travels by its name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _CallAtHand(threading.local):
    """Who hears of the call that is at hand on this thread; lanes may share a process."""

    hear: Callable[[], object] | None = None


_at_hand = _CallAtHand()


@contextmanager
def heard_by(hear: Callable[[], object]) -> Iterator[None]:
    """Have `hear` called whenever what is done within, on this thread, says that it goes on."""
    before, _at_hand.hear = _at_hand.hear, hear
    try:
        yield
    finally:
        _at_hand.hear = before


def goes_on() -> None:
    """Restart the deadline of the call that is at hand on this thread; do nothing without one."""
    if _at_hand.hear is not None:
        _at_hand.hear()
