"""Calls that lanes carry out together: streams, stages of a gang, and a `finish` on all lanes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from m2flow.engine.messages import (
    CallAborted,
    CallFailed,
    CallFinished,
    ItemsProduced,
    RunCall,
    RunFinish,
)
from m2flow.flow import StageNode
from tests.runtime.virtual_world import World

if TYPE_CHECKING:
    from tests.runtime.virtual_lanes import LaneProcess


class SharedCall:
    """A call of lanes that begin together; if one of them is lost, the others fail.

    Args:
        world: of the lanes.
        command: the call.
    """

    def __init__(self, world: World, command: RunCall | RunFinish) -> None:
        self.world, self.command, self.lanes = world, command, command.lanes
        self.number = command.call
        world.shared[self.number] = self
        self.there: dict[int, LaneProcess] = {}
        self._broken = self._begun = False

    def join(self, lane: LaneProcess) -> None:
        """A lane has come to the call."""
        self.there[lane.number], lane.shared = lane, self
        if self._broken or any(self.world.lanes[x].closed for x in self.lanes):
            self.lose(-1)
        elif len(self.there) == len(self.lanes):
            self._begun = True
            self.begin()

    def begin(self) -> None:
        """All lanes are there."""
        raise NotImplementedError

    def feed(self, lane: LaneProcess, items: list[int]) -> None:
        """A lane was given more items."""
        raise NotImplementedError

    def over(self) -> None:
        """It has ended on all lanes."""
        self.world.shared.pop(self.number, None)

    def lose(self, lost: int) -> None:
        """A lane is gone: the others hear of it by their connections to it."""
        self._broken = True
        there, self.there = self.there, {}
        for lane in there.values():
            if lane.number != lost:
                error = ConnectionError("connection closed by peer")
                lane.later(self.world.dice.random() * 0.2, partial(self._fails, lane, error))

    def _fails(self, lane: LaneProcess, error: BaseException) -> None:
        if lane.shared is self:
            lane.report(CallFailed(self.command.call, lane.number, error))
            lane.free()

    def fail(self, lane: LaneProcess, error: BaseException) -> None:
        """A lane cannot go on."""
        self.there.pop(lane.number, None)
        self._fails(lane, error)
        self.lose(lane.number)

    def withdraw(self, lane: LaneProcess) -> None:
        """A lane is to stop."""
        self.there.pop(lane.number, None)
        self._broken = True
        lane.report(CallAborted(self.command.call, lane.number))
        lane.free()

    def _alive(self, do: Callable[[], object]) -> None:
        if not self._broken:
            do()


class SharedFinish(SharedCall):
    """A `finish`: what all lanes have folded in is exactly the mini-batch, and none has had it."""

    command: RunFinish

    def begin(self) -> None:
        command, lanes = self.command, list(self.there.values())
        node = self.world.graph.nodes[command.node]
        size = self.world.num_items * node.fanout // node.minibatches
        window = range(command.minibatch * size, (command.minibatch + 1) * size)
        key = command.step, node.index
        counts = Counter(x for lane in lanes for x in lane.folded.get(key, ()) if x in window)
        assert counts == dict.fromkeys(window, 1), f"{node.name} folded {counts} in {window}"
        for lane in lanes:
            lane.folded[key] = [x for x in lane.folded.get(key, ()) if x not in window]
            if (state := lane.states.get(node.worker)) is not None:
                before = command.step * node.minibatches + command.minibatch
                assert state.learnt[node.index] == before, f"{node.name} learns {command} anew"
                state.learnt[node.index] += 1
        self.world.after(self.world.seconds(), partial(self._alive, self._end))

    def _end(self) -> None:
        lanes = list(self.there.values())
        self.over()
        for lane in lanes:
            lane.report(CallFinished(self.command.call, lane.number))
            lane.free()


class SharedStage(SharedCall):
    """A call of a stage whose lanes communicate."""

    command: RunCall

    def begin(self) -> None:
        for lane in self.there.values():
            lane.later(self.world.seconds(), partial(self._alive, partial(self._end, lane)))

    def _end(self, lane: LaneProcess) -> None:
        del self.there[lane.number]
        if not self.there:
            self.over()
        lane.do_call(self.command)


class SharedStream(SharedCall):
    """A streaming call: its lanes take in what all of them were given; the first one tells.

    Args:
        in_pieces: whether items are told before the last.
    """

    command: RunCall

    def __init__(self, world: World, command: RunCall, in_pieces: bool) -> None:
        super().__init__(world, command)
        self._node, self._in_pieces = world.graph.nodes[command.node], in_pieces
        self._given = dict.fromkeys(command.lanes, 0)
        self._batches: list[list[int]] = []
        self._taken = 0
        self._owed: list[int] = []
        self._unsaid: list[ItemsProduced] = []
        self._ticks = False

    def join(self, lane: LaneProcess) -> None:
        self.feed(lane, lane.items_of(self.command))
        super().join(lane)

    def feed(self, lane: LaneProcess, items: list[int]) -> None:
        if self._given[lane.number] == len(self._batches):
            self._batches.append(items)
        self._given[lane.number] += 1
        lane.check_fresh(self.command)
        if self._begun:
            self.begin()

    def begin(self) -> None:
        """Take in what has come to all lanes."""
        while self._taken < min(self._given.values()):
            outputs = outputs_of(self._node, self._batches[self._taken])
            self._owed += [item for item in outputs if item not in self.command.without]
            self.world.dice.shuffle(self._owed)
            self._taken += 1
        if not self._ticks and self._taken:
            self._tick()

    def _tick(self) -> None:
        self._ticks = True
        first = self.there[self.lanes[0]]
        first.later(self.world.seconds(), partial(self._alive, self._go_on))

    def _go_on(self) -> None:
        first, self._ticks = self.there[self.lanes[0]], False
        if self._owed:
            some = self.world.dice.randint(1, min(4, len(self._owed)))
            items, self._owed = self._owed[:some], self._owed[some:]
            self._unsaid += first.made(self.command, self._node, items)
            if self._in_pieces:
                first.report(*self._unsaid)
                self._unsaid = []
            self._tick()
        elif len(set(self._given.values())) == 1:
            self._end(first)

    def _end(self, first: LaneProcess) -> None:
        lanes = list(self.there.values())
        self.over()
        for lane in lanes:
            said = self._unsaid if lane is first else []
            lane.report(*said, CallFinished(self.command.call, lane.number))
            lane.free()


def outputs_of(node: StageNode, items: Sequence[int]) -> list[int]:
    return [item * node.expands + k for item in items for k in range(node.expands)]
