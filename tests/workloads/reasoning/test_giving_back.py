"""The generator gives unfinished samples back, and another one goes on with them."""

from __future__ import annotations

from collections.abc import Generator as Coroutine
from typing import Any

import pytest
import torch
from tests.reasoning.conftest import MakeRecipe

from m2flow.flow import GIVE_BACK, Batch, Place, Unfinished
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.experiment import ReasoningExperiment
from m2flow.workloads.reasoning.workers import Generator, ModelSource
from m2flow.workloads.reasoning.workers.generator import BEGUN, LISTEN_EVERY

SAMPLES = 4


@pytest.fixture
def prompts(tiny_recipe: MakeRecipe, warmed: ModelSource) -> Batch:
    recipe: ReasoningRecipe = tiny_recipe()
    return ReasoningExperiment(recipe).batch(0, warmed)


def loaded(model: ModelSource, version: int = 0, **settings: Any) -> Generator:
    double = ModelSource(model.path, "float64")
    made = Generator(
        double, samples_per_prompt=SAMPLES, max_new_tokens=30, temperature=4.0, **settings
    )
    made.load(Place(0, version=version))
    return made


def finished(pieces: Coroutine[Any, Any, None]) -> dict[int, dict[str, Any]]:
    return {piece.ids[row]: piece.row(row) for piece in pieces for row in range(len(piece))}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("turns", "max_running"), [(0, 256), (1, 256), (2, 5), (3, 2)])
def test_another_generator_goes_on_where_this_one_stopped(
    turns: int, max_running: int, prompts: Batch, warmed: ModelSource
) -> None:
    whole = finished(loaded(warmed).generate(prompts))
    first = loaded(warmed, version=2, max_running=max_running)
    call = first.generate(prompts)
    done: dict[int, dict[str, Any]] = {}
    for _ in range(turns + 1):
        piece = next(call)
        done |= {item: piece.row(row) for row, item in enumerate(piece.ids)}
    last = call.send(GIVE_BACK)
    if isinstance(last, Batch):
        done |= {item: last.row(row) for row, item in enumerate(last.ids)}
        last = next(call)
    assert isinstance(last, Unfinished)
    assert list(call) == []
    assert not first.engine.busy
    back = last.items
    assert set(back.ids) == whole.keys() - done.keys()
    assert any(len(ids) for ids in back["begun_ids"])

    second = loaded(warmed, version=2)
    done |= finished(second.generate(Unfinished(back)))
    assert done.keys() == whole.keys()
    for item, sample in done.items():
        assert sample.keys() == whole[item].keys()
        assert not set(BEGUN) & sample.keys()
        assert sample["completion_ids"].tolist() == whole[item]["completion_ids"].tolist()
        torch.testing.assert_close(
            sample["behaviour_logprobs"], whole[item]["behaviour_logprobs"], atol=1e-10, rtol=0
        )
        assert sample["finish_reason"] == whole[item]["finish_reason"]
        assert sample["version"] == (2, 2)


@pytest.mark.usefixtures("one_thread")
def test_unfinished_samples_may_come_while_a_call_runs(prompts: Batch, warmed: ModelSource) -> None:
    whole = finished(loaded(warmed).generate(prompts))
    call = loaded(warmed).generate(prompts.select([0, 1]))
    done = finished([next(call)])
    unfinished = call.send(GIVE_BACK)
    other = loaded(warmed).generate(prompts.select([2, 3]))
    done |= finished([next(other), other.send(unfinished), *other])
    assert done.keys() == whole.keys()
    for item, sample in done.items():
        assert sample["completion_ids"].tolist() == whole[item]["completion_ids"].tolist()


@pytest.mark.usefixtures("one_thread")
def test_a_call_that_finishes_nothing_listens_all_the_same(
    prompts: Batch, warmed: ModelSource
) -> None:
    generator = loaded(warmed)
    generator._stop_ids = ()  # nothing ends before its limit
    steps = 0
    step = generator.engine.step

    def counted() -> Any:
        nonlocal steps
        steps += 1
        return step()

    generator.engine.step = counted  # type: ignore[method-assign]
    call = generator.generate(prompts)
    assert len(next(call)) == 0
    assert steps == LISTEN_EVERY
    back = call.send(GIVE_BACK)
    assert isinstance(back, Unfinished)
    assert len(back.items) == len(prompts) * SAMPLES
    assert set(back.items["begun_ids"].lengths) == {LISTEN_EVERY}
