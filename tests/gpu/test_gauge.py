"""The gauge of a lane's memory on a device; skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from m2flow.runtime.lane.state.memory import MemoryGauge

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

DEVICE = "cuda:0"
MB = 1 << 20


def test_what_came_and_went_is_seen_above_what_was_there() -> None:
    held = torch.ones(32 * MB // 4, device=DEVICE)
    gauge = MemoryGauge(DEVICE)
    for size in (64 * MB, 16 * MB):
        gauge.begin()
        torch.ones(size // 4, device=DEVICE)
        assert gauge.risen() == pytest.approx(size, abs=MB)
    del held
