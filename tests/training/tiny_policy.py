"""A tiny model in double precision, and rollouts of it with shared and diverging prefixes."""

from __future__ import annotations

import random

import torch
from torch import nn
from transformers import (
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from m2flow.training.rollouts import TokenRollouts

VOCABULARY = 7


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Equal small models: 2 layers, 4 heads on 2 key-value heads, float64 unless told otherwise.

    Their own norms compute in float32 whatever the dtype; exact comparisons need better ones.
    """
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
    return _with_exact_norms(model).to(dtype).eval()


def make_mixture() -> nn.Module:
    """The same with 4 experts in each layer, of which 2 work on a token, and norms of heads."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        initializer_range=0.3,
        experts_implementation="eager",  # grouped products have no double precision
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM._from_config(config, attn_implementation="sdpa")
    return _with_exact_norms(model).double().eval()


def make_narrow_router(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Another, whose second layer has 4 experts and a router that is float32 in any dtype."""
    config = Ernie4_5_MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
        max_position_embeddings=512,
        initializer_range=0.3,
        experts_implementation="eager",
    )
    torch.manual_seed(0)
    model = Ernie4_5_MoeForCausalLM._from_config(config, attn_implementation="sdpa")
    model = _with_exact_norms(model).to(dtype)
    model.get_submodule("model.layers.1.mlp.gate").float()
    return model.eval()


def _with_exact_norms(model: nn.Module) -> nn.Module:
    norms = [name for name, module in model.named_modules() if "RMSNorm" in type(module).__name__]
    for name in norms:
        size = model.get_submodule(name).get_parameter("weight").numel()
        model.set_submodule(name, nn.RMSNorm(size, eps=1e-6))
    return model


def make_rollouts(seed: int = 0, groups: int = 3) -> TokenRollouts:
    """Groups of 4 completions of 1 to 9 tokens to each of some prompts, in float64.

    Few tokens, so that completions share prefixes; every third group has no advantage.
    """
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
    return TokenRollouts.from_rows(
        prompts, completions, logprobs, torch.tensor(advantages, dtype=torch.float64)
    )
