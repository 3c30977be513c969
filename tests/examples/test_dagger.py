"""The student learns to do as the expert would, where the student itself went."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from m2flow import Place


@pytest.fixture(scope="module")
def dagger(example: Callable[[str], ModuleType]) -> ModuleType:
    return example("dagger")


def test_success_rises(dagger: ModuleType) -> None:
    successes = dagger.train(steps=6)
    assert successes[0] < 0.2
    assert sum(successes[-3:]) / 3 > 0.8


def test_a_lesson_is_what_the_expert_would_have_done_there(dagger: ModuleType) -> None:
    tables = dagger.Tables()
    tables.load(Place())
    seen = tables.begin(dagger.episodes(step=0).select([3]))
    table = tables.tables[3]
    shown = torch.from_numpy(table.expert())
    away = -shown[None]  # the student goes the other way; the lesson is still the expert's
    after = tables.step(seen.with_columns(action=away))
    assert after["done"] == [False]
    assert not torch.equal(after["state"], seen["state"])
    ((state, lesson),) = tables.lessons[3]
    assert torch.equal(state, seen["state"][0])
    assert torch.equal(lesson, shown)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["collocated", "disaggregated"])
def test_lanes_change_nothing(mode: str, run_example: Callable[..., list[str]]) -> None:
    there = run_example("dagger", "--steps", "3", "--mode", mode, "--lanes", "cpu:2")
    assert there == run_example("dagger", "--steps", "3")
    assert len(there) == 3
