"""Workers that leave memory between any two calls: nothing that they compute changes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from m2flow.flow import Batch, Place
from m2flow.rewards.reward import WeightedReward
from m2flow.runtime.lane.state import resident_bytes
from m2flow.workloads.reasoning.experiment import ReasoningExperiment
from m2flow.workloads.reasoning.workers import (
    Critic,
    Generator,
    Learner,
    ModelSource,
    Reference,
    Verifier,
    gae,
    group_advantage,
)
from tests.training.parts import state_in

MakeRecipe = Callable[..., Any]

GROUP = 4


@pytest.fixture(autouse=True)
def threads(one_thread: None) -> None:
    """All of this file computes in this process."""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(spill=tmp_path / "spill")


def make_generator(model: ModelSource, place: Place) -> Generator:
    generator = Generator(model, samples_per_prompt=GROUP, max_new_tokens=6)
    generator.load(place)
    return generator


def storages(worker: Any) -> list[int]:
    """Bytes of the storages behind a worker's tensors, empty ones included."""
    tensors: list[Tensor]
    if isinstance(worker, Generator):
        tensors = list(worker.engine._tensors())
    else:
        tensors = list(worker.policy.state_dict().values())
    if isinstance(worker, Learner | Critic):
        tensors += list(worker.trainer.tensors())
        tensors += [p.grad for p in worker.policy.parameters() if p.grad is not None]
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


def train(recipe: Any, model: ModelSource, place: Place, switching: bool) -> dict[str, Tensor]:
    """Three steps by hand; weights, optimizer state and everything that was drawn on the way."""

    def switch() -> None:
        if not switching:
            return
        for worker in (generator, learner, reference, critic):
            num_bytes = worker.state_bytes()
            worker.offload()
            assert sum(storages(worker)) == 0
            assert 0 < worker.state_bytes() <= num_bytes
        for worker in (critic, reference, learner, generator):
            worker.onload()

    verifier = Verifier(model, (WeightedReward("addition"),))
    verifier.load(place)
    generator = make_generator(model, place)
    learner, reference = Learner(model, recipe), Reference(model, recipe)
    critic = Critic(model, recipe)
    for worker in (learner, reference, critic):
        worker.load(place)
    experiment = ReasoningExperiment(recipe, model)
    found = {}
    for step in range(3):
        pieces = []
        for piece in generator.generate(experiment.batch(step)):
            pieces.append(piece)
            switch()  # also while others are being drawn
        joined = Batch.concat(pieces)
        samples = joined.select(sorted(range(len(joined)), key=joined.ids.__getitem__))
        samples = group_advantage(verifier.score(samples), group_size=GROUP)
        switch()
        samples = reference.logprobs(learner.logprobs(samples))
        switch()
        valued = gae(samples, critic.values(samples), gamma=1.0, lam=0.9)
        critic.train(valued.select(list(range(8))))
        switch()
        critic.train_finish()
        found[f"values/{step}"] = valued["values"].values
        for start in (0, 8):
            learner.train(samples.select(list(range(start, start + 8))))
            switch()
        found[f"drawn/{step}"] = samples["completion_ids"].values
        found[f"logprobs/{step}"] = samples["old_logprobs"].values
        found[f"reference/{step}"] = samples["reference_logprobs"].values
        learner.train_finish()
        switch()
        generator.install(learner.weights(), step + 1)
        switch()
    found |= {f"critic/{name}": tensor for name, tensor in critic.parameters().items()}
    return {**found, **learner.parameters(), **dict(learner.trainer.optimizer.state_items())}


def test_switching_between_all_calls_changes_no_bit(
    tiny_recipe: MakeRecipe, warmed: ModelSource, place: Place
) -> None:
    recipe = tiny_recipe(algorithm={"kl_coefficient": 0.1})
    expected = train(recipe, warmed, place, switching=False)
    found = train(recipe, warmed, place, switching=True)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    before = torch.cat([p.detach().flatten() for p in warmed.load("cpu").parameters()])
    after = torch.cat([found[name].flatten() for name, _ in warmed.load("cpu").named_parameters()])
    assert not torch.equal(before, after)


def test_a_learner_says_from_the_start_what_it_will_take(
    tiny_recipe: MakeRecipe, warmed: ModelSource, place: Place
) -> None:
    learner = Learner(warmed, tiny_recipe())
    learner.load(place)
    weights = sum(parameter.nbytes for parameter in learner.policy.parameters())
    assert learner.state_bytes() == pytest.approx(4 * weights, rel=0.02)
    promised = learner.state_bytes()
    samples = _samples(tiny_recipe, warmed, place)
    learner.train(samples)
    learner.train_finish()
    assert learner.trainer.optimizer.bytes_to_come() == 0
    assert learner.state_bytes() == pytest.approx(promised, rel=0.02)
    learner.offload()
    assert learner.state_bytes() == pytest.approx(promised, rel=0.02)


def test_a_learner_that_is_away_can_be_saved_and_stays_away(
    tiny_recipe: MakeRecipe, warmed: ModelSource, place: Place, tmp_path: Path
) -> None:
    learner = Learner(warmed, tiny_recipe())
    learner.load(place)
    learner.train(_samples(tiny_recipe, warmed, place))
    learner.train_finish()
    expected = learner.parameters()
    learner.offload()
    folder = learner.save_checkpoint(str(tmp_path / "checkpoints"), 1, 1)
    found = learner.parameters()
    assert sum(storages(learner)) == 0
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    saved = state_in(folder)
    learner.onload()
    wanted = dict(learner.trainer.optimizer.state_items())
    assert all(torch.equal(saved[name], t) for name, t in wanted.items())


def test_memory_of_a_loaded_model_falls(
    tiny_recipe: MakeRecipe, place: Place, tmp_path: Path
) -> None:
    """The reader of weight files hands out pages of the file; these are let go as well.

    In a process of its own: in one with a past, allocators hold holes that fill and empty.
    """
    sizes = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1024}
    recipe = tiny_recipe(model=sizes, warmup={"steps": 0})
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        processes.submit(check_that_memory_falls, recipe, place, tmp_path).result(timeout=120)


def check_that_memory_falls(recipe: Any, place: Place, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = ReasoningExperiment(recipe).prepare(tmp_path / "model")
    workers: list[Any] = [Reference(model, recipe), Learner(model, recipe)]
    for worker in workers:
        worker.load(place)
        expected = [parameter.detach().clone() for parameter in worker.policy.parameters()]
        worker.offload()
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
        away, num_bytes = resident_bytes(), worker.state.nbytes()
        assert num_bytes > 50e6
        worker.onload()
        assert resident_bytes() - away > 0.9 * num_bytes
        for parameter, wanted in zip(worker.policy.parameters(), expected, strict=True):
            assert torch.equal(parameter, wanted)
        worker.offload()
        assert abs(resident_bytes() - away) < 0.1 * num_bytes


def _samples(tiny_recipe: MakeRecipe, model: ModelSource, place: Place) -> Batch:
    recipe = tiny_recipe()
    prompts = ReasoningExperiment(recipe, model).batch(0)
    samples = Batch.concat(list(make_generator(model, place).generate(prompts)))
    in_order = samples.select(sorted(range(len(samples)), key=samples.ids.__getitem__))
    verifier = Verifier(model, (WeightedReward("addition"),))
    verifier.load(place)
    return group_advantage(verifier.score(in_order), group_size=GROUP)
