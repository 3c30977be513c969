"""`m2flow` of which, in every other block of steps, no snapshots are taken; for `recovery.py`."""

from __future__ import annotations

from m2flow.cli.app import main
from m2flow.runtime.driver.recovery import Recovery

BLOCK = 7
"""Steps that follow each other with snapshots, or without. Where one is taken every second step,
three of the six after the first one have one."""

WITH, WITHOUT, WITH_TWIN, WITHOUT_TWIN = KINDS = (
    "snapshots",
    "no snapshots",
    "snapshots, twin",
    "no snapshots, twin",
)
"""What blocks are, in turn."""


def kind_of(step: int) -> str:
    """Of the block that a step is in, counted from 0."""
    return KINDS[step // BLOCK % len(KINDS)]


def _take_turns() -> None:
    due = Recovery.is_due.fget
    assert due is not None

    def is_due(self: Recovery) -> bool:
        return kind_of(self.given) in (WITH, WITH_TWIN) and bool(due(self))

    Recovery.is_due = property(is_due)  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    _take_turns()
    main()
