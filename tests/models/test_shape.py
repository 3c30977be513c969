"""Shapes from configurations: parameters to the last one, KV bytes, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from m2flow.errors import UserError
from m2flow.models.shape import KNOWN_MODELS, model_from_config, read_model

QWEN_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
QWEN_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(QWEN_7B, 7_615_616_512), (QWEN_MOE, 30_532_122_624)],
    ids=["dense", "many experts"],
)
def test_parameters_are_those_of_the_published_weights(
    config: dict[str, Any], parameters: int
) -> None:
    assert model_from_config(config).parameters == parameters


FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2Config": {},
    "Qwen3Config": {"attention_bias": True},
    "Qwen3MoeConfig": {"num_experts": 8, "num_experts_per_tok": 2},
    "Qwen2MoeConfig": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "Glm4MoeConfig": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "head_dim": 16,
        "pad_token_id": 0,
    },
    "LlamaConfig": {"attention_bias": True, "mlp_bias": True},
    "GemmaConfig": {"attention_bias": True},
    "Gemma2Config": {},
    "Gemma3TextConfig": {"attention_bias": True},
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


@pytest.mark.parametrize("whole", [True, False], ids=["all keys", "without defaults"])
@pytest.mark.parametrize("tied", [None, True, False], ids=["default", "tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_that_transformers_builds(
    family: str, tied: bool | None, whole: bool
) -> None:
    """A `config.json` leaves out defaults of its class, as Qwen3 does its head size."""
    import torch
    import transformers

    said = {**SMALL, **FAMILIES[family]} | ({} if tied is None else {"tie_word_embeddings": tied})
    config = getattr(transformers, family)(**said)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    built = sum(parameter.numel() for parameter in model.parameters())  # a shared one once
    written = config.to_dict() if whole else {**said, "model_type": config.model_type}
    assert model_from_config(written).parameters == built


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen3-32B", 32_762_123_264),
        ("Llama-3.1-8B", 8_030_261_248),
        ("Qwen2.5-0.5B", 494_032_768),
        ("Qwen2.5-1.5B", 1_543_714_304),
        ("Qwen2.5-3B", 3_085_938_688),
        ("Qwen2.5-32B", 32_763_876_352),
        ("Llama-2-7B", 6_738_415_616),
    ],
)
def test_known_shapes(name: str, parameters: int) -> None:
    assert KNOWN_MODELS[name].parameters == parameters
    assert read_model(f"someone/{name.lower()}") == KNOWN_MODELS[name]
    assert read_model(f"{name}-Instruct") == KNOWN_MODELS[name]


def test_known_shapes_are_what_their_configurations_say() -> None:
    assert model_from_config(QWEN_7B, "Qwen2.5-7B") == KNOWN_MODELS["Qwen2.5-7B"]
    assert model_from_config(QWEN_MOE, "Qwen3-30B-A3B") == KNOWN_MODELS["Qwen3-30B-A3B"]


def test_a_mixture_works_with_few_of_its_parameters_and_reads_what_is_touched() -> None:
    shape = model_from_config(QWEN_MOE)
    assert 2.9e9 < shape.active_parameters < 3.4e9
    # One token touches just its own experts; many touch all.
    assert shape.expert_bytes_read(1) == pytest.approx(2 * shape.experts_of_a_token)
    assert shape.expert_bytes_read(10_000) == pytest.approx(2 * shape.expert_parameters)
    every = shape.shared_parameters + shape.expert_parameters + 2 * shape.head_parameters
    assert shape.parameters == every + shape.hidden
    assert KNOWN_MODELS["Qwen2.5-7B"].expert_bytes_read(100) == 0


def test_experts_that_work_on_every_token_and_layers_without_experts_are_counted() -> None:
    """DeepSeek's name for the number of experts was not read, so that it was a dense model."""
    small = {key: value for key, value in QWEN_MOE.items() if key != "num_experts"}
    config = {**small, "n_routed_experts": 128, "n_shared_experts": 2, "first_k_dense_replace": 3}
    plain, other = model_from_config(QWEN_MOE), model_from_config(config)
    expert = 3 * 2048 * 768
    assert other.experts == plain.experts == 128
    assert other.expert_parameters == 45 * 128 * expert
    assert other.experts_of_a_token == 45 * 8 * expert
    dense = 3 * 3 * 2048 * other.intermediate - 3 * 2048 * 128  # no router there
    assert other.shared_parameters == plain.shared_parameters + 45 * 2 * expert + dense
    assert other.adapter_parameters(4) == plain.adapter_parameters(4) + 3 * 4 * (
        45 * (2048 + 2 * 768) + 3 * (2048 + other.intermediate)
    )
    assert not plain.latent_attention
    assert model_from_config({**config, "kv_lora_rank": 512}).latent_attention


def test_kv_bytes_count_key_value_heads_only() -> None:
    assert model_from_config(QWEN_7B).kv_bytes_per_token == 2 * 28 * 4 * 128 * 2
    assert model_from_config({**QWEN_7B, "num_key_value_heads": None}).kv_heads == 28


def test_flops_of_a_short_context_are_two_for_each_parameter() -> None:
    shape = KNOWN_MODELS["Qwen2.5-7B"]
    assert shape.forward_flops(10, 0) == 20 * shape.active_parameters
    assert shape.forward_flops(1, 1000) > shape.forward_flops(1, 0)


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size"])
@pytest.mark.parametrize("value", [None, 0, "many", True])
def test_what_a_configuration_must_say(key: str, value: object) -> None:
    with pytest.raises(UserError, match=key):
        model_from_config({**QWEN_7B, key: value})


def test_reading_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    assert read_model(tmp_path).hidden == 3584
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json cannot be read"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="no JSON object"):
        read_model(tmp_path)


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(UserError, match=r"Qwen2.5-7B"):
        read_model("Qwen/Qwen2.5-7")


def test_experts_of_mixtral_are_as_wide_as_its_dense_block_would_be() -> None:
    """Its configuration has no width of experts, which once was a KeyError."""
    config = {
        "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
        "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip
    shape = model_from_config(config)
    assert shape.expert_intermediate == 14336
    assert shape.parameters == 46_702_792_704
