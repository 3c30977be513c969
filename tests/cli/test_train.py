"""A whole run, and everything it leaves behind; a run that fails, and what it says."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from m2flow.plan import read_plan
from m2flow.rewards import addition
from m2flow.training.checkpoint import resume_point, step_of
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.workers import verifier

M2flow = Callable[..., Any]
Refused = Callable[..., str]

FILES = """
config.yaml plan.json metrics.jsonl samples.jsonl timeline.json report.html run.json
checkpoints/latest checkpoints/step_000002/MANIFEST.json
checkpoints/step_000003/model/config.json checkpoints/step_000003/model/model.safetensors
checkpoints/step_000003/model/tokenizer.json
""".split()

PER_STEP = """
time reward/mean accuracy/mean tokens/generated samples seconds/step throughput/tokens_per_s
throughput/samples_per_s version staleness/mean loss/policy train/grad_norm
seconds/generator.generate seconds/verifier.score seconds/group_advantage seconds/learner.train
""".split()


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_file_is_there(finished: Path) -> None:
    for name in FILES:
        assert (finished / name).exists(), name
    assert not [path for path in finished.rglob(".*") if "partial" in path.name]


def test_the_configuration_holds_every_default(finished: Path) -> None:
    config = yaml.safe_load((finished / "config.yaml").read_text())
    recipe = ReasoningRecipe.model_validate(config)
    assert recipe.model_dump(mode="json") == config, "nothing was left to a default"
    assert recipe.steps == 3
    assert config["algorithm"]["clip_high"] == 0.2
    assert config["generation"] == {
        "max_new_tokens": 6,
        "tokens_per_step": None,
        "max_versions": None,
        "temperature": 1.0,
        "max_running": 256,
        "dtype": None,
        "cache_gb": None,
        "captured_decode": True,
        "engine": "native",
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "stop": [],
    }


def test_the_plan_can_be_run_again(finished: Path) -> None:
    assert read_plan(finished / "plan.json").mode == "eager"


def test_one_row_of_figures_for_each_step(finished: Path) -> None:
    metrics = rows(finished / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    assert metrics[0].keys() >= {"step", "time", "eval/accuracy"}
    for row in metrics[1:]:
        assert row.keys() >= set(PER_STEP)
        assert row["samples"] == 16
        assert row["version"] == row["step"]
        assert row["staleness/mean"] == 0
    assert [row["step"] for row in metrics if "eval/accuracy" in row] == [0, 2, 3]
    assert all(row["eval/problems"] == 5 for row in metrics if "eval/problems" in row)
    times = [row["time"] for row in metrics]
    assert times == sorted(times)


def test_samples_are_for_people(finished: Path) -> None:
    samples = rows(finished / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [1] * 4 + [2] * 4 + [3] * 4
    for sample in samples:
        a, b = sample["prompt"].removesuffix("=").split("+")
        assert sample["answer"] == str(int(a) + int(b))
        right = sample["completion"] == f"#{sample['answer']}"
        assert sample["reward"] == float(right and sample["finish_reason"] == "stop")


def test_the_timeline_is_a_trace(finished: Path) -> None:
    trace = json.loads((finished / "timeline.json").read_text())
    names = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert names >= {"generator.generate", "verifier.score", "learner.train"}


def test_a_checkpoint_is_named_where_its_model_is_meant(
    run: Path, tiny: Path, refused: Refused
) -> None:
    words = ["model={}", f"model.path={run}/checkpoints/latest", "--run-dir", "other"]
    assert f"name {run}/checkpoints/latest/model, where it is" in refused("train", tiny, *words)


def test_checkpoints_move_on(finished: Path) -> None:
    checkpoints = finished / "checkpoints"
    assert (checkpoints / "latest").readlink() == Path("step_000003")
    assert sorted(path.name for path in checkpoints.glob("step_*")) == [
        "step_000002",
        "step_000003",
    ]
    found = resume_point(checkpoints)
    assert found is not None
    assert step_of(found) == 3


def test_the_report_needs_nothing_else(finished: Path) -> None:
    report = (finished / "report.html").read_text()
    assert report.lstrip().lower().startswith("<!doctype html>")
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", report)
    assert not re.search(r"<link[^>]+stylesheet|@import|url\(\s*['\"]?http", report)
    for stage in ("generator.generate", "learner.train"):
        assert stage in report


def test_the_report_can_be_written_again(run: Path, m2flow: M2flow) -> None:
    (run / "report.html").unlink()
    outcome = m2flow("report", run)
    assert outcome.code == 0
    assert outcome.out.strip() == str(run / "report.html")
    assert (run / "report.html").is_file()


def test_a_place_of_its_own_by_default(tiny: Path, m2flow: M2flow) -> None:
    fast = ["steps=1", "warmup.steps=0", "evaluation.problems=0"]
    first = m2flow("train", tiny, *fast)
    second = m2flow("train", tiny, *fast)
    assert first.code == second.code == 0
    runs = sorted(Path("runs").iterdir())
    assert len(runs) == 2
    assert all(path.name.startswith("tiny-") for path in runs)
    assert str(runs[0]) in first.out + second.out
    metrics = rows(runs[0] / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1], "no evaluation was asked for"


def test_the_same_seed_the_same_run(run: Path, m2flow: M2flow) -> None:
    assert m2flow("train", "tiny.yaml", "--run-dir", "again").code == 0
    assert (run / "samples.jsonl").read_text() == Path("again/samples.jsonl").read_text()
    name = "checkpoints/latest/model/model.safetensors"
    assert (run / name).read_bytes() == Path("again", name).read_bytes()


def test_from_a_model_on_disk(run: Path, m2flow: M2flow) -> None:
    model = run / "warmup"
    words = [f"model.path={model}", "warmup.steps=0", "--run-dir", "other"]
    assert m2flow("train", "tiny.yaml", *words).code == 0
    assert not Path("other/warmup").exists(), "nothing was made that is there already"
    assert Path("other/samples.jsonl").read_text() == (run / "samples.jsonl").read_text()
    name = "checkpoints/latest/model/model.safetensors"
    assert Path("other", name).read_bytes() == (run / name).read_bytes()


# A run that fails


def test_a_stage_that_raises(tiny: Path, m2flow: M2flow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1, the first cause on top, then the traceback down to the line that raised."""

    def score(*arguments: object) -> None:
        try:
            raise ZeroDivisionError("division by zero")
        except ZeroDivisionError as error:
            raise ValueError("the judge is out") from error

    monkeypatch.setattr(verifier, "weighted_sum", score)
    outcome = m2flow("train", tiny, "--run-dir", "run", "evaluation.problems=0")
    assert outcome.code == 1
    lines = outcome.err.splitlines()
    assert lines[0] == "failed: ZeroDivisionError: division by zero"
    assert lines[1] == "ValueError: the judge is out"
    assert "in score" in outcome.err
    assert Path("run/config.yaml").is_file()
    assert Path("run/metrics.jsonl").exists() is False


def test_a_reward_that_fails_now_and_then(
    tiny: Path, m2flow: M2flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on, counts the samples, says so once and writes down why."""
    right, calls = addition.addition_reward, []

    def score(*arguments: Any) -> float:
        calls.append(arguments)
        if len(calls) in (5, 25):
            raise OSError("the network is down")
        return right(*arguments)

    monkeypatch.setattr(addition, "addition_reward", score)
    outcome = m2flow("train", tiny, "--run-dir", "run", "evaluation.problems=0")
    assert outcome.code == 0
    assert outcome.out.count("reward addition raised OSError: the network is down") == 1
    shares = [row["reward/failed_share"] for row in rows(Path("run/metrics.jsonl"))]
    assert shares == [1 / 16, 1 / 16, 0.0]
    failed = [row for row in rows(Path("run/samples.jsonl")) if "failure" in row]
    assert [row["step"] for row in failed] == [1, 2]
    assert "the network is down" in failed[0]["failure"]


def test_a_reward_that_always_fails(
    tiny: Path, m2flow: M2flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(*arguments: Any) -> float:
        raise OSError("the network is down")

    monkeypatch.setattr(addition, "addition_reward", score)
    outcome = m2flow("train", tiny, "--run-dir", "run", "evaluation.problems=0")
    assert outcome.code == 1
    line = outcome.err.splitlines()[0]
    for part in ("addition raised OSError: the network is down (test_train.py:", "all 16 samples"):
        assert part in line


def test_a_failed_run_can_be_resumed(
    tiny: Path, m2flow: M2flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, calls = verifier.weighted_sum, []

    def score(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 4:
            raise OSError("the network is down")
        return right(*arguments)

    monkeypatch.setattr(verifier, "weighted_sum", score)
    assert m2flow("train", tiny, "--run-dir", "run").code == 1
    assert m2flow("train", tiny, "--run-dir", "run", "--resume").code == 0
    assert [row["step"] for row in rows(Path("run/metrics.jsonl"))] == [0, 1, 2, 3]


def test_an_interrupted_run(tiny: Path, m2flow: M2flow, monkeypatch: pytest.MonkeyPatch) -> None:
    def score(*arguments: Any) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(verifier, "weighted_sum", score)
    outcome = m2flow("train", tiny, "--run-dir", "run")
    assert outcome.code == 130
    assert outcome.err == (
        "interrupted; --resume goes on from the last checkpoint, if there is one\n"
    )


def test_a_stage_that_calls_exit(
    tiny: Path, m2flow: M2flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it ended the command in silence, with its own exit code."""

    def score(*arguments: Any) -> float:
        raise SystemExit(0)

    monkeypatch.setattr(verifier, "weighted_sum", score)
    outcome = m2flow("train", tiny, "--run-dir", "run")
    assert outcome.code == 1
    why = "code that the run calls has called exit(0)"
    assert f"RunFailed: {why}\n" in outcome.err
    assert json.loads(Path("run/run.json").read_text())["why"] == why


@pytest.mark.slow
def test_a_stage_that_raises_on_a_lane(
    tiny: Path, m2flow: M2flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same over Ray: the error of another process arrives as it was."""
    text = tiny.read_text().replace("mode: eager", "mode: collocated")
    tiny.write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}")
    Path("sitecustomize.py").write_text(
        "import m2flow.workloads.reasoning.workers.verifier as verifier\n"
        "def score(*arguments):\n    raise ValueError('the judge is out')\n"
        "verifier.weighted_sum = score\n"
    )
    outcome = m2flow("train", tiny, "--run-dir", "run", "evaluation.problems=0")
    assert outcome.code == 1
    first, *rest = outcome.err.splitlines()
    assert first == "the run failed: ValueError: the judge is out"
    assert any("verifier.score" in line and "failed on lane 0" in line for line in rest)
