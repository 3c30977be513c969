"""A whole embodied run: figures, films, checkpoints, and going on from one."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from m2flow.environments.spec import ActionSpec
from m2flow.environments.table import TableEnvironment
from m2flow.errors import UserError
from m2flow.observe.progress import JsonLines
from m2flow.plan import parse_lanes
from m2flow.workloads.common import train
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.common.workload import Examination
from m2flow.workloads.embodied.config import EmbodiedRecipe
from m2flow.workloads.embodied.evaluation import examine
from m2flow.workloads.embodied.experiment import EmbodiedExperiment
from m2flow.workloads.embodied.workers import EmbodiedLearner, Simulator

RECIPE: dict[str, Any] = {
    "workload": "embodied",
    "name": "table",
    "mode": "eager",
    "steps": 4,
    "rollouts_per_step": 4,
    "environment": {"name": "table:red", "options": {"privileged": True}},
    "policy": {"hidden": [16]},
    "rollout": {"horizon": 12},
    "evaluation": {"every": 2, "episodes": 4, "films": 1},
    "checkpoint": {"every": 2},
}

EVALUATED = ("eval/success", "eval/success_at_end", "eval/return", "eval/length", "eval/episodes")
"""Figures of an evaluation that do not depend on the machine."""


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "latest" / "policy.safetensors")


def _no_learner(*_: object) -> None:
    raise AssertionError("an examination trains nothing")


def test_four_steps_are_two_a_stop_and_two_more(tmp_path: Path) -> None:
    whole = train(RECIPE, run_dir=tmp_path / "whole")
    train(RECIPE, {"steps": 2}, run_dir=tmp_path / "parts")
    elsewhere = {"environment.processes": 2, "environment.steps_aside": True}
    elsewhere["environment.deadlines"] = {"step": 90}
    parts = train(RECIPE, elsewhere, run_dir=tmp_path / "parts", resume=True)
    ours, theirs = weights(whole), weights(parts)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_two_steps_of_the_recipe_from_pixels(tmp_path: Path) -> None:
    pytest.importorskip("pygame", reason='needs "gymnasium[classic-control]"')
    small = {
        "mode": "eager", "steps": 2, "rollouts_per_step": 2, "rollout.horizon": 12,
        "update.minibatches": 2, "evaluation": {"every": 2, "episodes": 1, "films": 1},
        "environment.options.max_episode_steps": 12,
    }  # fmt: skip
    run = train("ppo-cnn-cartpole", small, run_dir=tmp_path / "run")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = rows[-1]
    assert last["environment_steps"] == 24
    assert 0 < last["eval/return"] <= 12
    before, after = (
        EmbodiedExperiment(read_recipe("ppo-cnn-cartpole"))._source.make().state_dict(),
        weights(run),
    )
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert "actor.convolutions.0.weight" in moved, "the convolutions learn"
    assert (run / "films" / "step_000002_0.webp").is_file()


def test_a_run_has_figures_and_films(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = StringIO()
    run = train(RECIPE, run_dir=tmp_path / "run", progress=JsonLines(stream))
    said = [json.loads(line).get("text") for line in stream.getvalue().splitlines()]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = rows[-1]
    steps = [row for row in rows if "episodes/finished" in row]
    assert steps
    for name in ("episodes/return", "episodes/success_once"):
        assert all((name in row) == (row["episodes/finished"] > 0) for row in steps)
    for name in (
        "episodes/finished", "episodes/failed", "environment_steps",
        "throughput/steps_per_s", "loss/policy", "loss/value", "train/entropy",
        "train/explained_variance", "eval/success",
    ):  # fmt: skip
        assert name in last, name
    assert last["environment_steps"] == 48
    assert sorted(film.name for film in (run / "films").iterdir()) == sorted(
        f"{kind}_{step:06d}_0.{end}"
        for kind, end in (("step", "webp"), ("strip", "webp"), ("title", "txt"))
        for step in (0, 2, 4)
    )
    strip = Image.open(run / "films" / "strip_000004_0.webp")
    assert strip.height == 128
    assert strip.width in {128 * frames for frames in range(2, 9)}
    title = (run / "films" / "title_000004_0.txt").read_text()
    assert re.fullmatch(r"(un)?solved · reach the red ball · return -?\d[\d.e-]*", title)
    assert title.startswith("solved") or not last["eval/success"], "all four were candidates"
    assert f"film of an episode: {title}: {run}/films/step_000004_0.webp" in said
    page = (run / "report.html").read_text()
    assert page.count("data:image/webp;base64,") == 4, "of the first and the last evaluation"
    assert title in page
    lanes = parse_lanes("cpu:1")
    monkeypatch.setattr(EmbodiedLearner, "load", _no_learner)  # two of a large model may not fit
    figures = examine(Examination(run / "checkpoints" / "latest", None, limit=8, lanes=lanes))
    assert figures["about"] == "8 episodes of table:red"
    assert figures["success_low"] <= figures["success"] <= figures["success_high"]


def test_the_folder_that_is_named_is_evaluated_or_refused_in_a_line(tmp_path: Path) -> None:
    """One that is no checkpoint ended in a traceback, and a copy of one could not be evaluated."""
    run = train(RECIPE, {"steps": 1, "evaluation.episodes": 0}, run_dir=tmp_path / "run")
    other = {"steps": 1, "evaluation.episodes": 0, "policy.hidden": [8]}
    another = train(RECIPE, other, run_dir=tmp_path / "another")
    latest, copied, empty = run / "checkpoints" / "latest", tmp_path / "copied", tmp_path / "empty"
    shutil.copytree(latest, copied)
    empty.mkdir()

    def examined(model: Path, data: Path | None = None) -> dict[str, Any]:
        found = examine(Examination(model, data, limit=2, lanes=parse_lanes("cpu:1")))
        return {name: found[name] for name in ("about", "success", "return", "length")}

    def refused(model: Path, data: Path | None = None) -> str:
        with pytest.raises(UserError) as caught:
            examined(model, data)
        (line,) = str(caught.value).splitlines()
        return line

    figures = examined(latest)
    assert figures == examined(run / "checkpoints" / "step_000001")
    assert figures == examined(copied, run / "config.yaml")
    assert figures != examined(another / "checkpoints" / "latest")
    for model in (run, copied, empty):
        assert refused(model).startswith("MODEL: is no checkpoint of an embodied run")
    for model in (run / "checkpoints", latest / "trainer", latest / "policy.safetensors"):
        assert refused(model).startswith("MODEL: holds no policy.safetensors")
    for model in (run, empty, tmp_path / "nowhere", Path("tiny")):
        line = refused(model, run / "config.yaml")
        assert line.startswith("MODEL: holds no policy.safetensors")
        assert line.endswith("expected RUN/checkpoints/latest, or a copy of it")
    assert "holds weights of another policy" in refused(copied, another / "config.yaml")
    file = copied / "policy.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    assert "policy.safetensors is cut off or damaged" in refused(copied, run / "config.yaml")


class Narrow(TableEnvironment):
    """A table whose hand takes smaller steps."""

    def __init__(self) -> None:
        super().__init__("red", privileged=True)
        self.spec = replace(self.spec, action=ActionSpec(2, (-0.001,) * 2, (0.001,) * 2))


def test_a_policy_of_wider_actions_is_refused_before_an_episode(tmp_path: Path) -> None:
    """It was one as soon as an action was out of bounds, and the policy was to be squashed."""
    run = train(RECIPE, {"steps": 1, "evaluation.episodes": 0}, run_dir=tmp_path / "run")
    narrow = tmp_path / "narrow.yaml"
    narrow.write_text(json.dumps({**RECIPE, "environment": {"name": f"{__name__}:Narrow"}}))
    asked = Examination(run / "checkpoints" / "latest", narrow, limit=2, lanes=parse_lanes("cpu:1"))
    with pytest.raises(UserError, match=r"policy: the policy's low bounds .*-1\.0.*-0\.001"):
        examine(asked)


def environments_made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many environments are made in this process from now on, at each time."""
    made: list[int] = []
    make = Simulator._made

    def counted(simulator: Simulator, count: int) -> Any:
        made.append(count)
        return make(simulator, count)

    monkeypatch.setattr(Simulator, "_made", counted)
    return made


def test_an_evaluation_has_no_more_episodes_at_once_than_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began all of them at once, each in a simulator of its own, for which nobody had planned:
    a machine has no memory for 500 of LIBERO."""
    changes = {"steps": 1, "evaluation.episodes": 10, "evaluation.films": 0}
    made, counts, found = environments_made(monkeypatch), [], []
    for name in ("waves", "at once"):
        made.clear()
        run = train(RECIPE, changes, run_dir=tmp_path / name)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        found.append([{name: row[name] for name in EVALUATED} for row in rows])
        counts.append(sum(made))
        monkeypatch.setattr(EmbodiedRecipe, "evaluated_at_once", None, raising=False)
    for waves, at_once in zip(*found, strict=True):
        assert waves == pytest.approx(at_once, rel=1e-5), "but for rounding, as on other lanes"
    assert [row["eval/episodes"] for row in found[0]] == [10.0, 10.0]
    assert counts == [4, 10]


@pytest.mark.parametrize("processes", [0, 1])
def test_an_examination_has_so_many_heavy_simulators_on_a_lane(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of light ones, which run in the lane's own process, all at once."""
    recipe = {**RECIPE, "environment": {**RECIPE["environment"], "processes": processes}}
    run = train(recipe, {"steps": 1, "evaluation.episodes": 0}, run_dir=tmp_path / "run")
    latest, lanes = run / "checkpoints" / "latest", parse_lanes("cpu:1")
    made, found = environments_made(monkeypatch), []
    bound = "m2flow.workloads.embodied.evaluation.SIMULATORS_A_LANE"
    for most in (100, 3):
        monkeypatch.setattr(bound, most, raising=False)
        made.clear()
        figures = examine(Examination(latest, None, limit=7, lanes=lanes))
        assert figures["about"] == "7 episodes of table:red"
        found.append({name: figures[name] for name in ("success", "return", "length", "failed")})
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert sum(made) == (3 if processes else 7)
