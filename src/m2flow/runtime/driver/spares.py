"""`Spares`: processes that wait, with their imports done, to be a lane of cores that is lost.

When one is taken, the next one is started; a loss that comes before that one is up takes it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from m2flow.engine.plan import LaneSpec
from m2flow.runtime.driver.template import any_process_does

FETCH_SECONDS = 5.0
"""Longest that what a spare has answered may take to be here."""


class Spares:
    """The spare processes of a pool.

    Args:
        count: how many wait on each machine.
        make: starts one; called with a lane that it could be, and Ray's id of the machine.
    """

    def __init__(self, count: int, make: Callable[[LaneSpec, str], Any]) -> None:
        self._count, self._make = count, make
        self._modules: tuple[str, ...] = ()
        self._waiting: dict[str, list[tuple[Any, Any]]] = {}

    @property
    def actors(self) -> list[Any]:
        """The processes that wait."""
        return [actor for some in self._waiting.values() for actor, _ in some]

    def keep(self, lanes: Sequence[LaneSpec], nodes: Sequence[str]) -> None:
        """Start as many as are missing on the machines of lanes; nobody waits for them.

        Args:
            lanes: of the pool.
            nodes: Ray's ids of the machines.
        """
        if not self._count:
            return
        for lane in {lane.node: lane for lane in lanes if any_process_does(lane)}.values():
            waiting = self._waiting.setdefault(nodes[lane.node], [])
            while len(waiting) < self._count:
                self._start(lane, nodes[lane.node])

    def _start(self, lane: LaneSpec, node: str) -> None:
        actor = self._make(lane, node)
        self._waiting.setdefault(node, []).append((actor, actor.warm.remote(self._modules)))

    def hasten(self, lanes: Sequence[LaneSpec], node: str) -> None:
        """Start as many as these lanes of one machine will take, beside what else is done before.

        Nobody waits for them.
        """
        lanes = [lane for lane in lanes if any_process_does(lane)]
        for lane in lanes[len(self._waiting.get(node, [])) :]:
            self._start(lane, node)

    def warm(self, modules: Sequence[str]) -> None:
        """Have them import what workers will need."""
        self._modules = tuple(modules)
        for node, waiting in self._waiting.items():
            warm = [(actor, actor.warm.remote(self._modules)) for actor, _ in waiting]
            self._waiting[node] = warm

    def take(self, lane: LaneSpec, position: int, node: str) -> Any:
        """The first that was started, which is this lane from now on; None if there is none.

        If it has not done its imports, it has at least begun: another process would be up later.
        """
        waiting = self._waiting.get(node, []) if any_process_does(lane) else []
        while waiting:
            actor, warm = waiting.pop(0)
            try:
                if ray.wait([warm], timeout=0)[0]:
                    ray.get(warm, timeout=FETCH_SECONDS)
            except RayError:  # it has ended itself
                continue
            actor.become.remote(lane, position)
            return actor
        return None

    def end(self) -> None:
        """End those that wait."""
        for actor in self.actors:
            ray.kill(actor)
        self._waiting = {}
