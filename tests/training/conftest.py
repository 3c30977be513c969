"""A tiny model in double precision, and rollouts of it with shared and diverging prefixes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from m2flow.training.rollouts import Rollouts, TokenPairs

settings.register_profile("torch", deadline=None)
settings.load_profile("torch")

VOCABULARY = 7


@pytest.fixture(scope="session")
def make_model() -> Callable[..., nn.Module]:
    """Equal small models: 2 layers, 4 heads on 2 key-value heads, float64 unless told otherwise.

    Their own norms compute in float32 whatever the dtype; exact comparisons need better ones.
    """

    def make(dtype: torch.dtype = torch.float64) -> nn.Module:
        config = Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.3,
        )
        torch.manual_seed(0)
        model = Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa")
        model.model.norm = nn.RMSNorm(16, eps=1e-6)
        for layer in model.model.layers:
            layer.input_layernorm = nn.RMSNorm(16, eps=1e-6)
            layer.post_attention_layernorm = nn.RMSNorm(16, eps=1e-6)
        return model.to(dtype).eval()

    return make


@pytest.fixture(scope="session")
def make_rollouts() -> Callable[..., Rollouts]:
    """Groups of 4 completions of 1 to 9 tokens to each of some prompts, in float64.

    Few tokens, so that completions share prefixes; every third group has no advantage.
    """

    def make(seed: int = 0, groups: int = 3) -> Rollouts:
        rng = random.Random(seed)
        prompts, completions, logprobs, advantages = [], [], [], []
        for group in range(groups):
            prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6))]
            for _ in range(4):
                completion = [rng.randrange(2) for _ in range(rng.randint(1, 9))]
                prompts.append(prompt)
                completions.append(completion)
                logprobs.append(torch.tensor([-rng.uniform(1.5, 2.5) for _ in completion]).double())
                advantages.append(rng.uniform(-1, 1) if group % 3 else 0.0)
        return Rollouts.from_rows(
            prompts, completions, logprobs, torch.tensor(advantages, dtype=torch.float64)
        )

    return make


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
