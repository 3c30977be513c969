"""Whole commands whose launcher is killed in the middle of a step, under other workloads.

They go on with `--resume`: steps whose rollouts are there are not made again, every step and every
episode is there once, and figures and weights are those of a run that nobody disturbed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from m2flow.observe.run_directory import read_metrics
from tests.chaos.disturbed import Strike
from tests.chaos.test_seeded_runs import (
    EPISODES,
    Drawn,
    disturbed,
    ends_like,
    every_episode_counts_once,
    started,
    straight,
)
from tests.cli.test_signals import Started

__all__ = ["started", "straight"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SAMPLES = {"agentic": 16, "embodied": EPISODES}
"""Of a step, by workload."""


@pytest.mark.parametrize("workload", SAMPLES)
def test_what_was_rolled_out_is_not_rolled_out_again(
    workload: str,
    straight: Callable[[str], Path],
    started: list[Started],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed in the fifth step or a later one, with a checkpoint after the third."""
    monkeypatch.chdir(tmp_path)
    strike = Strike("launcher", "generation", step=4)
    drawn = Drawn(workload, "disaggregated", journal=True, victim="launcher", strike=strike)
    assert disturbed(drawn, tmp_path, started) == "resumed"
    run = tmp_path / "run"
    ends_like(run, straight(workload), workload)
    if workload == "embodied":
        every_episode_counts_once(run)
    recalled = {row["step"]: row.get("rollouts/recalled") for row in read_metrics(run)}
    assert recalled[4] == SAMPLES[workload]
    assert recalled[8] is None
