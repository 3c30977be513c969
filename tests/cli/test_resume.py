"""A run that was stopped or killed and resumed ends as if nothing had happened, or says why not.

The kills are SIGKILL in processes of their own, at chosen moments, so that no clean-up runs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from m2flow.errors import RunFailed, Stopped, UserError
from m2flow.flow import Batch
from m2flow.observe.ending import ending_of
from m2flow.observe.run_directory import RunDirectory, held, merge_steps, read_document
from m2flow.runtime.driver.journal import Journal
from m2flow.runtime.driver.run import Run
from m2flow.training import checkpoint
from m2flow.training.policy import PolicyTrainer
from m2flow.workloads.common import stopping
from m2flow.workloads.common.run import Training
from m2flow.workloads.reasoning.experiment import ReasoningExperiment

Refused = Callable[..., str]
M2flow = Callable[..., Any]

STEPS = ["steps=4"]
STATE = "shard-00001-model-00001-of-00001.safetensors"

KILLER = """
import os, signal, sys

import torch
from m2flow.cli.app import main
from m2flow.models import causal_lm
from m2flow.observe.run_directory import RunDirectory
from m2flow.workloads.reasoning import experiment, workers
from m2flow.training import checkpoint, supervised

recipe, *moments = sys.argv[1:]


def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)


def after_step(number):
    append = RunDirectory.append_metrics

    def patched(self, step, metrics):
        append(self, step, metrics)
        if step == number:
            die()

    RunDirectory.append_metrics = patched


def arrange(moment):
    if moment == "warm-up":
        experiment.train_supervised = die
    elif moment == "half a model":
        experiment.build_tiny = half_saved(experiment.build_tiny)
    elif moment == "half a checkpoint":
        checkpoint.commit = die
    else:
        after_step(int(moment.removeprefix("step ")))


def half_saved(build):
    def patched(*arguments, **options):
        model = build(*arguments, **options)

        def save_pretrained(folder):
            model.config.save_pretrained(folder)
            die()

        model.save_pretrained = save_pretrained
        return model

    return patched


for moment in moments:
    child = os.fork()
    if not child:
        arrange(moment)
        sys.argv = ["m2flow", "train", recipe, "steps=4", "--run-dir", moment]
        main()
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status), f"{moment}: ended by itself with status {status}"
"""

MOMENTS = ("warm-up", "half a model", "step 0", "step 1", "half a checkpoint", "step 3", "step 4")


@pytest.fixture(scope="module")
def killed(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run directory for each moment at which a run was killed."""
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-c", KILLER, str(finished.parent / "tiny.yaml"), *MOMENTS]
    ran = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return folder


@pytest.fixture(scope="module")
def straight(finished: Path, tmp_path_factory: pytest.TempPathFactory, m2flow: M2flow) -> Path:
    """The run that was never stopped."""
    recipe, folder = finished.parent / "tiny.yaml", tmp_path_factory.mktemp("straight") / "run"
    outcome = m2flow("train", recipe, *STEPS, "--run-dir", folder)
    assert outcome.code == 0, outcome.err
    return folder


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def figures(run: Path) -> list[dict[str, Any]]:
    """What the run's metrics say, less everything that time or an earlier end has a part in."""
    return [
        {
            key: value
            for key, value in row.items()
            if key not in ("time", "rollouts/recalled")
            and not key.startswith(("seconds/", "throughput/", "eval/seconds"))
            and not key.endswith("/seconds")
        }
        for row in rows(run)
    ]


def same_weights(run: Path, other: Path) -> None:
    for name in ("model/model.safetensors", f"trainer/{STATE}"):
        here = load_file(run / "checkpoints" / "latest" / name)
        there = load_file(other / "checkpoints" / "latest" / name)
        assert here.keys() == there.keys()
        for key in here:
            assert here[key].equal(there[key]), f"{name}: {key}"


def ends_like(run: Path, straight: Path) -> None:
    """Bit for bit the same weights and optimizer state; the same figures, each step once."""
    same_weights(run, straight)
    assert figures(run) == figures(straight)
    assert [row["step"] for row in rows(run)] == [0, 1, 2, 3, 4]
    samples = (run / "samples.jsonl").read_text()
    assert samples == (straight / "samples.jsonl").read_text()
    assert not list(run.rglob(".*")), "left-overs were swept up"


def test_the_weights_move_at_each_step(straight: Path) -> None:
    """Or the other tests would compare runs that learn nothing."""
    assert all(row["train/grad_norm"] > 0 for row in rows(straight)[1:])
    assert any(0 < row["reward/mean"] < 1 for row in rows(straight)[1:])


def test_stopped_after_two_steps(tiny: Path, straight: Path, m2flow: M2flow) -> None:
    assert m2flow("train", tiny, "steps=2", "--run-dir", "run").code == 0
    outcome = m2flow("train", tiny, *STEPS, "--run-dir", "run", "--resume")
    assert outcome.code == 0, outcome.err
    assert "going on from run/checkpoints/step_000002" in outcome.out
    ends_like(Path("run"), straight)


@pytest.mark.parametrize("moment", MOMENTS[:-1])
def test_killed(tiny: Path, killed: Path, straight: Path, m2flow: M2flow, moment: str) -> None:
    shutil.copytree(killed / moment, "run", symlinks=True)
    outcome = m2flow("train", tiny, *STEPS, "--run-dir", "run", "--resume")
    assert outcome.code == 0, outcome.err
    ends_like(Path("run"), straight)
    again = ["warm-up", "half a model", "step 0", "step 1", "half a checkpoint"]
    assert ("beginning again" in outcome.out) == (moment in again)
    assert ("warm-up" in outcome.out) == (moment in again[:2]), "done once, if it was whole"


def test_killed_and_killed_again(tiny: Path, killed: Path, straight: Path, m2flow: M2flow) -> None:
    """The last step had been reported, but not saved."""
    shutil.copytree(killed / "step 4", "run", symlinks=True)
    with Path("run/metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rewa')  # and a line was torn
    outcome = m2flow("train", tiny, *STEPS, "--run-dir", "run", "--resume")
    assert outcome.code == 0, outcome.err
    ends_like(Path("run"), straight)


TEN = [
    *("steps=10", "evaluation.every=5", "checkpoint.every=5", "model.dtype=float64"),
    "grace_seconds=300",  # on a busy machine the step lasted longer, and the run ended this process
]


def stopped_after_five(m2flow: M2flow, monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    """Ask a run for its end by a signal, as a scheduler does."""
    append = RunDirectory.append_metrics

    def told(self: RunDirectory, step: int, metrics: dict[str, float]) -> None:
        append(self, step, metrics)
        if step == 5:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "append_metrics", told)
        outcome = m2flow("train", *words)
    assert outcome.code == 128 + signal.SIGTERM, outcome.err
    assert "ended after step 5; saved is step 5" in outcome.err


def test_ten_steps_are_five_a_stop_and_five_more(
    tiny: Path, m2flow: M2flow, monkeypatch: pytest.MonkeyPatch, signals_are_heard: None
) -> None:
    """With a schedule over all ten, of which the second half begins where the first one ended."""
    words = [tiny, *TEN, "optimizer.schedule=cosine", "--run-dir"]
    assert m2flow("train", *words, "straight").code == 0
    stopped_after_five(m2flow, monkeypatch, *words, "parts")
    outcome = m2flow("train", *words, "parts", "--resume")
    assert outcome.code == 0, outcome.err
    assert "going on from parts/checkpoints/step_000005" in outcome.out
    same_weights(Path("parts"), Path("straight"))
    assert figures(Path("parts")) == figures(Path("straight"))
    assert [row["step"] for row in rows(Path("parts"))] == list(range(11))


def test_a_signal_while_a_checkpoint_is_written_does_not_write_it_again(
    tiny: Path, m2flow: M2flow, monkeypatch: pytest.MonkeyPatch, signals_are_heard: None
) -> None:
    """Of a large state that took minutes more, in which the scheduler's patience ended."""
    saved: list[int] = []
    save = ReasoningExperiment.save

    def told(self: ReasoningExperiment, run: Run, checkpoints: Path, step: int) -> None:
        save(self, run, checkpoints, step)
        saved.append(step)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(ReasoningExperiment, "save", told)
    outcome = m2flow("train", tiny, "steps=6", "grace_seconds=300", "--run-dir", "run")
    assert outcome.code == 128 + signal.SIGTERM, outcome.err
    assert "ended after step 2; saved is step 2" in outcome.err
    assert saved == [2]


@pytest.mark.parametrize("step", [5, 10])
def test_an_evaluation_that_a_signal_has_cut_short_is_made_up_for(
    tiny: Path,
    m2flow: M2flow,
    monkeypatch: pytest.MonkeyPatch,
    signals_are_heard: None,
    step: int,
) -> None:
    """Its step is saved all the same, and may be the last one."""
    words = [tiny, *TEN, "grace_seconds=0.1", "--run-dir"]
    assert m2flow("train", *words, "straight").code == 0

    def interrupted(training: Training, run: Run, at: int, held_out: Batch) -> dict[str, float]:
        if at < step:
            return evaluation(training, run, at, held_out)
        signal.raise_signal(signal.SIGTERM)
        deadline = time.monotonic() + 30
        while not training._stopping._overdue and time.monotonic() < deadline:
            time.sleep(0.01)
        return evaluation(training, run, at, held_out)

    evaluation = Training._evaluation
    with monkeypatch.context() as patch:
        patch.setattr(Training, "_evaluation", interrupted)
        outcome = m2flow("train", *words, "parts")
    assert outcome.code == 128 + signal.SIGTERM, outcome.err
    assert f"ended after step {step}; saved is step {step}" in outcome.err
    assert not any("eval/accuracy" in row for row in rows(Path("parts")) if row["step"] == step)

    outcome = m2flow("train", *words, "parts", "--resume")
    assert outcome.code == 0, outcome.err
    assert merge_steps(figures(Path("parts"))) == figures(Path("straight"))
    assert Path("parts/report.html").is_file()
    same_weights(Path("parts"), Path("straight"))


def wait_for_the_end() -> None:
    """Ask for the end, and do not look whether it is due: as what computes in one piece."""
    signal.raise_signal(signal.SIGTERM)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.01)
    pytest.fail("nobody has interrupted it")


INTERRUPTED = {
    "evaluation": (Training, "_evaluation", 2),
    "gradient": (PolicyTrainer, "fold", 6),
    "update": (PolicyTrainer, "finish", 6),
}
"""What is interrupted after step 5: its class and method, and which call of it."""


@pytest.mark.parametrize("moment", INTERRUPTED)
def test_a_step_that_an_eager_run_computes_in_one_piece_is_given_up(
    tiny: Path,
    m2flow: M2flow,
    monkeypatch: pytest.MonkeyPatch,
    signals_are_heard: None,
    moment: str,
) -> None:
    """The steps before it are saved, unless the weights may have moved; and each has its row."""
    words = [tiny, *TEN, "grace_seconds=0.1", "checkpoint.every=1000", "minibatches=1", "--run-dir"]
    assert m2flow("train", *words, "straight").code == 0
    assert rows(Path("straight"))[6]["train/grad_norm"] > 0, "nothing would have to be forgotten"
    owner, name, last = INTERRUPTED[moment]
    whole, calls = getattr(owner, name), 0

    def in_one_piece(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        result = whole(*arguments, **options)
        if calls == last:
            wait_for_the_end()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, in_one_piece)
        patch.setattr(stopping, "HEED_SECONDS", 0.1)
        outcome = m2flow("train", *words, "parts")
    assert outcome.code == 128 + signal.SIGTERM, outcome.err
    saved = "no checkpoint was saved" if moment == "update" else "saved is step 5"
    assert f"ended after step 5; {saved}" in outcome.err
    assert [row["step"] for row in rows(Path("parts"))] == list(range(6))

    outcome = m2flow("train", *words, "parts", "--resume")
    assert outcome.code == 0, outcome.err
    assert merge_steps(figures(Path("parts"))) == figures(Path("straight"))
    same_weights(Path("parts"), Path("straight"))


def test_an_evaluation_that_fails_costs_no_row(
    tiny: Path, m2flow: M2flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ends it, such as a second signal: the step before it is done."""

    def fails(training: Training, run: Run, at: int, held_out: Batch) -> dict[str, float]:
        if at:
            raise Stopped(signal.SIGTERM)
        return {}

    monkeypatch.setattr(Training, "_evaluation", fails)
    m2flow("train", tiny, *STEPS, "--run-dir", "run")
    assert [row["step"] for row in rows(Path("run"))] == [0, 1, 2]
    assert "reward/mean" in rows(Path("run"))[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("fsdp2", "tp2"), ("tp2", "cp2"), ("cp2", "fsdp2")])
def test_five_steps_under_one_layout_and_five_under_another(
    tiny: Path,
    m2flow: M2flow,
    monkeypatch: pytest.MonkeyPatch,
    signals_are_heard: None,
    before: str,
    after: str,
) -> None:
    """And the ten of an eager run, which has one lane."""
    assert m2flow("train", tiny, *TEN, "--run-dir", "straight").code == 0
    words = [tiny, *TEN, "mode=collocated", "lanes=cpu:2", "--run-dir", "parts"]
    stopped_after_five(m2flow, monkeypatch, *words, f"layouts.learner={before}")
    outcome = m2flow("train", *words, f"layouts.learner={after}", "--resume")
    assert outcome.code == 0, outcome.err
    parts, straight = (
        load_file(Path(run) / "checkpoints/latest/model/model.safetensors")
        for run in ("parts", "straight")
    )
    for name, tensor in straight.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-6, atol=1e-6)
    for here, there in zip(rows(Path("parts"))[1:], rows(Path("straight"))[1:], strict=True):
        for name in ("reward/mean", "loss/policy", "train/grad_norm", "tokens/generated"):
            assert here[name] == pytest.approx(there[name], rel=1e-6, abs=1e-6), name


def test_a_checkpoint_that_the_launcher_does_not_see_ends_the_run(
    tiny: Path, m2flow: M2flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner on another machine wrote it to a disk of its own, and nobody noticed."""
    forgotten: list[int] = []
    monkeypatch.setattr(ReasoningExperiment, "save", lambda *_: None)
    monkeypatch.setattr(checkpoint, "SECONDS_UNTIL_SEEN", 0.0)
    monkeypatch.setattr(Journal, "forget_before", lambda _, step: forgotten.append(step))
    error = m2flow("train", tiny, *STEPS, "--run-dir", "apart").error
    folder = Path("apart/checkpoints/step_000002").resolve()
    assert error.startswith(f"{folder}: the launcher does not see the checkpoint")
    assert "a folder that all machines share; name one by --run-dir" in error
    assert forgotten == [0], "its rollouts stay"


def test_the_plan_may_change(tiny: Path, run: Path, m2flow: M2flow) -> None:
    changes = [
        "steps=4",
        "deadline_seconds=99",
        "load_deadline_seconds=9",
        "evaluation.every=3",
        "checkpoint.keep=1",
    ]
    assert m2flow("train", tiny, *changes, "--run-dir", run, "--resume").code == 0
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["latest", "step_000004"]
    assert "deadline_seconds: 99" in (run / "config.yaml").read_text()


def test_a_resumed_run_outlives_the_checkpoint_that_it_began_from(
    tiny: Path, run: Path, m2flow: M2flow
) -> None:
    """Later checkpoints take its place while workers may still have to load from it."""
    words = ["steps=7", "checkpoint.every=1", "checkpoint.keep=1", "evaluation.problems=0"]
    outcome = m2flow("train", tiny, *words, "--run-dir", run, "--resume")
    assert outcome.code == 0, outcome.err
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["latest", "step_000007"]


CLUSTER = Path(__file__).parents[2] / "docs" / "how-to" / "run-on-a-cluster.md"
JOBS = {
    "slurm": r"^(run=.*\nm2flow train .*)$",
    "ray job": r"^ray job submit .* -- (sh -c .*)$",
    "kubernetes": r"^ +entrypoint: >-\n((?: {4}.*\n)+)",
}
"""What begins a run, and goes on with it when the job is started again, by what starts jobs."""


@pytest.mark.parametrize("job", JOBS)
def test_a_job_that_is_started_again_goes_on(
    tiny: Path, m2flow: M2flow, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    """The documented ones said `--resume` from the first, and were refused."""
    page = CLUSTER.read_text().replace("\\\n", " ")
    (command,) = re.findall(JOBS[job], page, re.MULTILINE)
    if job == "kubernetes":
        command = " ".join(command.split())
    for said, here in (("/shared/runs", "runs"), ("/shared/recipes/mine", "tiny")):
        assert said in command
        command = command.replace(said, here)
    command = re.sub(r"lanes=\S+", "lanes=cpu:1 warmup.steps=0 steps=$STEPS", command)
    program = Path("bin/m2flow")
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent.resolve()}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "mine")
    Path("runs/mine").mkdir(parents=True)  # as after a first start that was ended at once
    for steps in ("1", "2"):
        monkeypatch.setenv("STEPS", steps)
        started = ["sh", "-euc", command]
        said = subprocess.run(started, check=True, capture_output=True, text=True).stdout
        outcome = m2flow(*said.splitlines())
        assert outcome.code == 0, outcome.err
        assert ("going on from runs/mine/checkpoints/step_000001" in outcome.out) == (steps == "2")


# What cannot be resumed


def test_which_run(tiny: Path, refused: Refused) -> None:
    assert "--run-dir DIR" in refused("train", tiny, "--resume")
    assert "holds no run to resume (got 'none')" in refused(
        "train", tiny, "--resume", "--run-dir", "none"
    )
    Path("empty").mkdir()
    line = refused("train", tiny, "--resume", "--run-dir", "empty")
    assert "--run-dir: holds no run to resume (got 'empty')" in line


def resume(refused: Refused, *overrides: str) -> str:
    return refused("train", "tiny.yaml", *overrides, "--run-dir", "run", "--resume")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("seed=3", ["seed: differs", "got 3", "expected 0"]),
        ("optimizer.learning_rate=0.5", ["optimizer.learning_rate: differs", "0.5", "0.003"]),
        ("data.options.min_digits=0", ["data.options: differs", "'min_digits': 1"]),
        ("samples_per_prompt=8", ["samples_per_prompt: differs", "got 8", "expected 4"]),
        ("warmup.steps=0", ["warmup.steps: differs"]),
    ],
)
def test_what_changes_the_weights_must_stay(
    run: Path, refused: Refused, override: str, parts: list[str]
) -> None:
    line = resume(refused, override, "steps=4")
    for part in [*parts, "start a new run"]:
        assert part in line


ROWS = """
workload: reasoning
mode: eager
lanes: cpu:1
prompts_per_step: 4
samples_per_prompt: 4
model: {path: model}
data: {task: jsonl, path: rows.jsonl, template: "{question}"}
generation: {max_new_tokens: 6}
checkpoint: {every: 1}
"""


def test_rows_to_train_on_must_stay(
    tiny: Path, finished: Path, m2flow: M2flow, refused: Refused
) -> None:
    """With one row more each epoch has another order, and another tenth is held out."""
    shutil.copytree(finished / "warmup", "model")
    Path("rows.yaml").write_text(ROWS)
    rows = "".join(f'{{"question": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(15))
    Path("rows.jsonl").write_text(rows)
    outcome = m2flow("train", "rows.yaml", "steps=1", "--run-dir", "run")
    assert outcome.code == 0, outcome.err
    words = ["train", "rows.yaml", "steps=2", "--resume", "--run-dir"]

    Path("rows.jsonl").write_text(rows + '{"question": "20+1=", "answer": "21"}\n')
    line = refused(*words, "run")
    assert "data.path: has changed since the checkpoint" in line
    assert "(14 then, 15 now)" in line
    Path("rows.jsonl").write_text(rows.replace('"answer": "3"', '"answer": "4"'))
    assert "(14 then, 14 now)" in refused(*words, "run")

    shutil.copytree("run", "earlier", symlinks=True)  # a version that did not say which rows
    Path("earlier/checkpoints/latest/data.json").unlink()
    manifest = Path("earlier/checkpoints/latest/MANIFEST.json")
    listed = json.loads(manifest.read_text())
    del listed["files"]["data.json"]
    manifest.write_text(json.dumps(listed))
    outcome = m2flow(*words, "earlier")
    assert outcome.code == 0, outcome.err
    Path("rows.jsonl").write_text(rows)
    outcome = m2flow(*words, "run")
    assert outcome.code == 0, outcome.err


def test_a_schedule_ends_where_it_began_to(tiny: Path, m2flow: M2flow, refused: Refused) -> None:
    schedule = "optimizer.schedule=linear"
    assert m2flow("train", tiny, schedule, "steps=2", "--run-dir", "run").code == 0
    line = resume(refused, schedule, "steps=4")
    assert "steps: the linear schedule" in line
    assert "expected 2" in line


def test_all_steps_are_done(run: Path, refused: Refused) -> None:
    line = resume(refused)
    assert "steps: the run has taken 3 steps already (got 3)" in line
    assert "m2flow report run" in line


def test_a_run_that_is_at_work_is_not_gone_on_with(
    tiny: Path, m2flow: M2flow, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both would write its rows and checkpoints."""
    found: list[bool] = []
    append = RunDirectory.append_metrics

    def asking(self: RunDirectory, step: int, metrics: Any) -> None:
        with suppress(UserError), held(self.path, 0.0):
            found.append(True)
        append(self, step, metrics)

    monkeypatch.setattr(RunDirectory, "append_metrics", asking)
    assert m2flow("train", tiny, "steps=2", "--run-dir", "run").code == 0
    assert m2flow("train", tiny, "steps=3", "--run-dir", "run", "--resume").code == 0
    assert found == []
    with held(Path("run")):
        assert "--run-dir: another process trains there" in resume(refused, "steps=4")


@pytest.mark.parametrize("content", ["", '{"recipe": "ti', "[]"])
def test_a_record_of_the_run_that_cannot_be_read(
    tiny: Path, run: Path, refused: Refused, m2flow: M2flow, content: str
) -> None:
    """The doctor said that the run goes on with --resume, and --resume only that it cannot."""
    (run / "run.json").write_text(content)
    line = refused("train", tiny, *STEPS, "--run-dir", run, "--resume")
    assert line.startswith(f"{run}/run.json: ")
    assert line.endswith("remove it, and the run goes on: what it has learnt is in checkpoints/")
    (run / "run.json").unlink()
    assert m2flow("train", tiny, *STEPS, "--run-dir", run, "--resume").code == 0


def test_a_run_without_its_configuration(run: Path, refused: Refused) -> None:
    (run / "config.yaml").unlink()
    assert "config.yaml" in resume(refused, "steps=4")
    (run / "config.yaml").write_text("steps: [")
    assert "run/config.yaml: cannot be read as YAML" in resume(refused, "steps=4")


# Checkpoints that are not whole


def cut(path: Path) -> None:
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("break_it", "parts"),
    [
        (lambda at: cut(at / "model/model.safetensors"), ["model.safetensors has", "bytes"]),
        (lambda at: cut(at / "trainer" / STATE), [f"{STATE} has", "bytes"]),
        (lambda at: flip(at / "trainer" / STATE), [f"{STATE} is not what"]),
        (lambda at: (at / "model/config.json").unlink(), ["config.json is missing"]),
        (lambda at: (at / "MANIFEST.json").unlink(), ["MANIFEST.json is missing"]),
        (lambda at: cut(at / "MANIFEST.json"), ["MANIFEST.json cannot be read"]),
        (shutil.rmtree, ["MANIFEST.json is missing"]),
    ],
)
def test_a_checkpoint_that_is_not_whole(
    run: Path, refused: Refused, break_it: Callable[[Path], None], parts: list[str]
) -> None:
    """The line says which file it is, and which whole checkpoint there is instead."""
    assert sorted(p.name for p in (run / "checkpoints").glob("step_*")) == [
        "step_000002",
        "step_000003",
    ]
    break_it(run / "checkpoints" / "step_000003")
    line = resume(refused, "steps=4")
    for part in [*parts, "the checkpoint is not whole"]:
        assert part in line
    assert "resume from run/checkpoints/step_000002 instead" in line
    assert "run/checkpoints/latest" in line


def test_the_whole_checkpoint_that_was_named_is_resumed_from(
    run: Path, straight: Path, m2flow: M2flow
) -> None:
    cut(run / "checkpoints/step_000003/model/model.safetensors")
    latest = run / "checkpoints" / "latest"
    latest.unlink()
    latest.symlink_to("step_000002")
    assert m2flow("train", "tiny.yaml", *STEPS, "--run-dir", run, "--resume").code == 0
    same_weights(run, straight)


def test_what_an_earlier_end_has_left_is_not_that_of_a_run_that_went_on(
    run: Path, m2flow: M2flow
) -> None:
    """Nor is a run begun when it went on, nor an alarm told twice."""
    directory = RunDirectory(run)
    directory.failure.write_text("a traceback\n")
    directory.write_run(started=1.0, alarms=[{"step": 1, "alarm": "all is well"}])
    before = read_document(directory.run)
    assert m2flow("train", "tiny.yaml", *STEPS, "--run-dir", run, "--resume").code == 0
    assert not directory.failure.exists()
    after = read_document(directory.run)
    assert before is not None
    assert after is not None
    assert after["started"] == 1.0
    told = [one["alarm"] for one in after["alarms"]]
    assert told[0] == "all is well"
    assert len(set(told)) == len(told)


def test_a_dry_run_says_whether_a_run_may_go_on(
    run: Path, m2flow: M2flow, refused: Refused
) -> None:
    words = ["train", "tiny.yaml", *STEPS, "--dry-run"]
    assert "holds a run already" in refused(*words, "--run-dir", run)
    assert "which run should be resumed?" in refused(*words, "--resume")
    assert "differs from the run" in refused(*words, "--run-dir", run, "--resume", "seed=7")
    assert m2flow(*words, "--run-dir", run, "--resume").code == 0
    assert m2flow(*words, "--run-dir", "fresh").code == 0
    assert not Path("fresh").exists()


def test_no_whole_checkpoint_is_left(run: Path, refused: Refused) -> None:
    for step in ("step_000002", "step_000003"):
        flip(run / "checkpoints" / step / "model" / "model.safetensors")
    line = resume(refused, "steps=4")
    assert "no whole checkpoint is left; start a new run" in line


def test_left_over_folders_are_no_checkpoints(run: Path, straight: Path, m2flow: M2flow) -> None:
    checkpoints = run / "checkpoints"
    shutil.copytree(checkpoints / "step_000003", checkpoints / ".step_000004.partial")
    shutil.copytree(checkpoints / "step_000003", checkpoints / ".step_000001.doomed.partial")
    outcome = m2flow("train", "tiny.yaml", *STEPS, "--run-dir", run, "--resume")
    assert "going on from run/checkpoints/step_000003" in outcome.out
    same_weights(run, straight)
    assert not list(checkpoints.glob(".*"))


def test_a_resume_whose_workers_do_not_come_up_is_told(
    tiny: Path, finished: Path, m2flow: M2flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor said that the run had finished."""
    shutil.copytree(finished / "warmup", "model")
    Path("rows.yaml").write_text(ROWS)
    rows = "".join(f'{{"question": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(15))
    Path("rows.jsonl").write_text(rows)
    assert m2flow("train", "rows.yaml", "steps=1", "--run-dir", "run").code == 0

    def fails(*arguments: Any, **options: Any) -> None:
        raise RunFailed("lane 0: CUDA out of memory")

    monkeypatch.setattr("m2flow.workloads.common.run.launched", fails)
    assert m2flow("train", "rows.yaml", "steps=2", "--run-dir", "run", "--resume").code == 1
    ending = ending_of(Path("run"))
    assert ending.state == "failed"
    assert "out of memory" in ending.lines[0]
    assert Path("run/failure.txt").is_file()
