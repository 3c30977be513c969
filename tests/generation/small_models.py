"""Small random models of every supported architecture, and what transformers says of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from m2flow.generation.native import NativeEngine
from m2flow.generation.records import Completion, Request
from m2flow.models.norms import widen_norms

VOCAB_SIZE = 23
CONTEXT = 48
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
_EXPERTS: dict[str, Any] = {
    "head_dim": 12,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
}
_GEMMA: dict[str, Any] = {**_SIZES, "head_dim": 12, "tie_word_embeddings": True}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 12,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 12,
}
CONFIGS: dict[str, Any] = {
    "qwen2": lambda: Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "qwen2-untied-one-kv-head": lambda: Qwen2Config(
        **{**_SIZES, "num_key_value_heads": 1}, tie_word_embeddings=False
    ),
    "qwen2-yarn": lambda: Qwen2Config(**_SIZES, tie_word_embeddings=True, rope_parameters=_YARN),
    "llama": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=False),
    "llama-biases-scaled-rope": lambda: LlamaConfig(
        **{**_SIZES, "num_key_value_heads": 4},
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rope_parameters=_LLAMA3_ROPE,
    ),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=12, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=None, tie_word_embeddings=False),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **_SIZES, **_EXPERTS, norm_topk_prob=True, tie_word_embeddings=False
    ),
    "qwen3-moe-plain-shares": lambda: Qwen3MoeConfig(
        **_SIZES, **_EXPERTS, norm_topk_prob=False, tie_word_embeddings=True
    ),
}
FAMILIES: dict[str, Any] = {
    "mistral-window": lambda: MistralConfig(**_SIZES, sliding_window=7, tie_word_embeddings=False),
    "qwen2-windows": lambda: Qwen2Config(
        **_SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1,
        tie_word_embeddings=True,
    ),
    "gemma": lambda: GemmaConfig(**{**_GEMMA, "num_key_value_heads": 1}),
    "gemma2": lambda: Gemma2Config(
        **_GEMMA, sliding_window=6, query_pre_attn_scalar=20, attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        attn_implementation="eager",  # with sdpa some versions drop the cap without a word
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **{**_GEMMA, "num_hidden_layers": 4}, sliding_window=6, query_pre_attn_scalar=20,
        sliding_window_pattern=3, attention_bias=True,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
    ),
}  # fmt: skip
"""Those with windows, caps, or norms of Gemma's kind."""
_CLASSES = {
    "qwen2": Qwen2ForCausalLM,
    "llama": LlamaForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "mistral": MistralForCausalLM,
    "qwen3_moe": Qwen3MoeForCausalLM,
    "gemma": GemmaForCausalLM,
    "gemma2": Gemma2ForCausalLM,
    "gemma3_text": Gemma3ForCausalLM,
}


def small_model(name: str = "qwen2", seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """Every parameter is random, norms and biases too, which a fresh model leaves at 1 and 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = {**CONFIGS, **FAMILIES}[name]()
        config._experts_implementation = "eager"  # grouped products want float32, and large sizes
        model = _CLASSES[config.model_type](config)
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.data = (parameter.data + 0.1 * noise).to(dtype)
        for module in model.modules():
            if hasattr(module, "scalar_embed_scale"):  # a loaded model has it in its own dtype
                module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=dtype)
    widen_norms(model)  # as `load_model` does
    return model.eval()


def forward_logprobs(model: PreTrainedModel, request: Request, completion: Completion) -> Tensor:
    """Log-probability of each completion token, [T], by one full forward pass."""
    prompt = list(request.prompt_ids)
    ids = torch.tensor([prompt + completion.token_ids.tolist()])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    temperature = request.params.temperature or 1.0
    logprobs = torch.log_softmax(logits.double() / temperature, dim=-1)
    return logprobs.gather(1, completion.token_ids.unsqueeze(1)).squeeze(1)


def drain(engine: NativeEngine) -> dict[int, Completion]:
    """Steps the engine until nothing is left."""
    done: dict[int, Completion] = {}
    for _ in range(10_000):
        if not engine.busy:
            return done
        for completion in engine.step():
            assert completion.id not in done
            done[completion.id] = completion
    raise AssertionError("the engine does not come to an end")
