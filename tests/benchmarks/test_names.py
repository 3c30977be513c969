"""Benchmarks and scripts of the docs use names of m2flow that are there; most run seldom."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for folder in ("benchmarks", "docs")
    for path in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_imported_name_of_m2flow_is_there(script: str) -> None:
    """`benchmarks/training.py` once imported a class that had got another name."""
    for node in ast.walk(ast.parse((ROOT / script).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "m2flow":
            assert node.module is not None
            module = import_module(node.module)
            gone = [
                one.name
                for one in node.names
                if not hasattr(module, one.name) and find_spec(f"{node.module}.{one.name}") is None
            ]
            assert not gone, f"line {node.lineno}: {node.module} has no {', '.join(gone)}"


def test_a_benchmark_measures_the_checkout_that_its_results_name(tmp_path: Path) -> None:
    """A soak was once run of a mending that was elsewhere, and taken for one of the mended code."""
    other = tmp_path / "m2flow"
    other.mkdir()
    (other / "__init__.py").touch()
    ran = subprocess.run(
        [sys.executable, "-c", "import harness; harness.arguments('')"],
        cwd=ROOT / "benchmarks",
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert ran.stderr.splitlines() == [
        f"m2flow: {other / '__init__.py'} is not of this checkout: set PYTHONPATH={ROOT / 'src'}"
    ]
