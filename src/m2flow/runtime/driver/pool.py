"""`LanePool`: lanes on a Ray cluster, started once and used by one run after another.

    with LanePool(parse_lanes("cpu:2")) as pool:
        with m2flow.launch(flow, items_per_step=32, mode="hybrid", lanes=pool) as run: ...

Starting a lane takes seconds (an interpreter, torch); bringing a flow's workers up on lanes that
are there takes as long as the workers do. Process groups are kept from one run to the next.
"""

from __future__ import annotations

import pickle
import selectors
import shutil
import socket
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from m2flow.engine.plan import LaneSpec
from m2flow.errors import RunFailed, Stalled
from m2flow.flow.worker import Isolation
from m2flow.runtime.arguments import check_count, check_seconds
from m2flow.runtime.driver.cluster import RayCluster
from m2flow.runtime.driver.processes import START_SECONDS, LaneProcesses
from m2flow.runtime.driver.template import LaneTemplate, cluster_of
from m2flow.runtime.lane.actor import LAUNCHER, LaneAddress
from m2flow.runtime.lane.exchange import Exchange, name_of
from m2flow.runtime.lane.orders import (
    Close,
    FromLane,
    GoesOn,
    Introduce,
    LaneEnded,
    MethodResult,
    Order,
    Prepare,
    Probe,
    from_bytes,
    to_bytes,
)
from m2flow.runtime.transport.lines import SILENCE_SECONDS, LauncherLine, LineClosed
from m2flow.runtime.transport.measure import pairs_to_measure
from m2flow.runtime.transport.peering import Location
from m2flow.runtime.transport.sweeping import own_folder, sweep
from m2flow.runtime.transport.table import LinkTable

CLOSE_SECONDS = 5.0
"""Longest that lanes may take to close before they are ended."""

FAILED_SECONDS = 1.0
"""Longest that lanes may take to close after a failure: one may be in a call nobody waits for."""

CLEAR_SECONDS = 5.0
"""Longest that clearing up after lanes that were killed on another machine may take."""

QUIET_SECONDS = 10.0
"""Longest that lanes may take to stop what they do before they are started again themselves."""

END_SECONDS = 15.0
"""Longest that the processes of lanes may take to end."""

CHECK_SECONDS = 0.5
"""How often the lines are asked which lanes have said nothing for long."""


class PendingAnswer(Future[MethodResult]):
    """What a lane was asked: its answer, or RunFailed if the lane was lost before.

    Attributes:
        heard: when the lane was asked, or has last said that it goes on; of the monotonic clock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.heard = time.monotonic()


class LanePool:
    """Lanes that are up, and the lines to them.

    Args:
        lanes: what to start. The cluster is the one that Ray is connected to, or that RAY_ADDRESS
            names, or one that is started on this machine and ends with the pool.
        isolated: how the lanes that are reserved for a worker are to be set up, by worker.
        link: the one way that payloads are to take between lanes, such as "stream"; by default the
            one that fits (`m2flow.runtime.transport.table.way`).
        cluster: a connection to Ray that was made for the pool, and ends with it.
        lanes_per_process: how many lanes a process hosts. More than one is for emulated
            accelerators only (`m2flow.runtime.lane.shared`): no worker there may compute.
        start_seconds: longest that lanes may take to start at first; two minutes at least.
        spares: how many processes wait on each machine, with their imports done, for a lane of
            cores to be lost whose place they take.
        template: of which lanes of cores are forks; it was made for the pool, and ends with it. By
            default there is one where this process has started the cluster.

    Attributes:
        lanes: what was started, less those that were given up.
        spoiled: why no run can be started on the lanes any more, or None.
        lost: lanes whose processes have ended: why, and when that was noticed, in seconds since the
            epoch. `restart` brings them back.
        missing: the same of lanes that were given up. `call_back` and `take_in` bring them back.
        processes: of the lanes.
        world: positions of the lanes that have joined process groups; none of them can join again
            in the same process.
        num_worlds: how often lanes have met that had not met before.
        keeper: position of the lane that keeps their store.
        uses_groups: whether the present run needs process groups.
        run: whose workers the lanes hold; None where nobody's.

    Raises:
        UserError: the cluster has no room for the lanes, or a number is none or out of bounds.
        RunFailed: they did not start in time, or another user has made the pool's folder.
    """

    def __init__(
        self,
        lanes: Sequence[LaneSpec],
        isolated: Mapping[str, Isolation] | None = None,
        *,
        link: str | None = None,
        cluster: RayCluster | None = None,
        lanes_per_process: int = 1,
        start_seconds: float = 0.0,
        spares: int = 0,
        template: LaneTemplate | None = None,
    ) -> None:
        check_count("lanes_per_process", lanes_per_process)
        check_count("spares", spares, least=0)
        check_seconds("start_seconds", start_seconds, zero=True)
        self.lanes, self._link = tuple(lanes), link
        self._lanes_per_process = lanes_per_process
        if cluster is None and template is None:
            cluster, template = cluster_of(self.lanes)
        self._cluster = cluster or RayCluster(self.lanes)
        self._key = uuid.uuid4().bytes + uuid.uuid4().bytes
        self._folder = Path(tempfile.gettempdir()) / f"m2flow-{uuid.uuid4().hex[:12]}"
        self._selector = selectors.DefaultSelector()
        self._cluster.sweeper.guard(self._folder)
        self.processes = LaneProcesses(
            self.lanes,
            self._folder,
            self._key,
            link=link,
            isolated=isolated or {},
            per_process=lanes_per_process,
            start_seconds=start_seconds,
            spares=spares,
            template=template,
        )
        self._lines: dict[int, LauncherLine] = {}
        self._holding: set[int] = set()
        self._inbox: deque[tuple[int, FromLane]] = deque()
        self._awaited: dict[int, tuple[int, PendingAnswer]] = {}
        self._next_number = 0
        self._checked = time.monotonic()
        self.spoiled: str | None = None
        self.lost: dict[int, tuple[str, float]] = {}
        self.missing: dict[int, tuple[str, float]] = {}
        self.world: tuple[int, ...] = ()
        self.num_worlds = self.keeper = 0
        self.uses_groups = False
        self.run: object | None = None
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        try:
            own_folder(self._folder)
            self._attach(self.processes.bring_up(self.lanes))
        except BaseException:
            self._end()
            raise

    def _attach(self, lines: Mapping[int, LauncherLine]) -> None:
        """Take the lines to lanes that have come up; all lanes hear where these are."""
        for number, line in lines.items():
            self._lines[number] = line
            self._selector.register(line, selectors.EVENT_READ, number)
        peers = {lane: address.peer for lane, address in self.addresses.items()}
        if not hasattr(self, "exchange"):
            own = (None, LAUNCHER, self.processes.node, None, self._folder, self._key, self._link)
            self.exchange = Exchange(*own)
        self.exchange.introduce(peers)
        for lane in self._lines.keys() - lines.keys():
            self.send(lane, Introduce(peers))

    @property
    def addresses(self) -> Mapping[int, LaneAddress]:
        """Of each lane, by number."""
        return self.processes.addresses

    def prepare(self, modules: Sequence[str]) -> None:
        """Have the lanes import what workers will need, as long as there is nothing else to do."""
        for lane in self.lanes:
            self.send(lane.id, Prepare(tuple(modules)))
        self.processes.spares.warm(modules)

    # --- talking to lanes -------------------------------------------------------------------------

    def send(self, lane: int, order: Order, *, hold: bool = False) -> None:
        """Give a lane an order. One that is gone is heard of by `receive`.

        Args:
            lane, order: which.
            hold: it may go with the next order, and goes before `receive` waits.
        """
        line = self._lines.get(lane)
        if line is None:
            return
        line.hold(to_bytes(order))
        if hold:
            self._holding.add(lane)
        else:
            self._flush(lane, line)

    def _flush(self, lane: int, line: LauncherLine) -> None:
        self._holding.discard(lane)
        with suppress(LineClosed):
            line.flush()
            if line.unsent:
                self._selector.modify(line, selectors.EVENT_READ | selectors.EVENT_WRITE, lane)

    def receive(self, seconds: float) -> list[tuple[int, FromLane]]:
        """What lanes have said; waits for the first word, but no longer than this.

        The last that is heard of a lane is `LaneEnded`, after all that it has said before.
        """
        if self._inbox:
            said, self._inbox = list(self._inbox), deque()
            return said
        for lane in self._holding & self._lines.keys():
            self._flush(lane, self._lines[lane])
        said = self._ended_in_silence()
        if said:
            return said
        for key, events in self._selector.select(min(seconds, SILENCE_SECONDS)):
            if key.data is None:
                self._woken.recv(4096)
                continue
            lane, line = key.data, self._lines[key.data]
            try:
                if events & selectors.EVENT_WRITE:
                    line.flush()
                    if not line.unsent:
                        self._selector.modify(line, selectors.EVENT_READ, lane)
                for frame in line.take():
                    said += self._heard(lane, from_bytes(frame))
            except LineClosed as error:
                said.append((lane, self._ended(lane, str(error))))
        return said

    def wake(self) -> None:
        """Have `receive` return; may be called on any thread, and when the pool is closed."""
        with suppress(OSError):
            self._waker.send(b"!")

    def _ended_in_silence(self) -> list[tuple[int, FromLane]]:
        """Ask Ray about lanes that have said nothing for long; those that have ended."""
        ended: list[tuple[int, FromLane]] = []
        now = time.monotonic()
        if now - self._checked < CHECK_SECONDS:
            return ended
        self._checked = now
        for lane, line in list(self._lines.items()):
            try:
                line.check()
            except LineClosed as error:
                ended.append((lane, self._ended(lane, str(error))))
        return ended

    def _ended(self, lane: int, reason: str) -> LaneEnded:
        """A lane's line is closed: nothing more is heard of the lane."""
        line = self._lines.pop(lane)
        self._selector.unregister(line)
        line.close()
        ended = LaneEnded(self.processes.known_end(lane, seconds=2.0) or reason)
        self.spoil(f"lane {lane} was lost: {ended.reason}")
        self.lost.setdefault(lane, (ended.reason, time.time()))
        self._without_answer(lane, ended.reason)
        return ended

    def spoil(self, reason: str) -> None:
        """No run can be started on the lanes any more; the first reason counts."""
        self.spoiled = self.spoiled or reason

    def positions(self, lanes: Sequence[int]) -> tuple[int, ...]:
        """The positions of lanes among all with which the pool was started."""
        order = [lane.id for lane in self.processes.lanes]
        return tuple(order.index(lane) for lane in lanes)

    @property
    def all_positions(self) -> tuple[int, ...]:
        """The positions of the lanes that there are."""
        return self.positions([lane.id for lane in self.lanes])

    def new_number(self) -> int:
        """A number by which an answer is known."""
        self._next_number += 1
        return self._next_number

    def ask(self, lane: int, order: Callable[[int], Order]) -> MethodResult:
        """Give an order that has a number, and wait for its answer; `order` is called with it."""
        return self.ask_all({lane: order})[lane]

    def ask_all(
        self, orders: Mapping[int, Callable[[int], Order]], seconds: float = START_SECONDS
    ) -> dict[int, MethodResult]:
        """Give each lane its order, and wait for the answers; other words are kept for `receive`.

        Args:
            orders: by lane, called with the number of its answer.
            seconds: longest that all of them may be silent together: one may wait for another.

        Raises:
            RunFailed: a lane has not answered in time, or was lost.
        """
        answers = {lane: self.ask_later(lane, order) for lane, order in orders.items()}
        kept: deque[tuple[int, FromLane]] = deque()
        try:
            while not _all_answered(answers.values()):
                heard = max(answer.heard for answer in answers.values())
                if (left := heard + seconds - time.monotonic()) <= 0:
                    silent = sorted(lane for lane, answer in answers.items() if not answer.done())
                    what = f"lanes {silent} have not answered within {seconds:g} s"
                    raise RunFailed(what) from Stalled(what)
                kept.extend(self.receive(left))
            return {lane: answer.result() for lane, answer in answers.items()}
        finally:
            self._inbox.extend(kept)

    def ask_later(self, lane: int, order: Callable[[int], Order]) -> PendingAnswer:
        """Give an order that has a number, and wait for nothing: the future has its answer once
        `receive` has heard it."""
        number, answer = self.new_number(), PendingAnswer()
        self._awaited[number] = lane, answer
        if lane not in self._lines:
            self._without_answer(lane, self.lost.get(lane, ("it is gone",))[0])
        self.send(lane, order(number))
        return answer

    def _without_answer(self, lane: int, reason: str) -> None:
        """Nothing that a lane was asked will be answered any more."""
        for number, (asked, answer) in list(self._awaited.items()):
            if asked == lane:
                del self._awaited[number]
                answer.set_exception(RunFailed(f"lane {lane} was lost: {reason}"))

    def _heard(self, lane: int, message: FromLane) -> list[tuple[int, FromLane]]:
        """A message, unless it is of what `ask_later` was asked."""
        if isinstance(message, GoesOn):
            if message.number in self._awaited:
                self._awaited[message.number][1].heard = time.monotonic()
            return []
        if isinstance(message, MethodResult) and message.number in self._awaited:
            self._awaited.pop(message.number)[1].set_result(message)
            return []
        return [(lane, message)]

    # --- lanes that are lost ----------------------------------------------------------------------

    @property
    def can_restart(self) -> bool:
        """Whether lanes can be started again: each has a process of its own."""
        return self._lanes_per_process == 1

    def quiet(self, lanes: Collection[int], seconds: float = QUIET_SECONDS) -> set[int]:
        """Wait until lanes have carried out all orders; those that do not in time.

        What lanes say meanwhile, and have said before, is dropped.
        """
        answers = {
            lane: self.ask_later(lane, partial(Probe, peers=()))
            for lane in lanes
            if lane in self._lines
        }
        self._inbox.clear()
        deadline = time.monotonic() + seconds
        while not all(answer.done() for answer in answers.values()):
            if (left := deadline - time.monotonic()) <= 0:
                break
            self.receive(left)
        return {lane for lane, answer in answers.items() if not answer.done()}

    def hasten_restart(self) -> None:
        """Start processes for lanes of this machine that are lost, before it is time to `restart`
        them; nobody waits for it."""
        lost = [lane for lane in self.lanes if lane.id in self.lost and self.is_here(lane.id)]
        self.processes.spares.hasten(lost, self.processes.node)

    def restart(self, lanes: Collection[int]) -> None:
        """Start lanes again, each in a new process; those that are up are ended before.

        Nothing is on them then, and the others know where they are.

        Raises:
            RunFailed: a process has not ended, or the new ones have not started, in time.
        """
        assert self.can_restart, "lanes that share a process"
        self.processes.kill(lanes)
        self.await_ends(lanes)
        self._clear_after(lanes)
        self._attach(self.processes.bring_up([lane for lane in self.lanes if lane.id in lanes]))
        left = self.positions([lane.id for lane in self.lanes if lane.id not in lanes])
        self.world = tuple(position for position in self.world if position in left)
        for lane in lanes:
            self.lost.pop(lane, None)
        if not self.lost:
            self.spoiled = None

    def await_ends(self, lanes: Collection[int]) -> None:
        """Wait until the processes of lanes have ended that were killed; what is heard is dropped.

        Raises:
            RunFailed: they have not in time.
        """
        deadline = time.monotonic() + END_SECONDS
        while up := [lane for lane in lanes if lane in self._lines]:
            # Their lines stay open until they have ended, or they would clear up after the pool.
            if time.monotonic() > deadline:
                raise RunFailed(f"the processes of lanes {up} have not ended in {END_SECONDS:g} s")
            self.receive(0.1)

    def end(self, lane: int, reason: str) -> None:
        """End the process of a lane, which counts as lost from now on; `receive` tells its end."""
        self.lost.setdefault(lane, (reason, time.time()))
        self.processes.kill([lane])

    def begin(self, lane: int) -> Any:
        """Start a process for a lane that is lost, and wait for nothing; what `meet` wants.

        Its future is done when `meet` need not wait.
        """
        self.processes.kill([lane])
        self._clear_after([lane])
        started = self.processes.begin(self.processes.lanes[self.positions([lane])[0]])
        started.future().add_done_callback(lambda _: self.wake())
        return started

    def meet(self, lane: int, started: Any) -> None:
        """Have a lane again that was begun; nothing is on it, and the others know where it is.

        Raises:
            RayError, OSError: its process has ended.
        """
        self._attach({lane: self.processes.meet(lane, started)})
        (position,) = self.positions([lane])
        self.world = tuple(other for other in self.world if other != position)
        del self.lost[lane]
        if not self.lost:
            self.spoiled = None

    def _clear_after(self, lanes: Collection[int]) -> None:
        """Remove what lanes that have ended have left, and what was meant for them."""
        for lane in lanes:
            self.exchange.forget(lane)
            if self.is_here(lane):
                sweep(f"{self._folder.name}-{self.positions([lane])[0]}-")

    def give_up(self, lanes: Collection[int]) -> None:
        """Go on without lanes that are lost."""
        self._clear_after(lanes)
        for lane in lanes:
            self.missing[lane] = self.lost.pop(lane)
            self.processes.give_up(lane)
            if (line := self._lines.pop(lane, None)) is not None:  # its worker alone had ended
                self._selector.unregister(line)
                self.processes.hold(line)
                self._without_answer(lane, self.missing[lane][0])
        self.lanes = tuple(lane for lane in self.lanes if lane.id not in lanes)
        if not self.lost:
            self.spoiled = None

    def call_back(self, lane: int) -> bool:
        """Start a process for a lane that was given up, and wait for nothing; False if it cannot be
        done now."""
        return self.processes.call_back(self.processes.lanes[self.positions([lane])[0]])

    def take_in(self) -> dict[int, tuple[str, float]]:
        """Have lanes again that were called back and are up; as `missing` had them.

        Nothing is on them then. To be called while no step runs.
        """
        lines = self.processes.take_in()
        back = {lane: self.missing.pop(lane) for lane in lines}
        if back:
            there = {lane.id for lane in self.lanes} | back.keys()
            self.lanes = tuple(lane for lane in self.processes.lanes if lane.id in there)
            self._attach(lines)
        if not self.lost and self.lanes:
            self.spoiled = None
        return back

    @property
    def folder(self) -> Path:
        """Files of the launcher and of the lanes on its machine."""
        return self._folder

    @property
    def logs(self) -> Path | None:
        """Where what lanes print is kept, if the cluster is the pool's own."""
        return self._cluster.logs

    def is_here(self, lane: int) -> bool:
        """Whether a lane is on the launcher's machine."""
        return bool(self.addresses[lane].node == self.processes.node)

    def same_node(self, first: int, second: int) -> bool:
        return bool(self.addresses[first].node == self.addresses[second].node)

    def measure_links(self) -> LinkTable:
        """Measure the ways between lanes, one pair of each distance; for lanes without a run."""
        table = LinkTable()
        if self._lanes_per_process == 1:
            peers = {lane: address.peer for lane, address in self.addresses.items()}
            places = {lane: Location(name_of(lane), at.node, at.gpu) for lane, at in peers.items()}
            for asker, asked in sorted(pairs_to_measure(places)):
                answer = self.ask(asker, partial(Probe, peers=(asked,)))
                table = table.merged(pickle.loads(answer.value))
        return table

    # --- the end ----------------------------------------------------------------------------------

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """End the lanes, and the Ray cluster if it was started for this pool.

        Args:
            seconds: longest to wait for lanes that are busy before they are ended.
        """
        self.spoil("they were closed")
        for lane in self._lines:
            self.send(lane, Close())
        self.processes.wait(seconds)
        self._end()

    def _end(self) -> None:
        elsewhere = self.processes.end()
        for line in self._lines.values():
            line.close()
        self._lines = {}
        self._selector.close()
        self._woken.close()
        self._waker.close()
        if hasattr(self, "exchange"):
            self.exchange.close()
        _clear_machine(str(self._folder))  # of what lanes left that were ended, or lost
        if elsewhere:
            clear = ray.remote(num_cpus=0, max_retries=0)(_clear_machine)
            cleared = [
                clear.options(
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
                ).remote(self._folder.name)
                for node in elsewhere
            ]
            ray.wait(cleared, num_returns=len(cleared), timeout=CLEAR_SECONDS)
        self._cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        self.close(CLOSE_SECONDS if kind is None else FAILED_SECONDS)


def _all_answered(answers: Iterable[Future[MethodResult]]) -> bool:
    """Whether each lane has answered.

    Raises:
        RunFailed: one was lost; the others may wait for it.
    """
    answers = list(answers)
    for answer in answers:
        if answer.done():
            answer.result()
    return all(answer.done() for answer in answers)


def _clear_machine(folder: str) -> None:
    """Remove what a killed lane has left on the machine where this runs; `folder` as lanes there
    are told of it."""
    sweep(f"{Path(folder).name}-")
    shutil.rmtree(Path(tempfile.gettempdir()) / folder, ignore_errors=True)
