"""The loop of environment and policy finds the goal, and learns the same table on lanes."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from m2flow import Place


@pytest.fixture(scope="module")
def grid(example: Callable[[str], ModuleType]) -> ModuleType:
    return example("tabular_q_learning")


def test_it_learns_the_shortest_way(grid: ModuleType) -> None:
    successes, value = grid.train(steps=20)
    assert successes[0] < 0.1
    assert successes[-1] == 1.0
    # The shortest way has six moves: the first is worth the reward, discounted five times.
    assert float(value[0].max()) == pytest.approx(grid.DISCOUNT**5, rel=1e-2)
    never_left = [cell for cell in range(grid.NUM_CELLS) if grid._kind(cell) in "OG"]
    assert torch.equal(value[never_left], torch.zeros(len(never_left), 4, dtype=value.dtype))


def test_an_episode_by_hand(grid: ModuleType) -> None:
    """Stages are ordinary methods: down, up, down into the hole, with all that is handed over."""
    env = grid.GridWorld()
    env.load(Place())
    batch = grid.episodes(step=0, epsilon=0.0).select([0])
    rows = [
        env.step(batch.with_columns(move=torch.tensor([move]))) for move in (grid.BEGIN, 1, 3, 1, 2)
    ]
    assert [int(row["cell"]) for row in rows] == [0, 4, 0, 4, 5]
    assert [row["done"] for row in rows] == [[False]] * 4 + [[True]]
    assert [row["transitions"] for row in rows[:-1]] == [[[]]] * 4
    assert rows[-1]["transitions"] == [
        [(0, 1, 0.0, 4, False), (4, 3, 0.0, 0, False), (0, 1, 0.0, 4, False), (4, 2, 0.0, 5, True)]
    ]
    assert not env.cells
    assert not env.paths


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["collocated", "disaggregated"])
def test_lanes_change_nothing(mode: str, run_example: Callable[..., list[str]]) -> None:
    there = run_example("tabular_q_learning", "--steps", "10", "--mode", mode, "--lanes", "cpu:2")
    assert there == run_example("tabular_q_learning", "--steps", "10")
    assert len(there) == 3
