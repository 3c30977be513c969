"""What every benchmark here ends with: a table for people and one line of JSON for programs.

A target is a number with a bound; the exit code is 0 when every target holds and 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".bench"
"""Starting checkpoints and other things that are slow to make; not under version control."""

RESULTS = "benchmarks/results"

PACKAGES = ("m2flow", "torch", "ray", "transformers")


@dataclass(frozen=True)
class Target:
    """A bound that a measurement must keep: at least `target`, or at most."""

    name: str
    value: float
    target: float
    at_most: bool = False

    @property
    def holds(self) -> bool:
        return self.value <= self.target if self.at_most else self.value >= self.target


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks share.

    Raises:
        SystemExit: m2flow, here and in commands that are run, is not that of this checkout, whose
            commit the results would name.
    """
    found = find_spec("m2flow")
    if found is None or not Path(str(found.origin)).resolve().is_relative_to(ROOT.resolve()):
        place = None if found is None else found.origin
        raise SystemExit(f"m2flow: {place} is not of this checkout: set PYTHONPATH={ROOT / 'src'}")
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="the same measurement, shorter")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    return parser


def machine() -> dict[str, Any]:
    """The machine and the versions that a figure belongs to."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """The commit of the working tree, with a mark where it has changes beside results.

    Where a tree was copied without its history, M2FLOW_COMMIT says which one it is.
    """
    if named := os.environ.get("M2FLOW_COMMIT"):
        return named
    found = _git("describe", "--always")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RESULTS}")
    return (found + "-dirty" * bool(changed)) or "unknown"


def _git(*words: str) -> str:
    answer = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return answer.stdout.strip()


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print aligned columns."""
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for row in cells:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    """What JSON can say: None in the place of what is no number, or infinite."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def conclude(
    name: str,
    results: Mapping[str, Any],
    targets: Sequence[Target],
    options: argparse.Namespace,
) -> None:
    """Print the verdicts and the line of JSON, write `--out`, and exit."""
    for target in targets:
        verdict = "holds" if target.holds else "DOES NOT HOLD"
        bound = "at most" if target.at_most else "at least"
        print(f"{target.name}: {target.value:.3f}, target {bound} {target.target:g}: {verdict}")
    line = json.dumps(
        {
            "benchmark": name,
            "machine": machine(),
            "commit": commit(),
            "quick": options.quick,
            "results": _plain(results),
            "targets": [_plain({**asdict(target), "holds": target.holds}) for target in targets],
        },
        allow_nan=False,
    )
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(line + "\n")
    print(line)
    sys.exit(0 if all(target.holds for target in targets) else 1)
