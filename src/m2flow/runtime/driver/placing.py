"""Where lanes go on a Ray cluster: on which machine each one, and what is set aside for it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
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
    """Ray's ids of the cluster's machines by their numbers in a plan, and of the others at last.

    The launcher's has number 0. Of the others each number has one with the cores and GPUs that its
    lanes need, where there is one.
    """
    here = ray.get_runtime_context().get_node_id()
    machines = resources_there()
    machines.pop(here, None)
    wanted = 1 + max(lane.node for lane in lanes)
    if wanted > 1 + len(machines):
        raise UserError(
            "the plan needs more machines than the Ray cluster has",
            key="lanes",
            value=wanted,
            expected=f"at most {1 + len(machines)}",
            hint="join machines with `ray start --address=...`, and set RAY_ADDRESS for m2flow",
        )
    found = _fitting(lanes, range(1, wanted), machines)
    others = [node for node in sorted(machines) if node not in found.values()]
    return [here, *(found.get(number) or others.pop(0) for number in range(1, wanted)), *others]


def resources_there() -> dict[str, Mapping[str, float]]:
    """What the machines that Ray takes to be alive have in all, by their ids."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def machines_there() -> set[str]:
    """Ray's ids of the machines that it takes to be alive."""
    return set(resources_there())


def nodes_left(lanes: Sequence[LaneSpec], nodes: Sequence[str]) -> list[str]:
    """Ray's ids of the machines of lanes, as they are now.

    A machine on which no lane is, such as one that has joined, takes the place of one that has
    gone, if it has the cores and GPUs for it. Where there is none, the id stays.

    Args:
        lanes: all lanes of a pool.
        nodes: the ids as they were before.
    """
    machines = resources_there()
    of_lanes = {lane.node: nodes[lane.node] for lane in lanes}
    gone = [number for number, node in of_lanes.items() if node not in machines]
    free = {node: has for node, has in machines.items() if node not in of_lanes.values()}
    found = _fitting(lanes, gone, free)
    return [found.get(number, node) for number, node in enumerate(nodes)]


def _fitting(
    lanes: Sequence[LaneSpec], numbers: Iterable[int], machines: Mapping[str, Mapping[str, float]]
) -> dict[int, str]:
    """By number, the first machine left that has what its lanes need; those with GPUs choose first.

    A number that no machine fits is left out.

    Args:
        lanes: all lanes.
        numbers: of machines, as the lanes have them.
        machines: what each one has, by Ray's ids.
    """
    beside, left, found = gpus_beside(lanes), sorted(machines), dict[int, str]()
    needs = {number: _needs(lanes, number, beside) for number in sorted(numbers)}
    for number in sorted(
        needs, key=lambda one: (needs[one]["GPU"], needs[one]["CPU"]), reverse=True
    ):
        needed = needs[number].items()
        fits = (n for n in left if all(machines[n].get(what, 0) >= many for what, many in needed))
        if (node := next(fits, None)) is not None:
            found[number] = node
            left.remove(node)
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


def _needs(lanes: Iterable[LaneSpec], number: int, beside: Container[int]) -> dict[str, int]:
    """What Ray is to set aside for the lanes on the machine of a number, as it calls that."""
    here = [_resources(x, shares_gpu=x.id in beside) for x in lanes if x.node == number]
    return {
        "CPU": sum(one.get("num_cpus", 0) for one in here),
        "GPU": sum(one.get("num_gpus", 0) for one in here),
    }


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
            # Ray takes a command.
            environment["py_executable"] = shlex.quote(isolation.python)
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
            name, needed, free, node = lacking
            where = "" if node is None else f" on {_called(node)}"
            raise UserError(
                f"the lanes need {needed:g} {name}s, the Ray cluster has {free:g} free{where}",
                key="lanes",
                hint="use fewer lanes, or end what else runs on the cluster",
            )
        time.sleep(0.05)


def _called(node: str) -> str:
    """A machine in words, by Ray's id of it."""
    for one in ray.nodes():
        if one["NodeID"] == node:
            return f"the machine {one['NodeManagerHostname']} ({one['NodeManagerAddress']})"
    return "a machine that is gone"


def lacks(
    lanes: Sequence[LaneSpec], nodes: Sequence[str], beside: Mapping[int, int]
) -> tuple[str, float, float, str | None] | None:
    """A resource of which there is too little: its name, what is needed, what is free, and on which
    machine, if there are several."""
    several = len(nodes) > 1
    free_on = ray.state.available_resources_per_node() if several else {}
    for number, node in enumerate(nodes):
        free = free_on.get(node, {}) if several else ray.available_resources()
        for name, needed in _needs(lanes, number, beside).items():
            if needed > free.get(name, 0):
                return name, needed, free.get(name, 0), node if several else None
    return None
