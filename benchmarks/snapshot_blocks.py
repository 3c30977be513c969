"""`m2flow` of which, in every other block of steps, no snapshots are taken; for `recovery.py`."""

from __future__ import annotations

from blocks import has_it

from m2flow.cli.app import main
from m2flow.runtime.driver.recovery import Recovery


def _take_turns() -> None:
    due = Recovery.is_due

    def is_due(self: Recovery, step: int | None = None) -> bool:
        """A snapshot is begun in the last milliseconds of the step before `step`, or after it."""
        last = (self.given if step is None else step) - 1
        return has_it(last) and due(self, step)

    Recovery.is_due = is_due  # type: ignore[method-assign]


if __name__ == "__main__":
    _take_turns()
    main()
