"""`LaneProcesses`: the processes of a pool's lanes, as actors of Ray: started, watched, ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, RayActorError, RayError

from m2flow.engine.plan import LaneSpec
from m2flow.errors import CannotHeal, RunFailed
from m2flow.flow.worker import Isolation
from m2flow.runtime.driver.placing import (
    AGAIN_SECONDS,
    ROOM_SECONDS,
    check_room,
    gpus_beside,
    lacks,
    machines_there,
    nodes_for,
    nodes_left,
    options_of,
)
from m2flow.runtime.driver.spares import Spares
from m2flow.runtime.driver.template import LaneTemplate, any_process_does
from m2flow.runtime.lane.actor import LAUNCHER, VISIBLE, LaneAddress, LaneProcess
from m2flow.runtime.transport.lines import LauncherLine, connect
from m2flow.runtime.transport.process_watch import ProcessWatch

START_SECONDS = 120.0
"""Longest that lanes may take to start; at first as long as the pool says, if that is longer. Those
that are not up by then are named in the log."""

START_TRIES = 3
"""How often lanes are started at most when the process of one ends before it is up."""

GROUPS = {"objects": 2}
"""Threads of a lane's process for what is asked of it while it serves."""

GONE_SECONDS = 5.0
"""Longest that is waited for processes on this machine that were killed."""

MEET_SECONDS = 5.0
"""Longest that a lane may take to answer which has come up while a run goes on."""

_log = logging.getLogger(__name__)


class LaneProcesses:
    """The processes of lanes.

    Args:
        lanes: of the pool.
        folder: of the pool's files.
        key: that lines between its processes are opened with.
        link, isolated, per_process, start_seconds, spares, template: as of `LanePool`.

    Attributes:
        lanes: all lanes of the pool, those among them that it has given up.
        node: Ray's id of the launcher's machine.
        actors: of each lane, by number.
        addresses: of each lane, by number.
        spares: the processes that wait to be a lane that is lost.
    """

    def __init__(
        self,
        lanes: Sequence[LaneSpec],
        folder: Path,
        key: bytes,
        *,
        link: str | None,
        isolated: Mapping[str, Isolation],
        per_process: int,
        start_seconds: float,
        spares: int,
        template: LaneTemplate | None,
    ) -> None:
        self.lanes, self._folder, self._key, self._link = tuple(lanes), str(folder), key, link
        self._isolated, self._per_process = dict(isolated), per_process
        self._start_seconds = max(START_SECONDS, start_seconds)
        self._template = template
        self._lane_class = ray.remote(concurrency_groups=GROUPS)(LaneProcess)
        self.node: str = ray.get_runtime_context().get_node_id()
        self.spares = Spares(spares, self.make_spare)
        self.actors: dict[int, Any] = {}
        self.addresses: dict[int, LaneAddress] = {}
        self._serving: dict[int, Any] = {}
        self._nodes: list[str] = []
        self._awaited: dict[int, tuple[Any, float]] = {}
        self._held: list[LauncherLine] = []  # a lane whose line is closed clears up after the pool
        self._left_files: set[str] = set()

    # --- starting ---------------------------------------------------------------------------------

    def bring_up(self, lanes: Sequence[LaneSpec]) -> dict[int, LauncherLine]:
        """Start processes until all of these lanes are up; the lines to them, by number.

        Raises:
            UserError: the cluster has no room for them.
            RunFailed: they did not start in time, or ended again and again.
        """
        again, beside = bool(self._nodes), gpus_beside(self.lanes)
        seconds = AGAIN_SECONDS if again else ROOM_SECONDS
        check_room(lanes, lambda: self._machines_of(lanes), beside, seconds)
        seconds = START_SECONDS if again else self._start_seconds
        deadline = time.monotonic() + seconds
        lines: dict[int, LauncherLine] = {}
        for tries_left in reversed(range(START_TRIES)):
            nodes = self._machines_of(lanes)
            try:
                self.addresses |= self._make_ready(lanes, nodes, beside, deadline)
                self._serve([lane.id for lane in lanes], lines, deadline)
                break
            except (RayError, OSError, RunFailed) as error:
                self.kill([lane.id for lane in lanes])
                self._held += lines.values()
                lines = {}
                if not isinstance(error, RayActorError | ActorUnschedulableError | OSError):
                    raise
                if not tries_left:
                    first_line, *_ = str(error).splitlines()
                    raise RunFailed(
                        f"lanes have not come up in {START_TRIES} tries: {first_line}"
                    ) from error
        self._keep_spares()
        return lines

    def _keep_spares(self) -> None:
        gone = self.without_machine([lane.id for lane in self.lanes])
        self.spares.keep([lane for lane in self.lanes if lane.id not in gone], self._nodes)

    def _machines(self) -> list[str]:
        """Ray's ids of the machines of the lanes."""
        self._nodes = nodes_left(self.lanes, self._nodes) if self._nodes else nodes_for(self.lanes)
        return self._nodes

    def _machines_of(self, lanes: Sequence[LaneSpec]) -> list[str]:
        """Ray's ids of the machines of all lanes, those of some lanes still there."""
        if gone := self.without_machine([lane.id for lane in lanes]):
            raise RunFailed(f"the machine of lane {min(gone)} is gone")
        return self._nodes

    def without_machine(self, lanes: Collection[int]) -> set[int]:
        """The lanes among these whose machine is gone, as Ray says, with none in its place."""
        nodes, there = self._machines(), machines_there()
        return {x.id for x in self.lanes if x.id in lanes and nodes[x.node] not in there}

    @property
    def one_node(self) -> bool:
        """Whether launcher and lanes are all on one machine."""
        return {lane.node for lane in self.lanes} == {0}

    def _make_ready(
        self,
        lanes: Sequence[LaneSpec],
        nodes: Sequence[str],
        beside: Mapping[int, int],
        deadline: float,
    ) -> dict[int, LaneAddress]:
        """Start processes for lanes; the addresses of the lanes, by number, once all are up."""
        if self._per_process == 1:
            ready = self._start_alone(lanes, nodes, beside, deadline)
        else:
            ready = self._start_together(nodes)
        found = self._await_ready([lane.id for lane in lanes], ready, deadline)
        if self._per_process > 1:
            found = [address for some in found for address in some]
        return dict(zip((lane.id for lane in lanes), found, strict=True))

    def _await_ready(
        self, lanes: Sequence[int], ready: Sequence[Any], deadline: float
    ) -> list[Any]:
        """What lanes answer when they are up; the end of any of them is noticed at once.

        Raises:
            RunFailed: some are not up in time.
            RayError: the process of one has ended.
        """
        left = longest = deadline - time.monotonic()
        if longest > START_SECONDS:
            with suppress(GetTimeoutError):
                return list(ray.get(ready, timeout=START_SECONDS))
            late, left = self._not_up(lanes, ready), longest - START_SECONDS
            words = "lanes %s are not up after %g s; they may take %.0f s"
            _log.warning(words, late, START_SECONDS, longest)
        try:
            return list(ray.get(ready, timeout=max(1.0, left)))
        except GetTimeoutError:
            late = self._not_up(lanes, ready)
            raise RunFailed(f"lanes {late} have not started within {longest:.0f} s") from None

    def _not_up(self, lanes: Sequence[int], ready: Sequence[Any]) -> list[int]:
        done, _ = ray.wait(list(ready), num_returns=len(ready), timeout=0)
        up = [one in done for one in ready]
        return [lane for place, lane in enumerate(lanes) if not up[place // self._per_process]]

    def _serve(
        self, started: Sequence[int], lines: dict[int, LauncherLine], deadline: float
    ) -> None:
        """Have lanes that are up carry out orders; the lines to them are added, by number."""
        peers = {lane: address.peer for lane, address in self.addresses.items()}
        serving = {
            actor: actor.serve.remote(peers, START_SECONDS)
            for actor in dict.fromkeys(self.actors[lane] for lane in started)
        }
        self._serving |= {lane: serving[self.actors[lane]] for lane in started}
        for number in started:
            address = self.addresses[number]
            lines[number] = connect(
                address.line,
                self._key,
                same_node=address.node == self.node,
                seconds=max(1.0, deadline - time.monotonic()),
            )
            if address.node != self.node:  # on this machine the end of a process closes its line
                lines[number].on_silence = partial(self.known_end, number)

    def _start_alone(
        self,
        lanes: Sequence[LaneSpec],
        nodes: Sequence[str],
        beside: Mapping[int, int],
        deadline: float,
    ) -> list[Any]:
        """Start a process for each of some lanes; what will be its address."""
        for lane in lanes:
            position = self.lanes.index(lane)
            spare = self.spares.take(lane, position, nodes[lane.node])
            shares_gpu = lane.id in beside
            options = options_of(lane, nodes[lane.node], self._isolated, shares_gpu=shares_gpu)
            self.actors[lane.id] = spare or self._make(lane, position, nodes[lane.node], options)
        there = {lane.id for lane in lanes}
        beside = {lane: owner for lane, owner in beside.items() if lane in there}
        visible = self._visible_gpus(beside, deadline)
        return [self.actors[lane.id].ready.remote(visible.get(lane.id)) for lane in lanes]

    def _make(self, lane: LaneSpec, position: int, node: str, options: Mapping[str, Any]) -> Any:
        """A process for a lane, with Ray's options for it; of the template, where that can be."""
        if self._template is not None and any_process_does(lane):
            options = {**options, "runtime_env": {"py_executable": self._template.command}}
        made = self._lane_class.options(**options)
        folder = self._folder_on(node)
        return made.remote(lane, position, folder, self._key, self._link, self.one_node)

    def _folder_on(self, node: str) -> str:
        """The pool's folder as lanes of a machine are told of it; TMPDIR is each machine's own."""
        return self._folder if node == self.node else Path(self._folder).name

    def make_spare(self, lane: LaneSpec, node: str) -> Any:
        """A process that can be a lane later; `node` is Ray's id of its machine."""
        options = options_of(lane, node, {}, shares_gpu=False)
        return self._make(lane, LAUNCHER, node, {**options, "num_cpus": 0})

    def _start_together(self, nodes: Sequence[str]) -> list[Any]:
        """Start processes of several lanes; what will be the addresses of each one's."""
        from m2flow.runtime.lane.shared import SharedProcess

        ready = []
        for first in range(0, len(self.lanes), self._per_process):
            lanes = self.lanes[first : first + self._per_process]
            options = options_of(lanes[0], nodes[lanes[0].node], {}, shares_gpu=False)
            actor = ray.remote(concurrency_groups=GROUPS, **options)(SharedProcess).remote(
                [(first + n, lane) for n, lane in enumerate(lanes)],
                self._folder_on(nodes[lanes[0].node]),
                self._key,
                self.one_node,
            )
            self.actors.update({lane.id: actor for lane in lanes})
            ready.append(actor.ready.remote())
        return ready

    def _visible_gpus(self, beside: Mapping[int, int], deadline: float) -> dict[int, str]:
        """What each lane that shares another's GPU is to see, if its worker does not say.

        Raises:
            RunFailed: the other lane was given up, or does not answer in time.
            RayError: its process has ended.
        """
        by_id = {lane.id: lane for lane in self.lanes}
        asked = {}
        for lane, owner in beside.items():
            setup = self._isolated.get(by_id[lane].reserved_for or "")
            if setup is None or VISIBLE not in dict(setup.environment):
                if owner not in self.actors:
                    raise RunFailed(f"lane {owner}, whose GPU lane {lane} shares, was given up")
                asked[lane] = self.actors[owner].visible_gpus.remote()
        owners = [beside[lane] for lane in asked]
        found = self._await_ready(owners, list(asked.values()), deadline)
        return dict(zip(asked, found, strict=True))

    # --- one lane while the others go on ----------------------------------------------------------

    def begin(self, lane: LaneSpec) -> Any:
        """Start a process for a lane, and wait for nothing; what will be its address.

        Raises:
            CannotHeal: the lane whose GPU it shares is gone.
        """
        beside, deadline = gpus_beside(self.lanes), time.monotonic() + START_SECONDS
        try:
            (ready,) = self._start_alone([lane], self._nodes, beside, deadline)
        except (RayError, RunFailed) as error:
            first_line, *_ = str(error).splitlines()
            why = f"the lane whose GPU it shares does not answer: {first_line}"
            raise CannotHeal(f"lane {lane.id} cannot be started: {why}") from error
        return ready

    def meet(self, lane: int, ready: Any) -> LauncherLine:
        """The line to a lane that was begun and is up.

        Raises:
            RayError, OSError: its process has ended.
        """
        lines: dict[int, LauncherLine] = {}
        self.addresses[lane] = ray.get(ready, timeout=MEET_SECONDS)
        self._serve([lane], lines, time.monotonic() + MEET_SECONDS)
        self._keep_spares()
        return lines[lane]

    # --- lanes that are given up, and come back ---------------------------------------------------

    def give_up(self, lane: int) -> None:
        """Know no process of a lane any more."""
        self.kill([lane])
        for known in (self.actors, self._serving, self._awaited):
            known.pop(lane, None)
        address = self.addresses.pop(lane, None)
        if address is not None and address.node != self.node:
            self._left_files.add(address.node)

    def hold(self, line: LauncherLine) -> None:
        """Keep the line to a lane that was killed open: else the lane clears up after the pool."""
        self._held.append(line)

    def call_back(self, lane: LaneSpec) -> bool:
        """Start a process for a lane that was given up, and wait for nothing.

        Returns:
            False if that is not possible now: its machine is gone, or has no room.
        """
        beside = gpus_beside(self.lanes)
        owner = beside.get(lane.id)
        if self.without_machine([lane.id]) or lacks([lane], self._nodes, beside):
            return False
        if owner is not None and owner not in self.addresses:
            return False
        try:
            ready = self.begin(lane)
        except CannotHeal:  # its GPU is that of a lane which is about to be heard of as lost
            self.give_up(lane.id)
            return False
        self._awaited[lane.id] = ready, time.monotonic() + START_SECONDS
        return True

    @property
    def awaited(self) -> Collection[int]:
        """Lanes that were called back."""
        return self._awaited.keys()

    @property
    def has_news(self) -> bool:
        """Whether a lane that was called back is up, or will not be."""
        if not self._awaited:
            return False
        done, _ = ray.wait([ready for ready, _ in self._awaited.values()], timeout=0)
        return bool(done) or min(at for _, at in self._awaited.values()) < time.monotonic()

    def take_in(self) -> dict[int, LauncherLine]:
        """The lines to lanes that were called back and are up, by number; others stay given up."""
        lines: dict[int, LauncherLine] = {}
        up: list[int] = []
        for lane, (ready, latest) in list(self._awaited.items()):
            if not ray.wait([ready], timeout=0)[0]:
                if time.monotonic() > latest:
                    self.give_up(lane)
                continue
            del self._awaited[lane]
            try:
                self.addresses[lane] = ray.get(ready, timeout=MEET_SECONDS)
                up.append(lane)
            except RayError:
                self.give_up(lane)
        for lane in up:  # now that the addresses of all of them are known, for each is told of all
            try:
                self._serve([lane], lines, time.monotonic() + MEET_SECONDS)
            except (RayError, OSError):
                self.give_up(lane)
        if lines:
            self._keep_spares()
        return lines

    # --- the end ----------------------------------------------------------------------------------

    def kill(self, lanes: Collection[int]) -> None:
        """End the processes of lanes; nobody waits for it."""
        for lane in self.actors.keys() & set(lanes):
            ray.kill(self.actors[lane])

    def known_end(self, lane: int, seconds: float = 0.0) -> str | None:
        """What Ray knows of a lane's end; None if it knows of none."""
        try:
            ray.get(self._serving[lane], timeout=seconds)
        except GetTimeoutError:
            return None
        except RayActorError as error:
            return str(error).splitlines()[0]
        except RayError as error:
            cause = getattr(error, "cause", None)
            return str(cause or error).splitlines()[0]
        return "it has ended"

    def wait(self, seconds: float) -> None:
        """Wait until all have ended by themselves, but no longer than this."""
        serving = list(dict.fromkeys(self._serving.values()))
        if serving:
            ray.wait(serving, num_returns=len(serving), timeout=seconds)

    def end(self) -> set[str]:
        """End all, spares too; other machines on which a lane's files may be left.

        Lanes on this machine write nothing more then.
        """
        elsewhere = {
            self.addresses[lane].node
            for lane in self._serving
            if self.addresses[lane].node != self.node and not self._has_left(lane)
        }
        here = {one.process_id for one in self.addresses.values() if one.node == self.node}
        for actor in dict.fromkeys(self.actors.values()):
            ray.kill(actor)
        _await_ends(here)
        self.spares.end()
        if self._template is not None:
            self._template.close()
        self.actors, self._serving, self._awaited = {}, {}, {}
        for line in self._held:
            line.close()
        return elsewhere | self._left_files

    def _has_left(self, lane: int) -> bool:
        """Whether a lane has ended by itself, and has removed its files."""
        try:
            ray.get(self._serving[lane], timeout=0)
        except (GetTimeoutError, RayError):
            return False
        return True


def _await_ends(processes: Collection[int]) -> None:
    """Wait until processes have ended: Ray calls them dead when it has told them to end."""
    deadline = time.monotonic() + GONE_SECONDS
    for process in processes:
        watch = ProcessWatch(process)
        watch.ended(max(0.0, deadline - time.monotonic()))
        watch.close()
