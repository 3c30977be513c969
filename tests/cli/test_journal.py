"""A launcher that is killed in the middle of a step: what it had drawn is not drawn again."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from m2flow.generation import native
from m2flow.observe.run_directory import RunDirectory
from m2flow.runtime.lane.frames import read_frames
from tests.cli.test_resume import ends_like, figures, rows
from tests.cli.test_signals import Started, steps_done

M2flow = Callable[..., Any]

STEPS = 4
SAMPLES = 16
WORDS = [f"steps={STEPS}", "generation.max_new_tokens=12"]
"""Answers of many lengths, so that a group is seldom finished as a whole."""

KILLER = """
import os, signal, sys

import torch
from m2flow.cli.app import main
from m2flow.models import causal_lm
from m2flow.workloads.reasoning import experiment, workers
from m2flow.runtime.lane import frames, journal

recipe, words, *moments = sys.argv[1:]
add = journal.JournalWriter.add


def killed_after(step, count):
    def patched(self, frame):
        nonlocal count
        add(self, frame)
        if frame.step == step:
            count -= 1
            if not count:
                assert self.flush(60)
                os.kill(os.getpid(), signal.SIGKILL)

    journal.JournalWriter.add = patched


for moment in moments:
    child = os.fork()
    if not child:
        killed_after(*map(int, moment.split("-")))
        sys.argv = ["m2flow", "train", recipe, *words.split(), "--run-dir", moment]
        main()
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status), f"{moment}: ended by itself with status {status}"
"""

MOMENTS = ("0-1", "1-2", "3-1")
"""Step, and after how many of its pieces; there is a checkpoint after step 2."""


@pytest.fixture(scope="module")
def straight(finished: Path, tmp_path_factory: pytest.TempPathFactory, m2flow: M2flow) -> Path:
    """The run that was never stopped."""
    recipe, folder = finished.parent / "tiny.yaml", tmp_path_factory.mktemp("straight") / "run"
    outcome = m2flow("train", recipe, *WORDS, "--run-dir", folder)
    assert outcome.code == 0, outcome.err
    return folder


@pytest.fixture(scope="module")
def killed(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run directory for each moment at which a run was killed."""
    folder = tmp_path_factory.mktemp("killed")
    recipe = finished.parent / "tiny.yaml"
    command = [sys.executable, "-c", KILLER, str(recipe), " ".join(WORDS), *MOMENTS]
    ran = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return folder


def killed_at(moment: str, killed: Path) -> dict[int, list[int]]:
    """A run that was killed at a moment, as `run`; by step the samples that it has kept."""
    shutil.copytree(killed / moment, "run", symlinks=True)
    return kept()


def kept() -> dict[int, list[int]]:
    """By step the samples that are in the journal."""
    found: dict[int, list[int]] = {}
    for path in sorted(Path("run/journal").iterdir()):
        for frame in read_frames(path):
            assert frame.version == frame.step
            found.setdefault(frame.step, []).extend(frame.batch.ids)
    return found


def ends_nearly_like(run: Path, straight: Path) -> None:
    """The same samples, figures and weights, up to the order of sums: batches have differed."""
    for ours, theirs in zip(figures(run), figures(straight), strict=True):
        of_plan = [key for key in theirs if key.startswith(("publish/", "train/tokens_computed"))]
        for key in theirs.keys() - of_plan:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-4), key
    for ours, theirs in zip(*map(drawn, (run, straight)), strict=True):
        assert ours == theirs
    model = "checkpoints/latest/model/model.safetensors"
    here, there = load_file(run / model), load_file(straight / model)
    for key, tensor in there.items():
        assert here[key].allclose(tensor, rtol=0, atol=1e-4), key


def drawn(run: Path) -> list[Any]:
    """What was sampled, and how it was judged."""
    samples = map(json.loads, (run / "samples.jsonl").read_text().splitlines())
    return [[one[key] for key in ("step", "item", "completion", "reward")] for one in samples]


class Asked:
    """What the engine was asked for, but for evaluations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.samples = Counter[int]()
        submit = native.NativeEngine.submit

        def noting(engine: Any, requests: Any) -> None:
            requests = list(requests)
            if requests and requests[0].params.temperature > 0:
                self.samples[engine.version] += len(requests)
            submit(engine, requests)

        monkeypatch.setattr(native.NativeEngine, "submit", noting)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_goes_on_with_the_samples_that_were_finished(
    tiny: Path,
    killed: Path,
    straight: Path,
    m2flow: M2flow,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    there = killed_at(moment, killed)
    step, first = int(moment[0]), 2 if moment[0] > "2" else 0
    assert list(there) == list(range(first, step + 1)), "a checkpoint empties the journal"
    assert 0 < len(there[step]) < SAMPLES
    assert all(len(there[whole]) == SAMPLES for whole in range(first, step))
    asked = Asked(monkeypatch)
    outcome = m2flow("train", tiny, *WORDS, "--run-dir", "run", "--resume")
    assert outcome.code == 0, outcome.err
    words = str(step + 1) if first == step else f"{first + 1} to {step + 1}"
    assert f"rollouts of step {words} are there: they are not made again" in outcome.out
    expected = {n: SAMPLES - len(there.get(n, ())) for n in range(first, STEPS)}
    assert asked.samples == Counter({n: count for n, count in expected.items() if count})
    recalled = {row["step"] - 1: row["rollouts/recalled"] for row in rows(Path("run"))
                if "rollouts/recalled" in row}  # fmt: skip
    assert recalled == {n: float(len(items)) for n, items in there.items()}
    ends_nearly_like(Path("run"), straight)
    assert not Path("run/journal").exists()


def test_what_was_damaged_is_drawn_again(
    tiny: Path, killed: Path, straight: Path, m2flow: M2flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_at("1-2", killed)
    for path in Path("run/journal").iterdir():
        content = bytearray(path.read_bytes())
        if path.name.startswith("step_000000"):
            content[100] ^= 1  # its first frame
        path.write_bytes(content[:-7])  # and the last one is torn
    there = kept()
    assert len(there.get(0, ())) < SAMPLES
    asked = Asked(monkeypatch)
    assert m2flow("train", tiny, *WORDS, "--run-dir", "run", "--resume").code == 0
    assert asked.samples[0] == SAMPLES - len(there.get(0, ()))
    ends_nearly_like(Path("run"), straight)


def test_rollouts_of_an_abandoned_future_are_drawn_again(
    tiny: Path, killed: Path, straight: Path, m2flow: M2flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that do not begin where the run goes on: weights may have come to differ since."""
    killed_at("3-1", killed)
    for path in Path("run/journal").glob("step_000002-*"):
        path.unlink()
    asked = Asked(monkeypatch)
    outcome = m2flow("train", tiny, *WORDS, "--run-dir", "run", "--resume")
    assert outcome.code == 0, outcome.err
    assert "not made again" not in outcome.out
    assert asked.samples == {2: SAMPLES, 3: SAMPLES}
    ends_like(Path("run"), straight)


def test_a_run_without_a_journal(
    tiny: Path, killed: Path, straight: Path, m2flow: M2flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is written, and one that is there is not used."""
    killed_at("1-2", killed)
    before = sorted(Path("run/journal").iterdir())
    asked = Asked(monkeypatch)
    outcome = m2flow("train", tiny, *WORDS, "journal_gb=0", "--run-dir", "run", "--resume")
    assert outcome.code == 0, outcome.err
    assert asked.samples == Counter(dict.fromkeys(range(STEPS), SAMPLES))
    assert sorted(Path("run/journal").iterdir()) == before
    ends_like(Path("run"), straight)


def test_a_disk_that_takes_no_rollouts_does_not_end_the_run(
    tiny: Path, straight: Path, m2flow: M2flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`journal` is a file here, so that nobody can write there."""
    create = RunDirectory.create.__func__  # type: ignore[attr-defined]

    def with_a_file(*arguments: Any, **options: Any) -> RunDirectory:
        directory: RunDirectory = create(*arguments, **options)
        directory.journal.touch()
        return directory

    monkeypatch.setattr(RunDirectory, "create", classmethod(with_a_file))
    outcome = m2flow("train", tiny, *WORDS, "--run-dir", "run")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("rollouts are no longer kept for --resume: ") == 1
    ends_like(Path("run"), straight)


# --- on lanes -----------------------------------------------------------------------------------

WAITS = """
import os, time

def waits(prompt, completion, completion_ids, row):
    if os.path.exists("hold"):
        open("waiting", "a").close()
        time.sleep(60)
    return float(len(completion_ids) % 2)
"""


@pytest.fixture
def started(tiny: Path) -> Iterator[Callable[..., Started]]:
    runs: list[Started] = []

    def start(*words: str) -> Started:
        runs.append(Started(tiny, *words))
        return runs[-1]

    yield start
    for run in runs:
        run.end()


@pytest.mark.slow
def test_a_launcher_is_killed_while_lanes_score(
    started: Callable[..., Started], tiny: Path, m2flow: M2flow
) -> None:
    """All of the step is drawn then, and half of what follows on other lanes than before."""
    Path("my_reward.py").write_text(WAITS)
    common = [*WORDS, "lanes=cpu:2", "reward=my_reward:waits", "evaluation.problems=0"]
    assert m2flow("train", tiny, *common, "mode=eager", "--run-dir", "straight").code == 0
    run = started(*common, "mode=disaggregated", "checkpoint.every=100")
    run.wait_for(lambda: bool(list(Path("run").glob("journal/step_000001-*"))))
    Path("hold").touch()
    run.wait_for(Path("waiting").exists)
    run.wait_for(lambda: len(kept().get(steps_done(), ())) == SAMPLES)
    step = steps_done()
    run.process.kill()
    run.process.communicate()
    run.wait_until_quiet(60)
    Path("hold").unlink()
    resumed = started(*common, "mode=collocated", "--resume")
    _, errors = resumed.process.communicate(timeout=240)
    assert resumed.process.returncode == 0, errors
    recalled = {row["step"]: row.get("rollouts/recalled") for row in rows(Path("run"))}
    assert all(recalled[number] == SAMPLES for number in range(1, step + 2))
    spans = json.loads(Path("run/timeline.json").read_text())["traceEvents"]
    drawn = [span for span in spans if span.get("name") == "generator.generate"]
    assert {span["args"]["step"] for span in drawn} == set(range(step + 2, STEPS + 1))
    ends_nearly_like(Path("run"), Path("straight"))


def test_a_step_whose_rollouts_were_there_says_nothing_of_throughput(
    tiny: Path, killed: Path, m2flow: M2flow
) -> None:
    """Samples that an earlier process had drawn counted as drawn in the seconds of training."""
    there = killed_at("1-2", killed)
    assert m2flow("train", tiny, *WORDS, "--run-dir", "run", "--resume").code == 0
    for row in rows(Path("run")):
        if "seconds/step" in row:
            told = any(key.startswith("throughput/") for key in row)
            assert told == (row["step"] - 1 not in there)
