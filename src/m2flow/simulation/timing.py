"""`Timing`: how long each thing takes in a simulation, in virtual seconds, and how large it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from m2flow.engine.messages import Event, ExportWeights, InstallWeights, LaneCommand, RunFinish
from m2flow.flow.graph import StageNode


@dataclass(frozen=True, slots=True)
class Admitted:
    """What a streaming call makes of items that come to it.

    Attributes:
        pause: seconds in which nothing at work in the call grows, while they are taken in.
        needs: for each output item, in order, how many units it has to grow by.
    """

    pause: float
    needs: Sequence[float]


class Timing:
    """Nothing takes time and nothing is known; a subclass overrides what does and what is.

    In a streaming call all output items at work grow alike, each by one unit in `round` seconds;
    an item is finished when it has grown by what it needs.

    Attributes:
        has_links: whether items that cross lanes take time, so that `transfer` need be asked.
    """

    has_links: bool = False

    def dispatch(self, command: LaneCommand) -> float:
        """From a command to the moment at which its lane takes it up, if the lane is idle."""
        return 0.0

    def call(
        self, node: StageNode, step: int, lanes: Sequence[int], shares: Sequence[Sequence[int]]
    ) -> float:
        """A call of a stage: the input items of each lane of the replica."""
        return 0.0

    def elsewhere(self, node: StageNode, lane: int) -> float:
        """The share of a call that passes elsewhere, so that its lane could do other work."""
        return 0.0

    def admit(self, node: StageNode, step: int, lane: int, items: Sequence[int]) -> Admitted:
        """Input items come to a streaming call together."""
        return Admitted(0.0, [0.0] * (len(items) * node.expands))

    def round(self, node: StageNode, lane: int, running: int) -> float:
        """Seconds in which each of so many output items at work in a call grows by one unit."""
        return 1.0

    def slots(self, node: StageNode, lane: int) -> int | None:
        """The most output items that a streaming call works on at once; None for no limit."""
        return None

    def control(self, events: Sequence[Event]) -> float:
        """Seconds of the controller until it has handled events that come together.

        Events that come meanwhile wait.
        """
        return 0.0

    def hands_on(self, node: StageNode, finished: int, running: int) -> bool:
        """Whether a streaming call hands its finished items on while so many are at work."""
        return True

    def finish(self, node: StageNode, command: RunFinish) -> float:
        """The `finish` of a mini-batch on all lanes of the worker."""
        return 0.0

    def publish(self, command: ExportWeights | InstallWeights, lane: int) -> float:
        """A lane's part in an export or an install."""
        return 0.0

    def move(self, worker: str, what: str, lane: int) -> float:
        """Offload or onload of a worker on one lane."""
        return 0.0

    def transfer(self, producer: int, source: int, target: int, items: int) -> float:
        """So many items of a producer come from one lane to another."""
        return 0.0

    def item_bytes(self, node: StageNode) -> int:
        """Size of one output item."""
        return 0

    def leaves(self, node: StageNode, step: int, item: int) -> bool:
        """Whether an item leaves its loop now that this member has worked on it."""
        return True

    def said_length(self, producer: int, step: int, item: int) -> float:
        """What is said of an item where a stage that reads it declares a length."""
        return 0.0
