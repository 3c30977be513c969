"""Each kind of causal language model that is trained: a pack gives what its rows alone give.

A layer that carries a state, sees a window that only its mask tells, or attends by a mask of its
own would take a pack for one long row, without a word; a new transformers may bring such a kind.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from m2flow.errors import UserError
from m2flow.generation.causal_lms import check_packs
from m2flow.training.forward import token_logprobs
from m2flow.training.packing import pack
from m2flow.training.rollouts import TokenPairs

VOCAB = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8,
    "num_attention_heads": 4, "max_position_embeddings": 512, "num_kv_shared_layers": 0,
    "moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 6, "n_embd": 32, "n_layer": 3, "n_head": 4,
    "n_positions": 512, "n_inner": 48, "ffn_dim": 48, "rotary_dim": 4, "n_layers": 3, "n_heads": 4,
    "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1, "local_attention": 6,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CANNOT_BE_SO_SMALL = (
    AttributeError, ImportError, IndexError, KeyError, RuntimeError, StrictDataclassError,
    TypeError, ValueError,
)  # fmt: skip
MOST_PARAMETERS = 30_000_000
LEAST_KINDS = 75
"""That are small enough to be computed here, of transformers 5.23."""


def small_model(kind: str, kv_heads: int) -> Any:
    """A model of a kind; None where the kind is not trained, or cannot be made so small."""
    try:
        said = CONFIG_MAPPING[kind]().to_dict()
        check_packs(said)
        if said.get("is_decoder") is False:  # an encoder
            return None
        own = {key: value for key, value in SIZES.items() if key in said}
        own |= {"num_key_value_heads": kv_heads} if "num_key_value_heads" in said else {}
        types = set(said.get("layer_types") or ())
        if "sliding_window" in said and types and types <= {"full_attention", "sliding_attention"}:
            own["layer_types"] = ["sliding_attention", "full_attention"] * 2
        config = CONFIG_MAPPING[kind](**own)
        config._attn_implementation = "eager"
        with torch.device("meta"):
            size = sum(x.numel() for x in AutoModelForCausalLM.from_config(config).parameters())
        if size > MOST_PARAMETERS:
            return None
        model = AutoModelForCausalLM.from_config(config).eval()
    except (UserError, *CANNOT_BE_SO_SMALL):
        return None
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data = torch.randn(parameter.shape, generator=generator) / 4
    return model


@torch.no_grad()
def largest_gap(model: Any) -> float | None:
    """Between log-probabilities of a pack and of its rows; None where the rows do not compute."""
    rng = random.Random(7)
    drawn = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (6, 1, 9, 14, 12)]
    prompts, answers = [drawn[0]] * 3 + [[5]], drawn[1:]
    try:
        rows = [
            model(input_ids=torch.tensor([[*p, *a]]), use_cache=False).logits[0, len(p) - 1 : -1]
            for p, a in zip(prompts, answers, strict=True)
        ]
    except CANNOT_BE_SO_SMALL:
        return None
    targets_T = torch.tensor([token for answer in answers for token in answer])
    alone_T = torch.cat(rows).log_softmax(-1).gather(1, targets_T[:, None])[:, 0]
    gap = 0.0
    for sharing in ("prefix", "none"):
        (packed,) = pack(TokenPairs.from_rows(prompts, answers), 10_000, sharing)  # type: ignore[arg-type]
        found_T = torch.empty_like(alone_T)
        found_T[packed.token_index_T] = token_logprobs(model, packed).logprobs_T
        gap = max(gap, float((found_T - alone_T).abs().max()))
    return gap


@pytest.mark.slow
def test_a_pack_gives_what_its_rows_alone_give() -> None:
    gaps: dict[str, float] = {}
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        for kv_heads in (2, 4):
            model = small_model(kind, kv_heads)
            gap = None if model is None else largest_gap(model)
            if gap is not None:
                gaps[kind] = gap
                break
    assert {kind: gap for kind, gap in gaps.items() if not gap < 3e-4} == {}
    assert len(gaps) >= LEAST_KINDS, sorted(gaps)
