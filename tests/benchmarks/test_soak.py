"""What a soak counts as left behind."""

from __future__ import annotations

import importlib
import random
import sys
import uuid
from pathlib import Path
from typing import Any


def test_files_in_shared_memory_are_seen_when_their_pool_has_gone(tmp_path: Path) -> None:
    """They were looked for by the pool's folder, and so never found in the end."""
    run = importlib.import_module("soak").Soaked(tmp_path, [sys.executable, "-c", ""])
    run.process.wait()
    pool = run.temporary / f"m2flow-{uuid.uuid4().hex[:12]}"
    pool.mkdir()
    assert not run.segments()
    pool.rmdir()
    left = Path("/dev/shm", f"{pool.name}-0-1-0")
    other = Path("/dev/shm", f"{pool.name}0-0-1-0")
    try:
        left.touch()
        other.touch()
        assert run.left_behind() == [str(left)]
    finally:
        left.unlink()
        other.unlink()
        run.errors.close()


def test_what_grows_by_a_little_with_each_fault_is_seen() -> None:
    """Two files more a minute were within a tenth of the most of the third before."""
    soak = importlib.import_module("soak")

    def sample(minute: int, handles: int, processes: int) -> Any:
        return soak.Sample(60.0 * minute, 0, 0, processes, 1.0, 1.0, 1, handles, 1, 1.0, {})

    flat = [sample(minute, 400 + minute % 3, 13) for minute in range(30)]
    grows = [sample(minute, 400 + 2 * minute, 13) for minute in range(30)]
    busier = [sample(minute, 400 + 150 * (minute % 4 == 0), 13 + 4 * (minute % 4 == 0))
              for minute in range(30)]  # fmt: skip
    assert soak._growth(grows, "all_handles") < 1.1
    assert abs(soak.trend(flat, "all_handles")[0]) < 0.05
    slope, error = soak.trend(grows, "all_handles")
    assert slope - 2 * error > 0.2
    assert abs(soak.trend(busier, "all_handles")[0]) < 0.05, "processes that come and go"


def test_the_error_of_a_trend_tells_chance_from_growth() -> None:
    """Of figures that wander, as lanes' memory does, two errors hold the truth nearly always."""
    soak = importlib.import_module("soak")

    def misses(growth: float) -> float:
        missed = 0
        for seed in range(200):
            drawn, off, samples = random.Random(seed), 0.0, []
            for number in range(360):
                off = 0.8 * off + drawn.gauss(0.0, 20.0)
                mb = 1500.0 * (1 + growth * number / 720) + off
                samples.append(soak.Sample(5.0 * number, 0, 0, 13, 1.0, mb, 1, 1, 1, 1.0, {}))
            slope, error = soak.trend(samples, "all_mb")
            missed += slope - 2 * error > 0.1
        return missed / 200

    assert misses(0.0) < 0.05
    assert misses(1.0) > 0.95
