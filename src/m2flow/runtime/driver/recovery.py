"""`Recovery`: what a run goes back to when lanes are lost, and how often it may.

A run goes back to its last *snapshot*, which is what the workers have saved between two steps, and
takes the steps since then again. Items' seeds make them the same steps. The launcher keeps the
snapshot in its memory, so that no lane takes it along. The first one is free: what a worker is
loaded with. Later ones are taken as often as they are worth: one takes at most `SHARE` of the time
since the one before.

Knows no lanes' processes and no plan: `Run` starts lanes, and has workers save and restore.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from m2flow.engine.spans import Span
from m2flow.errors import RunFailed
from m2flow.flow.batch import Batch

LANE_RESTARTS = 3
"""How often each lane may be started again in a run, unless it is said otherwise."""

SHARE = 0.02
"""The most that snapshots may take of a run's time."""

BYTES_PER_SECOND = 5e8
"""How fast the first snapshot is expected to be."""

LOST = "lane lost"
"""Name of the span of a lane that was down."""

COPIES = 3
"""How often a state is in host memory while it is saved, carried here and kept."""

Files = Mapping[str, Any]
"""What a worker has saved: path below its folder to a uint8 tensor of shape [bytes]."""


@dataclass(frozen=True, slots=True)
class LaneLoss:
    """A lane that was lost and is back.

    Attributes:
        lane: which.
        reason: why, as far as it is known.
        at: when it was noticed, in seconds since the epoch.
        seconds: from then until its workers were up again.
        steps: how many steps that were done are taken again.
    """

    lane: int
    reason: str
    at: float
    seconds: float
    steps: int

    def __str__(self) -> str:
        again = f"; {self.steps} steps that were done are taken again" if self.steps else ""
        return f"lane {self.lane} was lost ({self.reason}); back after {self.seconds:.1f} s{again}"

    def span(self) -> Span:
        """The time without the lane, for the timeline."""
        return Span(self.lane, LOST, "wait", self.at, self.at + self.seconds, {"why": self.reason})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What workers have saved.

    Attributes:
        step: the next step; the weights have this version.
        files: by worker; a worker that is not named is as it was loaded.
    """

    step: int
    files: Mapping[str, Files] = field(default_factory=dict)


class Restarts:
    """How often lanes were started again, and how often each may be.

    Args:
        most: how often each lane may be.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._begun: Counter[int] = Counter()
        self._first: dict[int, str] = {}

    def count(self, lost: Mapping[int, str], error: BaseException) -> None:
        """Lanes that were lost, each with the reason, are to be started again.

        Raises:
            RunFailed: one of them is lost again and again; `error` is how this was heard of.
        """
        for lane, reason in lost.items():
            self._first.setdefault(lane, reason)
            if self._begun[lane] >= self.most:
                raise RunFailed(
                    f"lane {lane} was lost: {self._first[lane]}\nit was started again {self.most} "
                    f"times, which is the most (`lane_restarts`), and lost again: {error}"
                ) from error
        self._begun.update(list(lost))  # of a mapping it would add the values


class Recovery:
    """The books of one run.

    Args:
        first_step: number of the first step.
        unsaved: learners that do not say how their state is saved: there is no snapshot of a step
            that they have learnt from.
        num_bytes: about how much a snapshot holds.
        free_bytes: host memory that is free.
        restarts: of lanes; with none allowed nothing is kept.
        losses: lanes that were lost while the workers were brought up.
        clock: seconds.

    Attributes:
        losses: the lanes that were lost and are back, in order of time.
    """

    def __init__(
        self,
        first_step: int,
        unsaved: Sequence[str],
        num_bytes: int,
        free_bytes: int,
        restarts: Restarts,
        losses: Sequence[LaneLoss] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.losses = list(losses)
        self._snapshot: Snapshot | None = Snapshot(first_step)
        self._batches: list[Batch] = []
        self._restarts, self._clock = restarts, clock
        self._taken_at, self._seconds = clock(), num_bytes / BYTES_PER_SECOND
        self._why_not: str | None = None
        if unsaved:
            names = " and ".join(unsaved)
            self._why_not = f"{names} does not say how its state is saved (`save`, `restore`)"
        elif num_bytes and COPIES * num_bytes > free_bytes:
            self._why_not = f"no snapshot of its {num_bytes / 1e9:.3g} GB fits into host memory"
        self.given = first_step
        """The step whose result is to be given next."""

    @property
    def heals(self) -> bool:
        """Whether lanes may be started again at all."""
        return self._restarts.most > 0

    # --- while nothing is lost --------------------------------------------------------------------

    def feed(self, batch: Batch) -> None:
        """A step is begun with this batch."""
        if self._snapshot is not None and self.heals:
            self._batches.append(batch)

    def gave(self, step: int) -> None:
        """The result of a step was given: without snapshots there is no way back behind it."""
        self.given = step + 1
        if self._why_not is not None:
            self._snapshot, self._batches = None, []

    @property
    def is_due(self) -> bool:
        """Whether the next snapshot is worth its time."""
        snapshot = self._snapshot
        if snapshot is None or self._why_not is not None or not self.heals:
            return False
        if self.given == snapshot.step:
            return False
        return self._seconds <= SHARE * (self._clock() - self._taken_at)

    def keep(self, files: Mapping[str, Files], seconds: float) -> None:
        """A snapshot was taken, of all steps that were given; it took so long."""
        self._snapshot = Snapshot(self.given, files)
        self._batches = []
        self._taken_at, self._seconds = self._clock(), seconds

    def cannot(self, why: str) -> None:
        """A snapshot has failed: there will be no others."""
        self._why_not = why

    # --- when lanes are lost ----------------------------------------------------------------------

    def back_to(self, lost: Mapping[int, str], error: BaseException) -> Snapshot:
        """What to go back to now that lanes are lost.

        Args:
            lost: lane to the reason.
            error: how the loss was heard of.

        Raises:
            RunFailed: there is no way back, or a lane is lost again and again.
        """
        self._restarts.count(lost, error)
        if self._snapshot is None:
            raise RunFailed(
                f"{error}\nthe only copy of what was learnt was lost with it: {self._why_not}; "
                "`--resume` goes on from the last checkpoint"
            ) from error
        return self._snapshot

    def since_snapshot(self) -> tuple[list[Batch], list[Batch]]:
        """Batches of the steps since the snapshot: of those that were given, and of the others."""
        if self._snapshot is None:
            return [], []
        num_given = self.given - self._snapshot.step
        return self._batches[:num_given], self._batches[num_given:]

    def forget_open(self) -> None:
        """Forget the batches of steps that were not given: they will be fed again, or never."""
        self._batches, _ = self.since_snapshot()
