"""What is no number costs the optimizer steps that would learn from it, and a run goes on."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from m2flow.errors import RunFailed
from m2flow.observe.progress import Quiet
from m2flow.observe.run_directory import read_metrics
from m2flow.training.optimizer import NotFinite
from m2flow.workloads.common import train
from m2flow.workloads.embodied.config import EmbodiedRecipe
from m2flow.workloads.embodied.experiment import EmbodiedExperiment
from m2flow.workloads.embodied.workers.recording import Recordings

HERE = Path(__file__).parent

WORDS: dict[str, Any] = {
    "workload": "embodied",
    "mode": "eager",
    "steps": 4,
    "rollouts_per_step": 4,
    "environment": {"name": "pointing:Pointing"},
    "policy": {"hidden": [16]},
    "rollout": {"horizon": 8, "automatic_reset": False},
    "evaluation": {"episodes": 0},
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {"update": {"epochs": 2, "minibatches": 4}},
    "grpo": {
        "algorithm": {"name": "grpo", "group_size": 2, "reward": "return"},
        "update": {"epochs": 2, "minibatches": 4},
    },
    "sac": {
        "algorithm": {"name": "sac"},
        "policy": {"hidden": [16], "distribution": "squashed"},
        "replay": {"capacity": 200, "begin": 1, "batch_size": 8, "updates": 12},
        "max_skipped_updates": 11,
    },
}
BAD = 5
"""Number of the second rollout of the second step."""


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's module."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))


def spoil(monkeypatch: pytest.MonkeyPatch, column: str, value: float) -> None:
    """Spoil a turn of a rollout behind all that looks at what simulators give."""
    take = Recordings.take

    def spoilt(self: Recordings, numbers: Any, over: Any) -> dict[str, Any]:
        found = take(self, numbers, over)
        if BAD in numbers:
            row = list(numbers).index(BAD)
            if over[row]:
                found[f"turn.{column}"][row][3] = value
        return found

    monkeypatch.setattr(Recordings, "take", spoilt)


@pytest.mark.parametrize(
    ("algorithm", "column", "value"),
    [
        ("ppo", "logprobs", math.nan),
        ("grpo", "observation.state", math.nan),
        ("sac", "observation.state", math.nan),
        ("sac", "reward", 1e38),
    ],
)
def test_a_turn_that_is_no_number(
    algorithm: str, column: str, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One mini-batch of each pass; of a buffer those batches that have it."""
    spoil(monkeypatch, column, value)
    words = {**WORDS, **ALGORITHMS[algorithm]}
    said: list[str] = []
    progress = Quiet()
    monkeypatch.setattr(progress, "note", said.append)
    run = train(words, run_dir=tmp_path / "run", progress=progress)
    shares = [row["train/skipped_share"] for row in read_metrics(run)]
    assert shares[0] == 0.0
    if algorithm == "sac":
        assert 0 < shares[1] < 1
    else:
        assert shares[1:] == [0.25, 0.0, 0.0]
    assert any("step 2: no step was taken: the summed loss is " in one for one in said)
    weights = load_file(run / "checkpoints" / "latest" / "policy.safetensors")
    assert all(bool(torch.isfinite(one).all()) for one in weights.values())

    file = run / "skipped" / "step_000002.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["item"] for row in rows] == [0, 1, 2, 3]
    assert all(len(row["episodes"]) == 1 and row["steps_taken"] == 8 for row in rows)
    largest = [row["largest"][column] for row in rows]
    odd = largest.pop(BAD % 4)
    assert odd is None if math.isnan(value) else odd == pytest.approx(value)
    assert all(0 <= one < 100 for one in largest)


def test_passes_through_one_mini_batch_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, "logprobs", math.nan)
    words = {**WORDS, "update": {"epochs": 5, "minibatches": 1}, "max_skipped_updates": 1}
    run = train(words, run_dir=tmp_path / "run", progress=Quiet())
    assert [row["train/skipped_share"] for row in read_metrics(run)] == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("changes", [{}, ALGORITHMS["grpo"]], ids=["ppo", "grpo"])
def test_rollouts_of_which_an_episode_failed_are_kept(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    environment = {"name": "counting:Counting", "options": {"fails_at": 3}}
    words = {**WORDS, **changes, "environment": environment, "max_skipped_updates": 9}
    run = train(words, run_dir=tmp_path / "run", progress=Quiet())
    rows = [row for row in read_metrics(run) if row["episodes/failed"]]
    assert rows
    names = [f"step_{row['step']:06d}.jsonl" for row in rows]
    assert sorted(file.name for file in (run / "skipped").iterdir()) == names
    for row, name in zip(rows, names, strict=True):
        lines = (run / "skipped" / name).read_text().splitlines()
        kept = [json.loads(line) for line in lines]
        assert sum(one["failed"] for one in kept) == row["episodes/failed"]
        assert all(one["failed"] and isinstance(one["seed"], int) for one in kept)


@pytest.mark.parametrize("changes", [{}, ALGORITHMS["grpo"]], ids=["ppo", "grpo"])
def test_a_simulator_that_always_fails_ends_the_run(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """It had gone on for ever, with nothing to learn from."""
    environment = {"name": "counting:Counting", "options": {"fails_at": 3, "fails_always": True}}
    words = {**WORDS, **changes, "environment": environment, "max_skipped_updates": 1}
    run = tmp_path / "run"
    with pytest.raises(RunFailed, match=r"given up in 2 steps in a row \(max_skipped_updates: 1\)"):
        train(words, run_dir=run, progress=Quiet())
    assert [row["episodes/failed"] > 0 for row in read_metrics(run)] == [True]
    kept = sorted(file.name for file in (run / "skipped").iterdir())
    assert kept == ["step_000001.jsonl", "step_000002.jsonl"]


def test_fewer_than_half_of_the_episodes_are_borne(tmp_path: Path) -> None:
    """And steps that are borne begin the count anew; long rollouts end none in most steps."""
    experiment = EmbodiedExperiment(EmbodiedRecipe.model_validate(WORDS))
    most = experiment.recipe.max_skipped_updates

    def step(failed: Sequence[int], finished: Sequence[int]) -> None:
        episodes = [[{}] * count for count in finished]
        output = {"failed": failed, "episodes": episodes, "steps_taken": [len(failed)]}
        experiment.alarms(SimpleNamespace(output=output, step=3))  # type: ignore[arg-type]

    borne = [([1, 0, 0, 0], [0, 0, 0, 0]), ([2, 2, 2, 2], [2, 2, 2, 3]), ([0] * 4, [0] * 4)]
    bad = [([1, 1, 0, 0], [1, 1, 0, 0]), ([1, 1, 1, 1], [0, 0, 0, 0])]
    for failed, finished in borne * (most + 1):
        step(failed, finished)
    for _ in range(2):
        for turn in range(most):
            step(*bad[turn % 2])
        step(*borne[0])
    for turn in range(most):
        step(*bad[turn % 2])
    with pytest.raises(RunFailed, match=rf"in {most + 1} steps in a row .*step 4 it was 2, and 2 "):
        step(*bad[0])


def test_too_many_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, "logprobs", math.nan)
    words = {**WORDS, **ALGORITHMS["ppo"], "max_skipped_updates": 0}
    with pytest.raises(NotFinite, match=r"at once \(max_skipped_updates: 0\)"):
        train(words, run_dir=tmp_path / "run", progress=Quiet())
    rows = (tmp_path / "run/skipped/step_000002.jsonl").read_text().splitlines()
    assert [json.loads(row)["largest"]["logprobs"] is None for row in rows] == [
        item == BAD % 4 for item in range(4)
    ]
