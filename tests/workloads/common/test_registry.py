"""Workloads by name: one that a package registers is run as m2flow's own are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from m2flow.errors import UserError
from m2flow.workloads.common import known_workloads, read_recipe, registry, workload_named
from m2flow.workloads.reasoning.config import ReasoningRecipe

PACKAGE = '''
"""A workload of counting: items are numbers, a worker learns their sum."""

from pathlib import Path

from m2flow import Batch, Flow, Place, Stream, Worker, stage
from m2flow.errors import UserError
from m2flow.workloads.common import Recipe


class CountingRecipe(Recipe):
    workload: str = "counting"
    name: str = "counting"
    numbers_per_step: int = 4

    @property
    def items_per_step(self):
        return self.numbers_per_step


class Adder(Worker):
    total = 0.0

    @stage
    def double(self, numbers):
        return numbers.with_columns(number=[2 * n for n in numbers["number"]])

    @stage(accumulates=True)
    def add(self, numbers):
        self.total += sum(numbers["number"])
        return numbers.only("number")

    @add.finish
    def add_finish(self):
        return {"total": self.total}


class Counting(Flow):
    adder: Adder

    def step(self, numbers):
        return self.adder.add(self.adder.double(numbers))

    def evaluate(self, numbers):
        return self.adder.double(numbers)


class CountingExperiment:
    makes_model = False

    def __init__(self, recipe):
        self.recipe = recipe

    def prepare(self, folder, progress):
        raise AssertionError("there is no model")

    def flow(self, checkpoint=None):
        return Counting(adder=Adder())

    def batch(self, step):
        return Batch({"number": [float(step)] * self.recipe.numbers_per_step})

    def held_out(self):
        return Batch({"number": [1.0, 2.0]})

    def metrics(self, result):
        return {"reward/mean": sum(result.output["number"]), **result.metrics}

    def evaluation(self, result):
        return {"eval/success": sum(result.output["number"]) / 100}

    def alarms(self, result):
        return ()

    def note(self, result):
        assert result.step >= 0

    def films(self, result):
        return ()

    def samples(self, result, count):
        return [{"item": 0, "number": result.output["number"][0]}][:count]

    def rollouts(self, result):
        return self.samples(result, 1)

    def save(self, run, checkpoints, step):
        (checkpoints / f"step_{step:06d}").mkdir(parents=True)


class CountingWorkload:
    recipe = CountingRecipe
    reads_problems = False
    modules = ()

    def flow(self, recipe, model=None):
        return Counting(adder=Adder())

    def lacking(self, recipe):
        return ()

    def check_here(self, recipe):
        pass

    def prices(self, recipe, graph, assumed):
        raise UserError("nobody knows what counting takes")

    def profile_key(self, recipe):
        return {"model": {}, "shapes": {"numbers": recipe.numbers_per_step}}

    def model_name(self, recipe):
        return "none"

    def experiment(self, recipe):
        return CountingExperiment(recipe)

    def examine(self, examination):
        raise AssertionError("not asked")


WORKLOAD = CountingWorkload()
'''


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with an installed package: its module, and the metadata that pip would write."""
    site = tmp_path / "site"
    (site / "counting_for_m2flow-1.0.dist-info").mkdir(parents=True)
    (site / "counting_for_m2flow.py").write_text(PACKAGE)
    metadata = site / "counting_for_m2flow-1.0.dist-info"
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: counting\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[m2flow.workloads]\ncounting = counting_for_m2flow:WORKLOAD\n"
    )
    return site


def m2flow(folder: Path, site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "m2flow", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_third_party_s_workload_is_trained(tmp_path: Path, site: Path) -> None:
    recipe = tmp_path / "counting.yaml"
    recipe.write_text("workload: counting\nmode: eager\nlanes: cpu:1\nsteps: 3\n")
    done = m2flow(tmp_path, site, "train", "counting.yaml", "--run-dir", "run", "steps=2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 steps of 4 items" in done.stdout
    assert "held-out success 6.0%" in done.stdout
    assert (tmp_path / "run" / "report.html").is_file()
    dry = m2flow(tmp_path, site, "train", "counting.yaml", "--dry-run")
    assert "adder.double" in dry.stdout
    assert "memory: not known: nobody knows what counting takes" in dry.stdout
    assert "items_total: 12" in dry.stdout
    wrong = m2flow(tmp_path, site, "plan", "counting.yaml", "numbers_per_stepp=3")
    assert wrong.returncode == 2
    assert "did you mean 'numbers_per_step'?" in wrong.stderr


def test_an_unknown_workload_names_those_that_there_are(tmp_path: Path, site: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("workload: counting_\n")
    done = m2flow(tmp_path, site, "train", "recipe.yaml")
    assert done.returncode == 2
    assert done.stderr == (
        "error: workload: is not a workload (got 'counting_'); "
        "expected one of agentic, counting, embodied, reasoning; did you mean 'counting'?\n"
    )


def test_a_recipe_must_say_its_workload() -> None:
    with pytest.raises(UserError, match="is missing; expected one of agentic, embodied, reasoning"):
        read_recipe({"steps": 3})


def test_a_recipe_from_keys_and_values() -> None:
    recipe = read_recipe({"workload": "reasoning", "steps": 3}, {"data.options": {"max_digits": 2}})
    assert isinstance(recipe, ReasoningRecipe)
    assert (recipe.steps, recipe.data.options) == (3, {"max_digits": 2})
    assert read_recipe(recipe, ["steps=4"]).steps == 4
    assert read_recipe(recipe).steps == 3


def test_a_package_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = registry.metadata.EntryPoint("broken", "no_such_package:WORKLOAD", registry.GROUP)
    monkeypatch.setattr(registry, "OWN", (*registry.OWN, broken))
    assert set(known_workloads()) == {"agentic", "broken", "embodied", "reasoning"}
    with pytest.raises(UserError, match=r"no_such_package:WORKLOAD cannot be imported"):
        workload_named("broken")


def test_one_name_belongs_to_one_package(monkeypatch: pytest.MonkeyPatch) -> None:
    second = registry.metadata.EntryPoint("reasoning", "other:WORKLOAD", registry.GROUP)
    monkeypatch.setattr(registry, "OWN", (*registry.OWN, second))
    with pytest.raises(UserError, match="is registered by two packages"):
        known_workloads()
