"""Lanes of a toy that hear and say things in any order, twice, late, and that are lost.

An oracle beside the simulation: it knows nothing of time. Each lane has a queue of orders and the
payloads that it holds; what happens next is drawn. Lanes are lost alone or with all of their
machine, at once or with a line that is half open, so that they go on and nobody hears of it; the
launcher is lost too, and goes on from its last checkpoint with what a slow disk has kept of the
rollouts. The toy asserts that every payload is read from a lane that holds it, that versions grow
and none is too old, and counts which units were folded into which lane's state.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable
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
    Recalled,
    ReleaseItems,
    RunCall,
    RunFinish,
    StepSubmitted,
    Tick,
)
from m2flow.flow import SOURCE, StageNode
from m2flow.flow.rollouts import rollout_stages
from tests.engine.random_cases import Case, SeededCosts, unit_items

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
    unheard: list[Event] = field(default_factory=list)
    """What its last process has said on a line that was half open."""


@dataclass
class Wishes:
    """How often things go wrong, each a chance at every turn.

    Attributes:
        twice, late: an event is heard twice, or again much later.
        lose: a lane is lost.
        half_open: of those, with a line that is half open.
        machine: of those, with the other lanes of its machine, which has two.
        launcher: the launcher is lost, twice at most.
        slow: share of the lanes that get a turn once in eight only.
        most_lost: lanes that are lost, at most.
    """

    twice: float = 0.0
    late: float = 0.0
    lose: float = 0.0
    half_open: float = 0.0
    machine: float = 0.0
    launcher: float = 0.0
    slow: float = 0.0
    most_lost: int = 3


ANYTHING = Wishes(
    twice=0.2, late=0.1, lose=0.03, half_open=0.4, machine=0.3, launcher=0.004, slow=0.3
)
SCHEDULES = (
    Wishes(twice=0.3, late=0.1),
    Wishes(twice=0.3, late=0.1, lose=0.01),
    Wishes(twice=0.3, late=0.1, lose=0.1),
    Wishes(late=0.2, lose=0.05, half_open=0.8),
    Wishes(lose=0.03, machine=0.8),
    Wishes(launcher=0.02),
    ANYTHING,
)
"""What may go wrong in many schedules."""


class Toy:
    """Plays one case; `run` gives the reason if the engine gave it up as it may, or None."""

    def __init__(self, case: Case, wishes: Wishes, seed: int) -> None:
        self.case, self.graph, self.wishes = case, case.graph, wishes
        self.dice = random.Random(seed)
        self.costs: SeededCosts = case.costs()
        self.ended: list[int] = []
        self.num_lost = self.num_launchers = 0
        self.saved, self.made = 0, dict[tuple[int, int], set[int]]()
        """The next step after the last checkpoint, and rollouts by step and stage."""
        self.slow = {x.id for x in case.plan.lanes if self.dice.random() < wishes.slow}
        self.rollouts = {one.node: one.members for one in rollout_stages(case.graph)}
        self._begin(0)

    def _begin(self, first_step: int) -> None:
        """A launcher starts, and all lanes with it."""
        self.engine = Engine(self.case.graph, self.case.plan, first_step, heal=self.wishes.lose > 0)
        self.lanes = {lane.id: ToyLane() for lane in self.case.plan.lanes}
        self.old: list[Event] = []
        self.folds: list[Fold] = []
        self.dropped = set[tuple[int, int]]()
        """By lane and call, what is folded in and dropped again before anything else happens."""
        self.versions = {
            (edge.source, edge.target, lane): first_step
            for edge in self.graph.weight_edges
            for lane in self.case.plan.placements[edge.target].lanes
        }
        """Installed, by source, target and lane; -1 where the lane has been lost since."""
        self.submitted = first_step

    def run(self) -> str | None:
        for _ in range(100_000 if self.slow else 20_000):
            open_steps = self.submitted - len(self.ended)
            reason: str | None = None
            if not open_steps and self.dice.random() < 0.5:
                self.saved = self.submitted
            if self.dice.random() < self.wishes.launcher and self.num_launchers < 2:
                self.lose_launcher()
            elif (
                self.submitted < self.case.num_steps and open_steps <= self.case.plan.max_staleness
            ):
                step, self.submitted = self.submitted, self.submitted + 1
                there = tuple(self.recalled(step))
                reason = self.tell(StepSubmitted(step, self.case.num_items, recalled=there))
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
            self.lose_some(self.dice.choice(sorted(self.lanes)))
            return None
        if self.old and self.dice.random() < self.wishes.late:
            return self.tell(self.dice.choice(self.old))
        lane = self.dice.choice(sorted(self.lanes))
        toy = self.lanes[lane]
        if lane in self.slow and self.dice.random() < 7 / 8:
            return None
        if not toy.up:
            if toy.said:
                return self.hear(toy.said.popleft())
            toy.up = True
            toy.epoch += 1
            self.old += toy.unheard
            toy.unheard.clear()
            self.install_what_was_there(lane)
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

    def lose_some(self, lane: int) -> None:
        """A lane is lost, or its machine is, or the line to it is half open."""
        if self.dice.random() < self.wishes.machine:
            for other in self.lanes:
                if other // 2 == lane // 2:
                    self.lose(other)
        elif self.dice.random() < self.wishes.half_open:
            self.lose(lane, self.dice.randint(0, 12))
        else:
            self.lose(lane)

    def lose(self, lane: int, half_open: int | None = None) -> None:
        """A process ends; what it has said before is heard first, and then its end.

        On a line that is half open the last that it has said is not heard, and it goes on for a
        while.
        """
        toy = self.lanes[lane]
        if not toy.up:
            return
        self.num_lost += 1
        if half_open is not None:
            heard = [toy.said.popleft() for _ in range(self.dice.randint(0, len(toy.said)))]
            for _ in range(half_open):
                self.work(lane, toy)
            toy.unheard = list(toy.said)
            toy.said = deque(heard)
        toy.up, toy.stream = False, None
        toy.orders.clear()
        toy.held.clear()
        toy.owed.clear()
        toy.said.append(LaneLost(lane, "lost in the toy", toy.epoch))

    def lose_launcher(self) -> None:
        """All is gone but the checkpoint, and what the disk has taken of the rollouts."""
        self.num_launchers += 1
        share = self.dice.choice((0.0, 0.3, 0.7, 1.0))
        self.made = {
            key: {item for item in sorted(items) if self.dice.random() < share}
            for key, items in self.made.items()
            if key[0] >= self.saved
        }
        self.ended = [step for step in self.ended if step < self.saved]
        self._begin(self.saved)

    def recalled(self, step: int) -> list[Recalled]:
        """What need not be made in a step; whole units, where the stage does not stream."""
        found = []
        for index in self.rollouts:
            node, items = self.graph.nodes[index], self.made.get((step, index), set())
            if node.loop is None and not node.streaming:
                size = unit_items(node, self.case.num_items) * node.expands
                counts = Counter(item // size for item in items)
                items = {item for item in items if counts[item // size] == size}
            if items and self.num_launchers:
                lag = self.dice.randint(0, min(step, self.case.plan.max_staleness))
                found.append(Recalled(index, step - lag, tuple(sorted(items))))
        return found

    def tell(self, *events: Event) -> str | None:
        for event in events:
            if isinstance(event, LaneLost) and not self.engine._is_late(event):
                self.void(event.lane)
                self.versions |= {key: -1 for key in self.versions if key[2] == event.lane}
        for command in self.engine.handle(Tick(0.0, judge=False), *events):
            match command:
                case FailRun(message=message):
                    assert UNSAVABLE in message, message
                    return message
                case CompleteStep():
                    self.complete(command)
                case InstallWeights(source=source, target=target, lanes=(lane,)):
                    last = self.versions[source, target, lane]
                    assert command.version >= last, f"{target} goes back to version {last}"
                    self.versions[source, target, lane] = command.version
                    self.order(lane, command)
                case DropFolded():
                    self.drop(command)
                case (
                    AbortCall()
                    | ReleaseItems()
                    | RunCall()
                    | FeedCall()
                    | RunFinish()
                    | ExportWeights()
                ):
                    self.order_all(command.lanes, command)
                    if isinstance(command, RunCall | FeedCall):
                        self.check_versions(command)
        return None

    def drop(self, command: DropFolded) -> None:
        """Lanes drop what they have folded in, and what calls before this in their queues will."""
        where = command.step, command.node
        for lane in command.lanes:
            assert lane not in self.engine._state.lost, "an order for a lost lane"
            self.void(lane, where)
            self.dropped |= {
                (lane, order.call)
                for order in self.lanes[lane].orders
                if isinstance(order, RunCall) and (order.step, order.node) == where
            }

    def install_what_was_there(self, lane: int) -> None:
        """A lane that is up again has its weights installed before anybody hears of it."""
        for (source, target), version in self.engine.weights_on(lane).items():
            if version is not None:
                self.versions[source, target, lane] = version

    def check_versions(self, command: RunCall | FeedCall) -> None:
        """The weights that a call runs on are installed, and fresh enough."""
        worker = self.graph.nodes[command.node].worker
        for (_, target, lane), version in self.versions.items():
            if target == worker and lane in command.lanes:
                assert version >= max(0, command.step - self.case.plan.max_staleness)

    def void(self, lane: int, only: tuple[int, int] | None = None) -> None:
        """What a lane has folded in since the last mini-batch is gone; of one stage, or of all."""
        for fold in self.folds:
            state = self.engine.steps.get(fold.call.step)
            if state is None or fold.lane != lane or self.is_committed(fold.call):
                continue
            if only is None or only == (fold.call.step, fold.call.node):
                ledger = state.ledgers[fold.call.node]
                size = ledger.unit_items
                fold.items = [i for i in fold.items if ledger.window_of(i // size) < ledger.window]

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
                    begun = self.dice.random() < 0.5
                    toy.said.append(CallFailed(order.call, lane, error, toy.epoch, begun))
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
                elif part.producer != SOURCE:
                    assert self.num_launchers, "nothing is recalled"
                    assert set(part.items) <= self.recalled_items(order.step, part.producer)
                toy.held |= wanted
                items += part.items
        return sorted(items)

    def recalled_items(self, step: int, stream: int) -> set[int]:
        """Of a stream, or of the loop that it leaves; the launcher has them."""
        for first, members in self.rollouts.items():
            if stream in members:
                return self.made.get((step, first), set())
        return set()

    def keep(self, step: int, node: StageNode, items: Iterable[int]) -> None:
        """Rollouts that a lane has made are written; see `lose_launcher`."""
        for first, members in self.rollouts.items():
            if node.index in members:
                self.made.setdefault((step, first), set()).update(items)

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
        if node.accumulates and (lane, command.call) not in self.dropped:
            self.folds.append(Fold(lane, command, items))
        size = self.costs.item_bytes(node) * len(outputs)
        if outputs:
            made = ItemsProduced(command.call, lane, tuple(outputs), size, leaving, epoch=toy.epoch)
            toy.said.append(made)
            self.keep(step, node, outputs if node.loop is None else leaving)
        toy.said.append(CallFinished(command.call, lane, toy.epoch))

    def leaves(self, node: StageNode, step: int, item: int) -> bool:
        spec = self.graph.loops[node.loop or 0]
        return bool(spec.until) and self.dice.random() < 0.4

    def owe(self, toy: ToyLane, node: StageNode, items: list[int]) -> None:
        assert toy.stream is not None
        outputs = [i * node.expands + k for i in items for k in range(node.expands)]
        toy.owed += [item for item in outputs if item not in toy.stream.without]
        self.dice.shuffle(toy.owed)

    def hand_on(self, lane: int, toy: ToyLane, call: RunCall) -> None:
        """Some items of a streaming call are finished; the first lane of a gang tells of them."""
        count = self.dice.randint(1, min(4, len(toy.owed)))
        items, toy.owed = toy.owed[:count], toy.owed[count:]
        if call.lanes[0] == lane:
            toy.held |= {(call.step, call.node, item) for item in items}
            toy.said.append(ItemsProduced(call.call, lane, tuple(items), count, epoch=toy.epoch))
            self.keep(call.step, self.graph.nodes[call.node], items)

    def finish(self, lane: int, toy: ToyLane, command: RunFinish) -> None:
        """All that was folded in anywhere goes into the mini-batch, once all lanes are there."""
        toy.said.append(CallFinished(command.call, lane, toy.epoch))

    # --- ends -------------------------------------------------------------------------------------

    def complete(self, command: CompleteStep) -> None:
        """All items of the step are there, each on the lane that is named."""
        step = command.step
        assert step == len(self.ended), "steps end in order"
        assert command.version == step + 1
        assert max(command.staleness, default=0) <= self.case.plan.max_staleness
        self.ended.append(step)
        output = self.graph.nodes[self.graph.output]
        items = []
        for part in command.output:
            items += part.items
            if part.lane == LAUNCHER:
                assert set(part.items) <= self.recalled_items(step, part.producer)
                continue
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
