"""The Triton kernels compile for a GPU that is not there, and keep to its registers.

The interpreter, which `test_triton` uses, lets pass what the compiler refuses. Compiling needs no
device; it is done in a process of its own, where Triton does not interpret.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("compile_kernels.py")


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(capability)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
