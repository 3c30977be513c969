"""Plan files: what is written comes back, and every mistake in one names its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.errors import PlanError
from m2flow.plan import (
    EdgePlan,
    LaneSpec,
    Placement,
    Plan,
    StagePlan,
    read_plan,
    to_json,
)
from m2flow.plan.file import from_json

names = st.text(max_size=6)
counts = st.integers(0, 2**40)
maybe = st.none() | counts
seconds = st.floats(allow_nan=False)
lane_specs = st.builds(
    LaneSpec, counts, names, st.lists(counts, max_size=3).map(tuple), maybe, maybe
)
gangs = st.lists(counts, max_size=3).map(tuple)
placements = st.builds(Placement, st.lists(gangs, max_size=3).map(tuple), counts)
plans = st.builds(
    Plan,
    names,
    st.lists(lane_specs, max_size=3).map(tuple),
    st.dictionaries(names, placements, max_size=3),
    st.dictionaries(names, st.builds(StagePlan, maybe, maybe), max_size=3),
    st.dictionaries(names, st.builds(EdgePlan, maybe, maybe), max_size=3),
    st.lists(names, max_size=3).map(tuple),
    st.integers(),
    seconds,
    st.none() | seconds,
)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(plans)
def test_round_trip(plan: Plan) -> None:
    text = to_json(plan)
    assert from_json(Plan, text, "p") == plan
    assert to_json(from_json(Plan, text, "p")) == text


SMALL: dict[str, Any] = {
    "mode": "custom",
    "lanes": [{"id": 0}],
    "placements": {"gen": {"replicas": [[0]]}},
}


def read(folder: Path, text: str) -> Plan:
    """A plan from a file of the name `p`."""
    file = folder / "p"
    file.write_text(text)
    return read_plan(file)


def test_keys_with_a_default_may_be_left_out(tmp_path: Path) -> None:
    expected = Plan("custom", (LaneSpec(0),), {"gen": Placement(((0,),))})
    assert read(tmp_path, json.dumps(SMALL)) == read_plan(str(tmp_path / "p")) == expected


def test_a_whole_number_of_seconds_is_a_float(tmp_path: Path) -> None:
    plan = read(tmp_path, json.dumps({**SMALL, "deadline_seconds": 5}))
    assert isinstance(plan.deadline_seconds, float)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"lane": 1}, ("p: lane: ", "unknown key", "did you mean 'lanes'?")),
        ({"mode": 3}, ("p: mode: ", "wrong type (got 3)", "expected a valid string")),
        ({"lanes": 5}, ("p: lanes: ", "(got 5)", "expected a valid array")),
        ({"lanes": [3]}, ("p: lanes[0]: ", "(got 3)", "expected an object")),
        ({"lanes": [{}]}, ("p: lanes[0].id: ", "is missing")),
        ({"lanes": [{"id": 0}, {"id": "1"}]}, ("p: lanes[1].id: ", "wrong type", "integer")),
        ({"lanes": [{"id": True}]}, ("p: lanes[0].id: ", "wrong type (got True)")),
        ({"lanes": [{"id": 0, "core": []}]}, ("p: lanes[0].core: ", "did you mean 'cores'")),
        ({"lanes": [{"idd": 0}]}, ("p: lanes[0].idd: ", "did you mean 'id'")),
        ({"lanes": [{"id": 0, "cores": 1}]}, ("p: lanes[0].cores: ", "wrong type")),
        ({"lanes": [{"id": 0, "cores": [True]}]}, ("p: lanes[0].cores[0]: ", "wrong type")),
        ({"lanes": [{"id": 0, "gpu": 0.5}]}, ("p: lanes[0].gpu: ", "(got 0.5)", "integer")),
        ({"placements": []}, ("p: placements: ", "(got [])", "expected an object")),
        ({"placements": {"gen": {}}}, ("p: placements.gen.replicas: ", "is missing")),
        ({"placements": {"gen": {"replicas": 0}}}, ("p: placements.gen.replicas: ", "(got 0)")),
        ({"placements": {"gen": {"replicas": [0]}}}, ("p: placements.gen.replicas[0]: ", "got 0")),
        ({"placements": {"gen": {"replica": [0]}}}, ("p: placements.gen.replica: ", "'replicas'")),
        ({"stages": {"a": {"chunks": 1}}}, ("p: stages.a.chunks: ", "did you mean 'chunk'")),
        ({"stages": {"a": {"chunk": "1"}}}, ("p: stages.a.chunk: ", "(got '1')")),
        ({"stages": None}, ("p: stages: ", "expected an object")),
        ({"edges": {"a->b": {"max_items": 1.5}}}, ("p: edges.a->b.max_items: ", "(got 1.5)")),
        ({"order": "gen"}, ("p: order: ", "(got 'gen')", "array")),
        ({"order": [1]}, ("p: order[0]: ", "wrong type")),
        ({"max_staleness": None}, ("p: max_staleness: ", "wrong type", "integer")),
        ({"deadline_seconds": False}, ("p: deadline_seconds: ", "(got False)", "number")),
        ({"predicted_seconds": "soon"}, ("p: predicted_seconds: ", "(got 'soon')")),
        ({"mode": ["x"] * 500}, ("p: mode: is of the wrong type; expected a valid string",)),
    ],
)
def test_mistakes_are_refused_with_their_place(
    change: dict[str, Any], parts: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(PlanError) as error:
        read(tmp_path, json.dumps({**SMALL, **change}))
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("key", SMALL)
def test_required_keys(key: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=f"p: {key}: is missing"):
        read(tmp_path, json.dumps({k: v for k, v in SMALL.items() if k != key}))


@pytest.mark.parametrize("text", ["[]", "3", "null", '"plan"'])
def test_a_plan_is_a_table(text: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="p: is of the wrong type"):
        read(tmp_path, text)


def test_why_a_plan_was_chosen_is_not_read(tmp_path: Path) -> None:
    text = json.dumps({**SMALL, "decision": {"anything": 1}})
    assert read(tmp_path, text).mode == "custom"


def test_text_that_is_no_json_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text('{"mode": ')
    with pytest.raises(PlanError, match=r"plan\.json: is not JSON: .*line 1"):
        read_plan(file)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(b"\xff\xfe{")
    with pytest.raises(PlanError, match="is not a text file"):
        read_plan(file)


def test_no_such_file(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(PlanError, match="--plan: there is no such plan file"):
            read_plan(path)
