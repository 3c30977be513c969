"""What is built from this tree: a wheel that works alone in an empty folder, and a whole sdist."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]

FEW_STEPS = """
steps=2 prompts_per_step=2 warmup.steps=2 warmup.samples_per_step=4 evaluation.problems=4
""".split()

Installed = Callable[..., subprocess.CompletedProcess[str]]


def called(*words: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command without this process's PYTHONPATH, so that only what is installed is found."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        words,
        cwd=cwd,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the sdist, by their suffix."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {path.suffix: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def installed(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """`m2flow WORDS` of the wheel in an environment of its own, run in an empty folder.

    What m2flow depends on is that of this process: installing it anew would take minutes.
    """
    home, empty = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("empty")
    venv.create(home, with_pip=False)
    python, ours = home / "bin" / "python", sysconfig.get_path("purelib")
    there = called(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home)
    packages = Path(there.stdout.strip())
    (packages / "dependencies.pth").write_text(f"{ours}\n")
    pip = [python, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    done = called(*pip, "--target", packages, built[".whl"], cwd=empty)
    assert done.returncode == 0, done.stderr
    found = called(python, "-c", "import m2flow; print(m2flow.__file__)", cwd=empty)
    assert found.stdout.strip() == str(packages / "m2flow" / "__init__.py"), found

    def run(*words: str, folder: str = ".") -> subprocess.CompletedProcess[str]:
        cache = str(empty.parent / "cache")
        return called(python, "-m", "m2flow", *words, cwd=empty / folder, M2FLOW_CACHE=cache)

    return run


def test_the_wheel_trains_and_plans_by_name_in_an_empty_folder(installed: Installed) -> None:
    listed = installed("recipes")
    assert {path.stem for path in (PROJECT / "recipes").glob("*.yaml")} == {
        line.split()[0] for line in listed.stdout.splitlines()
    }
    words = ["--cluster", "1x8xH100", "--mode", "collocated"]
    planned = installed("plan", "qwen2.5-7b-grpo-math", *words)
    assert planned.returncode == 0, planned.stderr
    trained = installed("train", "quickstart", *FEW_STEPS, "--mode", "eager", "--run-dir", "run")
    assert trained.returncode == 0, trained.stderr
    assert "Done: 2 steps" in trained.stdout
    assert installed("report", "run").returncode == 0


def test_the_wheel_begins_a_project(installed: Installed) -> None:
    begun = installed("init", "mine")
    assert begun.returncode == 0, begun.stderr
    described = installed("train", "recipe.yaml", "--dry-run", folder="mine")
    assert described.returncode == 0, described.stderr


def test_the_wheel_refuses_an_unknown_name_in_one_line(installed: Installed) -> None:
    refused = installed("train", "quikstart")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "did you mean quickstart" in refused.stderr


def test_the_wheel_holds_the_package_and_the_recipes(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built[".whl"]) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    source = PROJECT / "src"
    here = {str(path.relative_to(source)) for path in (source / "m2flow").rglob("*.py")}
    shipped = {
        f"m2flow/{path.relative_to(PROJECT)}"
        for folder in ("recipes", "examples/project")
        for path in (PROJECT / folder).iterdir()
        if path.is_file()
    }
    static = source / "m2flow" / "observe" / "static"
    names = "index.html charts.js report.js rollouts.js dashboard.js dashboard.css "
    names += "uPlot.iife.min.js uPlot.min.css uPlot.LICENSE"
    page = {str((static / name).relative_to(source)) for name in names.split()}
    assert held == here | shipped | page | {"m2flow/py.typed"}


def test_the_sdist_is_the_repository(built: dict[str, Path]) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    with tarfile.open(built[".gz"]) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert held >= set(listed.stdout.splitlines())
