"""Two nodes whose link is cut while they train: a short cut changes nothing, a long one is said."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from m2flow.observe.ending import ending_of
from m2flow.observe.run_directory import read_metrics
from m2flow.runtime.transport.listening import SILENT_SECONDS
from tests.chaos.cut_network import END_SECONDS, hit, linked, start_disturbed, wait_until_quiet
from tests.chaos.disturbed import Strike
from tests.cli.conftest import TINY, run_command
from tests.cli.test_journal import ends_nearly_like
from tests.runtime.cluster_of_two import TwoNodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 6
WORDS = (f"steps={STEPS}", "checkpoint.every=2", "evaluation.every=1000")
CUT_SECONDS = 6.0
NOTICED_SECONDS = SILENT_SECONDS + 96
"""From a cut to the end of the run: what notices it, then the end on a busy machine."""

PHASES = ("generation", "training")


@pytest.fixture(scope="module")
def cluster() -> Iterator[TwoNodes]:
    """For cuts after which it is as good as before."""
    with linked() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    (folder / "tiny.yaml").write_text(TINY)
    words = [*WORDS, "mode=eager", "--run-dir", folder / "run"]
    outcome = run_command("train", folder / "tiny.yaml", *words)
    assert outcome.code == 0, outcome.err
    return folder / "run"


def begun(cluster: TwoNodes, folder: Path, phase: str, *words: str) -> subprocess.Popen[str]:
    """A run across both nodes; returns when its second step is in a phase."""
    (folder / "tiny.yaml").write_text(TINY)
    strike = Strike("", phase, step=1)
    run = start_disturbed(cluster, folder, strike, *WORDS, "mode=disaggregated", *words)
    assert hit(run, folder), run.communicate()
    return run


@pytest.mark.parametrize("phase", PHASES)
def test_a_cut_of_some_seconds_changes_nothing(
    phase: str, cluster: TwoNodes, straight: Path, tmp_path: Path
) -> None:
    run = begun(cluster, tmp_path, phase)
    cluster.cut()
    time.sleep(CUT_SECONDS)
    cluster.mend()
    _, errors = run.communicate(timeout=END_SECONDS + 30)
    assert run.returncode == 0, errors
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == list(range(STEPS + 1))
    ends_nearly_like(tmp_path / "run", straight)
    wait_until_quiet(cluster, tmp_path)


@pytest.mark.parametrize("phase", PHASES)
def test_a_cut_for_good_ends_the_run_with_its_cause(
    phase: str, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no lane may be started again. What was on the other side ends by itself."""
    with linked() as cluster:
        run = begun(cluster, tmp_path, phase, "lane_restarts=0")
        cluster.cut()
        _, errors = run.communicate(timeout=NOTICED_SECONDS)
        assert run.returncode == 1, errors
        (happened,) = (x for x in errors.splitlines() if x.startswith("the run failed: "))
        assert "lane 1 was lost: " in happened
        account = ending_of(tmp_path / "run")
        assert account.state == "failed"
        assert "lane 1 was lost" in account.lines[0]
        cluster.mend()
        wait_until_quiet(cluster, tmp_path)
    monkeypatch.chdir(tmp_path)
    words = [*WORDS, "mode=eager", "lanes=cpu:1", "--run-dir", "run", "--resume"]
    outcome = run_command("train", "tiny.yaml", *words)
    assert outcome.code == 0, outcome.err
    ends_nearly_like(tmp_path / "run", straight)
