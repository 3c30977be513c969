"""What a run is alarmed about is told once, and not without end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from m2flow.observe.run_directory import RunDirectory, alarms_of, read_document
from m2flow.training.optimizer import NOT_TAKEN
from m2flow.workloads.common.run import ALARM_CHARACTERS, ALARMS_KEPT, Training


def test_alarms_that_all_differ_are_told_up_to_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sample may have an error of its own: `run.json` was written again for each, for ever."""
    told: list[str] = []
    progress: Any = SimpleNamespace(note=told.append)
    experiment: Any = SimpleNamespace(recipe=None)
    stopping: Any = None
    run = Training(
        experiment, None, None, None, progress, resumed=False, checkpoint=None, stopping=stopping
    )
    run._directory = directory = RunDirectory.create(tmp_path / "run", "r")
    for step in range(1, 101):
        run._tell(step, [f"sample {step}: {'x' * 10_000}", "always the same", NOT_TAKEN])
    assert len(told) == ALARMS_KEPT + 1 + 99, "each once, that there are more, and each step lost"
    assert sum("further ones are not" in said for said in told) == 1
    assert max(map(len, told)) < ALARM_CHARACTERS + 20
    kept = alarms_of(read_document(directory.run) or {})
    assert len(kept) == ALARMS_KEPT
    assert kept[:3] == [
        {"step": 1, "alarm": f"sample 1: {'x' * (ALARM_CHARACTERS - 10)}…"},
        {"step": 1, "alarm": "always the same"},
        {"step": 1, "alarm": NOT_TAKEN},
    ]
    written: list[object] = []
    monkeypatch.setattr(directory, "write_run", lambda **facts: written.append(facts))
    run._tell(101, ["something new"])
    assert not written
