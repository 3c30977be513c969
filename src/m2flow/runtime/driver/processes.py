"""`LaneProcesses`: the processes of a pool's lanes, as actors of Ray: started, watched, ended."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from m2flow.engine.plan import LaneSpec
from m2flow.errors import RunFailed
from m2flow.flow.worker import Isolation
from m2flow.runtime.driver.placing import check_room, gpus_beside, nodes_for, options_of
from m2flow.runtime.driver.spares import Spares
from m2flow.runtime.lane.actor import LAUNCHER, VISIBLE, LaneAddress, LaneProcess
from m2flow.runtime.transport.lines import LauncherLine, connect

START_SECONDS = 120.0
"""Longest that lanes may take to start."""

START_TRIES = 3
"""How often lanes are started at most when the process of one ends before it is up."""


class LaneProcesses:
    """The processes of lanes.

    Args:
        lanes: of the pool.
        folder: of the pool's files.
        key: that lines between its processes are opened with.
        link, isolated, per_process, spares: as of `LanePool`.

    Attributes:
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
        spares: int,
    ) -> None:
        self._lanes, self._folder, self._key, self._link = tuple(lanes), str(folder), key, link
        self._isolated, self._per_process = dict(isolated), per_process
        self.node: str = ray.get_runtime_context().get_node_id()
        self.spares = Spares(spares, self.make_spare)
        self.actors: dict[int, Any] = {}
        self.addresses: dict[int, LaneAddress] = {}
        self._serving: dict[int, Any] = {}

    # --- starting ---------------------------------------------------------------------------------

    def bring_up(self, lanes: Sequence[LaneSpec]) -> dict[int, LauncherLine]:
        """Start processes until all of these lanes are up; the lines to them, by number.

        Raises:
            UserError: the cluster has no room for them.
            RunFailed: they did not start in time, or ended again and again.
        """
        nodes, beside = nodes_for(self._lanes), gpus_beside(self._lanes)
        check_room(lanes, nodes, beside)
        deadline = time.monotonic() + START_SECONDS
        held: list[LauncherLine] = []  # a lane whose line is closed clears up after the pool
        lines: dict[int, LauncherLine] = {}
        for tries_left in reversed(range(START_TRIES)):
            try:
                self.addresses |= self._make_ready(lanes, nodes, beside, deadline)
                self._serve([lane.id for lane in lanes], lines, deadline)
            except GetTimeoutError:
                raise RunFailed(f"lanes have not started within {START_SECONDS:g} s") from None
            except (RayActorError, OSError) as error:
                if not tries_left:
                    first_line, *_ = str(error).splitlines()
                    raise RunFailed(
                        f"lanes have not come up in {START_TRIES} tries: {first_line}"
                    ) from error
                self.kill([spec.id for spec in lanes])
                held += lines.values()
                lines = {}
            else:
                break
        for line in held:
            line.close()
        self.spares.keep(self._lanes, nodes)
        return lines

    def _make_ready(
        self,
        lanes: Sequence[LaneSpec],
        nodes: Sequence[str],
        beside: Mapping[int, int],
        deadline: float,
    ) -> dict[int, LaneAddress]:
        """Start processes for lanes; the addresses of the lanes, by number, once all are up."""
        if self._per_process == 1:
            ready = self._start_alone(lanes, nodes, beside)
        else:
            ready = self._start_together(nodes)
        found: list[Any] = ray.get(ready, timeout=max(1.0, deadline - time.monotonic()))
        if self._per_process > 1:
            found = [address for some in found for address in some]
        return dict(zip((lane.id for lane in lanes), found, strict=True))

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
        self, lanes: Sequence[LaneSpec], nodes: Sequence[str], beside: Mapping[int, int]
    ) -> list[Any]:
        """Start a process for each of some lanes; what will be its address."""
        for lane in lanes:
            position = self._lanes.index(lane)
            spare = self.spares.take(lane, position, nodes[lane.node])
            shares_gpu = lane.id in beside
            options = options_of(lane, nodes[lane.node], self._isolated, shares_gpu=shares_gpu)
            self.actors[lane.id] = spare or self._make(lane, position, options)
        there = {lane.id for lane in lanes}
        visible = self._visible_gpus({x: owner for x, owner in beside.items() if x in there})
        return [self.actors[lane.id].ready.remote(visible.get(lane.id)) for lane in lanes]

    def _make(self, lane: LaneSpec, position: int, options: Mapping[str, Any]) -> Any:
        """A process for a lane, with Ray's options for it."""
        one_node = {lane.node for lane in self._lanes} == {0}
        make = ray.remote(**options)(LaneProcess)
        return make.remote(lane, position, self._folder, self._key, self._link, one_node)

    def make_spare(self, lane: LaneSpec, node: str) -> Any:
        """A process that can be a lane later; `node` is Ray's id of its machine."""
        options = options_of(lane, node, {}, shares_gpu=False)
        return self._make(lane, LAUNCHER, {**options, "num_cpus": 0})

    def _start_together(self, nodes: Sequence[str]) -> list[Any]:
        """Start processes of several lanes; what will be the addresses of each one's."""
        from m2flow.runtime.lane.shared import SharedProcess

        ready = []
        for first in range(0, len(self._lanes), self._per_process):
            lanes = self._lanes[first : first + self._per_process]
            options = options_of(lanes[0], nodes[lanes[0].node], {}, shares_gpu=False)
            actor = ray.remote(**options)(SharedProcess).remote(
                [(first + n, lane) for n, lane in enumerate(lanes)], self._folder, self._key
            )
            self.actors.update({lane.id: actor for lane in lanes})
            ready.append(actor.ready.remote())
        return ready

    def _visible_gpus(self, beside: Mapping[int, int]) -> dict[int, str]:
        """What each lane that shares another's GPU is to see, if its worker does not say."""
        by_id = {lane.id: lane for lane in self._lanes}
        asked = {}
        for lane, owner in beside.items():
            setup = self._isolated.get(by_id[lane].reserved_for or "")
            if setup is None or VISIBLE not in dict(setup.environment):
                asked[lane] = self.actors[owner].visible_gpus.remote()
        found = ray.get(list(asked.values()), timeout=START_SECONDS)
        return dict(zip(asked, found, strict=True))

    # --- the end ----------------------------------------------------------------------------------

    def kill(self, lanes: Collection[int]) -> None:
        """End the processes of lanes; nobody waits for it."""
        for lane in lanes:
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
        """End all, spares too; other machines on which a lane's files may be left."""
        elsewhere = {
            self.addresses[lane].node
            for lane in self._serving
            if self.addresses[lane].node != self.node and not self._has_left(lane)
        }
        for actor in dict.fromkeys(self.actors.values()):
            ray.kill(actor)
        self.spares.end()
        self.actors, self._serving = {}, {}
        return elsewhere

    def _has_left(self, lane: int) -> bool:
        """Whether a lane has ended by itself, and has removed its files."""
        try:
            ray.get(self._serving[lane], timeout=0)
        except (GetTimeoutError, RayError):
            return False
        return True
