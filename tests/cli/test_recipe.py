"""Recipes and overrides: every mistake is one line that names the key and what would be right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from m2flow.errors import UserError
from m2flow.observe.run_directory import RunDirectory
from m2flow.workloads.common.planning import planned
from m2flow.workloads.common.reading import read_recipe, read_yaml, validated
from m2flow.workloads.reasoning.config import ReasoningRecipe

Refused = Callable[..., str]


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("promts_per_step=4", ["promts_per_step", "unknown key", "'prompts_per_step'"]),
        ("generation.max_new_token=4", ["generation.max_new_token", "'max_new_tokens'"]),
        ("temperature=0.5", ["temperature", "'generation.temperature'"]),
        (
            "learning_rate=1e-5",
            ["'warmup.learning_rate' or 'critic.learning_rate' or 'optimizer.learning_rate'?"],
        ),
        ("xyzzy=4", ["xyzzy", "valid names", "prompts_per_step"]),
        ("1.2=3", ["1: unknown key"]),
        ("steps=abc", ["steps", "'abc'", "integer"]),
        ("steps=0", ["steps", "got 0", "greater than or equal to 1"]),
        ("steps=true", ["steps", "got True", "integer"]),
        ("steps=2.0", ["steps", "got 2.0", "integer"]),
        ("steps='4'", ["steps", "'4'", "integer"]),
        ("steps=", ["steps", "integer"]),
        ("steps=[1, 2]", ["steps", "[1, 2]", "integer"]),
        ("steps=[1,", ["steps", "YAML"]),
        ("steps=2024-13-45", ["steps", "YAML"]),
        ("steps.now=4", ["steps.now", "steps is no section", "got 3"]),
        ("seed=1:30", ["seed", "'1:30'", "integer"]),
        ("seed=-1", ["seed", "got -1", "greater than or equal to 0"]),
        ("seed=99999999999999999999", ["seed", "less than"]),
        ("optimizer.betas=3", ["optimizer.betas", "got 3", "expected a list"]),
        ("optimizer.betas=[1, 2, 3]", ["optimizer.betas", "[1, 2, 3]", "at most 2 items"]),
        ("optimizer.betas=[0.9]", ["optimizer.betas.1: is missing (got [0.9])"]),
        ("optimizer.betas=[0.9, 1.5]", ["optimizer.betas.1", "got 1.5", "less than 1"]),
        ("optimizer.learning_rate=.inf", ["optimizer.learning_rate", "finite"]),
        ("optimizer.learning_rate=0", ["optimizer.learning_rate", "greater than 0"]),
        ("optimizer.learning_rate=fast", ["optimizer.learning_rate", "'fast'", "a valid number"]),
        ("algorithm.dual_clip=0.5", ["algorithm.dual_clip", "greater than 1"]),
        ("algorithm.clip_low=2", ["algorithm.clip_low", "less than or equal to 1"]),
        (
            "training.drop_zero_advantage=maybe",
            ["training.drop_zero_advantage", "'maybe'", "boolean"],
        ),
        ("model=3", ["model", "got 3", "expected a table of keys"]),
        ("model.dtype=float16", ["model.dtype", "'float16'", "did you mean 'bfloat16'?"]),
        ("model.path=''", ["model.path", "empty", "take it out"]),
        ("data={task: jsonl, path: ''}", ["data.path", "empty", "a file or folder"]),
        ("data={task: jsonl, path: x, eval_path: ''}", ["data.eval_path", "empty", "take it out"]),
        ("mode=nonsense", ["mode", "'nonsense'", "'collocated', 'disaggregated' or 'hybrid'"]),
        ("mode=colocated", ["mode", "did you mean 'collocated'?"]),
        ("data.task=adition", ["data.task", "did you mean 'addition'?"]),
        ("data.path=x.jsonl", ["data.path", "addition", "'x.jsonl'", "set data.task to jsonl"]),
        ("data.eval_path=x.jsonl", ["data.eval_path", "addition", "set data.task to jsonl"]),
        ("data.on_bad_row=skip", ["data.on_bad_row", "addition"]),
        ("data.template=x", ["data.template", "jsonl or gym"]),
        ("data.dataset=chain_sum", ["data.dataset", "set data.task to gym"]),
        ("logger=[tensorboard]", ["logger", "jsonl is missing", "add jsonl"]),
        ("logger=jsonl", ["logger", "'jsonl'", "expected a list, in brackets"]),
        ("logger=[jsnl]", ["logger.0", "did you mean 'jsonl'?"]),
        ("workload=chess", ["workload", "'chess'", "reasoning"]),
        (
            "generation.stop=['']",
            ["generation.stop.0: is wrong (got ''); expected at least 1 character"],
        ),
        ("reward=[{weight: 2}]", ["reward.0.function: is missing (got {'weight': 2})"]),
        (
            "data={task: gym, dataset: {a: 1, b: 0}}",
            ["data.dataset.b: is no share of the problems (got 0); expected a whole number"],
        ),
        ("data={task: gym, dataset: [a]}", ["data.dataset: is wrong (got ['a'])", "a table of"]),
        ("deadline_seconds=1e15", ["deadline_seconds: is wrong (got 10000", "equal to 1000000"]),
        ("load_deadline_seconds=1e7", ["load_deadline_seconds: is wrong", "equal to 1000000"]),
        ("grace_seconds=1e10", ["grace_seconds: is wrong", "equal to 1000000"]),
        ("generation.max_running=2000000000", ["generation.max_running", "to 1000000"]),
        ("judge.max_running=2000000000", ["judge.max_running", "to 1000000"]),
        ("model.lora_rank=100000000000000000000000", ["model.lora_rank", "equal to 65536"]),
        ("generation.cache_gb=1e23", ["generation.cache_gb", "less than or equal to 1000000"]),
        ("judge.cache_gb=1e23", ["judge.cache_gb", "less than or equal to 1000000"]),
        ("journal_gb=1e308", ["journal_gb", "less than or equal to 1000000"]),
        ("algorithm.clip_high=1e39", ["algorithm.clip_high", "less than or equal to 1e+30"]),
        ("algorithm.dual_clip=1e39", ["algorithm.dual_clip", "less than or equal to 1e+30"]),
        ("algorithm.gap_cap=1e39", ["algorithm.gap_cap", "less than or equal to 1e+30"]),
        ("critic.value_clip=1e39", ["critic.value_clip", "less than or equal to 1e+30"]),
        ("algorithm.kl_coefficient=1e39", ["algorithm.kl_coefficient", "equal to 1e+30"]),
        ("generation.temperature=1e-320", ["generation.temperature", "equal to 0.000001"]),
        ("judge={path: x, temperature: 1e-320}", ["judge.temperature", "0 or at least 1e-06"]),
        ("layouts=fsdp2", ["layouts", "'fsdp2'", "expected a table of keys"]),
        ("samples_per_prompt=1", ["samples_per_prompt", "grpo", "got 1", "at least 2"]),
        (
            "minibatches=3",
            ["prompts_per_step", "samples_per_prompt", "minibatches", "16", "3 mini-batches"],
        ),
        ("steps", ["steps", "not an override", "key=value"]),
        ("=4", ["=4", "not an override", "key=value"]),
    ],
)
def test_a_wrong_override_is_one_line(
    tiny: Path, refused: Refused, override: str, parts: list[str]
) -> None:
    line = refused("train", tiny, override)
    for part in parts:
        assert part in line


def test_a_schedule_must_outlast_its_warm_up(tiny: Path, refused: Refused) -> None:
    wrong = ["optimizer.schedule=linear", "optimizer.warmup_steps=6"]
    line = refused("train", tiny, *wrong)
    assert "optimizer.warmup_steps" in line
    assert "steps x minibatches x epochs = 6" in line


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"steps: [", ["YAML", "line 1"]),
        (b"steps: 3\n\tseed: 1\n", ["YAML", "line 2"]),
        (b"steps: 3\nseed: 1\nsteps: 4\n", ["steps stands there twice", "line 3"]),
        (b"model: {dtype: float32, dtype: float64}\n", ["dtype stands there twice"]),
        (b"on: 3\n", ["key is no text", "line 1"]),
        (b"- steps\n- 3\n", ["table of keys", "list"]),
        (b"just words\n", ["table of keys", "str"]),
        (b"", ["table of keys", "nothing"]),
        (b"\xff\xfe\x00", ["not text", "UTF-8"]),
        (b"name: \x00\n", ["YAML"]),
        (b"model: &model {path: *model}\n", ["YAML", "nested too deeply"]),
        (b"workload: reasoning\nmodell: {dtype: float32}\n", ["modell", "did you mean 'model'?"]),
        (b"workload: reasoning\nmodel:\n", ["model", "expected a table of keys"]),
    ],
)
def test_a_file_that_is_no_recipe(
    tiny: Path, refused: Refused, content: bytes, parts: list[str]
) -> None:
    Path("bad.yaml").write_bytes(content)
    line = refused("train", "bad.yaml")
    for part in parts:
        assert part in line


def test_a_recipe_that_is_not_there(tiny: Path, refused: Refused) -> None:
    assert "did you mean tiny.yaml?" in refused("train", "tinny.yaml")
    Path("recipes").mkdir()
    Path("recipes/mine.yaml").write_text("steps: 3\n")
    line = refused("plan", "mine")
    assert "there is no such recipe" in line
    assert "did you mean recipes/mine.yaml?" in line
    assert "is a folder" in refused("train", "recipes")
    assert "there is no such recipe" in refused("train", "nowhere/at/all.yaml")


def test_a_recipe_of_m2flow_by_name(
    tiny: Path, m2flow: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder without recipes; a file of that name comes first, and may stand on a name."""
    monkeypatch.setenv("COLUMNS", "100")  # lines are cut to the width of the terminal
    listed = m2flow("recipes").out
    assert {"quickstart", "gsm8k"} <= {line.split()[0] for line in listed.splitlines()}
    assert "A small model learns to think before it answers" in listed
    assert read_recipe("quickstart").steps == 80
    Path("mine.yaml").write_text("base: quickstart\nsteps: 7\n")
    mine, shipped = read_recipe("mine.yaml"), read_recipe("quickstart")
    assert mine == shipped.model_copy(update={"steps": 7})
    Path("copy.yaml").write_text(m2flow("recipes", "quickstart").out)
    assert read_recipe("copy.yaml") == shipped
    Path("quickstart").write_text("base: quickstart.yaml\nsteps: 9\n")
    assert read_recipe("quickstart").steps == 9


def test_a_name_that_no_recipe_has(tiny: Path, refused: Refused) -> None:
    line = refused("train", "math-qwen2.5-7b")
    assert "there is no such recipe" in line
    assert "qwen2.5-7b-grpo-math" in line
    assert "`m2flow recipes`" in line
    assert "did you mean quickstart" in refused("train", "recipes/quickstart.yaml")
    assert "did you mean 'quickstart'?" in refused("recipes", "quikstart")


def test_overrides_reach_into_sections_and_files(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("workload: reasoning\nsteps: 7\nmodel:\ndata: {options: {min_digits: 2}}\n")
    recipe = read_recipe(
        path,
        ["model.hidden_size=64", "data.options.max_digits=3", "optimizer.learning_rate=1e-6"],
    )
    assert recipe.steps == 7
    assert recipe.model.hidden_size == 64
    assert recipe.data.options == {"min_digits": 2, "max_digits": 3}
    assert recipe.optimizer.learning_rate == 1e-6, "YAML 1.1 takes this for text"


def test_the_later_override_holds(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("workload: reasoning\nsteps: 7\n")
    assert read_recipe(path, ["steps=8", "steps=9"]).steps == 9


def test_an_override_changes_the_one_section_that_it_names(tmp_path: Path) -> None:
    """With an alias of YAML two sections were one table, and both were changed."""
    path = tmp_path / "recipe.yaml"
    often = "evaluation: &often {every: 10}\ncheckpoint: *often\n"
    path.write_text(f"workload: reasoning\n{often}")
    recipe = read_recipe(path, ["checkpoint.every=50"])
    assert (recipe.evaluation.every, recipe.checkpoint.every) == (10, 50)
    both = {"every": 10}
    recipe = read_recipe(
        {"workload": "reasoning", "evaluation": both, "checkpoint": both}, {"checkpoint.every": 50}
    )
    assert (recipe.evaluation.every, recipe.checkpoint.every) == (10, 50)
    recipe = read_recipe(
        {"workload": "reasoning"},
        {"evaluation": both, "checkpoint": both, "checkpoint.every": 50},
    )
    assert (recipe.evaluation.every, recipe.checkpoint.every) == (10, 50)
    assert both == {"every": 10}, "what the caller has given stays"


def test_text_may_look_like_a_number(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("workload: reasoning\nname: 2026\n")
    assert read_recipe(path).name == "2026"
    recipe = read_recipe(path, ["lanes=2"])
    with pytest.raises(UserError, match="lane specification"):
        planned(recipe)


@pytest.mark.parametrize("written", ["1062e40", "0034567", "12:30:00", "1e-4", "0x10", "1_000"])
def test_text_that_looks_like_a_number_is_what_was_written(written: str, tmp_path: Path) -> None:
    """In a run's `config.yaml` as well, which `--resume` compares; numbers are numbers."""
    words = [f"name={written}", f"data.system_prompt={written}", f"generation.stop=[{written}]"]
    options = [f"reward=[{{function: math, weight: {written}}}]"] if ":" not in written else []
    recipe = read_recipe({"workload": "reasoning", "seed": 7}, [*words, *options])
    assert isinstance(recipe, ReasoningRecipe)
    assert (recipe.name, recipe.data.system_prompt) == (written, written)
    assert recipe.generation.stop == (written,)
    run = RunDirectory(tmp_path)
    run.write_config(recipe.model_dump(mode="json"))
    assert validated(read_yaml(run.config)) == recipe


def test_a_whole_number_is_decimal(tmp_path: Path) -> None:
    """`seed=010` ran with seed 8."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("workload: reasoning\nsteps: 010\ndata: {options: {max_digits: 08}}\n")
    read = read_recipe(recipe, ["seed=010", "data.options.min_digits=1e0"])
    assert isinstance(read, ReasoningRecipe)
    assert (read.seed, read.steps) == (10, 10)
    mixed = read_recipe(recipe, ["data={task: gym, dataset: {chain_sum: 02}}"])
    assert isinstance(mixed, ReasoningRecipe)
    assert mixed.data.dataset == {"chain_sum": 2}
    assert {key: str(value) for key, value in read.data.options.items()} == {
        "max_digits": "8",
        "min_digits": "1.0",
    }


def test_an_empty_table_is_all_defaults(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("{workload: reasoning}\n")
    assert read_recipe(path) == ReasoningRecipe()


@pytest.mark.parametrize("name", ["quickstart", "gsm8k"])
def test_the_recipes_of_the_project_are_valid(name: str) -> None:
    assert read_recipe(Path(__file__).parents[2] / "recipes" / f"{name}.yaml").name == name
