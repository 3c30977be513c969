"""`Recovery`: what a run goes back to when lanes are lost.

A run goes back to its last *snapshot*, which is what the workers have saved between two steps, and
takes the steps since then again. Items' seeds make them the same steps. The launcher holds the
snapshot, so that no lane takes it along. The first one is free: what a worker is
loaded with. Later ones are taken beside the steps, as often as they are worth: one holds a lane up
for at most `SHARE` of the time since the one before was begun, and keeps it busy for at most `BUSY`
of that; or so many steps have been given since then.

Knows no lanes' processes and no plan: `Run` starts lanes, and has workers save and restore.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from m2flow.engine.spans import Span
from m2flow.errors import RunFailed
from m2flow.flow.batch import Batch
from m2flow.runtime.lane.orders import SaveSeconds

SHARE = 0.015
"""The share of the time for which snapshots may hold a lane up, at most."""

BUSY = 0.02
"""That for which they may keep it busy, while it would have waited for others."""

BYTES_PER_SECOND = 2e9
"""How fast the first snapshot is expected to be."""

LOST, BACK = "lane lost", "lane back"
"""Names of the spans of a lane that was down, and of one that is taken in again."""

COPIES = 3
"""How often a state is in host memory: the last one, one to come, and the one that all lanes of the
launcher's machine read; without what is on its way to other machines."""

State = Mapping[str, Any]
"""What a worker has saved: name to tensor on the CPU."""


@dataclass(frozen=True, slots=True)
class LaneLoss:
    """A lane that was lost, and is back or given up.

    Attributes:
        lane: which.
        reason: why, as far as it is known.
        at: when it was noticed, in seconds since the epoch.
        seconds: from then until its workers were up again, there or elsewhere.
        steps: how many steps that were done are taken again.
        healed: whether the steps have gone on meanwhile: nobody else went back.
        given_up: why it was not started again; "" where it is back.
        left: where it is not: on what the run goes on.
    """

    lane: int
    reason: str
    at: float
    seconds: float
    steps: int
    healed: bool = False
    given_up: str = ""
    left: str = ""

    def __str__(self) -> str:
        again = f"; {self.steps} steps that were done are taken again" if self.steps else ""
        lost, after = f"lane {self.lane} was lost ({self.reason})", f"after {self.seconds:.1f} s"
        if self.healed:
            return f"{lost}; back {after}, the step has gone on"
        if self.given_up:
            return f"{lost}; {self.given_up}: on without it {after}, {self.left}{again}"
        return f"{lost}; back {after}{again}"

    def span(self) -> Span:
        """The time without the lane, for the timeline."""
        return Span(self.lane, LOST, "wait", self.at, self.at + self.seconds, {"why": self.reason})


@dataclass(frozen=True, slots=True)
class LaneReturn:
    """A lane that was given up, and is taken in again.

    Attributes:
        lane: which.
        lost_at: when its loss was noticed, in seconds since the epoch.
        at: when the run paused to take it in.
        seconds: of the pause.
        left: on what the run goes on.
    """

    lane: int
    lost_at: float
    at: float
    seconds: float
    left: str

    def __str__(self) -> str:
        away, pause = self.at - self.lost_at, f"pause {self.seconds:.2f} s"
        return f"lane {self.lane} is back after {away:.0f} s: on with it, {self.left} ({pause})"

    def span(self) -> Span:
        """The pause, for the timeline."""
        return Span(self.lane, BACK, "wait", self.at, self.at + self.seconds)


@dataclass(frozen=True, slots=True)
class SavedStates:
    """What workers have saved.

    Attributes:
        step: the next step; the weights have this version.
        states: by worker; a worker that is not named is as it was loaded.
    """

    step: int
    states: Mapping[str, State] = field(default_factory=dict)


class Recovery:
    """The books of one run.

    Args:
        first_step: number of the first step.
        unsaved: learners that do not say how their state is saved: there is no snapshot of a step
            that they have learnt from.
        num_bytes: about how much a snapshot holds.
        free_bytes: host memory that is free.
        heals: whether a run may go on after a loss at all; if not, nothing is kept.
        every: steps from one snapshot to the next, at most, whatever one takes; None for no limit.
        clock: seconds.
        sent_bytes: about what lies in host memory beside, on its way to lanes of other machines,
            while a run goes back.

    Attributes:
        heals: the same.
        returns: lanes that were given up, and were taken in again.
        snapshot_seconds: for how long snapshots held lanes up.
    """

    def __init__(
        self,
        first_step: int,
        unsaved: Sequence[str],
        num_bytes: int,
        free_bytes: int,
        heals: bool,
        every: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sent_bytes: int = 0,
    ) -> None:
        self.heals, self._every = heals, every
        self.returns: list[LaneReturn] = []
        self.snapshot_seconds = 0.0
        self._snapshot: SavedStates | None = SavedStates(first_step)
        self._batches: list[Batch] = []
        self._begun: int | None = None
        self._begun_at = clock()
        self._paused_at: float | None = None
        self._pause_seconds = 0.0
        self._clock = clock
        self._taken_at, self._apart = clock(), num_bytes / BYTES_PER_SECOND / SHARE
        self._why_not: str | None = None
        if unsaved:
            names = " and ".join(unsaved)
            self._why_not = f"{names} does not say how its state is saved (`save`, `restore`)"
        elif num_bytes and COPIES * num_bytes + sent_bytes > free_bytes:
            self._why_not = f"no snapshot of its {num_bytes / 1e9:.3g} GB fits into host memory"
        self.given = first_step
        """The step whose result is to be given next."""

    @property
    def saves(self) -> bool:
        """Whether the workers' states can be saved."""
        return self._why_not is None

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

    def is_due(self, step: int | None = None) -> bool:
        """Whether the next snapshot is worth its time.

        Args:
            step: it would be of all steps before this one; by default, of those that were given.
        """
        snapshot, step = self._snapshot, self.given if step is None else step
        if snapshot is None or self._why_not is not None or not self.heals:
            return False
        if self._begun is not None or step <= snapshot.step:
            return False
        if self._every is not None and step - snapshot.step >= self._every:
            return True
        return self._clock() - self._taken_at >= self._apart

    def pause(self) -> None:
        """No further step is begun until those in flight are over, so that a snapshot can begin."""
        self._paused_at = self._clock()

    def pause_is_over(self) -> None:
        """Further steps are begun: what has passed since `pause` was for something else."""
        self._paused_at = None

    def begin(self, step: int) -> None:
        """A snapshot of all steps before this one is on its way."""
        self._begun, self._begun_at = step, self._clock()
        self._pause_seconds = 0.0 if self._paused_at is None else self._begun_at - self._paused_at
        self._paused_at = None

    @property
    def can_keep(self) -> bool:
        """Whether the results of all steps before the snapshot that was begun were given."""
        return self._begun is not None and self.given >= self._begun

    def keep(self, states: Mapping[str, State], seconds: SaveSeconds) -> None:
        """The snapshot that was begun is here, and took so long."""
        assert self._snapshot is not None
        assert self._begun is not None
        self._batches = self._batches[self._begun - self._snapshot.step :]
        self._snapshot, self._begun = SavedStates(self._begun, states), None
        held_up = max(seconds.held_up, self._pause_seconds)
        self._taken_at, self._apart = self._begun_at, max(held_up / SHARE, seconds.busy / BUSY)
        self.snapshot_seconds += held_up

    @property
    def is_behind(self) -> bool:
        """Whether a state of now would save steps: results were given since the last snapshot."""
        snapshot = self._snapshot
        return snapshot is not None and self._why_not is None and snapshot.step < self.given

    @property
    def seconds_since(self) -> float:
        """Since the last snapshot was begun."""
        return self._clock() - self._taken_at

    def take_over(self, states: Mapping[str, State]) -> None:
        """What a replica that is left holds now, before the step whose result is given next."""
        _, self._batches = self.since_snapshot()
        self._snapshot = SavedStates(self.given, states)

    def give_up(self, why_not: str | None = None) -> None:
        """The snapshot that was begun will not come; with a reason, none will."""
        self._begun = None
        self._why_not = self._why_not or why_not

    @property
    def warning(self) -> str | None:
        """What people should know of a run that could heal, and takes no snapshots."""
        if self._why_not is None or not self.heals:
            return None
        return f"no snapshots: a run that loses what has learnt ends ({self._why_not})"

    # --- when lanes are lost ----------------------------------------------------------------------

    def back_to(self, error: BaseException) -> SavedStates:
        """What to go back to now that lanes are lost; `error` is how this was heard of.

        Raises:
            RunFailed: there is no way back.
        """
        if self._snapshot is None:
            raise RunFailed(
                f"{error}\nthere is no snapshot of what was learnt: {self._why_not}; "
                "`--resume` goes on from the last checkpoint"
            ) from error
        self._paused_at = None
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
