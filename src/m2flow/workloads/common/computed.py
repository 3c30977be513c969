"""A profile of lanes of this machine from data sheets, for runs of which nothing was measured yet.

A run on accelerators begins with the plan that it leads to, and learns from there. Without torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph
from m2flow.plan.profile import Profile
from m2flow.plan.profile.analytic import analytic_profile
from m2flow.plan.profile.clusters import Cluster, Machines
from m2flow.plan.profile.hardware import (
    DEVICES,
    USABLE_MEMORY,
    Device,
    device_called,
    device_named,
)
from m2flow.workloads.common.recipe import Recipe
from m2flow.workloads.common.registry import workload_of
from m2flow.workloads.common.workload import NOTHING_ASSUMED

ENDLESS = 1 << 60
"""Bytes of a lane that has no limit."""

STAND_IN = "H100"
"""Whose rates stand for those of accelerators that no data sheet here is of."""


def computed_profile(
    recipe: Recipe, graph: FlowGraph, lanes: Sequence[LaneSpec], name: str
) -> Profile | None:
    """Return a profile from data sheets; None where nothing can be computed.

    Args:
        recipe: says the sizes.
        graph: of its flow.
        lanes: of accelerators.
        name: of the accelerators, as their driver has it. Where no data sheet here is of them, but
            the lanes have a limit, they count as a `STAND_IN` with that memory: what fits where
            then is right, and how long it takes the run learns.
    """
    if any(lane.gpu is None for lane in lanes):
        return None
    if device_called(name) is None and any(lane.memory_bytes is None for lane in lanes):
        return None
    try:
        prices = workload_of(recipe).prices(recipe, graph, NOTHING_ASSUMED)
        return analytic_profile(graph, cluster_of(lanes, name), prices, recipe.items_per_step)
    except UserError:
        return None


def whose_figures(name: str) -> str:
    """Say whose figures such a profile is of."""
    known = device_called(name)
    if known is None:
        return f"with the rates of an {STAND_IN}, as no figures of these accelerators are known"
    return f"from the data sheet of the {known.name}"


def cluster_of(lanes: Sequence[LaneSpec], name: str = "") -> Cluster:
    """Return lanes as a cluster.

    Args:
        lanes: of any kind; those of cores without a limit may take what they want.
        name: of the accelerators among them. Those that no data sheet is of have the memory that
            their lanes may take.
    """
    parts = Counter((lane.node, lane.kind) for lane in lanes)
    return Cluster(
        tuple(
            Machines(1, replace(_device(kind, lanes, name), lanes_per_node=count))
            for (_, kind), count in sorted(parts.items())
        )
    )


def lanes_named(plan: Plan, cluster: Cluster) -> Plan:
    """Return a plan whose lanes have the kinds that the cluster of its lanes has: a device that is
    the only one of its kind is called `gpu` there, whatever the plan calls it."""
    kinds = {device.name.lower(): kind for kind, device in cluster.kinds.items()}
    lanes = tuple(replace(lane, kind=kinds.get(lane.kind, lane.kind)) for lane in plan.lanes)
    return replace(plan, lanes=lanes)


def _device(kind: str, lanes: Sequence[LaneSpec], name: str) -> Device:
    """Return what stands for a kind of lane."""
    known = device_called(name) if kind == "gpu" else None
    found = known or (DEVICES["CPU"] if kind == "cpu" else DEVICES[STAND_IN])
    if kind not in ("cpu", "gpu"):
        found = device_named(kind)
    limits = [lane.memory_bytes for lane in lanes if lane.kind == kind]
    said = [limit for limit in limits if limit is not None]
    if len(said) == len(limits):
        may = round(min(said) / USABLE_MEMORY)
        # An engine takes its share of what it may have of a device, and of no more than there is.
        return replace(found, memory_bytes=min(may, known.memory_bytes) if known else may)
    return replace(found, memory_bytes=ENDLESS) if kind == "cpu" else found
