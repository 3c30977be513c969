"""The gauge of a lane's memory, on blocks of known size."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

import pytest
import torch

from m2flow.runtime.lane.state import memory as gauge_file
from m2flow.runtime.lane.state.memory import MemoryGauge

MB = 1 << 20
NOISE = 4 * MB


def risen(num_blocks: int, block: int) -> int:
    """What the gauge shows of so many blocks that are there together and go again."""
    gauge = MemoryGauge("cpu")
    gauge.begin()
    blocks = [torch.ones(block // 4) for _ in range(num_blocks)]
    del blocks
    found = gauge.risen()
    assert found is not None
    return found


def test_what_came_and_went_is_seen() -> None:
    assert risen(1, 64 * MB) == pytest.approx(64 * MB, abs=NOISE)


def test_memory_that_the_heap_has_kept_hides_nothing() -> None:
    """Small blocks that are freed stay with the process: the second time it need not grow."""
    assert [risen(256, MB // 16) for _ in range(3)] == pytest.approx([16 * MB] * 3, abs=NOISE)


def test_pages_of_files_that_come_later_are_not_taken_off(tmp_path: Path) -> None:
    """They are read in after the peak, as libraries' pages are that the system had dropped."""
    path = tmp_path / "library"
    path.write_bytes(bytes(32 * MB))
    gauge = MemoryGauge("cpu")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        gauge.begin()
        block = torch.ones(16 * MB)
        time.sleep(0.1)
        del block
        assert sum(library[:: mmap.PAGESIZE]) == 0
        found = gauge.risen()
    assert found == pytest.approx(64 * MB, abs=NOISE)


def test_where_the_system_does_not_tell_there_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    gauge = MemoryGauge("cpu")
    assert gauge.risen() is None, "not begun"
    monkeypatch.setattr(gauge_file, "reset_peak_resident_bytes", lambda: False)
    gauge.begin()
    assert gauge.risen() is None
