"""A tiny model in double precision, and rollouts of it with shared and diverging prefixes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

from m2flow.training.rollouts import Rollouts, TokenPairs
from tests.training.tiny_policy import make_model, make_rollouts

settings.register_profile("torch", deadline=None)
settings.load_profile("torch")


@pytest.fixture(scope="session", name="make_model")
def make_model_fixture() -> Callable[..., nn.Module]:
    """Makes equal small models."""
    return make_model


@pytest.fixture(scope="session", name="make_rollouts")
def make_rollouts_fixture() -> Callable[..., Rollouts]:
    """Makes rollouts from a seed."""
    return make_rollouts


@pytest.fixture(scope="session")
def plain_logprobs() -> Callable[[nn.Module, TokenPairs], Tensor]:
    """[T] log-probabilities, one row at a time, by the model's own attention: slow and obvious."""

    def compute(model: nn.Module, pairs: TokenPairs) -> Tensor:
        prompts = pairs.prompt_ids_P.split(pairs.prompt_lengths_B.tolist())
        completions = pairs.completion_ids_T.split(pairs.completion_lengths_B.tolist())
        found = []
        for prompt, completion in zip(prompts, completions, strict=True):
            ids = torch.cat([prompt, completion])[None]
            logprobs = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
            found += [logprobs[len(prompt) - 1 + t, token] for t, token in enumerate(completion)]
        return torch.stack(found)

    return compute
