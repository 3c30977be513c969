"""Tiny models are what their seed says; damaged folders are named, never half-loaded."""

from __future__ import annotations

import json
import logging
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.utils.logging import enable_progress_bar, is_progress_bar_enabled

from m2flow.errors import UserError
from m2flow.generation.supported import check_supported
from m2flow.models.causal_lm import TinySpec, build_tiny, load_model, load_tokenizer
from m2flow.models.tokenizer import byte_tokenizer, character_tokenizer
from m2flow.runtime.lane.state import resident_bytes
from m2flow.workloads.reasoning.workers import ModelSource

SMALL = TinySpec(hidden_size=16, num_hidden_layers=2, intermediate_size=32)


def small(seed: int = 0, dtype: torch.dtype = torch.float32, spec: TinySpec = SMALL):  # type: ignore[no-untyped-def]
    return build_tiny(spec, vocab_size=7, eos_token_id=5, pad_token_id=6, seed=seed, dtype=dtype)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    small().save_pretrained(folder)
    character_tokenizer("01234").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def test_the_default_model_has_079_million_parameters() -> None:
    model = build_tiny(TinySpec(), vocab_size=18, eos_token_id=16, pad_token_id=17, seed=0)
    assert sum(p.numel() for p in model.parameters()) == 790_912
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.eos_token_id == 16


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = small(seed=3).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(5)
    again, other = small(seed=3).state_dict(), small(seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.norm.weight"] + 1, other["model.norm.weight"])
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first[name], other[name])
    assert first[name].std() == pytest.approx(0.08, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_dtype_rounds_the_same_numbers(dtype: torch.dtype) -> None:
    reference, model = small(), small(dtype=dtype)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, reference.state_dict()[name].to(dtype))
    assert model.dtype == model.config.dtype == dtype


def test_bfloat16_leaves_the_rotary_frequencies_unrounded() -> None:
    expected = small().model.rotary_emb.inv_freq
    assert torch.equal(small(dtype=torch.bfloat16).model.rotary_emb.inv_freq, expected)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"hidden_size": 36}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_a_spec_that_makes_no_model_is_refused(change: dict[str, float], key: str) -> None:
    with pytest.raises(UserError, match=f"^{key}"):
        TinySpec(**change)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_model_loads_as_it_was(folder: Path, dtype: torch.dtype) -> None:
    model = load_model(folder, dtype)
    assert not model.training
    assert model.dtype == dtype
    for name, tensor in small(dtype=dtype).state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer("0123").input_ids == [0, 1, 2, 3]
    assert tokenizer.eos_token_id == 5


def test_shards_load_and_a_missing_one_is_named(tmp_path: Path) -> None:
    small().save_pretrained(tmp_path, max_shard_size="6KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    assert torch.equal(load_model(tmp_path).lm_head.weight, small().lm_head.weight)
    shards[1].unlink()
    with pytest.raises(UserError, match=shards[1].name):
        load_model(tmp_path)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    for load in (load_model, load_tokenizer):
        with pytest.raises(UserError, match=r"does not exist.*hf download"):
            load(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        load_model(tmp_path / "file")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        load_model(folder)


def test_weights_of_another_format_are_not_taken_for_missing(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"convert pytorch_model\.bin"):
        load_model(folder)


def test_a_tokenizer_that_is_not_there(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer_config\.json"):
        load_tokenizer(folder)


def test_a_tokenizer_beside_a_qwen2_model_stays_what_it_is(folder: Path) -> None:
    """AutoTokenizer rebuilds it as Qwen2's own: normalised, without line breaks, one id more."""
    for tokenizer, text in (
        (character_tokenizer("01 \n"), "0 1\n\n0"),
        (byte_tokenizer(), "e\N{COMBINING ACUTE ACCENT} <eos>\n"),
    ):
        tokenizer.save_pretrained(folder)
        back = load_tokenizer(folder)
        assert back(text).input_ids == tokenizer(text).input_ids
        assert back.decode(back(text).input_ids) == text
        assert len(back) == len(tokenizer)


@pytest.mark.parametrize("kind", ["llama", "starcoder2", "qwen2"])
def test_a_tokenizer_of_bytes_splits_as_its_file_says(kind: str, tmp_path: Path) -> None:
    """Classes such as GPT2Tokenizer split otherwise: line breaks one by one, digits together."""
    said = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    said.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(False)])
    said.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    said.train_from_iterator(["Steps:\n\n1. add 25\n\n2. mul 125\n\n"] * 50, trainer)
    said.save(str(tmp_path / "tokenizer.json"))
    declared = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<eos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(declared))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    text = "Steps:\n\n1. add 125\n\n2. mul"
    read = load_tokenizer(tmp_path)
    assert read(text).input_ids == said.encode(text).ids
    assert read.eos_token == "<eos>"


def test_a_tokenizer_without_eos(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="no eos token"):
        load_tokenizer(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_weights_that_were_cut_off(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"model\.safetensors is cut off"):
        load_model(folder)


@pytest.mark.parametrize("content", ["", "{", "[1]", "{}"])
def test_a_damaged_configuration(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json"):
        load_model(folder)


@pytest.fixture
def transformers_heard(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What transformers logs comes by the root only where CI is set: here, once everywhere."""
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)


def set_layers(folder: Path, layers: int) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = layers
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))


def test_weights_of_another_model_are_not_filled_up_at_random(
    folder: Path, caplog: pytest.LogCaptureFixture, transformers_heard: None
) -> None:
    """transformers draws tensors that the file lacks at random, with no more than a warning."""
    set_layers(folder, 3)
    with pytest.raises(UserError, match=r"lack \d+ of the model's tensors"):
        load_model(folder)
    assert not caplog.messages, "the refusal says it, and the warning would say otherwise"


def test_weights_that_are_not_used_are_told(
    folder: Path, caplog: pytest.LogCaptureFixture, transformers_heard: None
) -> None:
    set_layers(folder, 1)
    load_model(folder)
    (report,) = caplog.messages
    assert "model.layers.1.mlp.up_proj.weight" in report


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_no_bars_whatever_was_imported_first() -> None:
    enable_progress_bar()  # as it is where transformers comes before m2flow
    runpy.run_module("m2flow.models.causal_lm", run_name="imported_again", alter_sys=True)
    assert not is_progress_bar_enabled()


def test_a_model_on_its_way_elsewhere_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    """Its weights lie in pages of the file, which all processes of a machine have in common."""
    spec = TinySpec(hidden_size=512, num_hidden_layers=8, intermediate_size=2048)
    made = build_tiny(
        spec, vocab_size=4096, eos_token_id=5, pad_token_id=6, seed=0, dtype=torch.bfloat16
    )
    made.save_pretrained(tmp_path)
    size = sum(parameter.nbytes for parameter in made.parameters())
    expected = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    load_model(tmp_path, torch.bfloat16, own_memory=False)  # whatever is imported by it
    before = resident_bytes()
    model = load_model(tmp_path, torch.bfloat16, own_memory=False)
    assert resident_bytes() - before < 0.2 * size
    weights = str(tmp_path / "model.safetensors")
    assert {mapped_file(parameter) for parameter in model.parameters()} == {weights}
    assert all(torch.equal(model.state_dict()[name], one) for name, one in expected.items())
    model = load_model(tmp_path, torch.bfloat16)
    assert weights not in {mapped_file(parameter) for parameter in model.parameters()}
    assert all(torch.equal(model.state_dict()[name], one) for name, one in expected.items())


def mapped_file(tensor: torch.Tensor) -> str:
    """The file in whose pages a tensor begins; no path where the memory is the process's own."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = [*line.split(maxsplit=5), ""][:6]
        first, end = (int(address, 16) for address in span.split("-"))
        if first <= tensor.data_ptr() < end:
            return name.strip()
    raise AssertionError(f"no mapping holds {tensor.data_ptr():x}")


def test_a_head_of_its_own_is_refused_where_the_configuration_ties_it(folder: Path) -> None:
    """transformers computes with it, and engines, which go by the configuration, would not."""
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"]
    load_model(folder, torch.float32)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1.0
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"head of their own.*tie_word_embeddings to false"):
        load_model(folder, torch.float32)
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert load_model(folder, torch.float32).lm_head.weight.equal(tensors["lm_head.weight"])


def test_quantized_weights_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    quantized = {**config, "quantization_config": {"quant_method": "awq"}}
    (folder / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(UserError, match=r"quantized \(awq\).*bfloat16"):
        load_model(folder, torch.float32)
    with pytest.raises(UserError, match=r"quantized \(awq\)"):
        check_supported(quantized)


def test_weights_of_other_shapes_are_one_line(
    folder: Path, caplog: pytest.LogCaptureFixture, transformers_heard: None
) -> None:
    """transformers prints a table, and raises what names no tensor."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    with pytest.raises(UserError, match=r"6 of the weights have another shape.*down_proj"):
        load_model(folder)
    assert not caplog.messages


@pytest.mark.parametrize("content", ["", '{"eos_token_id": [5', "version https://git-lfs"])
def test_a_damaged_generation_config_is_one_line(folder: Path, content: str) -> None:
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(UserError, match=r"generation_config\.json cannot be read.*copy the file"):
        ModelSource(str(folder)).stop_ids()
