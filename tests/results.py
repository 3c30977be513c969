"""What tests have found, for the results of benchmarks."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[1]


def add_result(variable: str, benchmark: str, name: str, found: Mapping[str, Any]) -> None:
    """Add what was found under a name to the file that a variable names, if it is set."""
    if not (where := os.environ.get(variable)):
        return
    spec = importlib.util.spec_from_file_location("harness", PROJECT / "benchmarks" / "harness.py")
    assert spec is not None
    assert spec.loader is not None
    harness: Any = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, harness)  # its dataclasses ask for their module
    spec.loader.exec_module(harness)
    file = PROJECT / where
    with (PROJECT / "pyproject.toml").open() as lock:  # tests run beside each other
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = json.loads(file.read_text())["results"] if file.exists() else {}
        results[name] = {**found, "commit": harness.commit()}
        commits = ", ".join(dict.fromkeys(one["commit"] for one in results.values()))
        row = {
            "benchmark": benchmark,
            "machine": harness.machine(),
            "commit": commits,
            "results": results,
        }
        file.write_text(json.dumps(row) + "\n")
