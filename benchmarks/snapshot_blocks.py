"""`m2flow` of which, in every other block of steps, no snapshots are taken; for `recovery.py`."""

from __future__ import annotations

from m2flow.cli.app import main
from m2flow.runtime.driver.recovery import Recovery

BLOCK = 7
"""Steps that follow each other with snapshots, or without."""

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
    due = Recovery.is_due

    def is_due(self: Recovery, step: int | None = None) -> bool:
        """A snapshot is begun in the last milliseconds of the step before `step`, or after it."""
        last = (self.given if step is None else step) - 1
        return kind_of(last) in (WITH, WITH_TWIN) and due(self, step)

    Recovery.is_due = is_due  # type: ignore[method-assign]


if __name__ == "__main__":
    _take_turns()
    main()
