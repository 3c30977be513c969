"""Plan files: written by `to_json`, so that a run can be repeated, compared and edited by hand."""

from __future__ import annotations

from pathlib import Path

from m2flow.engine.plan import Plan
from m2flow.errors import PlanError
from m2flow.plan.file.codec import from_json, read_text

DECISION = "decision"
"""The key beside the plan's own that says why the plan was chosen; it is not read."""


def plan_from_json(text: str, where: str = "plan") -> Plan:
    """Read a plan.

    Args:
        text: JSON, as `to_json` writes it; keys with a default may be left out.
        where: name of the file, for errors.

    Raises:
        PlanError: the text is no JSON, or a key is unknown, missing or of the wrong type.
    """
    return from_json(Plan, text, where, PlanError, ignore=(DECISION,))


def read_plan(path: Path | str) -> Plan:
    """Read a plan file.

    Raises:
        PlanError: there is no such file, or it is no plan.
    """
    return plan_from_json(read_text(path, "plan file", "--plan", PlanError), str(path))
