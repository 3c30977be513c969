"""Whole commands of which a lane is killed: without a learner on it, the step goes on.

The generator stands apart, and the verifier beside the learner. Figures and weights are those of an
eager run, and `metrics.jsonl` says whether anybody went back.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from m2flow.observe.run_directory import read_metrics
from tests.chaos.disturbed import Strike
from tests.chaos.test_seeded_runs import (
    STEPS,
    Drawn,
    disturbed,
    ends_like,
    started,
    straight,
)
from tests.cli.test_signals import Started

__all__ = ["started", "straight"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("phase", "healed"), [("generation", True), ("scoring", False)])
def test_the_run_ends_like_an_undisturbed_one(
    phase: str,
    healed: bool,
    straight: Callable[[str], Path],
    started: list[Started],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("M2FLOW_CACHE", str(tmp_path / "cache"))
    strike = Strike("lane", phase, step=4)
    drawn = Drawn("native", "disaggregated", journal=True, victim="lane", strike=strike)
    assert disturbed(drawn, tmp_path, started), "nobody was hit"
    run = tmp_path / "run"
    rows = [row for row in read_metrics(run) if row["step"]]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert (rows[-1]["lanes/restarts"], rows[-1]["lanes/healed"]) == (1, healed)
    assert not (healed and any("rollouts/recalled" in row for row in rows))
    ends_like(run, straight("native"), "native")
