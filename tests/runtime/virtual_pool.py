"""A real `LanePool`, `RayCarrier` and `Run` on lanes under a virtual clock.

What is put in their place is what touches the world: sockets, Ray, processes, payloads, the clock.
"""

from __future__ import annotations

import selectors
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, cast

from m2flow.engine.messages import CompleteStep, Event
from m2flow.engine.plan import LaneSpec, Plan
from m2flow.errors import RunFailed
from m2flow.flow import Batch
from m2flow.runtime.driver import (
    carrier,
    loading,
    mending,
    moving,
    pool,
    recovery,
    run,
    runner,
    snapshots,
    standing,
    starting,
    supervision,
)
from m2flow.runtime.driver.carrier import RayCarrier
from m2flow.runtime.driver.journal import Journal
from m2flow.runtime.driver.methods import STEP, Methods, Plans
from m2flow.runtime.driver.pool import LanePool
from m2flow.runtime.driver.processes import START_TRIES
from m2flow.runtime.driver.recovery import Recovery
from m2flow.runtime.driver.run import Run
from m2flow.runtime.driver.supervision import Supervision
from m2flow.runtime.lane import frames
from m2flow.runtime.lane.exchange import ItemsKey
from m2flow.runtime.lane.orders import STATES
from m2flow.runtime.lane.reports import Report
from m2flow.runtime.transport.peering import PeerLost
from tests.runtime.virtual_lanes import LaneProcess, VirtualLine
from tests.runtime.virtual_world import World

TIMED = (
    carrier, loading, mending, moving, pool, recovery, run, runner, snapshots, standing, starting,
    supervision,
)  # fmt: skip
"""Modules that look at the clock."""

ENDED = "the launcher has ended it"


class Selector:
    """Waits in virtual time for lines that have something to say."""

    def __init__(self, world: World) -> None:
        self.world, self.woken = world, False
        self._numbers: dict[VirtualLine, int] = {}
        self._news: dict[VirtualLine, None] = {}

    def register(self, line: VirtualLine, _: int, number: int) -> None:
        self._numbers[line], line.on_news = number, self._hear

    def _hear(self, line: VirtualLine) -> None:
        if line in self._numbers:
            self._news[line] = None

    def unregister(self, line: VirtualLine) -> None:
        del self._numbers[line]
        self._news.pop(line, None)

    def wake(self, _: bytes) -> None:
        self.woken = True

    def select(self, seconds: float) -> list[tuple[Any, int]]:
        until = self.world.now + seconds
        while not (self._news or self.woken) and self.world.advance(until):
            pass
        news, self._news = list(self._news), {}
        heard = [(SimpleNamespace(data=self._numbers[line]), selectors.EVENT_READ) for line in news]
        if self.woken:
            self.woken = False
            heard.append((SimpleNamespace(data=None), selectors.EVENT_READ))
        return heard


class Starting:
    """A process on its way up: what Ray's `ready` is to those who wait for it."""

    def __init__(self, world: World, lane: int) -> None:
        self.world, self.done = world, False
        self.fails = world.is_gone(lane) or world.dice.random() < world.faults.stillborn
        self._then: list[Callable[[object], None]] = []
        world.struck[lane] += self.fails
        world.failed_starts[lane] += self.fails
        world.after(world.dice.random() * 3, self._up)

    def _up(self) -> None:
        self.done = True
        for then in self._then:
            then(None)

    def future(self) -> Starting:
        return self

    def add_done_callback(self, then: Callable[[object], None]) -> None:
        self._then.append(then)


class VirtualProcesses:
    """As `LaneProcesses`, of lanes that are all of the launcher's process."""

    node = 0

    def __init__(self, world: World, lanes: Sequence[LaneSpec]) -> None:
        self.world, self.lanes = world, tuple(lanes)
        self.addresses: dict[int, Any] = {}
        self._awaited: dict[int, Starting] = {}
        self.spares = SimpleNamespace(hasten=lambda lanes, node: None)

    def bring_up(self, lanes: Sequence[LaneSpec]) -> dict[int, VirtualLine]:
        if gone := self.without_machine([lane.id for lane in lanes]):
            raise RunFailed(f"the machine of lane {min(gone)} is gone")
        self.world.sleep(self.world.dice.random())
        if self.world.dice.random() < self.world.faults.stillborn:
            for lane in lanes:  # each that was to be started again, but those ended for the others
                before = self.world.lanes.get(lane.id)
                lost = before is None or before.line.silent or before.reason != ENDED
                self.world.struck[lane.id] += lost
                self.world.failed_starts[lane.id] += START_TRIES
            raise RunFailed(f"lanes have not come up in {START_TRIES} tries")
        return {lane.id: self._process(lane.id) for lane in lanes}

    def _process(self, lane: int) -> VirtualLine:
        self.kill([lane])
        self.world.lanes[lane] = LaneProcess(self.world, lane)
        self.addresses[lane] = SimpleNamespace(
            node=self.world.nodes[lane], peer=None, meeting_port=None, host="", process_id=0
        )
        return self.world.lanes[lane].line

    def kill(self, lanes: Collection[int]) -> None:
        for lane in lanes:
            if lane in self.world.lanes:
                self.world.lanes[lane].die(ENDED)

    def known_end(self, lane: int, seconds: float = 0.0) -> str | None:
        return self.world.lanes[lane].reason or None

    def without_machine(self, lanes: Collection[int]) -> set[int]:
        return {lane for lane in lanes if self.world.is_gone(lane)}

    def begin(self, lane: LaneSpec) -> Starting:
        return Starting(self.world, lane.id)

    def meet(self, lane: int, started: Starting) -> VirtualLine:
        if started.fails:
            raise OSError("it has ended before it was up")
        return self._process(lane)

    def give_up(self, lane: int) -> None:
        self.kill([lane])
        self._awaited.pop(lane, None)
        self.addresses.pop(lane, None)

    def call_back(self, lane: LaneSpec) -> bool:
        if self.world.is_gone(lane.id):
            return False
        self._awaited[lane.id] = self.begin(lane)
        return True

    @property
    def awaited(self) -> Collection[int]:
        return self._awaited.keys()

    @property
    def has_news(self) -> bool:
        return any(started.done for started in self._awaited.values())

    def take_in(self) -> dict[int, VirtualLine]:
        lines = {}
        for lane, started in list(self._awaited.items()):
            if started.done:
                del self._awaited[lane]
                if started.fails:
                    self.give_up(lane)
                else:
                    lines[lane] = self._process(lane)
        return lines


class VirtualExchange:
    """The launcher's exchange: it fetches, and packs nothing."""

    link = None

    def __init__(self, world: World) -> None:
        self.world = world

    def shared(self, state: Any) -> Any:
        return state

    def wrap(self, batch: Batch, lane: int, *, same_node: bool) -> Batch:
        return batch

    def fetch_later(
        self,
        lane: int,
        key: ItemsKey,
        seconds: float,
        *,
        then: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> Future[Batch]:
        fetched, holder = Future[Batch](), self.world.lanes[lane]
        states = key.step == STATES
        after = self.world.disk_seconds() if states else self.world.seconds()
        self.world.after(after, partial(self._fetch, holder, key, fetched, then))
        return fetched

    def _fetch(
        self,
        holder: LaneProcess,
        key: ItemsKey,
        fetched: Future[Batch],
        then: Callable[[Batch], Batch],
    ) -> None:
        held = {(key.step, key.producer, item) for item in key.items}
        if not holder.up or (key.step != STATES and not held <= holder.held):
            fetched.set_exception(PeerLost(f"lane {holder.number} has not got it"))
        elif key.step == STATES:
            if key.producer in holder.saved:  # or the launcher has let go of it
                state = holder.saved[key.producer].clone()
                fetched.set_result(then(Batch({"state": [{"part": state}]})))
        else:
            fetched.set_result(self.world.batch(key.producer, key.step, key.items))

    def introduce(self, peers: object) -> None:
        pass

    def forget(self, lane: int) -> None:
        pass


class VirtualPool(LanePool):
    """The lanes of a world."""

    def __init__(self, world: World, lanes: Sequence[LaneSpec]) -> None:
        selector = Selector(world)
        self.virtual, self.lanes, self._link, self._lanes_per_process = world, tuple(lanes), None, 1
        self._folder = cast("Any", SimpleNamespace(name="virtual"))
        self._selector = cast("Any", selector)
        self._woken = cast("Any", SimpleNamespace(recv=lambda _: b""))
        self._waker = cast("Any", SimpleNamespace(send=selector.wake))
        self.exchange = cast("Any", VirtualExchange(world))
        self.processes = cast("Any", VirtualProcesses(world, lanes))
        self._lines, self._awaited, self.lost, self.missing = {}, {}, {}, {}
        self._holding, self._inbox, self._next_number, self._checked = set(), deque(), 0, world.now
        self.spoiled, self.world, self.num_worlds, self.keeper = None, (), 0, 0
        self.uses_groups = False
        self._attach(self.processes.bring_up(self.lanes))


class VirtualCarrier(RayCarrier):
    """Says some of what lanes report twice, or again much later."""

    def __init__(self, lanes: VirtualPool, *given: Any, **more: Any) -> None:
        lanes.virtual.plan = given[1]
        lanes.virtual.shared.clear()
        self._old: list[Event] = []
        super().__init__(lanes, *given, **more)

    def wait(self, seconds: float) -> list[Report]:
        reports, world = [], cast("VirtualPool", self.pool).virtual
        for report in super().wait(seconds):
            reports.append(report)
            if report.event is None or getattr(report.event, "call", 1) < 0:
                continue
            self._old.append(report.event)
            if world.dice.random() < world.faults.twice:
                reports.append(Report(report.event))
        if self._old and world.dice.random() < world.faults.late:
            reports.append(Report(world.dice.choice(self._old)))
        return reports

    def collect(self, flow: str, command: CompleteStep) -> Future[Batch]:
        cast("VirtualPool", self.pool).virtual.check_complete(command)
        return super().collect(flow, command)


class VirtualJournal(Journal):
    """The journal on the disk of a world."""

    def __init__(self, world: World) -> None:
        self.world, self.folder, self.max_bytes = world, cast("Any", "virtual"), 1 << 30

    def _files(self) -> Iterator[tuple[int, Any]]:
        for number, frame in enumerate(self.world.disk):
            yield frame.step, (number, frame)

    def forget_before(self, step: int) -> None:
        self.world.disk = [frame for frame in self.world.disk if frame.step >= step]


class CrashedRun(Run):
    """A run under the clock of a world."""

    def _new_recovery(self, first_step: int, snapshot_every: int | None) -> Recovery:
        assert snapshot_every is None
        every = cast("VirtualPool", self._pool).virtual.dice.choice((None, None, 1, 2))
        books = super()._new_recovery(first_step, every)
        books._clock, books._taken_at = self._now, self._now()
        return books

    def _now(self) -> float:
        return cast("VirtualPool", self._pool).virtual.now

    def _save_what_is_left(self, busy: Collection[int]) -> None:
        before = self._recovery.back_to(RunFailed("")).step if self._recovery.is_behind else -1
        super()._save_what_is_left(busy)
        if self._recovery.back_to(RunFailed("")).step > before >= 0:
            cast("VirtualPool", self._pool).virtual.events["states of replicas taken over"] += 1

    def _take_up(self, plans: Plans, carrier: Any, next_steps: Mapping[str, int]) -> None:
        super()._take_up(plans, carrier, next_steps)
        for one in self._runners.values():
            one._clock, one._attended = self._now, self._now()


def launched(
    world: World,
    lanes: Sequence[LaneSpec],
    plan: Plan,
    workers: Mapping[str, Any],
    first_step: int,
    restarts: int,
    elastic: Any,
) -> CrashedRun:
    """A run of a world's flow, as `launch` starts it."""
    virtual = VirtualPool(world, lanes)
    methods = Methods({STEP: world.graph}, {STEP: world.num_items}, collective=frozenset(workers))
    watch = Supervision(virtual, restarts, elastic, lambda: world.now)

    def load(plans: Plans) -> RayCarrier:
        return VirtualCarrier(
            virtual, methods.graphs, plans.everything, workers, plans.by_method, first_step,
            load_seconds=1e6,
        )  # fmt: skip

    plans, loaded, losses = starting._loaded(virtual, methods, methods.planned(plan), load, watch)
    return CrashedRun(
        methods, plans, workers, loaded, first_step, pool=virtual, load_deadline_seconds=1e6,
        supervision=watch, losses=losses,
    )  # fmt: skip


@contextmanager
def virtual_time(world: World) -> Iterator[None]:
    """Everything in the driver looks at a world's clock, and touches nothing outside of it."""
    clock = SimpleNamespace(
        monotonic=lambda: world.now, time=lambda: world.now, perf_counter=lambda: world.now
    )
    there: list[tuple[ModuleType, str, Any]] = [(module, "time", clock) for module in TIMED]
    there += [
        (loading, "cloudpickle", SimpleNamespace(dumps=lambda _: b"")),
        (mending, "ray", SimpleNamespace(wait=_wait)),
        (supervision, "LOOK_SECONDS", 0.5),
        (pool, "to_bytes", _same),
        (pool, "from_bytes", _same),
        (pool, "sweep", lambda _: None),
        (run, "gc", SimpleNamespace(freeze=lambda: None)),
        (carrier, "RayCarrier", VirtualCarrier),
        (frames, "read_frames", lambda file: [file[1]]),
    ]
    before = [getattr(module, name, None) for module, name, _ in there]
    for module, name, value in there:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(there, before, strict=True):
            setattr(module, name, value)


def _wait(started: Sequence[Starting], timeout: float) -> tuple[list[Starting], list[Starting]]:
    done = [one for one in started if one.done]
    return done, [one for one in started if not one.done]


def _same(message: Any) -> Any:
    return message
