"""Profiles: what the planner knows of time and memory, and where it knows it from.

`data` holds the classes. A profile is learned from the spans of steps that ran (`learning`, from
`evidence`), or computed for hardware that is not here (`analytic`, from the `work` that a workload
declares and the `hardware` of a cluster). Pure: nothing here starts anything or reads a clock.
"""

from m2flow.plan.profile.data import (
    KEY_PARTS,
    PLACES,
    LinkCost,
    Piecewise,
    Profile,
    PublishCost,
    Quantiles,
    StageCost,
    StageProfile,
    WorkerCost,
    differences,
)

__all__ = [
    "KEY_PARTS",
    "PLACES",
    "LinkCost",
    "Piecewise",
    "Profile",
    "PublishCost",
    "Quantiles",
    "StageCost",
    "StageProfile",
    "WorkerCost",
    "differences",
]
