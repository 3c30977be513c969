"""What long tests write down for the results of benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.results import add_result


def test_results_are_added_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "found.json"
    monkeypatch.setenv("M2FLOW_COMMIT", "abc")
    add_result("M2FLOW_FOUND", "found", "nobody asks", {"cases": 1})
    monkeypatch.setenv("M2FLOW_FOUND", str(file))
    add_result("M2FLOW_FOUND", "found", "one", {"cases": 1})
    monkeypatch.setenv("M2FLOW_COMMIT", "def")
    add_result("M2FLOW_FOUND", "found", "two", {"cases": 2})
    row = json.loads(file.read_text())
    assert row["commit"] == "abc, def"
    assert row["results"] == {
        "one": {"cases": 1, "commit": "abc"},
        "two": {"cases": 2, "commit": "def"},
    }
