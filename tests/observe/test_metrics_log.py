"""The figures of steps: what is written where, and what is missing is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from m2flow.errors import UserError
from m2flow.observe.metrics_log import MetricsLog
from m2flow.observe.run_directory import RunDirectory, read_metrics


def test_jsonl_writes_the_runs_metrics(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "r")
    log = MetricsLog(run, ["jsonl"])
    log.add(1, {"reward/mean": 0.5})
    log.close()
    assert read_metrics(run.path)[0]["reward/mean"] == 0.5


def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in list(sys.modules):
        if module.partition(".")[0] == "tensorboard":
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match=r"pip install 'm2flow\[dash\]'"):
        MetricsLog(RunDirectory(tmp_path), ["jsonl", "tensorboard"])


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the dash extra is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = RunDirectory.create(tmp_path / "run", "r")
    first = MetricsLog(run, ["jsonl", "tensorboard"])
    for step in range(1, 5):
        first.add(step, {"reward/mean": step / 10})
    first.close()
    again = MetricsLog(run, ["jsonl", "tensorboard"], resumed_step=2)
    again.add(3, {"reward/mean": 0.9})
    again.close()
    events = EventAccumulator(str(run.tensorboard)).Reload()
    values = {event.step: event.value for event in events.Scalars("reward/mean")}
    assert values == pytest.approx({1: 0.1, 2: 0.2, 3: 0.9})
