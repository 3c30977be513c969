"""The memory account of a plan on lanes of this machine, before anything is started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph
from m2flow.plan.account import LaneAccount, accounts, in_lines
from m2flow.plan.choose.judge import sized
from m2flow.plan.machine import usable_memory
from m2flow.plan.profile.analytic import analytic_profile
from m2flow.plan.profile.clusters import Cluster, Machines
from m2flow.plan.profile.hardware import DEVICES, USABLE_MEMORY, Device, device_named
from m2flow.plan.sizes import bytes_text
from m2flow.workloads.common.recipe import Recipe
from m2flow.workloads.common.registry import workload_of
from m2flow.workloads.common.workload import NOTHING_ASSUMED

ENDLESS = 1 << 60
"""Bytes of a lane that has no limit."""


def memory_lines(recipe: Recipe, graph: FlowGraph, plan: Plan) -> list[str]:
    """Return the memory account as lines, by the workload's prices; or a line why it is unknown.

    Args:
        recipe: says the sizes.
        graph: of its flow.
        plan: who stands where; what it says of sizes is not read.
    """
    cluster = _cluster_of(plan.lanes)
    try:
        prices = workload_of(recipe).prices(recipe, graph, NOTHING_ASSUMED)
        profile = analytic_profile(graph, cluster, prices, recipe.items_per_step)
    except UserError as error:
        return [f"memory: not known: {str(error).removeprefix(f'{error.key}: ')}"]
    works = {kind: prices(device, cluster.lanes_of(kind)) for kind, device in cluster.kinds.items()}
    plan = sized(plan, graph, profile, recipe.items_per_step)
    found = accounts(plan, graph, works, profile, recipe.items_per_step)
    return [*in_lines(found), *_beyond_machine(found)]


def _beyond_machine(found: Sequence[LaneAccount]) -> list[str]:
    """Return a line if the lanes take more host memory than this machine has."""
    cores = sum(one.neighbours * one.most_bytes for one in found if one.kind == "cpu")
    needed, (_, there) = cores + sum(one.host_bytes for one in found), usable_memory()
    if needed <= there:
        return []
    return [f"  together {bytes_text(needed)}, and this machine has {bytes_text(there)}"]


def _cluster_of(lanes: Sequence[LaneSpec]) -> Cluster:
    """Return a cluster whose devices have the lanes' memory; its rates are not used."""
    parts = Counter((lane.node, lane.kind) for lane in lanes)
    return Cluster(
        tuple(
            Machines(1, count, replace(_device(kind, lanes), lanes_per_node=count))
            for (_, kind), count in sorted(parts.items())
        )
    )


def _device(kind: str, lanes: Sequence[LaneSpec]) -> Device:
    """Return a device with the memory of a kind of lane."""
    found = DEVICES["CPU"] if kind == "cpu" else DEVICES["H100"]
    if kind not in ("cpu", "gpu"):
        found = device_named(kind)
    limits = [lane.memory_bytes for lane in lanes if lane.kind == kind]
    known = [limit for limit in limits if limit is not None]
    if len(known) == len(limits):
        return replace(found, memory_bytes=round(min(known) / USABLE_MEMORY))
    return replace(found, memory_bytes=ENDLESS) if kind == "cpu" else found
