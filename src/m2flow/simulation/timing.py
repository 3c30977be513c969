"""What the simulated driver asks of time: how long each thing takes, in virtual seconds.

`Costs` is the short form, one price a stage, for tests. `Timing` is all that a simulation can ask:
who works on what, where, and beside how many others. `Plain` makes a `Timing` of `Costs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from m2flow.engine.messages import Event, ExportWeights, InstallWeights, LaneCommand, RunFinish
from m2flow.flow.graph import StageNode


class Costs(Protocol):
    """How long things take, in virtual seconds, and how large they are."""

    def call(self, node: StageNode, num_items: int) -> float:
        """A call of a stage on so many input items (on one lane of a gang)."""
        ...

    def item(self, node: StageNode, step: int, item: int) -> float:
        """For a streaming stage: how long one output item takes from its start."""
        ...

    def finish(self, node: StageNode) -> float:
        """The `finish` of a mini-batch."""
        ...

    def publish(self, source: str, target: str | None) -> float:
        """Export of the source's weights (no target), or install in the target on one lane."""
        ...

    def move(self, worker: str, what: str) -> float:
        """Offload or onload of a worker on one lane."""
        ...

    def item_bytes(self, node: StageNode) -> int:
        """Size of one output item."""
        ...

    def leaves(self, node: StageNode, step: int, item: int) -> bool:
        """Whether an item leaves its loop now that this member has worked on it."""
        ...


@dataclass(frozen=True, slots=True)
class Admitted:
    """What a streaming call makes of items that come to it.

    Attributes:
        pause: seconds in which nothing at work in the call grows, while they are taken in.
        needs: for each output item, in order, how many units it has to grow by.
    """

    pause: float
    needs: Sequence[float]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Items that one call reads and that lie on another lane."""

    node: StageNode
    step: int
    producer: int
    source: int
    target: int
    items: Sequence[int]


@runtime_checkable
class Timing(Protocol):
    """How long things take where, in virtual seconds, and how large they are.

    In a streaming call all output items at work grow alike, each by one unit in `round` seconds;
    an item is finished when it has grown by what it needs.

    Attributes:
        has_links: whether items that cross lanes take time, so that `transfer` need be asked.
    """

    has_links: bool

    def dispatch(self, command: LaneCommand) -> float:
        """From a command to the moment at which its lane takes it up, if the lane is idle."""
        ...

    def call(
        self, node: StageNode, step: int, lanes: Sequence[int], shares: Sequence[Sequence[int]]
    ) -> float:
        """A call of a stage: the input items of each lane of the replica."""
        ...

    def admit(self, node: StageNode, step: int, lane: int, items: Sequence[int]) -> Admitted:
        """Input items come to a streaming call together."""
        ...

    def round(self, node: StageNode, lane: int, running: int) -> float:
        """Seconds in which each of so many output items at work in a call grows by one unit."""
        ...

    def slots(self, node: StageNode, lane: int) -> int | None:
        """The most output items that a streaming call works on at once; None for no limit."""
        ...

    def control(self, events: Sequence[Event]) -> float:
        """Seconds of the controller until it has handled events that come together.

        Events that come meanwhile wait.
        """
        ...

    def hands_on(self, node: StageNode, finished: int, running: int) -> bool:
        """Whether a streaming call hands its finished items on while so many are at work."""
        ...

    def finish(self, node: StageNode, command: RunFinish) -> float:
        """The `finish` of a mini-batch on all lanes of the worker."""
        ...

    def publish(self, command: ExportWeights | InstallWeights, lane: int) -> float:
        """A lane's part in an export or an install."""
        ...

    def move(self, worker: str, what: str, lane: int) -> float:
        """Offload or onload of a worker on one lane."""
        ...

    def transfer(self, transfer: Transfer) -> float:
        """Items come from one lane to another."""
        ...

    def item_bytes(self, node: StageNode) -> int:
        """Size of one output item."""
        ...

    def leaves(self, node: StageNode, step: int, item: int) -> bool:
        """Whether an item leaves its loop now that this member has worked on it."""
        ...


class Plain:
    """`Costs` as a `Timing`: nothing depends on lanes, and streamed items do not share a lane."""

    has_links: bool = False

    def __init__(self, costs: Costs) -> None:
        self.costs = costs

    def dispatch(self, command: LaneCommand) -> float:
        return 0.0

    def call(
        self,
        node: StageNode,
        step: int,
        lanes: Sequence[int],
        shares: Sequence[Sequence[int]],
    ) -> float:
        return max(self.costs.call(node, len(items)) for items in shares)

    def admit(
        self,
        node: StageNode,
        step: int,
        lane: int,
        items: Sequence[int],
    ) -> Admitted:
        outputs = (item * node.expands + k for item in items for k in range(node.expands))
        return Admitted(0.0, [self.costs.item(node, step, output) for output in outputs])

    def round(self, node: StageNode, lane: int, running: int) -> float:
        return 1.0

    def slots(self, node: StageNode, lane: int) -> int | None:
        return None

    def control(self, events: Sequence[Event]) -> float:
        return 0.0

    def hands_on(self, node: StageNode, finished: int, running: int) -> bool:
        return True

    def finish(self, node: StageNode, command: RunFinish) -> float:
        return self.costs.finish(node)

    def publish(self, command: ExportWeights | InstallWeights, lane: int) -> float:
        target = command.target if isinstance(command, InstallWeights) else None
        return self.costs.publish(command.source, target)

    def move(self, worker: str, what: str, lane: int) -> float:
        return self.costs.move(worker, what)

    def transfer(self, transfer: Transfer) -> float:
        return 0.0

    def item_bytes(self, node: StageNode) -> int:
        return self.costs.item_bytes(node)

    def leaves(self, node: StageNode, step: int, item: int) -> bool:
        return self.costs.leaves(node, step, item)
