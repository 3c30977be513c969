"""The page on environments of one's own: what it says to write is written, and learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import m2flow
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.embodied.experiment import EmbodiedExperiment

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "own-environment.md"


def write_the_page(folder: Path) -> None:
    """The environment and the recipe, which are the page's first blocks, as files."""
    found = re.findall(r"```(python|yaml)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    blocks = dict(reversed(found))  # the first of each
    (folder / "corridor.py").write_text(blocks["python"])
    (folder / "corridor.yaml").write_text(blocks["yaml"])


def test_the_page_leads_to_a_policy_that_finds_the_door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_the_page(tmp_path)
    monkeypatch.chdir(tmp_path)
    recipe = read_recipe(yaml.safe_load(Path("corridor.yaml").read_text()))
    experiment = EmbodiedExperiment(recipe)  # type: ignore[arg-type]
    held_out = experiment.held_out()
    assert held_out is not None
    with m2flow.launch(
        experiment.flow(), items_per_step=recipe.items_per_step, also={"evaluate": len(held_out)}
    ) as run:
        before = experiment.evaluation(run.run_method("evaluate", held_out))
        for _ in run.steps(experiment.batch(step) for step in range(recipe.steps)):
            pass
        after = experiment.evaluation(run.run_method("evaluate", held_out))
    assert before["eval/success"] < 0.8
    assert after["eval/success"] > 0.95


def test_lanes_find_an_environment_in_the_folder_of_the_command(tmp_path: Path) -> None:
    write_the_page(tmp_path)
    few = ["steps=1", "evaluation.episodes=0", "--mode", "collocated", "lanes=cpu:1"]
    command = Path(sys.executable).with_name("m2flow")
    done = subprocess.run(
        [command, "train", "corridor.yaml", "--run-dir", "run", *few],
        cwd=tmp_path,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(m2flow.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
