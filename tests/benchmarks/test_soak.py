"""What a soak counts as left behind."""

from __future__ import annotations

import importlib
import sys
import uuid
from pathlib import Path


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
