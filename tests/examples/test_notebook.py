"""The cells of `examples/notebook.ipynb` run in a loop, one after another, as in a notebook."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook.ipynb"


def cells() -> list[str]:
    document = json.loads(NOTEBOOK.read_text())
    return ["".join(c["source"]) for c in document["cells"] if c["cell_type"] == "code"]


async def run_cells() -> dict[str, Any]:
    """Run every cell at the top level of a module, where `await` may stand."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells()):
        compiled = compile(cell, f"cell {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        made = eval(compiled, names)
        if inspect.iscoroutine(made):
            await made
    return names


def test_cells_compile_and_hold_no_output() -> None:
    document = json.loads(NOTEBOOK.read_text())
    assert all(not c.get("outputs") and not c.get("execution_count") for c in document["cells"])
    for number, cell in enumerate(cells()):
        compile(cell, f"cell {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.slow
def test_it_runs_in_a_loop_with_ray_connected(tmp_path: Path) -> None:
    """In a process of its own: workers of cells are pickled by value from `__main__`."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve())],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "all cells ran"


if __name__ == "__main__":
    found = asyncio.run(run_cells())
    assert found["losses"][-1] < 1e-2 < found["losses"][0]
    assert [row["step"] for row in found["rows"]] == [1, 2, 3]
    assert found["ray"].is_initialized()
    found["ray"].shutdown()
    print("all cells ran")
