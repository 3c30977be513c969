"""A critic is the policy's body with a head of zeros, and a folder like any model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    Olmo2Config,
    OPTConfig,
    PhimoeConfig,
)

from m2flow.errors import UserError
from m2flow.models.causal_lm import TinySpec, build_tiny, load_model
from m2flow.models.critic import load_critic
from m2flow.training.packing import pack
from m2flow.training.rollouts import TokenPairs
from m2flow.training.values import token_values

SPEC = TinySpec(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


_ENDS = {"vocab_size": 16, "eos_token_id": 14, "pad_token_id": 15, "bos_token_id": None}
_SIZES: dict[str, Any] = {
    **_ENDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
OTHERS = {
    "cohere2": lambda: Cohere2Config(**_SIZES),
    "gemma3_text": lambda: Gemma3TextConfig(**_SIZES, head_dim=8),
    "gpt2": lambda: GPT2Config(**_ENDS, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "granite": lambda: GraniteConfig(**_SIZES),
    "olmo2": lambda: Olmo2Config(**_SIZES),
    "opt": lambda: OPTConfig(
        **_ENDS, hidden_size=32, word_embed_proj_dim=16, ffn_dim=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, do_layer_norm_before=False,
    ),
    "phimoe": lambda: PhimoeConfig(**_SIZES, num_local_experts=4),
}  # fmt: skip
"""Architectures of which transformers has no class that classifies tokens, or one of its own; OPT
as in opt-350m, whose body gives less than the width of its layers."""


@pytest.fixture
def policy_folder(tmp_path: Path) -> Path:
    policy = build_tiny(SPEC, vocab_size=11, eos_token_id=9, pad_token_id=10, seed=3)
    policy.save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


@pytest.mark.parametrize("dtype", DTYPES)
def test_made_of_a_policy(policy_folder: Path, dtype: torch.dtype) -> None:
    random_state = torch.get_rng_state()
    critic, policy = load_critic(policy_folder, dtype), load_model(policy_folder, dtype)
    assert torch.equal(torch.get_rng_state(), random_state)
    weights, body = critic.state_dict(), policy.base_model.state_dict()
    assert all(torch.equal(weights[f"model.{name}"], value) for name, value in body.items())
    assert {name for name in weights if not name.startswith("model.")} == {
        "score.weight",
        "score.bias",
    }
    assert not any(weights[f"score.{name}"].any() for name in ("weight", "bias"))
    assert {parameter.dtype for parameter in critic.parameters()} == {dtype}
    assert all(parameter.device.type == "cpu" for parameter in critic.parameters())
    norms = [type(m).forward.__module__ for m in critic.modules() if "RMSNorm" in type(m).__name__]
    assert ("m2flow.models.norms" in norms) == (dtype is torch.float64)
    assert not critic.training


@pytest.mark.parametrize("dtype", DTYPES)
def test_written_and_read_back(policy_folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    critic = load_critic(policy_folder, dtype)
    torch.nn.init.normal_(critic.score.weight)
    critic.save_pretrained(tmp_path / "critic")
    again = load_critic(tmp_path / "critic", dtype)
    there = again.state_dict()
    assert all(torch.equal(value, there[name]) for name, value in critic.state_dict().items())
    microbatch = pack(TokenPairs.from_rows([[1, 2]], [[3, 4, 9]]), 100)[0]
    assert torch.equal(token_values(again, microbatch), token_values(critic, microbatch))


@pytest.mark.parametrize("kind", OTHERS)
def test_of_another_architecture(kind: str, tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(OTHERS[kind]()).save_pretrained(tmp_path / "policy")
    critic: Any = load_critic(tmp_path / "policy")
    body = load_model(tmp_path / "policy").base_model.state_dict()
    assert all(torch.equal(critic.base_model.state_dict()[name], x) for name, x in body.items())
    head = critic.classifier if kind == "gpt2" else critic.score
    assert not any(tensor.any() for tensor in head.parameters())
    torch.nn.init.normal_(head.weight)
    critic.save_pretrained(tmp_path / "critic")
    again = load_critic(tmp_path / "critic")
    assert again.state_dict().keys() == critic.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], x) for name, x in critic.state_dict().items())
    microbatch = pack(TokenPairs.from_rows([[1, 2]], [[3, 4, 9]]), 100)[0]
    alone_T = critic(input_ids=torch.tensor([[1, 2, 3, 4, 9]])).logits[0, 1:4, 0]
    torch.testing.assert_close(token_values(again, microbatch), alone_T, rtol=1e-5, atol=1e-5)


def test_half_a_critic_is_refused(policy_folder: Path, tmp_path: Path) -> None:
    load_critic(policy_folder).save_pretrained(tmp_path / "critic")
    file = tmp_path / "critic" / "model.safetensors"
    tensors = load_file(file)
    del tensors["score.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lack 1 of the model's tensors, among them score\.weight"):
        load_critic(tmp_path / "critic")
    with pytest.raises(UserError, match="does not exist"):
        load_critic(tmp_path / "nowhere")
