"""Runs under `generation.engine` vllm and sglang: themselves where installed, else stand-ins."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Phi3Config, Phi3ForCausalLM

from m2flow.errors import UserError
from m2flow.flow import Batch, Place
from m2flow.models.tokenizer import PAD_TOKEN, byte_tokenizer
from m2flow.plan import parse_lanes
from m2flow.workloads.common import Examination
from m2flow.workloads.common.start import describe, train
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.encoding import context_of
from m2flow.workloads.reasoning.evaluation import answered, as_trained
from m2flow.workloads.reasoning.experiment import ReasoningExperiment
from m2flow.workloads.reasoning.workers import Generator

FAKES = Path(__file__).parents[2] / "generation"
ENGINES = ("vllm", "sglang")
REAL = {name for name in ENGINES if importlib.util.find_spec(name) is not None}
RECIPES = Path(__file__).parents[3] / "recipes"
TINY: dict[str, Any] = {
    "workload": "reasoning",
    "mode": "eager",
    "lanes": "cpu:1",
    "steps": 3,
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    "model": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    "generation": {"engine": "vllm", "max_new_tokens": 6, "cache_gb": 0.125},
    "training": {"drop_zero_advantage": False},
    "evaluation": {"every": 9, "problems": 2},
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine is there, or its stand-in."""
    fakes = [str(FAKES / f"fake_{name}") for name in ENGINES if name not in REAL]
    for fake in fakes:
        monkeypatch.syspath_prepend(fake)
    paths = [*fakes, *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def changed(**keys: Any) -> dict[str, Any]:
    return {**TINY, "generation": {**TINY["generation"], **keys}}


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_engine_draws_is_what_the_learner_computes(engine: str, tmp_path: Path) -> None:
    run = train(changed(engine=engine), run_dir=tmp_path / "run")
    steps = [m for m in metrics_of(run) if m["step"] > 0]
    assert [step["version"] for step in steps] == [1, 2, 3]
    for step in steps:  # with the weights of the version that was published before
        assert step["train/engine_gap"] < 1e-5


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("engine", ENGINES)
def test_prompts_fit_into_the_positions_that_an_engine_computes(
    engine: str, tmp_path: Path
) -> None:
    """Of a rope with factors for long texts they are fewer than the model has."""
    folder, data = tmp_path / "phi", tmp_path / "rows.jsonl"
    factors = [1.0] * 4
    config = Phi3Config(
        vocab_size=258, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=131072,
        original_max_position_embeddings=4096, pad_token_id=257, eos_token_id=256,
        rope_scaling={"type": "longrope", "long_factor": factors, "short_factor": factors},
    )  # fmt: skip
    Phi3ForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    rows = [{"question": f"{n}+1", "answer": n + 1} for n in range(40)]
    rows[1] = {"question": "x" * 4100, "answer": 1}
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = changed(engine=engine) | {
        "model": {"path": str(folder)},
        "warmup": {"steps": 0},
        "prompts_per_step": 1,
        "data": {"task": "jsonl", "path": str(data), "template": "{question}="},
    }
    expected = r"rows\.jsonl:2: .*at most original_max_position_embeddings of .* = 4096"
    with pytest.raises(UserError, match=expected):
        ReasoningExperiment(ReasoningRecipe.model_validate(recipe))
    asked = Examination(folder, data, template="{question}=", engine=engine)
    assert as_trained(asked, context_of(str(folder))).max_new_tokens == 2048
    with pytest.raises(UserError, match=r"original_max_position_embeddings = 4096"):
        answered(asked)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("engine", ["native", *ENGINES])
def test_a_special_token_ends_answers_by_its_name(engine: str, tmp_path: Path) -> None:
    """No text holds it, so as a string it never was found; beside it a string is still one."""
    experiment = ReasoningExperiment(ReasoningRecipe.model_validate(changed(engine=engine)))
    model = experiment.prepare(tmp_path / "model")
    generator = Generator(
        model, samples_per_prompt=8, max_new_tokens=24, engine=engine, cache_gb=0.125,
        stop=(PAD_TOKEN, "7"),
    )  # fmt: skip
    generator.load(Place(spill=tmp_path))
    try:
        found = Batch.concat(list(filter(len, generator.generate(experiment.batch(0)))))
    finally:
        generator.close()
    tokenizer, ended = model.tokenizer(), 0
    ends = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("7")}
    for ids, reason in zip(found["completion_ids"].rows(), found["finish_reason"], strict=True):
        *before, last = ids.tolist()
        assert not ends & set(before)
        assert (last in ends) == (reason == "stop")
        ended += last == tokenizer.pad_token_id
    assert ended


@pytest.mark.usefixtures("installed")
def test_it_examines_as_the_native_engine_does(tmp_path: Path) -> None:
    """Greedily, with a model that has learned to end its answers and gets some right."""
    learned = {
        "steps": 1,
        "data": {"options": {"min_digits": 1, "max_digits": 1, "thinking_share": 0}},
        "warmup": {"steps": 60, "samples_per_step": 32, "learning_rate": 1e-2},
    }
    run = train({**TINY, **learned}, {"checkpoint.every": 1}, run_dir=tmp_path / "run")
    data = tmp_path / "sums.jsonl"
    rows = [{"question": f"{a}+{b}=", "answer": a + b} for a in range(4) for b in range(3)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {}
    for engine in ("native", "vllm"):
        asked = Examination(
            run / "checkpoints" / "latest",
            data,
            engine=engine,
            max_new_tokens=40,
            template="{question}",
            lanes=parse_lanes("cpu:1"),
        )
        rewards, figures = answered(asked)
        found[engine] = rewards, figures["mean_tokens"], figures["truncated_share"]
    assert found["vllm"] == found["native"]
    assert len({reward for rewards in found["native"][0] for reward in rewards}) == 2
    assert found["native"][2] < 1


def test_without_vllm_nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("m2flow.generation.supported.importlib.util.find_spec", lambda _: None)
    words = r"generation\.engine: vLLM is not installed .*pip install 'm2flow\[vllm\]'"
    recipe = ReasoningRecipe.model_validate(TINY)
    for start in (lambda: train(recipe, run_dir=tmp_path / "run"), lambda: describe(recipe)):
        with pytest.raises(UserError, match=words):
            start()
    assert not (tmp_path / "run").exists()


def test_without_torchao_nothing_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("m2flow.training.torchao_adamw.importlib.util.find_spec", lambda _: None)
    words = {**TINY, "generation": {"max_new_tokens": 6}}
    recipe = ReasoningRecipe.model_validate({**words, "training": {"moments": "8bit"}})
    wanted = r"training\.moments: torchao is not installed; pip install 'm2flow\[torchao\]'"
    for start in (lambda: train(recipe, run_dir=tmp_path / "run"), lambda: describe(recipe)):
        with pytest.raises(UserError, match=wanted):
            start()
    assert not (tmp_path / "run").exists()


def test_without_liger_nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("m2flow.training.fused.importlib.util.find_spec", lambda _: None)
    words = {**TINY, "generation": {"max_new_tokens": 6}}
    recipe = ReasoningRecipe.model_validate({**words, "training": {"fused_kernels": True}})
    wanted = r"training\.fused_kernels: liger-kernel is not installed .*'m2flow\[liger\]'"
    for start in (lambda: train(recipe, run_dir=tmp_path / "run"), lambda: describe(recipe)):
        with pytest.raises(UserError, match=wanted):
            start()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"temperature": 0.001}, r"generation\.temperature: vLLM draws at 0\.01"),
        ({"dtype": "float64"}, r"generation\.dtype: vLLM does not compute in it"),
        ({"engine": "sglang", "top_p": 0.9}, r"generation\.top_p: SGLang records"),
        ({"engine": "sglang", "dtype": "float64"}, r"generation\.dtype: SGLang does not"),
        ({"engine": "hf"}, r"generation\.engine"),
    ],
)
def test_what_an_engine_does_not_do_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ReasoningRecipe.model_validate(changed(**keys))


def test_a_further_engine_is_a_row_of_the_table() -> None:
    """In an interpreter of its own: recipes read the table once."""
    code = """
import sys
from m2flow.generation.supported import ENGINES, EngineAbilities
ENGINES["third"] = EngineAbilities(
    "Third", dtypes=("bfloat16",), least_temperature=0.5, samplers=("top_p",),
    why_no_sampler="Third takes none away",
)
from m2flow.workloads.reasoning.config import ReasoningRecipe
def said(generation):
    recipe = {"workload": "reasoning", "generation": {"engine": "third", **generation}}
    try:
        ReasoningRecipe.model_validate({**recipe, "model": {"dtype": "bfloat16"}})
    except ValueError as error:
        print(*str(error).split())
    else:
        print("taken")
said({"top_p": 0.9})
said({"temperature": 0.4})
said({"top_k": 3})
said({"dtype": "float32"})
said({"tokens_per_step": 4})
assert "torch" not in sys.modules
"""
    said = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    words = (
        "taken",
        "Third draws at 0.5",
        "Third takes none",
        "Third does not compute",
        "Third begins",
    )
    assert len(said) == len(words)
    for line, word in zip(said, words, strict=True):
        assert word in line


@pytest.mark.vllm
@pytest.mark.timeout(3600)
def test_the_quick_start_learns_with_vllm(tmp_path: Path) -> None:
    words = ["generation.engine=vllm", "generation.cache_gb=1.0", "mode=eager"]
    found = metrics_of(train(RECIPES / "quickstart.yaml", words, run_dir=tmp_path / "run"))
    accuracy = [step["eval/accuracy"] for step in found if "eval/accuracy" in step]
    assert accuracy[0] < 0.5
    assert accuracy[-1] > 0.9
    assert max(step.get("train/engine_gap", 0.0) for step in found) < 1e-3


@pytest.mark.vllm
@pytest.mark.timeout(3600)
def test_steps_of_gsm8k_keep_vllm_and_the_learner_together(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps so large that weights of a step before would show in the gap; a reward that varies."""
    (tmp_path / "parity.py").write_text(
        "def even(prompt, completion, completion_ids, row):\n"
        "    return float(completion_ids[0] % 2 == 0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = [
        "generation.engine=vllm", "generation.cache_gb=1.0", "mode=eager", "steps=3",
        "model.dtype=float32", f"data.path={shared_data / 'gsm8k_train.jsonl'}",
        "reward=parity:even", "optimizer.learning_rate=3e-3", "evaluation.problems=4",
    ]  # fmt: skip
    found = metrics_of(train(RECIPES / "gsm8k.yaml", words, run_dir=tmp_path / "run"))
    steps = [step for step in found if step["step"] > 0]
    assert len(steps) == 3
    assert all(step["train/grad_norm"] > 0 for step in steps)
    assert all(0 < step["train/engine_gap"] < 1e-3 for step in steps)
