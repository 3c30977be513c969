"""Lanes under a virtual clock, as their processes behave towards the launcher and each other.

A `LaneProcess` takes up real orders (`m2flow.runtime.lane.orders`) and gives real reports. What a
worker has learnt is a count of the mini-batches of each stage that it has gone through, and the
versions installed in it: enough to assert, on the lane, that every item is folded in once, into
what has learnt all before and no more, that weights are what their version says, fresh enough, and
never older than those before, and that the lane's limit of memory is kept.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from m2flow.engine.messages import (
    LAUNCHER,
    AbortCall,
    CallAborted,
    CallFailed,
    CallFinished,
    Event,
    ExportWeights,
    FeedCall,
    InstallWeights,
    ItemsProduced,
    MoveState,
    RunCall,
    RunFinish,
)
from m2flow.flow import StageNode
from m2flow.flow.rollouts import Rollouts
from m2flow.runtime.lane.host import share_of
from m2flow.runtime.lane.orders import (
    CallMethod,
    DropStep,
    Execute,
    KeepRollouts,
    Load,
    Loaded,
    Loading,
    MethodResult,
    Order,
    Probe,
    Reports,
    Save,
    SaveSeconds,
)
from m2flow.runtime.lane.reports import Report
from m2flow.runtime.transport.frame import LineClosed
from m2flow.runtime.transport.lines import SILENCE_SECONDS
from m2flow.runtime.transport.listening import SILENT_SECONDS
from m2flow.runtime.transport.peering import PeerLost
from m2flow.runtime.weights.exports import Export
from tests.runtime.shared_calls import (
    SharedCall,
    SharedFinish,
    SharedStage,
    SharedStream,
    outputs_of,
)
from tests.runtime.virtual_world import WorkerState, World


class VirtualLine:
    """The launcher's end of the line to a process, and the process's end.

    Attributes:
        silent: nothing comes through any more, and neither end knows.
    """

    unsent = False

    def __init__(self, world: World, lane: LaneProcess) -> None:
        self.world, self.lane, self.silent = world, lane, False
        self.on_news: Callable[[VirtualLine], None] = lambda _: None
        self._heard: deque[Any] = deque()
        self._end: str | None = None
        self._held: list[Order] = []
        self._there = self._here = self._at = world.now

    def hold(self, order: Order) -> None:
        self._held.append(order)

    def flush(self) -> None:
        held, self._held = self._held, []
        for order in held:
            self._there = max(self._there, self.world.now + self._delay())
            self.world.after(self._there - self.world.now, partial(self._arrive, order))

    def _delay(self) -> float:
        return self.world.dice.choice((0.0, 0.001, self.world.dice.random() * 0.05))

    def _arrive(self, order: Order) -> None:
        if not self.silent and self.lane.up:
            self.lane.take(order)

    def say(self, message: object) -> None:
        """The lane says something; its words keep their order."""
        self._here = max(self._here, self.world.now + self._delay())
        self.world.after(self._here - self.world.now, partial(self._hear, message))

    def _hear(self, message: object) -> None:
        if not self.silent:
            self._heard.append(message)
            self.on_news(self)

    def end(self, reason: str) -> None:
        """The process has ended; that is heard after all that it has said."""
        if not self.silent:
            self._here = max(self._here, self.world.now + self._delay())
            self.world.after(self._here - self.world.now, partial(self._ended, reason))

    def _ended(self, reason: str) -> None:
        self._end = self._end or reason
        self.on_news(self)

    def fall_silent(self) -> None:
        """The line is half open from now on; this is noticed when it has been silent for long."""
        self.silent = True
        self.world.after(SILENT_SECONDS, partial(self._ended, "it has been silent"))

    def take(self) -> list[Any]:
        self._at = self.world.now
        if not self._heard and self._end is not None:
            raise LineClosed(self._end)
        heard, self._heard = list(self._heard), deque()
        if self._end is not None:
            self.on_news(self)
        return heard

    def check(self) -> None:
        """Of a lane elsewhere that says nothing it is known in the end that its process is gone."""
        if self.world.now - self._at >= SILENCE_SECONDS:
            self._at = self.world.now
            if not self.lane.up and self.world.nodes[self.lane.number]:
                raise LineClosed(self.lane.reason)

    def close(self) -> None:
        pass


class LaneProcess:
    """One process of a lane.

    Attributes:
        up: whether it runs, whoever knows of it.
        closed: whether its connections have ended, which those at the other end see.
        held: payloads, by (step, producer, item).
        folded: by (step, stage) the items folded in since its last mini-batch.
        saved: by number the states that it keeps for others.
        laid_out: (source, version) of weights that others may have from here.
        shared: the call that it works on together with others.
    """

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number, self.reason = world, number, ""
        self.up, self.closed = True, False
        self.line = VirtualLine(world, self)
        self.states: dict[str, WorkerState] = {}
        self.held: set[tuple[int, int, int]] = set()
        self.folded: dict[tuple[int, int], list[int]] = {}
        self.saved: dict[int, WorkerState] = {}
        self.laid_out: set[tuple[str, int]] = set()
        self.shared: SharedCall | None = None
        self._resident: set[str] = set()
        self._orders: deque[Order] = deque()
        self._busy = self._keeps = False
        self._pace = 8 if number in world.slow else 1
        self._limit: int | None = None

    @property
    def is_heard(self) -> bool:
        """Whether it is up, and its line not half open."""
        return self.up and not self.line.silent

    def die(self, reason: str, *, silently: bool = False) -> None:
        """The process ends; where its machine goes, nobody is told."""
        if not self.up:
            return
        self.up, self.reason = False, reason
        if silently:
            self.line.fall_silent()
            return
        self.closed = True
        self.line.end(reason)
        for call in list(self.world.shared.values()):
            if self.number in call.lanes:
                call.lose(self.number)

    def later(self, seconds: float, do: Callable[[], object]) -> None:
        """Do something later, if the process still runs then."""
        self.world.after(seconds * self._pace, lambda: self.up and do())

    def report(self, *events: Event, exports: tuple[Export, ...] = ()) -> None:
        at = self.world.now
        self.line.say(Reports([Report(event, at=at) for event in events], exports))

    def _answer(self, number: int, value: object, *, raised: bool = False) -> None:
        self.line.say(MethodResult(number, pickle.dumps(value), raised))

    # --- orders -----------------------------------------------------------------------------------

    def take(self, order: Order) -> None:
        """An order has come."""
        call = self.shared
        match order:
            case Execute(command=FeedCall() as command) if call and call.number == command.call:
                self._release(order)
                missing = self._missing(command)
                if missing is None:
                    call.feed(self, self.items_of(command))
                else:
                    call.fail(self, missing)
            case Execute(command=AbortCall(call=number)) if call and call.number == number:
                self._release(order)
                call.withdraw(self)
            case _:
                self._orders.append(order)
                self._go_on()

    def free(self) -> None:
        """The order at hand is done."""
        self._busy, self.shared = False, None
        self._go_on()

    def _go_on(self) -> None:
        while self._orders and not self._busy:
            self._busy = True
            self._carry_out(self._orders.popleft())

    def _carry_out(self, order: Order) -> None:
        world = self.world
        match order:
            case Execute():
                self._release(order)
                self._execute(order)
                return
            case Load(number=number, placed=placed):
                for worker in placed:
                    self.line.say(Loading(number, worker))
                self.later(world.seconds(), partial(self._load, order))
                return
            case Save():
                seconds = world.disk_seconds()
                self.later(seconds, partial(self._save, order, seconds))
                return
            case CallMethod(number=number, worker=worker, method="discard"):
                self._check_memory((worker,))
                for key in self._folded_of(worker):
                    del self.folded[key]
                self._answer(number, None)
            case CallMethod(number=number, worker=worker):
                self._check_memory((worker,))
                self._answer(number, self.states[worker].learnt)
            case Probe(number=number):
                self._answer(number, None)
            case DropStep(step=-1):
                self.saved.clear()
            case DropStep(step=step):
                self.held = {key for key in self.held if key[0] != step}
            case KeepRollouts():
                self._keeps = True
        self._busy = False

    def _load(self, order: Load) -> None:
        states = dict[str, WorkerState]()
        for worker, placed in order.placed.items():
            if order.keep is not None and worker in order.keep:
                states[worker] = self.states[worker]
            elif placed.saved is not None:
                states[worker] = placed.saved["state"][0]["part"].clone()
            elif placed.state is not None:
                there = self.world.lanes[placed.state.lane]
                if not there.up:
                    lost = PeerLost(f"lane {placed.state.lane} is gone")
                    self.line.say(Loaded(order.number, {}, pickle.dumps(lost), self.world.now))
                    self.free()
                    return
                states[worker] = there.saved[placed.state.producer].clone()
            else:
                states[worker] = self.world.as_loaded(worker)
        self.states, self._limit = states, order.memory_bytes
        if order.keep is None:
            self.held.clear()
        self.folded.clear()
        self.laid_out.clear()
        self._resident.clear()
        self._keeps = False
        self.line.say(Loaded(order.number, {}))
        self.free()

    def _folded_of(self, worker: str) -> list[tuple[int, int]]:
        """Keys of what a worker has folded in since its last mini-batch."""
        nodes = self.world.graph.nodes
        return [key for key, some in self.folded.items() if some and nodes[key[1]].worker == worker]

    def _save(self, order: Save, seconds: float) -> None:
        self._check_memory((order.worker,))
        for _, index in self._folded_of(order.worker):
            node = self.world.graph.nodes[index]
            assert not node.has_finish, f"{order.worker} is in the middle of a mini-batch"
        if self.world.dice.random() < self.world.faults.full:
            self.world.events["snapshots without room"] += 1
            self.world.without_room = True
            self._answer(order.number, OSError("no space left on device"), raised=True)
        else:
            self.saved[order.producer] = self.states[order.worker].clone()
            self._answer(order.number, SaveSeconds(seconds, seconds))
        self.free()

    # --- commands ---------------------------------------------------------------------------------

    def _execute(self, order: Execute) -> None:
        command, world = order.command, self.world
        match command:
            case FeedCall():  # it has ended, and leaves the items to the engine
                self.free()
            case AbortCall(call=call):
                self.report(CallAborted(call, self.number))
                self.free()
            case MoveState():
                assert (command.worker in self._resident) == (command.what == "offload")
                self._resident ^= {command.worker}
                self._check_memory(())
                self.later(world.seconds(), self.free)
            case RunCall():
                self._check_memory(self._workers(command), working=True)
                self.check_fresh(command)
                self.later(world.seconds(), partial(self._call, order, command))
            case RunFinish():
                self._check_memory(self._workers(command), working=True)
                self._join(world.shared.get(command.call) or SharedFinish(world, command))
            case ExportWeights():
                self._check_memory((command.source,))
                self.later(world.seconds(), partial(self._export, order, command))
            case InstallWeights(source=source, target=target):
                self._check_memory((source, target) if command.local else (target,))
                self.later(world.seconds(), partial(self._install, order, command))

    def _release(self, order: Execute) -> None:
        for one in order.released:
            self.held -= {(one.step, one.producer, item) for item in one.items}

    def _workers(self, command: RunCall | RunFinish) -> tuple[str, ...]:
        graph, node = self.world.graph, self.world.graph.nodes[command.node]
        if isinstance(command, RunCall) and command.fused and node.loop is not None:
            return tuple(graph.nodes[n].worker for n in graph.loops[node.loop].members)
        return (node.worker,)

    def _check_memory(self, needed: Sequence[str], *, working: bool = False) -> None:
        """Those are resident who are needed, and the lane holds no more than it may."""
        if self._limit is None:
            return
        spots = self.world.plan.placements
        for worker in needed:
            known = worker in self._resident or not spots[worker].state_bytes
            assert known, f"{worker} is not resident on lane {self.number}"
        used = sum(spots[worker].state_bytes for worker in self._resident)
        used += max((spots[worker].working_bytes for worker in needed), default=0) * working
        assert used <= self._limit, f"lane {self.number} holds {used} of {self._limit} bytes"

    def check_fresh(self, command: RunCall | FeedCall) -> None:
        worker = self.world.graph.nodes[command.node].worker
        for source, version in (
            self.states[worker].versions.items() if worker in self.states else ()
        ):
            lag = command.step - version
            assert 0 <= lag <= self.world.plan.max_staleness, f"{worker} is {lag} behind {source}"

    # --- calls of stages --------------------------------------------------------------------------

    def items_of(self, command: RunCall | FeedCall) -> list[int]:
        share = command.inputs[command.lanes.index(self.number)]
        return sorted(item for part in share[0] for item in part.items)

    def _missing(self, command: RunCall | FeedCall) -> PeerLost | None:
        """Bring what a call reads; who does not have it, or is gone."""
        node = self.world.graph.nodes[command.node]
        collective = node.worker in self.states
        for parts in share_of(command, self.number, collective=collective):
            for part in parts:
                wanted = {(command.step, part.producer, item) for item in part.items}
                if part.lane == LAUNCHER:
                    self.held |= wanted
                    continue
                holder = self.world.lanes.get(part.lane)
                if holder is None or not holder.up or not wanted <= holder.held:
                    return PeerLost(f"lane {part.lane} has not got {sorted(wanted)}")
                self.held |= wanted
        return None

    def _call(self, order: Execute, command: RunCall) -> None:
        world, node = self.world, self.world.graph.nodes[command.node]
        missing = self._missing(command)
        if missing is not None:
            after = world.dice.random() * (SILENT_SECONDS if world.gone else 0.5)
            self.later(after / self._pace, partial(self._failed, command.call, missing))
            return
        shared = world.shared.get(command.call)
        if shared is None and node.streaming:
            shared = SharedStream(world, command, order.in_pieces)
        elif shared is None and len(command.lanes) > 1 and node.worker in self.states:
            shared = SharedStage(world, command)
        if shared is None:
            self.later(world.seconds(), partial(self.do_call, command))
        else:
            self._join(shared)

    def _join(self, call: SharedCall) -> None:
        """Come to a call, and look at what has come for it already."""
        call.join(self)
        waiting, self._orders = self._orders, deque()
        for order in waiting:
            self.take(order)

    def _failed(self, call: int, error: BaseException, *, begun: bool = False) -> None:
        self.report(CallFailed(call, self.number, error, begun=begun))
        self.free()

    def do_call(self, command: RunCall) -> None:
        """Make all outputs of a call at once."""
        dice, node = self.world.dice, self.world.graph.nodes[command.node]
        items = self.items_of(command)
        outputs = outputs_of(node, items)
        leaving: tuple[int, ...] = ()
        if node.loop is not None:
            until = bool(self.world.graph.loops[node.loop].until)
            leaving = tuple(x for x in outputs if command.fused or (until and dice.random() < 0.4))
        if node.accumulates:
            self.folded.setdefault((command.step, node.index), []).extend(items)
        said = self.made(command, node, outputs, leaving)
        self.report(*said, CallFinished(command.call, self.number))
        self.free()

    def made(
        self, command: RunCall, node: StageNode, outputs: list[int], leaving: tuple[int, ...] = ()
    ) -> list[ItemsProduced]:
        """Outputs are here; what is to be said of them."""
        if not outputs:
            return []
        world, step = self.world, command.step
        self.held |= {(step, node.index, item) for item in outputs}
        self._keep(step, node, outputs if node.loop is None else list(leaving))
        stream = node.index if node.loop is None else world.graph.loops[node.loop].members[-1]
        lengths: tuple[float, ...] = ()
        if world.graph.length_column(stream) is not None:
            lengths = tuple(world.length(stream, step, item) for item in outputs)
        number, size = self.number, 3 * len(outputs)
        return [ItemsProduced(command.call, number, tuple(outputs), size, leaving, lengths)]

    def _keep(self, step: int, node: StageNode, items: list[int]) -> None:
        """Write rollouts; they are there once the disk has them, if the process lives so long."""
        stage = self.world.rollouts.get(node.index)
        if not self._keeps or stage is None or stage.worker not in self.states or not items:
            return
        version = min(self.states[stage.worker].versions.values())
        frame = Rollouts(step, stage.name, version, self.world.batch(node.index, step, items))
        self.later(self.world.disk_seconds() / self._pace, partial(self.world.disk.append, frame))

    # --- weights ----------------------------------------------------------------------------------

    def _export(self, order: Execute, command: ExportWeights) -> None:
        assert order.sends is not None
        source, version = command.source, command.version
        self.world.check_settled(self.states[source], version)
        oldest = order.sends.oldest
        self.laid_out = {one for one in self.laid_out if one[0] != source or one[1] >= oldest}
        self.laid_out.add((source, version))
        export = Export(source, version, self.number, 1)
        self.report(CallFinished(command.call, self.number), exports=(export,))
        self.free()

    def _install(self, order: Execute, command: InstallWeights) -> None:
        source, target, version = command.source, command.target, command.version
        if command.local:
            self.world.check_settled(self.states[source], version)
        for export in order.exports:
            there = self.world.lanes.get(export.lane)
            if there is None or not there.up or (source, version) not in there.laid_out:
                self._failed(command.call, PeerLost(f"lane {export.lane} has no such weights"))
                return
        versions = self.states[target].versions
        assert version >= versions[source], f"{target} goes back to version {version} of {source}"
        versions[source] = version
        self.report(CallFinished(command.call, self.number))
        self.free()
