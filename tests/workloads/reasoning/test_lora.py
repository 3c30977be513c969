"""LoRA: adapters alone are trained, whole weights are published, and a run goes on from both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

pytest.importorskip("peft", reason='needs the extra: pip install "m2flow[lora]"')

from m2flow.errors import UserError
from m2flow.flow import Place
from m2flow.generation import vllm_transfer
from m2flow.generation.external_engine import ExternalEngine
from m2flow.generation.native import NativeEngine
from m2flow.generation.vllm_engine import VLLMEngine
from m2flow.models import lora
from m2flow.models.causal_lm import TinySpec, build_tiny, load_model
from m2flow.models.lora import Summed, adapted_layers, adapter_weights, add_lora, merged_weights
from m2flow.models.shape import model_from_config
from m2flow.runtime.transport.groups import LaneGroups
from m2flow.training import checkpoint
from m2flow.training.sharded import WholeModel
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.workers import Learner, ModelSource
from tests.training.lane_processes import LaneProcesses
from tests.training.test_sharded import PAIR, place_on, saved_on, stepped
from tests.training.tiny_policy import make_mixture

RECIPE = {
    "steps": 8,
    "model": {"dtype": "float64", "lora_rank": 4},
    "training": {"tokens_per_microbatch": 40},
    "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0},
}


def tiny() -> Any:
    spec = TinySpec(
        hidden_size=16, num_hidden_layers=2, intermediate_size=24, max_position_embeddings=64
    )
    return build_tiny(
        spec, vocab_size=15, eos_token_id=13, pad_token_id=14, seed=0, dtype=torch.float64
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from m2flow.models.tokenizer import character_tokenizer

    path = tmp_path_factory.mktemp("model")
    tiny().save_pretrained(path)
    character_tokenizer("0123456789+=#").save_pretrained(path)
    return path


def learner_at(folder: Path, place: Place, checkpoint: str | None = None) -> Learner:
    recipe = ReasoningRecipe.model_validate(RECIPE)
    learner = Learner(ModelSource(str(folder), "float64"), recipe, checkpoint)
    learner.load(place)
    return learner


def test_a_model_does_what_it_did_until_adapters_are_trained() -> None:
    plain, adapted = tiny(), tiny()
    add_lora(adapted, 4)
    ids = torch.arange(10)[None]
    assert torch.equal(plain(ids).logits, adapted(ids).logits)
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 7
    assert len(adapted_layers(plain)) == 2 * 7
    assert all(".lora_" in name for name in trained)
    shape = model_from_config(plain.config.to_dict())
    count = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert count == shape.adapter_parameters(4)
    weights = dict(merged_weights(adapted))
    assert weights.keys() == plain.state_dict().keys()
    assert all(torch.equal(weights[name], one) for name, one in plain.state_dict().items())


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.lora_rank: the model has no blocks.*got 4"):
        add_lora(torch.nn.Sequential(torch.nn.Linear(2, 2)), 4)


def test_fused_projections_are_adapted_and_routers_are_not() -> None:
    config = Phi3Config(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=0,
    )  # fmt: skip
    names = {name.rpartition(".")[2] for name in adapted_layers(Phi3ForCausalLM(config))}
    assert names == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    mixture = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=16,
            hidden_size=16,
            intermediate_size=32,
            moe_intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
        )
    )
    names = {name.rpartition(".")[2] for name in adapted_layers(mixture)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}


SIZES = {
    "vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 4, "moe_intermediate_size": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "head_dim": 8,
}  # fmt: skip
QWEN3 = {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8}
MIXTURES = {
    "glm4_moe": ("glm4_moe", ROUTED | {"head_dim": 8}),
    "deepseek_v3": ("deepseek_v3", ROUTED | LATENT),
    "qwen3_moe": ("qwen3_moe", QWEN3),
    "qwen3_moe with a dense layer": ("qwen3_moe", QWEN3 | {"mlp_only_layers": [0]}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
}
"""Model types whose experts have the names of a dense block's layers, and more sizes of each."""


@pytest.mark.parametrize("name", MIXTURES)
def test_of_a_mixture_the_dense_and_the_shared_layers_are_adapted_and_no_expert(
    name: str, tmp_path: Path
) -> None:
    kind, sizes = MIXTURES[name]
    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES, **sizes))
    made.save_pretrained(tmp_path / "begun")
    model = load_model(tmp_path / "begun")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    adapted = adapted_layers(model)
    add_lora(model, 2)
    assert model.config.model_type == kind
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert trained == {f"{name}.lora_{half}.default.weight" for name in adapted for half in "AB"}
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    published = dict(merged_weights(model))
    changed = {name for name, x in published.items() if not torch.equal(before[name], x)}
    assert changed == {f"{name}.weight" for name in adapted}
    summed = Summed(before, adapter_weights(model), 2.0)
    assert all(torch.equal(summed[name], x) for name, x in published.items())
    NativeEngine(model.config).install(published, 1)
    checkpoint.write_model(tmp_path, WholeModel(model, published), None)
    written = load_model(tmp_path / "model")
    assert written.state_dict().keys() == published.keys() == before.keys()
    assert all(torch.equal(written.state_dict()[name], x) for name, x in published.items())
    ids = torch.arange(10)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            written.eval()(ids).logits, model.eval()(ids).logits, rtol=0, atol=1e-5
        )


def test_what_is_published_computes_what_is_trained(folder: Path, tmp_path: Path) -> None:
    learner = learner_at(folder, Place(spill=tmp_path))
    before = {name: x.clone() for name, x in learner.weights().items()}
    stepped(learner)
    stepped(learner)
    published = {name: x.clone() for name, x in learner.weights().items()}
    changed = {name for name in before if not torch.equal(before[name], published[name])}
    assert changed == {f"{name}.weight" for name in adapted_layers(tiny())}
    other = tiny()
    other.load_state_dict(published)
    ids = torch.arange(10)[None]
    torch.testing.assert_close(other(ids).logits, learner.policy(ids).logits, rtol=0, atol=1e-6)


def test_a_checkpoint_is_a_whole_model_and_goes_on(folder: Path, tmp_path: Path) -> None:
    through = learner_at(folder, Place(spill=tmp_path))
    stepped(through)
    expected = stepped(through)
    first = learner_at(folder, Place(spill=tmp_path))
    after_one = stepped(first)
    saved = first.save_checkpoint(str(tmp_path / "run"), 1, 1)
    again = stepped(learner_at(folder, Place(spill=tmp_path), saved))
    for name, value in expected.items():
        torch.testing.assert_close(again[name], value, rtol=0, atol=1e-12)
    model = ModelSource(f"{saved}/model", "float64").load("cpu")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, after_one[name], rtol=0, atol=1e-12)


def test_it_moves_to_another_lane(folder: Path, tmp_path: Path) -> None:
    first, second = (learner_at(folder, Place(spill=tmp_path)) for _ in range(2))
    stepped(first)
    lent = {name: x.clone() for name, x in first.save().items()}
    second.restore(lent)
    for x in lent.values():
        x.zero_()
    one, other = stepped(first), stepped(second)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_adapters_alone_give_what_is_published_merged(dtype: torch.dtype) -> None:
    base, adapted = tiny().to(dtype), tiny().to(dtype)
    add_lora(adapted, 4, 12)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    alone = {name: x.clone() for name, x in adapter_weights(adapted).items()}
    summed, merged = Summed(base.state_dict(), alone, 3.0), dict(merged_weights(adapted))
    assert summed.keys() == merged.keys()
    assert all(torch.equal(summed[name], x) for name, x in merged.items())
    assert not torch.equal(
        merged["model.layers.0.mlp.up_proj.weight"],
        base.state_dict()["model.layers.0.mlp.up_proj.weight"],
    )


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shape of each sum of a weight and its adapter, as they are taken."""
    taken: list[torch.Size] = []

    def noted(weight: Tensor, delta: Tensor) -> Tensor:
        taken.append(weight.shape)
        return added(weight, delta)

    added = lora._added
    monkeypatch.setattr(lora, "_added", noted)
    return taken


def summed_of(kind: str, **sizes: Any) -> tuple[Any, Summed]:
    """A model's configuration, and the sums of its weights and the adapters."""
    model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES, **sizes))
    base = {name: x.clone() for name, x in model.state_dict().items()}
    add_lora(model, 2)
    return model.config, Summed(base, adapter_weights(model), 2.0)


@pytest.mark.parametrize("kind", ["qwen3", "cohere"])
def test_an_engine_is_handed_each_sum_once(kind: str, sums: list[torch.Size]) -> None:
    """It was summed up anew to look for its name and again for its shape."""
    config, summed = summed_of(kind)
    engine = NativeEngine(config)
    assert (engine.notice is None) == (kind == "qwen3")
    assert "model.layers.0.mlp.up_proj.weight" in summed
    assert "model.layers.0.mlp.up_proj.lora_A.weight" not in summed
    assert sums == []
    engine.install(summed, 1)
    assert len(sums) == 2 * 7


@pytest.mark.parametrize("tied", [False, True])
def test_another_engine_is_handed_each_sum_once(
    tied: bool, sums: list[torch.Size], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_transfer, "export", lambda size, _: (torch.empty(size).byte(), {}))
    asked: list[tuple[str, ...]] = []
    engine = VLLMEngine.__new__(VLLMEngine)
    engine._device, engine._tied, engine._folders = "cuda:0", tied, [tmp_path]
    engine._ask = lambda *message: asked.append(message)  # type: ignore[method-assign]
    _, summed = summed_of("qwen3", tie_word_embeddings=tied)
    engine._hand_over(summed, 1)
    assert [what for what, *_ in asked] == ["start_update", "update", "finish_update"]
    assert len(sums) == 2 * 7
    ExternalEngine._hand_over(engine, summed, 2)
    assert asked[-1][-1] == "model.embed_tokens.weight"
    assert len(sums) == 2 * 2 * 7


def test_adapters_of_another_model_are_refused() -> None:
    adapted = tiny()
    add_lora(adapted, 4)
    alone, base = adapter_weights(adapted), tiny().state_dict()
    name = "model.layers.0.mlp.up_proj"
    for half in ("A", "B"):
        cut = {f"{name}.lora_{half}.weight": alone[f"{name}.lora_{half}.weight"][:1, :3]}
        with pytest.raises(ValueError, match=r"adapters do not fit.*0\.mlp\.up_proj\.weight'\]"):
            Summed(base, {**alone, **cut}, 2.0)
    with pytest.raises(ValueError, match=r"adapters do not fit.*model\.layers\.0\.mlp\.up_proj"):
        Summed({name: x for name, x in base.items() if ".up_proj" not in name}, alone, 2.0)
    half = {
        name: x for name, x in alone.items() if not name.endswith("0.mlp.up_proj.lora_B.weight")
    }
    with pytest.raises(ValueError, match=r"adapters do not fit.*up_proj\.lora_B"):
        Summed(base, half, 2.0)


@pytest.fixture(scope="module")
def lanes() -> Iterator[LaneProcesses]:
    with LaneProcesses(2) as lanes:
        yield lanes


def steps_of_pair(groups: LaneGroups, folder: Path, root: Path, layout: str) -> Any:
    place = place_on(groups, PAIR, root, layout)
    assert place is not None
    learner = learner_at(folder, place)
    stepped(learner)
    saved = learner.save_checkpoint(str(root / "pair"), 1, 1)
    learner.weights()
    return saved, stepped(learner)


@pytest.mark.parametrize("layout", ["fsdp2", "tp2", "cp2"])
def test_a_gang_trains_the_same_adapters(
    lanes: LaneProcesses, folder: Path, tmp_path: Path, layout: str
) -> None:
    alone = learner_at(folder, Place(spill=tmp_path))
    stepped(alone)
    expected: dict[str, Tensor] = stepped(alone)
    found = lanes(steps_of_pair, folder, tmp_path, layout)
    for _, weights in found:
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
    again = stepped(learner_at(folder, Place(spill=tmp_path), found[0][0]))
    for name, value in expected.items():
        torch.testing.assert_close(again[name], value, rtol=1e-5, atol=1e-6)
    written = load_file(Path(found[0][0]) / "model" / "model.safetensors")
    assert "lm_head.weight" not in written, "it is the embedding, which is there already"


def test_a_lane_that_is_not_the_first_of_the_world_writes_the_sum(
    lanes: LaneProcesses, folder: Path, tmp_path: Path
) -> None:
    _, found = lanes(saved_on, Learner, RECIPE, folder, tmp_path, (1,))
    written = load_model(checkpoint.begin(tmp_path, 1) / "model", torch.float64).state_dict()
    assert written.keys() == found.keys()
    assert all(tensor.equal(found[name]) for name, tensor in written.items())


def steps_of_mixture(groups: LaneGroups, folder: Path, root: Path) -> Any:
    """On lanes that divide the experts, which have no adapters."""
    place = place_on(groups, PAIR, root, "ep2")
    assert place is not None
    return two_steps(folder, place)


def two_steps(folder: Path, place: Place) -> dict[str, Tensor]:
    recipe = ReasoningRecipe.model_validate({**RECIPE, "model": {"lora_rank": 4}})
    learner = Learner(ModelSource(str(folder), "float32"), recipe)
    learner.load(place)
    stepped(learner)
    return stepped(learner)


def test_experts_are_divided_beside_adapters(lanes: LaneProcesses, tmp_path: Path) -> None:
    make_mixture().save_pretrained(tmp_path / "mixture")
    expected = two_steps(tmp_path / "mixture", Place(spill=tmp_path))
    for weights in lanes(steps_of_mixture, tmp_path / "mixture", tmp_path):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-5)
