"""Workloads by name: those of m2flow, and those that installed packages register.

A package registers a workload in its `pyproject.toml`:

    [project.entry-points."m2flow.workloads"]
    my_workload = "my_package.workload:WORKLOAD"
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import cast

from m2flow.errors import UserError, suggestion
from m2flow.workloads.common.recipe import Recipe
from m2flow.workloads.common.workload import Workload

GROUP = "m2flow.workloads"

OWN = tuple(
    metadata.EntryPoint(name, f"m2flow.workloads.{name}.workload:WORKLOAD", GROUP)
    for name in ("reasoning", "embodied", "agentic")
)
"""The workloads of m2flow itself, which are known without an installation too."""


def known_workloads() -> Mapping[str, metadata.EntryPoint]:
    """Workloads by name.

    Raises:
        UserError: two packages register workloads of one name.
    """
    found: dict[str, metadata.EntryPoint] = {}
    for entry in (*OWN, *metadata.entry_points(group=GROUP)):
        before = found.setdefault(entry.name, entry)
        if before.value != entry.value:
            raise UserError(
                f"is registered by two packages, as {before.value} and as {entry.value}",
                key="workload",
                value=entry.name,
                hint="uninstall one of them",
            )
    return found


def workload_named(name: object) -> Workload:
    """The workload of a name.

    Raises:
        UserError: there is none, or its package cannot be imported; names those that there are.
    """
    known = known_workloads()
    names = ", ".join(sorted(known))
    if name is None:
        raise UserError("is missing", key="workload", expected=f"one of {names}")
    entry = known.get(str(name))
    if entry is None:
        raise UserError(
            "is not a workload",
            key="workload",
            value=name,
            expected=f"one of {names}",
            hint=suggestion(str(name), known),
        )
    try:
        return cast(Workload, entry.load())
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"{entry.value} cannot be imported: {error}", key="workload", value=name
        ) from error


def workload_of(recipe: Recipe) -> Workload:
    """The workload that a recipe belongs to."""
    return workload_named(recipe.workload)
