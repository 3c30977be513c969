"""Tiny models in double precision, and rollouts of one with shared and diverging prefixes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

from m2flow.models.causal_lm import TinySpec, build_tiny
from m2flow.models.tokenizer import character_tokenizer
from m2flow.training.rollouts import TokenPairs, TokenRollouts
from tests.training.tiny_policy import make_mixture, make_model, make_rollouts

settings.register_profile("torch", deadline=None)
settings.load_profile("torch")


@pytest.fixture(scope="session", name="make_model")
def make_model_fixture() -> Callable[..., nn.Module]:
    """Makes equal small models."""
    return make_model


@pytest.fixture(scope="session", name="make_rollouts")
def make_rollouts_fixture() -> Callable[..., TokenRollouts]:
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


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders: one of a dense model, and one of a mixture."""
    spec = TinySpec(
        hidden_size=16, num_hidden_layers=2, intermediate_size=24, max_position_embeddings=64
    )
    dense = build_tiny(
        spec, vocab_size=15, eos_token_id=13, pad_token_id=14, seed=0, dtype=torch.float64
    )
    found = {}
    for name, model in (("dense", dense), ("mixture", make_mixture())):
        found[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(found[name])
        character_tokenizer("0123456789+=#").save_pretrained(found[name])
    return found
