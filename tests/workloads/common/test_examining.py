"""Who examines a model, where nobody names a workload."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from m2flow.engine.plan import Plan
from m2flow.errors import UserError
from m2flow.flow import Batch
from m2flow.plan import parse_lanes
from m2flow.plan.chunks import ITEMS_IN_TIME
from m2flow.runtime.driver.runner import StepResult
from m2flow.workloads.common import read_recipe, registry, workload_named
from m2flow.workloads.common.examining import (
    deadline_of,
    examined,
    examiner_of,
    in_waves,
    wave_size,
)
from m2flow.workloads.common.resume import check_directory, check_model, recipe_of, run_of
from m2flow.workloads.common.workload import Examination
from tests.plan.small_graphs import Grpo, Model, Trainer

MODEL, PROBLEMS = Path("model"), Path("problems.jsonl")


@pytest.mark.parametrize(
    ("recipe", "name"), [("quickstart-embodied", "embodied"), ("quickstart", "reasoning")]
)
def test_a_recipe_and_a_run_say_whose_they_are(recipe: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"base: {recipe}\n")
    assert examiner_of(MODEL, tmp_path / "mine.yaml") is workload_named(name)
    keys = read_recipe(recipe).model_dump(mode="json")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(keys))
    (tmp_path / "checkpoints").mkdir()
    assert examiner_of(tmp_path / "checkpoints" / "latest", None) is workload_named(name)


def checkpoint_of(run: Path, recipe: str) -> Path:
    """What a run leaves that has saved one step, as far as it is looked at."""
    step = run / "checkpoints" / "step_000002"
    (step / "model").mkdir(parents=True)
    (run / "warmup").mkdir()
    (run / "checkpoints" / "latest").symlink_to(step.name)
    (run / "config.yaml").write_text(yaml.safe_dump(read_recipe(recipe).model_dump(mode="json")))
    return step


@pytest.mark.parametrize("recipe", ["agentic-calculator", "quickstart-embodied"])
def test_a_file_of_problems_is_not_asked_of_a_policy_that_acts(recipe: str, tmp_path: Path) -> None:
    """A model that had learnt to use tools was examined without them, and nothing said so."""
    latest = checkpoint_of(tmp_path, recipe).parent / "latest"
    kind = recipe.removesuffix("-calculator").removeprefix("quickstart-")
    with pytest.raises(UserError, match=rf"^--data: is no recipe, and MODEL is of an {kind} run: "):
        examiner_of(latest, PROBLEMS)
    assert examiner_of(latest, None) is workload_named(kind)


def test_a_file_of_problems_is_asked_of_a_policy_that_answers(tmp_path: Path) -> None:
    latest = checkpoint_of(tmp_path, "quickstart").parent / "latest"
    assert examiner_of(latest, PROBLEMS) is workload_named("reasoning")


def test_the_run_of_a_model_is_the_one_that_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    step = checkpoint_of(run, "quickstart")
    monkeypatch.chdir(run)
    relative = (Path("checkpoints/latest"), Path("checkpoints/latest/model"), Path("warmup"))
    for path in (step, step / "model", step.parent / "latest", run / "warmup", *relative):
        assert run_of(path) == run.resolve()
    beside = run / "models" / "mine"
    for path in (run, beside, beside / "deeper"):
        assert run_of(path) is None
    check_model(step)
    with pytest.raises(UserError, match=r"^MODEL: is a run, and has a model for each checkpoint"):
        check_model(run)


def test_a_configuration_of_others_makes_no_run_of_a_model(tmp_path: Path) -> None:
    """Of Hydra, say; no model below it could be examined, and one beside it was called a run."""
    model = tmp_path / "models" / "qwen"
    model.mkdir(parents=True)
    (tmp_path / "config.yaml").write_text("defaults: [model]\n")
    assert run_of(model) is None
    assert examiner_of(model, PROBLEMS) is workload_named("reasoning")
    (model / "config.yaml").write_text("defaults: [model]\n")
    check_model(model)


@pytest.mark.parametrize("text", ["defaults: [model]\n", "- a list\n", "not: [yaml\n", ""])
def test_a_project_of_others_with_checkpoints_is_no_run(text: str, tmp_path: Path) -> None:
    """Models are kept so by many trainers; none of them could be examined."""
    model = tmp_path / "checkpoints" / "step_10"
    model.mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(text)
    for path in (model, model / "model"):
        assert run_of(path) is None
        assert examiner_of(path, PROBLEMS) is workload_named("reasoning")
    check_model(tmp_path)


def test_a_project_of_others_that_is_resumed_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("defaults: [model]\n")
    with pytest.raises(UserError, match=rf"^{tmp_path}/config.yaml: workload: is missing"):
        check_directory(read_recipe("quickstart"), tmp_path, resume=True)


def test_a_run_whose_configuration_is_damaged_is_a_run(tmp_path: Path) -> None:
    step = checkpoint_of(tmp_path, "quickstart")
    (tmp_path / "config.yaml").write_text("not: [yaml\n")
    (tmp_path / "run.json").write_text("{}")
    assert run_of(step) == tmp_path.resolve()
    with pytest.raises(UserError, match=r"config\.yaml"):
        recipe_of(tmp_path)


def test_what_is_wrong_with_the_recipe_of_a_run_is_said_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("defaults: [model]\n")
    with pytest.raises(UserError, match=rf"^{tmp_path}/config.yaml: workload: is missing"):
        recipe_of(tmp_path)


def test_problems_are_for_the_one_workload_that_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None is the default: a second one that reads problems is asked for by name."""
    (own,) = (entry for entry in registry.OWN if workload_named(entry.name).reads_problems)
    assert examiner_of(MODEL, PROBLEMS) is workload_named(own.name)
    second = EntryPoint("second", own.value, registry.GROUP)
    monkeypatch.setattr(registry, "OWN", (*registry.OWN, second))
    with pytest.raises(UserError, match=rf"^--workload: is missing; expected {own.name} or second"):
        examiner_of(MODEL, PROBLEMS)


def test_a_model_of_no_run_needs_something_to_be_asked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--data: is missing; expected a file of problems"):
        examiner_of(tmp_path, None)


@pytest.mark.parametrize(
    ("workload", "asked", "option"),
    [
        ("embodied", {"temperature": 0.5}, "--temperature"),
        ("embodied", {"engine": "vllm"}, "--engine"),
        ("agentic", {"seed": 3}, "--seed"),
        ("agentic", {"samples": 4}, "--samples"),
        ("agentic", {"skip_bad_rows": True}, "--on-bad-row"),
        ("agentic", {"chat_options": {"enable_thinking": False}}, "--chat-option"),
    ],
)
def test_what_would_change_nothing_is_refused(
    workload: str, asked: dict[str, Any], option: str, tmp_path: Path
) -> None:
    """A success rate at a temperature that nobody has drawn at is worse than none."""
    with pytest.raises(UserError, match=f"^{option}: changes nothing: .*what does: --data, "):
        workload_named(workload).examine(Examination(tmp_path, None, **asked))


def test_a_call_may_take_as_long_as_is_said() -> None:
    """Ten minutes were all that there was, whatever the run was trained with."""
    recipe = read_recipe("quickstart", {"deadline_seconds": 1800.0})
    assert deadline_of(Examination(MODEL, None), None) == 600.0
    assert deadline_of(Examination(MODEL, None), recipe) == 1800.0
    assert deadline_of(Examination(MODEL, None, deadline_seconds=7200.0), recipe) == 7200.0


@pytest.mark.parametrize("count", range(24))
@pytest.mark.parametrize("most", [None, 1, 4, 5, 100])
def test_waves_give_what_all_items_give_at_once(count: int, most: int | None) -> None:
    waves: list[int] = []

    def asked(batch: Batch) -> StepResult:
        waves.append(len(batch))
        output = Batch({"y": batch["x"] * 2, "why": [f"{x}" for x in batch["x"].tolist()]})
        return StepResult(len(waves), output, {}, [], 10.0 * len(waves), 1.5, 7, None)

    size = wave_size(count, most)
    found = in_waves(asked, Batch({"x": torch.arange(count)}), size)
    assert found.output["y"].tolist() == [2 * x for x in range(count)]
    assert found.output["why"] == [str(x) for x in range(count)]
    assert found.output.ids == tuple(range(count))
    assert max(waves) == size <= (most or count)
    assert len(waves) == max(1, -(-count // (most or 100))), "no more of them than it takes"
    assert (found.started, found.seconds) == (10.0, 1.5 * len(waves))


@pytest.mark.parametrize("lanes", ["cpu:1", "2xcpu:1"])
def test_the_deadline_and_short_calls_are_in_the_plan(
    lanes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Plan] = []

    def launched(*_: object, plan: Plan, **__: object) -> nullcontext[SimpleNamespace]:
        plans.append(plan)
        return nullcontext(SimpleNamespace(step=len))

    monkeypatch.setattr("m2flow.runtime.driver.launch.launch", launched)
    flow, batch = Grpo(gen=Model(), learner=Trainer()), Batch({"x": list(range(9740))})
    examined(flow, batch, parse_lanes(lanes), None, "gen", 1800.0)
    (plan,) = plans
    assert plan.deadline_seconds == 1800.0
    assert plan.stages["score"].chunk == ITEMS_IN_TIME
