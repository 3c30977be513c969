"""What all workloads share: the protocol of a workload, the base of recipes, and the run itself.

from m2flow.workloads.common import train
run_dir = train("recipes/quickstart.yaml", {"steps": 20})
"""

from __future__ import annotations

from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.common.recipe import Recipe, Section
from m2flow.workloads.common.registry import known_workloads, workload_named
from m2flow.workloads.common.start import train
from m2flow.workloads.common.workload import (
    Assumed,
    Examination,
    Experiment,
    Progress,
    Workload,
)

__all__ = [
    "Assumed",
    "Examination",
    "Experiment",
    "Progress",
    "Recipe",
    "Section",
    "Workload",
    "known_workloads",
    "read_recipe",
    "train",
    "workload_named",
]
