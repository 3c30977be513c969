"""Where lanes go on a Ray cluster: on which machine each one, and what is set aside for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from m2flow.engine.plan import LaneSpec
from m2flow.errors import UserError
from m2flow.flow.worker import Isolation

ROOM_SECONDS = 3.0
"""Longest that the cluster may take to know that the lanes of an earlier run have ended."""

AGAIN_SECONDS = 60.0
"""Longest that room for a lost lane may take: Ray may have to find out that its machine is gone."""


def nodes_for(lanes: Sequence[LaneSpec]) -> list[str]:
    """Ray's ids of the cluster's machines, that of the launcher first."""
    here = ray.get_runtime_context().get_node_id()
    nodes = [here, *sorted(machines_there() - {here})]
    wanted = 1 + max(lane.node for lane in lanes)
    if wanted > len(nodes):
        raise UserError(
            "the plan needs more machines than the Ray cluster has",
            key="lanes",
            value=wanted,
            expected=f"at most {len(nodes)}",
            hint="join machines with `ray start --address=...`, and set RAY_ADDRESS for m2flow",
        )
    return nodes


def machines_there() -> set[str]:
    """Ray's ids of the machines that it takes to be alive."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def nodes_left(lanes: Sequence[LaneSpec], nodes: Sequence[str]) -> list[str]:
    """Ray's ids of the machines of lanes, as they are now.

    A machine on which no lane is, such as one that has joined, takes the place of one that has
    gone. Where there is none, the id stays.

    Args:
        lanes: all lanes of a pool.
        nodes: the ids as they were before.
    """
    there, found = machines_there(), list(nodes)
    used = sorted({lane.node for lane in lanes})
    free = sorted(there - {nodes[number] for number in used})
    for number in used:
        if nodes[number] not in there and free:
            found[number] = free.pop(0)
    return found


def gpus_beside(lanes: Sequence[LaneSpec]) -> dict[int, int]:
    """For each lane that shares a GPU and is not its owner, the owner: the lane that is not
    reserved for a worker, or else the first."""
    owners: dict[tuple[int, int], int] = {}
    on_gpus = [lane for lane in lanes if lane.gpu is not None]
    for lane in sorted(on_gpus, key=lambda one: one.reserved_for is not None):
        assert lane.gpu is not None
        owners.setdefault((lane.node, lane.gpu), lane.id)
    found = {lane.id: owners[lane.node, lane.gpu] for lane in on_gpus if lane.gpu is not None}
    return {lane: owner for lane, owner in found.items() if lane != owner}


def _resources(lane: LaneSpec, *, shares_gpu: bool) -> dict[str, int]:
    """What Ray is to set aside for a lane: nothing for one that shares with the lane beside it.

    Cores are named in any case, or Ray sets one aside for each GPU without a word.
    """
    if lane.gpu is not None:
        return {"num_cpus": 0} if shares_gpu else {"num_cpus": 0, "num_gpus": 1}
    return {"num_cpus": 0 if lane.reserved_for is not None else len(lane.cores)}


def options_of(
    lane: LaneSpec, node: str, isolated: Mapping[str, Isolation], *, shares_gpu: bool
) -> dict[str, Any]:
    """Ray's options for the actor of a lane."""
    options: dict[str, Any] = {
        **_resources(lane, shares_gpu=shares_gpu),
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        "max_restarts": 0,
    }
    isolation = isolated.get(lane.reserved_for or "")
    if isolation is not None:
        environment: dict[str, Any] = {"env_vars": dict(isolation.environment)}
        if isolation.python is not None:
            environment["py_executable"] = isolation.python
        options["runtime_env"] = environment
    return options


def check_room(
    lanes: Sequence[LaneSpec],
    nodes: Callable[[], Sequence[str]],
    beside: Mapping[int, int],
    seconds: float,
) -> None:
    """Refuse lanes that the cluster has no room for: Ray would wait for it without a word.

    What the lanes of a run that has just ended held comes back a moment later: it is waited for
    no longer than `seconds`. `nodes` says at each look what the machines are.
    """
    deadline = time.monotonic() + seconds
    while True:
        lacking = lacks(lanes, nodes(), beside)
        if lacking is None:
            return
        if time.monotonic() > deadline:
            name, needed, free = lacking
            raise UserError(
                f"the lanes need {needed:g} {name}s, the Ray cluster has {free:g} free",
                key="lanes",
                hint="use fewer lanes, or end what else runs on the cluster",
            )
        time.sleep(0.05)


def lacks(
    lanes: Sequence[LaneSpec], nodes: Sequence[str], beside: Mapping[int, int]
) -> tuple[str, float, float] | None:
    """A resource of which there is too little: its name, what is needed, what is free."""
    free_on = ray.state.available_resources_per_node() if len(nodes) > 1 else {}
    for number, node in enumerate(nodes):
        here = [lane for lane in lanes if lane.node == number]
        free = free_on.get(node, {}) if len(nodes) > 1 else ray.available_resources()
        for name, key in (("CPU", "num_cpus"), ("GPU", "num_gpus")):
            needed = sum(
                _resources(lane, shares_gpu=lane.id in beside).get(key, 0) for lane in here
            )
            if needed > free.get(name, 0):
                return name, needed, free.get(name, 0)
    return None
