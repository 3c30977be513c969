"""Plans as JSON, in and out, so that a run can be repeated, compared and edited by hand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from m2flow.engine.plan import EdgePlan, LaneSpec, Placement, Plan, StagePlan
from m2flow.errors import PlanError, suggestion

T = TypeVar("T")

DECISION = "decision"
"""Beside the plan: why it was chosen. Not read here."""


def to_json(plan: Plan) -> str:
    """The plan as JSON text, for people to read and edit."""
    return json.dumps(dataclasses.asdict(plan), indent=2) + "\n"


def from_json(text: str, where: str = "plan") -> Plan:
    """Read a plan back.

    Args:
        text: JSON, as `to_json` gives it; keys with a default may be left out.
        where: name of the file, for errors.

    Raises:
        PlanError: the text is no JSON, or a key is unknown, missing or of the wrong type.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"is not JSON: {error}", key=where) from None
    if isinstance(data, dict):
        data.pop(DECISION, None)
    fields = dict(_checked(Plan, data, where))
    if not isinstance(fields["lanes"], list):
        raise PlanError("must be a list", key=f"{where}: lanes", value=fields["lanes"])
    fields["lanes"] = tuple(
        _build(LaneSpec, lane, f"{where}: lanes[{n}]") for n, lane in enumerate(fields["lanes"])
    )
    for name, kind in (("placements", Placement), ("stages", StagePlan), ("edges", EdgePlan)):
        table = fields.get(name, {})
        if not isinstance(table, dict):
            raise PlanError("must be a table", key=f"{where}: {name}", value=table)
        fields[name] = {
            key: _build(kind, value, f"{where}: {name}.{key}") for key, value in table.items()
        }
    return _build(Plan, fields, where)


def read_plan(path: Path | str) -> Plan:
    """Read a plan file.

    Raises:
        PlanError: there is no such file, or it is no plan.
    """
    path = Path(path)
    if not path.is_file():
        raise PlanError("there is no such plan file", key="--plan", value=str(path))
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise PlanError("is not a text file", key="--plan", value=str(path)) from None
    return from_json(text, str(path))


def _checked(kind: type[Any], data: object, where: str) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise PlanError("must be a table", key=where, value=data)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in data:
        if key not in fields:
            raise PlanError("unknown key", key=f"{where}: {key}", hint=suggestion(key, fields))
    for name, field in fields.items():
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and name not in data:
            raise PlanError("is missing", key=f"{where}: {name}")
    return data


def _build(kind: type[T], data: object, where: str) -> T:
    """Make a dataclass of JSON values, checking the kind of each."""
    if isinstance(data, kind):
        return data
    values = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        checked = _checked(kind, data, where)
        if field.name in checked:
            value = checked[field.name]
            values[field.name] = _value(str(field.type), value, f"{where}: {field.name}")
    return kind(**values)


def _value(kind: str, value: Any, where: str) -> Any:
    """A JSON value as the annotation `kind` wants it."""
    if value is None and kind.endswith("| None"):
        return None
    plain = kind.removesuffix(" | None")
    if plain == "float" and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if plain == "int" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if plain == "bool" and isinstance(value, bool):
        return value
    if plain == "str" and isinstance(value, str):
        return value
    if plain == "tuple[int, ...]" and _is_list_of(value, int):
        return tuple(value)
    if plain == "tuple[str, ...]" and _is_list_of(value, str):
        return tuple(value)
    if plain == "tuple[tuple[int, ...], ...]" and isinstance(value, list):
        return tuple(_value("tuple[int, ...]", gang, where) for gang in value)
    if plain.startswith(("Mapping", "tuple[LaneSpec")):
        return value
    raise PlanError("is of the wrong type", key=where, value=value, expected=plain)


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(type(entry) is kind for entry in value)
