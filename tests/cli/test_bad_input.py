"""Mistakes of a person with a pretrained model, each through the commands that meet it.

One line, exit code 2, nothing written; a dry run refuses what the run would, where all files of the
recipe are there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from m2flow.models.causal_lm import TinySpec, build_tiny
from m2flow.models.tokenizer import byte_tokenizer

Refused = Callable[..., str]

FEW = ["--max-new-tokens", "16"]
TRAIN, DRY = ["train"], ["train", "--dry-run"]
CHAT = "{% for turn in messages %}{{ turn.content }}{% endfor %}"
RECIPE = """
workload: reasoning
steps: 1
prompts_per_step: 4
samples_per_prompt: 2
model: {path: model}
data: {task: jsonl, path: data.jsonl, options: {held_out_rows: 4}}
generation: {max_new_tokens: 16}
evaluation: {problems: 4}
mode: eager
lanes: cpu:1
"""
REWARDS = """
number = 3

def two(prompt, completion):
    return 1.0
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("made"), byte_tokenizer()
    spec = TinySpec(32, 2, 4, 2, 64, 256)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = build_tiny(spec, vocab_size=len(tokenizer), seed=0, **ids)
    model.save_pretrained(folder, max_shard_size="20KB")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a recipe, a model in several files, problems and a module of rewards."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made, "model")
    Path("recipe.yaml").write_text(RECIPE)
    Path("rewards_of_mine.py").write_text(REWARDS)
    rows = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(20)]
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def drop(pattern: str) -> Callable[[], None]:
    def change() -> None:
        sorted(Path("model").glob(pattern))[0].unlink()

    return change


def template(text: str) -> Callable[[], None]:
    def change() -> None:
        Path("model/chat_template.jinja").write_text(text)

    return change


def no_end() -> None:
    file = Path("model/tokenizer_config.json")
    said = json.loads(file.read_text())
    file.write_text(json.dumps({key: x for key, x in said.items() if key != "eos_token"}))


def of_kind(name: str) -> Callable[[], None]:
    def change() -> None:
        file = Path("model/config.json")
        said = {} if name == "mamba" else json.loads(file.read_text())
        file.write_text(json.dumps(said | {"model_type": name}))

    return change


def cut(name: str) -> Callable[[], None]:
    return lambda: os.truncate(Path("model") / name, 100)


MODELS = [
    (drop("tokenizer_config.json"), ["tokenizer_config.json is missing"]),
    (drop("tokenizer.json"), ["the tokenizer has no vocabulary", "expected tokenizer.json"]),
    (no_end, ["the tokenizer has no eos token", "set eos_token"]),
    (drop("*.safetensors"), ["1 of 6 weight files are missing: model-00001-of-00006"]),
    (of_kind("nonsense"), ["model_type", "'nonsense'", "such as qwen2", "generation.engine: vllm"]),
    (of_kind("mamba"), ["model_type", "'mamba'", "generation.engine: vllm"]),
    (of_kind("falcon_h1"), ["model_type: config.json holds what no such model has", "published"]),
    (template("{% for turn in messages %}{{ turn"), ["chat template", "data.chat to false"]),
    (template("{{ raise_exception('not so') }}"), ["chat template", "not so"]),
    (cut("tokenizer.json"), ["model: the tokenizer cannot be read", "again"]),
]
"""What is wrong with a model's folder, and what is said of it."""

MISSING = (0, 3)
"""Of these, what a dry run tells beside the plan: files may come later."""


@pytest.mark.parametrize("command", [TRAIN, DRY, ["eval"]], ids=["train", "dry-run", "eval"])
@pytest.mark.parametrize("case", range(len(MODELS)))
def test_a_model_folder(case: int, command: list[str], refused: Refused, m2flow: Refused) -> None:
    break_it, parts = MODELS[case]
    break_it()
    if command == DRY and case in MISSING:
        said = m2flow(*DRY, "recipe.yaml")
        assert said.code == 0
        line = said.out[said.out.index("what a run would miss:") :]
    elif command == ["eval"]:
        line = refused("eval", "model", "--data", "data.jsonl", "--lanes", "cpu:1", *FEW)
    else:
        line = refused(*command, "recipe.yaml")
    for part in parts:
        assert part in line


SETTINGS = [
    (["data.chat=true"], ["data.chat", "no chat template", "leave it out"]),
    (
        ["generation.max_new_tokens=250"],
        [
            "data.jsonl:1",
            "does not fit",
            "max_position_embeddings of model = 256",
            "lower generation",
        ],
    ),
    (
        ["prompts_per_step=17"],
        ["prompts_per_step", "got 17", "at most the 16 problems"],
    ),
    (["reward=rewards_of_mine:number"], ["reward", "number is no function"]),
    (["reward=rewards_of_mine:two"], ["reward", "does not take four arguments"]),
    (["reward=rewards_of_mine:twoo"], ["reward", "has no twoo", "did you mean 'two'?"]),
    (
        ["reward=[{function: math, deadline_seconds: 1e9}]"],
        ["reward", "deadline_seconds", "less than or equal to 1000000"],
    ),
    (["reward=no_such_module:f"], ["reward", "there is no module no_such_module"]),
    (["generation.engine=vllm"], ["generation.engine", "pip install 'm2flow[vllm"]),
    (["generation.engine=sglang"], ["generation.engine", "pip install 'm2flow[sglang"]),
    (["model.lora_publish=adapter"], ["model.lora_publish", "no adapters", "set model.lora_rank"]),
    (
        ["mode=collocated", "lanes=2xcpu:1", "layouts.learner=tp3"],
        ["layouts.learner", "'tp3'", "expected one of one, fsdp2, tp2, cp2"],
    ),
]


ADDITION = ["data={task: addition}"]


@pytest.mark.parametrize("command", [TRAIN, DRY], ids=["train", "dry-run"])
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["reward=nope:x"], ["reward", "there is no module nope"]),
        (["data.answer_column=right"], ["data.answer_column", "has no such column"]),
        (["warmup.steps=5"], ["warmup.steps", "has no demonstrations"]),
        ([*ADDITION, "reward=nope:x"], ["reward", "there is no module nope"]),
        ([*ADDITION, "data.options.min_digits=7"], ["data.options.min_digits", "(7, "]),
    ],
)
def test_a_model_that_is_made_on_the_spot(
    words: list[str], parts: list[str], command: list[str], refused: Refused
) -> None:
    line = refused(*command, "recipe.yaml", "model={}", *words)
    for part in parts:
        assert part in line


@pytest.mark.parametrize("command", [TRAIN, DRY], ids=["train", "dry-run"])
@pytest.mark.parametrize(("words", "parts"), SETTINGS)
def test_settings(words: list[str], parts: list[str], command: list[str], refused: Refused) -> None:
    if words == ["generation.engine=vllm"] and _there("vllm"):
        pytest.skip("vLLM is installed")
    line = refused(*command, "recipe.yaml", *words)
    for part in parts:
        assert part in line


def _there(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


def test_what_is_right_is_not_refused(m2flow: Refused) -> None:
    template(CHAT)()
    said = m2flow(*DRY, "recipe.yaml")
    assert said.code == 0
    assert "what a run would miss" not in said.out
