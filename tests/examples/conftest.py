"""The programs in `examples/` as modules, and as commands."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are tiny here, and a run in this process would leave its thread count behind."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def example() -> Callable[[str], ModuleType]:
    """Import `examples/NAME.py` by its path."""

    def load(name: str) -> ModuleType:
        qualified = f"m2flow_example_{name}"
        if qualified not in sys.modules:
            spec = importlib.util.spec_from_file_location(qualified, ROOT / f"examples/{name}.py")
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[qualified] = module
            spec.loader.exec_module(module)
        return sys.modules[qualified]

    return load


@pytest.fixture(scope="session")
def run_example() -> Callable[..., list[str]]:
    """Run `python examples/NAME.py OPTIONS` as a reader would; the lines it prints."""

    def run(name: str, *options: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, f"examples/{name}.py", *options],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run
