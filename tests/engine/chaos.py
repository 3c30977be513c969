"""Lanes of a toy that hear and say things in any order, twice, late, and that are lost.

An oracle beside the simulation: it knows nothing of time. Each lane has a queue of orders and the
payloads that it holds; what happens next is drawn. It asserts that every payload is read from a
lane that holds it, and counts which units were folded into which lane's state.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Any

from m2flow.engine import Engine
from m2flow.engine.messages import (
    LAUNCHER,
    AbortCall,
    CallAborted,
    CallFailed,
    CallFinished,
    Command,
    CompleteStep,
    DropFolded,
    Event,
    ExportWeights,
    FailRun,
    FeedCall,
    Inputs,
    InstallWeights,
    ItemsProduced,
    LaneLost,
    LaneRestarted,
    ReleaseItems,
    RunCall,
    RunFinish,
    StepSubmitted,
    Tick,
)
from m2flow.flow import SOURCE, StageNode
from tests.engine.random_cases import Case, SeededCosts

UNSAVABLE = "cannot be made again"
"""What a run says that has lost what no stage can make once more."""


@dataclass
class Fold:
    """Items that a call has folded in on one lane, and that are not lost."""

    lane: int
    call: RunCall
    items: list[int]


class Missing(Exception):
    """A lane was asked for a payload that is gone with it."""


@dataclass
class ToyLane:
    """A process: its epoch, its orders, what it holds, and the streaming call that it runs."""

    epoch: int = 0
    up: bool = True
    orders: deque[Command] = field(default_factory=deque)
    held: set[tuple[int, int, int]] = field(default_factory=set)
    """(step, producer, item)"""
    stream: RunCall | None = None
    owed: list[int] = field(default_factory=list)
    """Output items of the streaming call that are still to be handed on."""
    said: deque[Event] = field(default_factory=deque)
    """What it has said and nobody has heard."""


@dataclass
class Wishes:
    """How often things go wrong, each a chance at every turn."""

    twice: float = 0.0
    late: float = 0.0
    lose: float = 0.0
    most_lost: int = 3


class Toy:
    """Plays one case; `run` gives the reason if the engine gave it up as it may, or None."""

    def __init__(self, case: Case, wishes: Wishes, seed: int) -> None:
        self.case, self.graph, self.wishes = case, case.graph, wishes
        self.dice = random.Random(seed)
        self.costs: SeededCosts = case.costs()
        self.engine = Engine(case.graph, case.plan, heal=wishes.lose > 0)
        self.lanes = {lane.id: ToyLane() for lane in case.plan.lanes}
        self.ended: list[int] = []
        self.old: list[Event] = []
        self.num_lost = 0
        self.folds: list[Fold] = []

    def run(self) -> str | None:
        submitted = 0
        for _ in range(20_000):
            open_steps = submitted - len(self.ended)
            if submitted < self.case.num_steps and open_steps <= self.case.plan.max_staleness:
                reason = self.tell(StepSubmitted(submitted, self.case.num_items))
                submitted += 1
            elif len(self.ended) == self.case.num_steps:
                return None
            else:
                reason = self.turn()
            if reason is not None:
                return reason
        raise AssertionError("it goes on for ever")

    def turn(self) -> str | None:
        """Something happens."""
        if self.num_lost < self.wishes.most_lost and self.dice.random() < self.wishes.lose:
            return self.lose(self.dice.choice(sorted(self.lanes)))
        if self.old and self.dice.random() < self.wishes.late:
            return self.tell(self.dice.choice(self.old))
        lane = self.dice.choice(sorted(self.lanes))
        toy = self.lanes[lane]
        if not toy.up:
            if toy.said:
                return self.hear(toy.said.popleft())
            toy.up = True
            toy.epoch += 1
            again = LaneRestarted(lane, toy.epoch)
            return self.tell(*[again] * self.dice.choice((1, 2)))
        if toy.said and self.dice.random() < 0.5:
            event = toy.said.popleft()
            self.old.append(event)
            return self.hear(event)
        self.work(lane, toy)
        return None

    def hear(self, event: Event) -> str | None:
        """Tell the engine what a lane has said, once or twice."""
        if isinstance(event, CallFailed):  # a driver looks for lanes that are lost first
            for lane, other in self.lanes.items():
                while not other.up and other.said and lane != event.lane:
                    if (reason := self.hear(other.said.popleft())) is not None:
                        return reason
        return self.tell(*[event] * (2 if self.dice.random() < self.wishes.twice else 1))

    def lose(self, lane: int) -> str | None:
        """A process ends; what it has said before is heard first, and then its end."""
        toy = self.lanes[lane]
        if not toy.up:
            return None
        self.num_lost += 1
        toy.up, toy.stream = False, None
        toy.orders.clear()
        toy.held.clear()
        toy.owed.clear()
        toy.said.append(LaneLost(lane, "lost in the toy", toy.epoch))
        return None

    def tell(self, *events: Event) -> str | None:
        for event in events:
            if isinstance(event, LaneLost) and not self.engine._is_late(event):
                self.void(event.lane)
        for command in self.engine.handle(Tick(0.0, judge=False), *events):
            match command:
                case FailRun(message=message):
                    assert UNSAVABLE in message, message
                    return message
                case CompleteStep():
                    self.complete(command)
                case InstallWeights(lanes=(lane,)):
                    self.order(lane, command)
                case (
                    AbortCall()
                    | DropFolded()
                    | ReleaseItems()
                    | RunCall()
                    | FeedCall()
                    | RunFinish()
                    | ExportWeights()
                ):
                    self.order_all(command.lanes, command)
        return None

    def void(self, lane: int, only: tuple[int, int] | None = None) -> None:
        """What a lane has folded in since the last mini-batch is gone; of one stage, or of all."""
        for fold in self.folds:
            state = self.engine.steps.get(fold.call.step)
            if state is None or fold.lane != lane or self.is_committed(fold.call):
                continue
            if only is None or only == (fold.call.step, fold.call.node):
                ledger = state.ledgers[fold.call.node]
                size = ledger.num_items // ledger.node.minibatches
                fold.items = [i for i in fold.items if i // size < ledger.window]

    def is_committed(self, fold: RunCall) -> bool:
        """Whether a lane has ended its part of the `finish` that a call's items are part of."""
        return any(
            isinstance(call.command, RunFinish)
            and (call.command.node, call.step) == (fold.node, fold.step)
            and not call.withdrawn
            and len(call.running) < len(call.command.lanes)
            for call in self.engine.calls.values()
        )

    def order_all(self, lanes: tuple[int, ...], command: Command) -> None:
        for lane in lanes:
            self.order(lane, command)

    def order(self, lane: int, command: Command) -> None:
        """What is sent to a process that is gone is lost."""
        assert lane not in self.engine._state.lost, "an order for a lost lane"
        if self.lanes[lane].up:
            self.lanes[lane].orders.append(command)

    # --- lanes ------------------------------------------------------------------------------------

    def work(self, lane: int, toy: ToyLane) -> None:
        """A lane takes up an order, or goes on with its streaming call."""
        if toy.orders and (toy.stream is None or self.dice.random() < 0.5):
            self.take_up(lane, toy, toy.orders.popleft())
        elif toy.stream is not None and self.gang_is_there(toy, toy.stream):
            call = toy.stream
            if toy.owed:
                self.hand_on(lane, toy, call)
            else:
                toy.stream = None
                toy.said.append(CallFinished(call.call, lane, toy.epoch))

    def gang_is_there(self, toy: ToyLane, call: RunCall) -> bool:
        """Whether all lanes of a streaming call have taken up what came; they agree on it.

        They end together, too: the first one first.
        """
        first = self.lanes[call.lanes[0]]
        if first is not toy and (not first.up or first.stream is call):
            return False
        return not any(
            getattr(order, "call", None) == call.call
            for lane in call.lanes
            for order in self.lanes[lane].orders
        )

    def take_up(self, lane: int, toy: ToyLane, order: Command) -> None:
        match order:
            case ReleaseItems(step=step, producer=producer, items=items):
                toy.held -= {(step, producer, item) for item in items}
            case RunCall():
                try:
                    self.run_call(lane, toy, order)
                except Missing as error:
                    toy.said.append(CallFailed(order.call, lane, error, toy.epoch))
            case DropFolded(node=node, step=step):
                self.void(lane, (step, node))
            case FeedCall():
                if toy.stream is not None and toy.stream.call == order.call:
                    try:
                        items = self.read(lane, toy, order, order.inputs)
                    except Missing as error:
                        toy.stream, toy.owed = None, []
                        toy.said.append(CallFailed(order.call, lane, error, toy.epoch))
                        return
                    self.owe(toy, self.graph.nodes[order.node], items)
            case AbortCall(call=call):
                if toy.stream is not None and toy.stream.call == call:
                    toy.stream, toy.owed = None, []
                toy.said.append(CallAborted(call, lane, toy.epoch))
            case RunFinish():
                self.finish(lane, toy, order)
            case ExportWeights(call=call) | InstallWeights(call=call):
                toy.said.append(CallFinished(call, lane, toy.epoch))

    def read(self, lane: int, toy: ToyLane, order: Any, inputs: tuple[Inputs, ...]) -> list[int]:
        """Fetch what a call reads; every part from the lane that the command names."""
        items: list[int] = []
        for parts in inputs[order.lanes.index(lane)]:
            items = []
            for part in parts:
                wanted = {(order.step, part.producer, item) for item in part.items}
                if part.lane != LAUNCHER:
                    holder = self.lanes[part.lane]
                    if not wanted <= holder.held:
                        assert self.num_lost, f"lane {part.lane} does not hold {wanted}"
                        raise Missing(f"lane {part.lane} does not hold {wanted - holder.held}")
                else:
                    assert part.producer == SOURCE
                toy.held |= wanted
                items += part.items
        return sorted(items)

    def run_call(self, lane: int, toy: ToyLane, command: RunCall) -> None:
        node, step = self.graph.nodes[command.node], command.step
        items = self.read(lane, toy, command, command.inputs)
        if node.streaming:
            toy.stream = command
            self.owe(toy, node, items)
            return
        outputs = [i * node.expands + k for i in items for k in range(node.expands)]
        toy.held |= {(step, node.index, item) for item in outputs}
        leaving: tuple[int, ...] = ()
        if node.loop is not None:
            leaving = tuple(i for i in outputs if command.fused or self.leaves(node, step, i))
        if node.accumulates:
            self.folds.append(Fold(lane, command, items))
        size = self.costs.item_bytes(node) * len(outputs)
        if outputs:
            made = ItemsProduced(command.call, lane, tuple(outputs), size, leaving, epoch=toy.epoch)
            toy.said.append(made)
        toy.said.append(CallFinished(command.call, lane, toy.epoch))

    def leaves(self, node: StageNode, step: int, item: int) -> bool:
        spec = self.graph.loops[node.loop or 0]
        return bool(spec.until) and self.dice.random() < 0.4

    def owe(self, toy: ToyLane, node: StageNode, items: list[int]) -> None:
        toy.owed += [i * node.expands + k for i in items for k in range(node.expands)]
        self.dice.shuffle(toy.owed)

    def hand_on(self, lane: int, toy: ToyLane, call: RunCall) -> None:
        """Some items of a streaming call are finished; the first lane of a gang tells of them."""
        count = self.dice.randint(1, min(4, len(toy.owed)))
        items, toy.owed = toy.owed[:count], toy.owed[count:]
        if call.lanes[0] == lane:
            toy.held |= {(call.step, call.node, item) for item in items}
            toy.said.append(ItemsProduced(call.call, lane, tuple(items), count, epoch=toy.epoch))

    def finish(self, lane: int, toy: ToyLane, command: RunFinish) -> None:
        """All that was folded in anywhere goes into the mini-batch, once all lanes are there."""
        toy.said.append(CallFinished(command.call, lane, toy.epoch))

    # --- ends -------------------------------------------------------------------------------------

    def complete(self, command: CompleteStep) -> None:
        """All items of the step are there, each on the lane that is named."""
        step = command.step
        self.ended.append(step)
        output = self.graph.nodes[self.graph.output]
        items = []
        for part in command.output:
            items += part.items
            held = {(step, part.producer, item) for item in part.items}
            assert held <= self.lanes[part.lane].held or not self.lanes[part.lane].up
        total = self.case.num_items * output.fanout * output.expands
        assert sorted(items) == list(range(total))
        for node in self.graph.nodes:
            if node.accumulates:
                counts = Counter(
                    item
                    for fold in self.folds
                    if (fold.call.step, fold.call.node) == (step, node.index)
                    for item in fold.items
                )
                wanted = dict.fromkeys(range(self.case.num_items * node.fanout), 1)
                assert dict(counts) == wanted, f"{node.name} folded {counts}"
        for toy in self.lanes.values():
            toy.held = {key for key in toy.held if key[0] != step}


def without_memory(case: Case) -> Case:
    """The same with no limits of memory, which the toy does not play."""
    lanes = tuple(replace(lane, memory_bytes=None) for lane in case.plan.lanes)
    case.plan = replace(case.plan, lanes=lanes)
    return case
