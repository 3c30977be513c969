"""The recipes that come with m2flow are valid; nothing of what they name has to be installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from m2flow.workloads.common import workload_named
from m2flow.workloads.common.reading import read_recipe
from tests.cli.conftest import predicted_plan, run_command

FOLDER = Path(__file__).parents[3] / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_valid(path: Path) -> None:
    """Those of published checkpoints leave to the user which folder it lies in."""
    published = path.stem.startswith(("openvla", "pi0"))
    assert read_recipe(path, {"model": "tiny"} if published else {}).steps > 0


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_short(path: Path) -> None:
    """What recipes have in common stands in defaults and in a base."""
    assert len(path.read_text().splitlines()) < 40


@pytest.mark.parametrize("name", ["quickstart", "quickstart-embodied", "agentic-calculator"])
def test_what_lanes_import_ahead_holds_all_workers(name: str) -> None:
    """Else each lane, and each that takes a lost one's place, would import them while others wait.

    What transformers does at a process's first model is done then as well; and Ray is not imported,
    nor a thread started, or the process could not be forked.
    """
    recipe = read_recipe(next(path for path in RECIPES if path.stem == name))
    workload = workload_named(recipe.workload)
    workers = {type(one).__module__ for one in workload.flow(recipe).workers.values()}
    ahead = "; ".join(f"import {module}" for module in workload.modules)
    said = "{name for name in sys.modules if name.startswith('m2flow')}"
    known = "sys.modules.get('transformers.conversion_mapping')"
    first = f"getattr({known}, '_checkpoint_conversion_mapping_cache', None) is not None"
    forks = "'ray' not in sys.modules and threading.active_count() == 1"
    code = f"import json, sys, threading; {ahead}; print(json.dumps([*{said}, {first}, {forks}]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    *imported, has_read_patterns, can_be_forked = json.loads(done.stdout)
    assert workers <= set(imported)
    assert has_read_patterns or name == "quickstart-embodied"
    assert can_be_forked


SIZED = re.findall(
    r"^\| `([\w.-]+)`(?: \(below\))? \| `(\w[\w-]+)` \| ([\d.]+) "
    r"\| (\w+), (\d+) % \| (\d+) of (\d+) GB \|$",
    (FOLDER / "README.md").read_text(),
    re.MULTILINE,
)
"""Recipe, cluster, seconds a step, what takes most of them, share, and gigabytes, of each row."""

WORDS = {
    "generation": "generator.generate",
    "turns": "generator.turn",
    "training": "learner.train",
}


def test_every_sized_recipe_has_a_row() -> None:
    assert len(SIZED) == 8


@pytest.mark.slow
@pytest.mark.parametrize("row", SIZED, ids=[row[0] for row in SIZED])
def test_predicted_plans_of_sized_recipes_are_those_of_the_readme(row: tuple[str, ...]) -> None:
    name, cluster, seconds, word, share, memory, limit = row
    done = run_command("plan", FOLDER / name, "--cluster", cluster)
    assert done.code == 0, done.err
    _, taken, most, its_share, *sizes = predicted_plan(done.out)
    assert float(taken) == float(seconds)
    assert (most, its_share) == (WORDS[word], share)
    assert [f"{float(size):.0f}" for size in sizes] == [memory, limit]
