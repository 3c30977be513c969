"""Whole commands of which a lane is killed: without a learner on it, the step goes on.

The generator stands apart, and the verifier beside the learner. Figures and weights are those of an
eager run, and `metrics.jsonl` says whether anybody went back.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from m2flow.observe.run_directory import read_metrics
from tests.chaos.disturbed import Strike
from tests.chaos.test_seeded_runs import (
    MODEL,
    OF_THE_PLAN,
    RECIPES,
    STEPS,
    WEIGHTS_APART,
    Drawn,
    disturbed,
    started,
)
from tests.cli.conftest import run_command
from tests.cli.test_resume import figures
from tests.cli.test_signals import Started

__all__ = ["started"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("straight")
    recipe, *words = RECIPES["native"]
    (folder / "tiny.yaml").write_text(recipe)
    said = ["--run-dir", folder / "run", "mode=eager", "lanes=cpu:1"]
    outcome = run_command("train", folder / "tiny.yaml", *words, *said)
    assert outcome.code == 0, outcome.err
    return folder / "run"


@pytest.mark.parametrize(("phase", "healed"), [("generation", True), ("scoring", False)])
def test_the_run_ends_like_an_undisturbed_one(
    phase: str,
    healed: bool,
    straight: Path,
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
    for row, wanted in zip(figures(run), figures(straight), strict=True):
        expected = {key: x for key, x in wanted.items() if not key.startswith(OF_THE_PLAN)}
        assert {key: row.get(key) for key in expected} == pytest.approx(
            expected, rel=1e-3, abs=1e-4
        )
    here, there = (load_file(folder / MODEL) for folder in (run, straight))
    for key, tensor in there.items():
        assert here[key].allclose(tensor, rtol=0, atol=WEIGHTS_APART["native"]), key
