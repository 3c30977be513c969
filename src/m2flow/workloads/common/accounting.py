"""The memory account of a plan on lanes of this machine, before anything is started."""

from __future__ import annotations

from collections.abc import Sequence

from m2flow.engine.plan import Plan
from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph
from m2flow.plan.account import LaneAccount, accounts, in_lines
from m2flow.plan.choose.judge import sized
from m2flow.plan.machine import usable_memory
from m2flow.plan.profile.analytic import analytic_profile
from m2flow.plan.sizes import bytes_text
from m2flow.workloads.common.computed import cluster_of, lanes_named
from m2flow.workloads.common.recipe import Recipe
from m2flow.workloads.common.registry import workload_of
from m2flow.workloads.common.workload import NOTHING_ASSUMED


def memory_lines(recipe: Recipe, graph: FlowGraph, plan: Plan) -> list[str]:
    """Return the memory account as lines, by the workload's prices; or a line why it is unknown.

    Args:
        recipe: says the sizes.
        graph: of its flow.
        plan: who stands where; what it says of sizes is not read.
    """
    cluster = cluster_of(plan.lanes)
    plan = lanes_named(plan, cluster)
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
