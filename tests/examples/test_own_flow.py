"""The flow of one's own learns, and prints the same on lanes as in one process."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest


def test_it_learns(example: Callable[[str], ModuleType]) -> None:
    rewards = example("own_flow").train(steps=30)
    assert rewards[0] < 0.35  # one quadrant in four is right by chance
    assert sum(rewards[-5:]) / 5 > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["collocated", "disaggregated"])
def test_lanes_change_nothing(mode: str, run_example: Callable[..., list[str]]) -> None:
    there = run_example("own_flow", "--steps", "15", "--mode", mode, "--lanes", "cpu:2")
    assert there == run_example("own_flow", "--steps", "15")
    assert len(there) == 3
