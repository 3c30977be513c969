"""A tiny model that gets some small sums right, made once for all tests of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.experiment import ReasoningExperiment
from m2flow.workloads.reasoning.workers import ModelSource

TINY: dict[str, Any] = {
    "steps": 4,
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    "model": {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    },
    "data": {"options": {"min_digits": 1, "max_digits": 1, "thinking_share": 0}},
    "warmup": {"steps": 40, "samples_per_step": 32, "learning_rate": 2e-2},
    "optimizer": {"learning_rate": 3e-3},
    "generation": {"max_new_tokens": 6},
    "evaluation": {"problems": 5},
}

MakeRecipe = Callable[..., ReasoningRecipe]


@pytest.fixture(scope="session")
def tiny_recipe() -> MakeRecipe:
    """Makes the tiny recipe, with some of its sections or values replaced."""

    def make(**changes: Any) -> ReasoningRecipe:
        data = dict(TINY)
        for key, value in changes.items():
            merged = isinstance(value, dict) and isinstance(data.get(key), dict)
            data[key] = {**data[key], **value} if merged else value
        return ReasoningRecipe.model_validate(data)

    return make


@pytest.fixture(scope="session")
def warmed(tiny_recipe: MakeRecipe, tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """The model that the tiny recipe starts from."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return ReasoningExperiment(tiny_recipe()).prepare(tmp_path_factory.mktemp("warmed"))
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """What runs in one process leaves the number of threads as it was."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def data_file(tmp_path: Path) -> Path:
    """Forty questions, one a line."""
    path = tmp_path / "questions.jsonl"
    lines = [f'{{"question": "What is {n} + {n}?", "answer": "{2 * n}"}}\n' for n in range(40)]
    path.write_text("".join(lines))
    return path
