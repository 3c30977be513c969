"""Models that the decoder does not compute, by transformers' own forward pass."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    BigBirdConfig,
    BloomConfig,
    Cohere2Config,
    DeepseekV2Config,
    DogeConfig,
    FalconConfig,
    Gemma3Config,
    Gemma4TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    MambaConfig,
    MixtralConfig,
    NemotronConfig,
    OPTConfig,
    PhiConfig,
    PhimoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    T5Config,
    cache_utils,
)

from m2flow.errors import UserError
from m2flow.generation.causal_lms import NOT_PACKED, check_packs
from m2flow.generation.native import NativeEngine
from m2flow.generation.own_forward import OwnSlots
from m2flow.generation.records import Completion, Request, SamplingParams
from m2flow.generation.supported import check_supported
from m2flow.generation.tensor_parallel import TensorParallel
from m2flow.models.norms import widen_norms
from m2flow.training.forward import token_logprobs
from m2flow.training.packing import pack
from m2flow.training.rollouts import TokenPairs
from tests.generation.small_models import drain, forward_logprobs

VOCAB, CONTEXT = 23, 48
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": None,
}
_OLD: dict[str, Any] = {"vocab_size": VOCAB, "n_head": 4, "n_layer": 2, "initializer_range": 0.3}
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
QUICK: dict[str, Any] = {
    "absolute-positions": lambda: GPT2Config(**_OLD, n_embd=32, n_positions=CONTEXT),
    "windows": lambda: Cohere2Config(**_SIZES, **_TWO_KINDS),
    "keys-wider-than-values": lambda: DeepseekV2Config(
        **{**_SIZES, "num_key_value_heads": 4}, kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=6, first_k_dense_replace=2, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16,
    ),
    "experts-in-some-layers": lambda: Qwen3MoeConfig(
        **_SIZES, head_dim=12, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20,
        mlp_only_layers=[0],
    ),
    "windows-of-masks-alone": lambda: PhimoeConfig(
        **_SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=6
    ),
    "a-layer-with-such-a-window": lambda: Qwen2MoeConfig(
        **_SIZES, use_sliding_window=True, sliding_window=6, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=20, shared_expert_intermediate_size=20,
    ),
}  # fmt: skip
SLOW: dict[str, Any] = {
    "bloom": lambda: BloomConfig(**_OLD, hidden_size=32),
    "falcon-alibi": lambda: FalconConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True,
        initializer_range=0.3,
    ),
    "gpt-neox": lambda: GPTNeoXConfig(**{**_SIZES, "num_key_value_heads": 4}),
    "opt": lambda: OPTConfig(
        **{**_SIZES, "pad_token_id": 1}, ffn_dim=40, word_embed_proj_dim=32, init_std=0.3
    ),
    "phi": lambda: PhiConfig(**_SIZES),
    "mixtral": lambda: MixtralConfig(**_SIZES, num_local_experts=4, sliding_window=None),
    "sinks": lambda: GptOssConfig(
        **_SIZES, **_TWO_KINDS, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "gemma4": lambda: Gemma4TextConfig(
        **{**_SIZES, "num_hidden_layers": 4}, head_dim=8, global_head_dim=8, sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
    ),
}  # fmt: skip

NO_DECODER = {"no-decoder": lambda: BigBirdConfig(**_SIZES)}


def model_of(name: str, seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = {**QUICK, **SLOW, **NO_DECODER}[name]()
        config._experts_implementation = "eager"
        # bloom masks by the least float64, which its softmax in float32 does not know
        dtype = torch.float32 if name == "bloom" else torch.float64
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    widen_norms(model)
    return model


def pool(count: int = 14) -> list[Request]:
    """Every other prompt twice; the longest fills the context."""
    rng = random.Random(3)
    asked = []
    for number in range(count):
        if number % 2 == 0:
            ids = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, 5, 7, 11, 20, 28)))]
        asked.append(Request(number, ids, number, SamplingParams(rng.randint(1, 18), 1.0)))
    return [*asked, Request(count, ids, count, SamplingParams(CONTEXT - len(ids), 1.0))]


def engine_of(model: Any, **limits: Any) -> NativeEngine:
    engine = NativeEngine(model.config, dtype=model.dtype, **limits)
    engine.install(model.state_dict(), 0)
    return engine


def drawn(engine: NativeEngine, asked: list[Request]) -> dict[int, Completion]:
    engine.submit(asked)
    return drain(engine)


def check_logprobs(name: str) -> None:
    model = model_of(name)
    asked = pool()
    done = drawn(engine_of(model, max_running=5), asked)
    bound = 1e-4 if model.dtype is torch.float32 else 1e-6
    for one in asked:
        expected = forward_logprobs(model, one, done[one.id]).to(model.dtype)
        torch.testing.assert_close(done[one.id].logprobs, expected, atol=bound, rtol=0)


@pytest.mark.parametrize("name", QUICK)
def test_logprobs_are_those_of_a_full_forward(name: str) -> None:
    check_logprobs(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_logprobs_of_further_architectures(name: str) -> None:
    check_logprobs(name)


@pytest.mark.parametrize("name", ["absolute-positions", "windows"])
def test_limits_and_company_change_nothing(name: str) -> None:
    """One at a time, pieces of three tokens, a cache for two, sleep: the same draws."""
    model = model_of(name)
    asked = [*pool(), *(Request(n, [n % 7, 5], n, SamplingParams(30, 1.0)) for n in range(20, 26))]
    alone = drawn(engine_of(model, max_running=1), asked)
    cell_bytes = engine_of(model)._decoder.cell_bytes  # type: ignore[union-attr]
    tight = engine_of(model, prefill_tokens=3, cache_bytes=2 * CONTEXT * cell_bytes)
    tight.submit(asked)
    found: dict[int, Completion] = {}
    for step in range(2000):
        if step == 9:
            tight.sleep()
            tight.wake()
        found |= {one.id: one for one in tight.step()}
        cache = tight._cache
        assert isinstance(cache, OwnSlots)
        assert cache.rows * cache.columns <= 2 * CONTEXT
        if not tight.busy:
            break
    assert tight.preemptions > 0
    assert found.keys() == alone.keys()
    for number, one in found.items():
        assert one.token_ids.tolist() == alone[number].token_ids.tolist()
        torch.testing.assert_close(one.logprobs, alone[number].logprobs, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", QUICK)
def test_the_trainer_computes_the_same(name: str) -> None:
    """Log-probabilities of a pack are those that were recorded when the tokens were drawn."""
    model, asked = model_of(name), pool(6)
    done = drawn(engine_of(model), asked)
    answers = [done[one.id] for one in asked]
    pairs = TokenPairs.from_rows(
        [list(one.prompt_ids) for one in asked], [one.token_ids.tolist() for one in answers]
    )
    (packed,) = pack(pairs, 10_000)
    with torch.no_grad():
        found = token_logprobs(model, packed).logprobs_T[packed.token_index_T.argsort()]
    drawn_T = torch.cat([one.logprobs for one in answers])
    torch.testing.assert_close(found, drawn_T, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (BloomConfig(**_OLD, hidden_size=32), "cannot be replaced"),
        (DogeConfig(**_SIZES), "makes of the values"),
        (GptOssConfig(**_SIZES), "has sinks"),
        (NemotronConfig(**_SIZES), "which rows are packed"),
    ],
)
def test_what_cannot_be_packed_is_not_trained(config: Any, why: str) -> None:
    """Its own attention would take a pack for one long row, without a word."""
    made = config.to_dict()
    assert check_supported(made) is not None
    with pytest.raises(UserError, match=rf"{why}.*cannot be packed.*{config.model_type}"):
        check_packs(made)
    check_packs(GPT2Config().to_dict())


@pytest.mark.parametrize(
    "config",
    [
        Lfm2Config(**_SIZES, layer_types=["conv", "full_attention"]),
        GraniteMoeHybridConfig(**_SIZES, layer_types=["mamba", "attention"], mamba_n_heads=8),
    ],
    ids=["convolution", "state-space"],
)
def test_layers_with_a_state_are_not_trained_in_packs(config: Any) -> None:
    """Such a layer would take a pack for one long row, whatever engine generates."""
    with pytest.raises(UserError, match=r"not all layers keep keys.*cannot be packed"):
        check_packs(config.to_dict())
    config.layer_types = ["full_attention" if isinstance(config, Lfm2Config) else "attention"] * 2
    check_packs(config.to_dict())


def test_all_kinds_with_sinks_are_known() -> None:
    """Their attention asks for them as `s_aux`; `packed_attention` would refuse it after a step."""
    folder = Path(transformers.__file__).parent / "models"
    kinds = {
        path.parent.name
        for path in folder.glob("*/modeling_*.py")
        if "s_aux=self.sinks" in path.read_text(encoding="utf-8")
    }
    assert "gpt_oss" in kinds
    causal = {
        kind
        for kind in kinds & set(CONFIG_MAPPING)
        if CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING
    }
    assert causal <= {kind for kind, why in NOT_PACKED.items() if why.endswith("sinks")}


def test_running_requests_go_on_with_new_weights() -> None:
    model, other = model_of("absolute-positions"), model_of("absolute-positions", seed=1)
    engine = engine_of(model)
    engine.submit([Request(0, [2, 7, 1], 5, SamplingParams(8, 1.0))])
    for _ in range(3):
        engine.step()
    engine.install(dict(other.named_parameters()), 4)
    done = drain(engine)[0]
    assert done.token_versions.tolist() == [0, 0, 0, 4, 4, 4, 4, 4]
    ids = done.token_ids
    with torch.no_grad():
        past = model(torch.tensor([[2, 7, 1, *ids[:2]]]), use_cache=True).past_key_values
        logits = other(ids[2:-1][None], past_key_values=past).logits[0]
    expected = torch.log_softmax(logits, -1).gather(1, ids[3:, None])[:, 0]
    torch.testing.assert_close(done.logprobs[3:], expected, atol=1e-9, rtol=0)


def test_an_install_that_does_not_fit_changes_nothing() -> None:
    model = model_of("absolute-positions")
    engine = engine_of(model)
    weights = dict(model.named_parameters())
    name = "transformer.h.0.ln_1.weight"
    for wrong in ({**weights, name: weights[name][:-1]}, {**weights, "more": weights[name]}):
        with pytest.raises(ValueError, match="do not fit"):
            engine.install(wrong, 1)
    del weights[name]
    with pytest.raises(ValueError, match=name):
        engine.install(weights, 1)
    assert engine.version == 0


def test_a_notice_says_that_it_is_slower() -> None:
    for name, made in QUICK.items():
        notice = check_supported(made().to_dict())
        assert notice is not None, name
        assert "transformers' own forward pass, which is slower" in notice
    assert check_supported(Qwen2Config().to_dict()) is None


def test_a_transformers_without_dummy_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cache_utils, "DummyLayer", raising=False)
    assert check_supported(GPT2Config().to_dict()) is not None


def test_it_is_not_divided() -> None:
    with pytest.raises(UserError, match="gangs of 1"):
        NativeEngine(GPT2Config(**_OLD, n_embd=32), parallel=TensorParallel(0, 2))


def test_rows_that_depend_on_each_other_are_refused() -> None:
    """A model that is no decoder sees what comes after a token, too."""
    with pytest.raises(UserError, match=r"other tokens for a prompt in pieces.*big_bird"):
        engine_of(model_of("no-decoder"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (T5Config().to_dict(), "is_encoder_decoder.*decoder-only"),
        (MambaConfig().to_dict(), "keep a state.*vllm"),
        (JambaConfig().to_dict(), "keep a state.*vllm"),
        (Llama4TextConfig(**_SIZES).to_dict(), "layer_types.*chunks"),
        (Gemma3Config().to_dict(), "more than text.*gemma3_text"),
        ({"model_type": "mine", "auto_map": {"AutoModel": "mine.Mine"}}, "auto_map.*its code"),
        ({"model_type": "mine"}, "model_type.*does not know"),
        ({"model_type": "clip"}, "model_type.*no causal language model"),
        (
            GPT2Config().to_dict() | {"rope_parameters": {"rope_type": "longrope"}},
            "rope_type.*change with the length",
        ),
    ],
)
def test_what_cannot_be_drawn_from_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"(?s){message}") as caught:
        check_supported(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["deepseek_v3", "dots1", "glm4_moe"])
def test_what_transformers_keeps_in_float32_is_so_here_too(kind: str, tmp_path: Path) -> None:
    """The bias by which experts are chosen: in bfloat16 other experts would be."""
    sizes = {**_SIZES, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4}
    groups = {
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    }
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    own = {**ranks, "v_head_dim": 8} if kind == "deepseek_v3" else {"head_dim": 8}
    config = CONFIG_MAPPING[kind](**sizes, **groups, **own)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    engine: Any = NativeEngine(read.config, dtype=torch.bfloat16, max_running=2)
    engine.install(read.state_dict(), 0)
    there = {name: x.dtype for name, x in engine._decoder._model.state_dict().items()}
    assert there == {name: x.dtype for name, x in read.state_dict().items()}
    assert torch.float32 in there.values()
