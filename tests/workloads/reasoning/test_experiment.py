"""What a recipe means: the starting model, the batch of any step, and the figures of a step."""

from __future__ import annotations

import json
import logging
import math
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from m2flow.algorithms.sampling import derive_seed
from m2flow.engine.spans import Span
from m2flow.errors import RunFailed, UserError
from m2flow.flow import Batch
from m2flow.models.tokenizer import byte_tokenizer, character_tokenizer
from m2flow.runtime.driver.runner import StepResult
from m2flow.workloads.common.run import step_figures
from m2flow.workloads.reasoning.encoding import Names, encode, may_not_fit
from m2flow.workloads.reasoning.experiment import ReasoningExperiment, sample_figures
from m2flow.workloads.reasoning.named import task_of
from m2flow.workloads.reasoning.reward_sections import JudgeSection, RewardModelSection
from m2flow.workloads.reasoning.tasks import Problem
from m2flow.workloads.reasoning.workers import ModelSource
from m2flow.workloads.reasoning.workers.columns import with_score
from m2flow.workloads.reasoning.workers.judge_model import JudgeModel
from m2flow.workloads.reasoning.workers.reward_model import RewardModel

MakeRecipe = Any


# The data


def test_a_batch_depends_on_recipe_and_step_alone(
    tiny_recipe: MakeRecipe, warmed: ModelSource
) -> None:
    """A resumed run asks a new object for step 7 first."""
    before, after = (ReasoningExperiment(tiny_recipe(), warmed) for _ in range(2))
    batches = [before.batch(step) for step in range(8)]
    again = after.batch(7)
    assert again["prompt"] == batches[7]["prompt"]
    assert again["seed"] == batches[7]["seed"]
    assert again["prompt_ids"].values.equal(batches[7]["prompt_ids"].values)
    other = ReasoningExperiment(tiny_recipe(seed=1), warmed).batch(7)
    assert other["seed"] != again["seed"]


def test_each_prompt_of_the_run_has_a_seed_of_its_own(
    tiny_recipe: MakeRecipe, warmed: ModelSource
) -> None:
    experiment = ReasoningExperiment(tiny_recipe(seed=5), warmed)
    seeds = [seed for step in range(6) for seed in experiment.batch(step)["seed"]]
    assert seeds == [derive_seed(5, 1, index) for index in range(24)]
    assert len(set(seeds)) == 24


def test_what_a_batch_holds(tiny_recipe: MakeRecipe, warmed: ModelSource) -> None:
    experiment = ReasoningExperiment(tiny_recipe(), warmed)
    batch, tokenizer = experiment.batch(2), warmed.tokenizer()
    assert len(batch) == 4
    for row in range(4):
        problem = experiment.task.train(2 * 4 + row)
        assert batch["prompt"][row] == problem.prompt
        assert batch["answer"][row] == problem.answer
        assert tokenizer.decode(batch["prompt_ids"][row]) == problem.prompt
        assert batch["prompt_ids"][row].dtype == torch.int64


def test_held_out_problems(tiny_recipe: MakeRecipe, warmed: ModelSource) -> None:
    held_out = ReasoningExperiment(tiny_recipe(), warmed).held_out()
    assert held_out is not None
    assert len(set(held_out["prompt"])) == 5
    none = ReasoningExperiment(tiny_recipe(evaluation={"problems": 0}))
    assert none.held_out() is None


def jsonl(path: Path, **more: Any) -> dict[str, Any]:
    return {
        "data": {"task": "jsonl", "path": str(path), "options": {}, **more},
        "warmup": {"steps": 0},
        "model": {"max_position_embeddings": 200},
    }


def test_a_file_is_walked_once_an_epoch(tiny_recipe: MakeRecipe, data_file: Path) -> None:
    task = ReasoningExperiment(tiny_recipe(**jsonl(data_file))).task
    assert task.num_train == 36
    lines = [task.train(index).metadata["line"] for index in range(36)]
    assert sorted(lines) == list(range(1, 37))


def test_options_of_a_file(tiny_recipe: MakeRecipe, data_file: Path) -> None:
    recipe = tiny_recipe(**jsonl(data_file, options={"held_out_rows": 10}))
    assert task_of(recipe).num_train == 30


def test_rows_are_read_for_the_rewards_of_the_recipe(
    tiny_recipe: MakeRecipe, data_file: Path
) -> None:
    tests = ["assert f('####') == 1"]
    rows = [json.dumps({"question": question, "tests": tests}) for question in ("f?", "g?")]
    data_file.write_text("\n".join(rows))
    task = task_of(tiny_recipe(**jsonl(data_file), reward="code"))
    assert json.loads(task.train(0).answer) == tests
    with pytest.raises(UserError, match="no answer column"):
        task_of(tiny_recipe(**jsonl(data_file)))


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"options": {"rewards": ["code"]}}, "data.options.rewards"),
        ({"options": {"path": "x"}}, "data.options.path"),
        ({"options": {"seed": 1}}, "data.options.seed"),
        ({"options": {"held_out_row": 10}}, "data.options.held_out_row"),
        ({"options": {"held_out_rows": 40}}, "data.options.held_out_rows"),
        ({"template": "nothing"}, "data.template"),
    ],
)
def test_a_task_complains_in_the_words_of_the_recipe(
    tiny_recipe: MakeRecipe, data_file: Path, data: dict[str, Any], key: str
) -> None:
    with pytest.raises(UserError) as caught:
        ReasoningExperiment(tiny_recipe(**jsonl(data_file, **data)))
    assert str(caught.value).startswith(f"{key}: ")


def test_bad_rows_are_left_out_if_asked(
    tiny_recipe: MakeRecipe, data_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with data_file.open("a") as file:
        file.write("nonsense\n")
    with pytest.raises(UserError, match=r"questions\.jsonl:41: is not valid JSON"):
        ReasoningExperiment(tiny_recipe(**jsonl(data_file)))
    with caplog.at_level(logging.WARNING):
        experiment = ReasoningExperiment(tiny_recipe(**jsonl(data_file, on_bad_row="skip")))
    assert experiment.task.num_train == 36
    assert "left out 1 unusable rows (first: line 41" in caplog.text


def test_gym_without_reasoning_gym(
    tiny_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    recipe = tiny_recipe(data={"task": "gym", "dataset": "chain_sum", "options": {}})
    with pytest.raises(UserError, match=r"data\.task: reasoning-gym is not installed.*pip install"):
        task_of(recipe)


def test_data_sets_of_reasoning_gym_take_turns(tiny_recipe: MakeRecipe) -> None:
    options = {"chain_sum": {"min_terms": 2, "max_terms": 2}}
    shares = {"spell_backward": 1, "chain_sum": 3}
    data = {"task": "gym", "dataset": shares, "options": options}
    task = task_of(tiny_recipe(data=data))
    problems = [task.train(index) for index in (9, 2, *range(24))][2:]  # in any order
    names = [problem.metadata["dataset"] for problem in problems]
    for start in range(0, 24, 4):
        assert sorted(names[start : start + 4]) == ["chain_sum"] * 3 + ["spell_backward"]
    only = data | {"dataset": "chain_sum", "options": options["chain_sum"]}
    alone = task_of(tiny_recipe(data=only))
    sums = [problem for problem in problems if problem.metadata["dataset"] == "chain_sum"]
    assert sums == [alone.train(index) for index in range(18)]
    held_out = [problem.metadata["dataset"] for problem in task.held_out(8)]
    assert sorted(held_out) == ["chain_sum"] * 6 + ["spell_backward"] * 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"dataset": {}}, "data.dataset: names no data set"),
        ({"dataset": {"chain_sums": 1}}, "data.dataset: reasoning-gym has no such data set"),
        ({"dataset": {"chain_sum": 1}, "options": {"min_terms": 2}}, "data.options.min_terms: "),
        (
            {"dataset": {"chain_sum": 1}, "options": {"chain_sum": {"min_term": 2}}},
            "data.options.min_term: chain_sum has no such option",
        ),
    ],
)
def test_a_mixture_is_checked(tiny_recipe: MakeRecipe, data: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        task_of(tiny_recipe(data={"task": "gym", "options": {}} | data))
    assert str(caught.value).startswith(message)


# Prompts must fit


def test_rows_with_long_prompts_are_left_out_if_asked(
    tiny_recipe: MakeRecipe, data_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = data_file.read_text().splitlines()
    for line in (30, 9, 20):
        rows[line - 1] = json.dumps({"question": f"{line}" * 300, "answer": "1"})
    data_file.write_text("\n".join(rows))
    with caplog.at_level(logging.WARNING):
        experiment = ReasoningExperiment(tiny_recipe(**jsonl(data_file, max_prompt_tokens=100)))
    assert experiment.task.num_train == 33
    assert "3 rows whose prompt has more than 100 tokens are not trained on" in caplog.text
    lines = {experiment.task.train(index).metadata["line"] for index in range(33)}
    assert lines == set(range(1, 37)) - {9, 20, 30}


@pytest.mark.parametrize("of_their_own", [False, True])
def test_held_out_rows_with_long_prompts_are_left_out_too(
    of_their_own: bool,
    tiny_recipe: MakeRecipe,
    data_file: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They had refused the run that asked for long rows to be left out."""
    rows = data_file.read_text().splitlines()
    for line in (30, 38, 39):
        rows[line - 1] = json.dumps({"question": f"{line}" * 300, "answer": "1"})
    data_file.write_text("\n".join(rows[:36] if of_their_own else rows))
    held_out, more = data_file, {}
    if of_their_own:
        held_out = tmp_path / "held_out.jsonl"
        held_out.write_text("\n".join(rows[36:]))
        more = {"eval_path": str(held_out)}
    settings = jsonl(data_file, max_prompt_tokens=100, **more)
    with caplog.at_level(logging.WARNING):
        experiment = ReasoningExperiment(tiny_recipe(**settings))
    assert experiment.task.num_train == 35
    assert f"{data_file}: 1 rows whose prompt has more than 100 tokens are not" in caplog.text
    assert f"{held_out}: 2 held-out rows whose prompt has more than 100 tokens" in caplog.text
    lines = [problem.metadata["line"] for problem in experiment.task.held_out(9)]
    assert lines == ([1, 4] if of_their_own else [37, 40])


def test_a_limit_that_leaves_nothing_to_evaluate_on(
    tiny_recipe: MakeRecipe, data_file: Path
) -> None:
    rows = data_file.read_text().splitlines()
    rows[36:] = [json.dumps({"question": "x" * 300, "answer": "1"})] * 4
    data_file.write_text("\n".join(rows))
    settings = jsonl(data_file, max_prompt_tokens=100)
    with pytest.raises(UserError, match=r"data\.max_prompt_tokens: leaves no held-out row .*100"):
        ReasoningExperiment(tiny_recipe(**settings))
    unasked = ReasoningExperiment(tiny_recipe(**settings, evaluation={"problems": 0}))
    assert unasked.held_out() is None


def test_a_limit_that_leaves_too_few_rows(tiny_recipe: MakeRecipe, data_file: Path) -> None:
    with pytest.raises(UserError, match=r"data\.max_prompt_tokens: leaves no row to train on"):
        ReasoningExperiment(tiny_recipe(**jsonl(data_file, max_prompt_tokens=1)))


@given(st.text(max_size=40), st.integers(0, 60), st.integers(1, 30))
def test_a_text_that_surely_fits_does(text: str, context: int, max_new_tokens: int) -> None:
    """The quick test never lets a prompt through that encoding would refuse."""
    problem = Problem(text, "")
    tokens = len(byte_tokenizer()(text)["input_ids"])
    if tokens + max_new_tokens > context:
        assert may_not_fit(problem, context, max_new_tokens)
    assert not may_not_fit(problem, None, max_new_tokens)


@pytest.mark.parametrize("line", [1, 20, 36, 37, 40])
def test_the_line_of_a_prompt_that_is_too_long(
    tiny_recipe: MakeRecipe, data_file: Path, line: int
) -> None:
    rows = data_file.read_text().splitlines()
    rows[line - 1] = json.dumps({"question": "x" * 300, "answer": "1"})
    data_file.write_text("\n".join(rows))
    with pytest.raises(UserError) as caught:
        ReasoningExperiment(tiny_recipe(**jsonl(data_file)))
    assert str(caught.value).startswith(f"{data_file}:{line}: a prompt of ")


def test_the_first_line_of_several(tiny_recipe: MakeRecipe, data_file: Path) -> None:
    rows = data_file.read_text().splitlines()
    for line in (30, 9, 20):
        rows[line - 1] = json.dumps({"question": f"{line}" * 300, "answer": "1"})
    data_file.write_text("\n".join(rows))
    with pytest.raises(UserError, match=r"questions\.jsonl:9: .*, and 2 more like it,"):
        ReasoningExperiment(tiny_recipe(**jsonl(data_file)))


def test_the_names_that_a_person_knows() -> None:
    names = Names("f.jsonl", "--max-new-tokens", "its context")
    tokenizer = character_tokenizer("0123456789")
    batch = encode([Problem("123", "4")], [7], tokenizer, 5, 2, names)
    assert batch["prompt_ids"][0].tolist() == [1, 2, 3]
    with pytest.raises(UserError, match=r"f\.jsonl: .*-tokens = 3.*at most its context = 5"):
        encode([Problem("123", "4")], [7], tokenizer, 5, 3, names)
    assert len(encode([Problem("123", "4")], [7], tokenizer, None, 999, names)) == 1
    with pytest.raises(UserError, match=r"f\.jsonl: .*cannot encode"):
        encode([Problem("abc", "4")], [7], tokenizer, 5, 2, names)


# The starting model


def weights(source: ModelSource) -> dict[str, torch.Tensor]:
    return dict(source.load("cpu").state_dict())


@dataclass
class Told:
    """A progress that keeps the losses."""

    losses: list[float]

    def phase(self, name: str, total: int | None = None, completed: int = 0) -> None:
        assert (name, total) == ("warm-up", 40)

    def update(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        assert metrics is not None
        self.losses.append(metrics["loss"])

    def note(self, text: str) -> None:
        raise AssertionError(text)


def test_demonstrations_have_the_special_tokens_of_a_prompt_alone(
    tiny_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Adding:
        """Puts a token before every text, as Llama's tokenizer does."""

        eos_token_id, chat_template = 1, None

        def __call__(self, texts: list[str], add_special_tokens: bool = True) -> Any:
            return {"input_ids": [[0] * add_special_tokens + [9] * len(text) for text in texts]}

    shown = list[Any]()
    experiment = ReasoningExperiment(tiny_recipe(warmup={"steps": 2}))
    monkeypatch.setattr(experiment, "_show", lambda _model, pairs, _progress: shown.append(pairs))
    experiment._warm_up(None, Adding(), None)
    (pairs,) = shown
    assert set(pairs.completion_ids_T.tolist()) == {1, 9}
    assert set(pairs.prompt_ids_P.tolist()) == {0, 9}


def test_the_warm_up_learns(
    tiny_recipe: MakeRecipe, warmed: ModelSource, tmp_path: Path, one_thread: None
) -> None:
    losses: list[float] = []
    experiment = ReasoningExperiment(tiny_recipe())
    experiment.prepare(tmp_path, Told(losses))
    assert losses[-1] < 0.8 * math.log(18), "better than guessing one of 18 tokens"
    assert (tmp_path / "config.json").is_file()
    assert not list(tmp_path.glob(".*"))
    again = weights(ModelSource(str(tmp_path)))
    assert all(value.equal(again[name]) for name, value in weights(warmed).items())


def test_the_warm_up_s_learning_rate_is_used(
    tiny_recipe: MakeRecipe, tmp_path: Path, one_thread: None
) -> None:
    """It once stood in the recipe and went nowhere."""
    moved = {}
    start = ReasoningExperiment(tiny_recipe(warmup={"steps": 0})).prepare(tmp_path / "start")
    for rate in (1e-3, 1e-6):
        recipe = tiny_recipe(warmup={"steps": 5, "learning_rate": rate})
        trained = weights(ReasoningExperiment(recipe).prepare(tmp_path / str(rate)))
        moved[rate] = max(float((trained[k] - v).abs().max()) for k, v in weights(start).items())
    assert 0 < moved[1e-6] < 1e-5 < moved[1e-3]


@pytest.mark.parametrize("home", [False, True])
def test_lanes_are_told_where_models_lie_whatever_folder_they_work_in(
    tiny_recipe: MakeRecipe,
    warmed: ModelSource,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    home: bool,
) -> None:
    """Those of another machine work where Ray was started there. The recipe stays as it is."""
    (tmp_path / "model").symlink_to(warmed.path)
    monkeypatch.chdir(tmp_path.parent if home else tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    named = "~/model" if home else "model"
    recipe = tiny_recipe(model={"path": named}, warmup={"steps": 0})
    experiment = ReasoningExperiment(recipe)
    flow = experiment.flow()
    expected = str(tmp_path / "model")
    assert flow.generator.model.path == flow.learner.model.path == expected
    assert experiment.prepare(tmp_path / "unused").path == expected
    assert recipe.model.path == named
    classifier = RewardModel(RewardModelSection(path=named))
    judge = JudgeModel(JudgeSection(path=named))
    assert classifier.source.path == judge.model.path == expected


def test_preparing_again_leaves_what_else_is_there(
    tiny_recipe: MakeRecipe, tmp_path: Path, one_thread: None
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".partial").mkdir()
    (tmp_path / ".partial" / "config.json").write_text("half of it")
    recipe = tiny_recipe(warmup={"steps": 0})
    ReasoningExperiment(recipe).prepare(tmp_path).load("cpu")
    ReasoningExperiment(recipe).prepare(tmp_path).load("cpu")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not (tmp_path / ".partial").exists()


def test_a_model_from_disk_is_used_where_it_lies(
    tiny_recipe: MakeRecipe, warmed: ModelSource, tmp_path: Path
) -> None:
    recipe = tiny_recipe(model={"path": warmed.path}, warmup={"steps": 0})
    experiment = ReasoningExperiment(recipe)
    assert not experiment.makes_model
    assert experiment.prepare(tmp_path / "unused") == warmed
    assert not (tmp_path / "unused").exists()


def test_a_model_from_disk_can_be_warmed_up(
    tiny_recipe: MakeRecipe, warmed: ModelSource, tmp_path: Path, one_thread: None
) -> None:
    recipe = tiny_recipe(model={"path": warmed.path}, warmup={"steps": 2})
    experiment = ReasoningExperiment(recipe)
    assert experiment.makes_model
    further = weights(experiment.prepare(tmp_path))
    assert any(not value.equal(further[name]) for name, value in weights(warmed).items())
    second = weights(experiment.prepare(tmp_path / "again"))
    assert all(value.equal(second[name]) for name, value in further.items())


@pytest.mark.parametrize(
    ("sizes", "key"),
    [
        ({"hidden_size": 30}, "model.hidden_size"),
        ({"num_key_value_heads": 3}, "model.num_key_value"),
    ],
)
def test_sizes_that_make_no_model(tiny_recipe: MakeRecipe, sizes: dict[str, int], key: str) -> None:
    with pytest.raises(UserError) as caught:
        ReasoningExperiment(tiny_recipe(model=sizes))
    assert str(caught.value).startswith(key)


# The figures


OUTPUT = Batch(
    {
        "prompt": [f"p{n // 2}" for n in range(6)],
        "text": [f"t{n}" for n in range(6)],
        "answer": ["a"] * 6,
        "reward": [1.0, 0.0, 0.5, 0.5, 1.0, 1.0],
        "failure": [""] * 6,
        "finish_reason": ["stop", "length", "stop", "stop", "length", "stop"],
        "num_tokens": [3, 6, 2, 2, 6, 5],
        "num_prompt_tokens": [4] * 6,
    }
)


def test_figures_of_samples_by_hand() -> None:
    figures = sample_figures(OUTPUT, group_size=2)
    assert figures["reward/mean"] == pytest.approx(4 / 6)
    assert figures["reward/std"] == pytest.approx(statistics.pstdev(OUTPUT["reward"]))
    assert figures["accuracy/mean"] == pytest.approx(3 / 6)
    assert figures["reward/zero_variance_share"] == pytest.approx(2 / 3)
    assert figures["tokens/generated"] == 24
    assert figures["tokens/prompt"] == 24
    assert figures["length/mean"] == 4
    assert figures["length/truncated_share"] == pytest.approx(2 / 6)


def test_groups_whose_judged_answers_have_one_reward_teach_nothing() -> None:
    """An answer that nobody could judge has a reward of 0, which is none."""
    output = OUTPUT.with_columns(failure=["", "it raised", "", "", "", ""])
    figures = sample_figures(output, group_size=2)
    assert figures["reward/zero_variance_share"] == 1.0
    assert figures["reward/failed_share"] == pytest.approx(1 / 6)


def test_a_group_with_a_signal_in_what_is_trained_on_is_counted_as_one() -> None:
    """Turns, lengths and drift may part answers whose rewards are alike."""
    shaped = torch.tensor([1.0, 0.0, 0.5, 0.4, 1.0, 0.9], dtype=torch.float64)
    figures = sample_figures(OUTPUT.with_columns(shaped=shaped), group_size=2)
    assert figures["reward/zero_variance_share"] == 0.0
    assert figures["reward/mean"] == pytest.approx(4 / 6)


@pytest.mark.parametrize("name", ["ppo", "reinforce++"])
def test_a_sample_that_nobody_compares_is_no_group_that_teaches_nothing(
    tiny_recipe: MakeRecipe, name: str
) -> None:
    """With one sample of a prompt each step warned of 100% of the groups."""
    recipe = tiny_recipe(samples_per_prompt=1, algorithm={"name": name})
    experiment = ReasoningExperiment(recipe)
    result = of_output(OUTPUT.with_columns(finish_reason=["stop"] * 6))
    assert "reward/zero_variance_share" not in experiment.metrics(result)
    assert not experiment.alarms(result)


def test_accuracy_is_over_what_functions_could_judge(tiny_recipe: MakeRecipe) -> None:
    """Where a model judged too, answers whose function had failed counted as wrong."""
    failed = OUTPUT.with_columns(failure=["", "it raised", "", "", "", ""])
    judged = with_score(
        failed, "judge", [0.5, None, 0.5, None, 0.5, 0.5], ["says nothing"] * 6, 1.0
    )
    experiment = ReasoningExperiment(tiny_recipe(samples_per_prompt=2))
    for output in (failed, judged):
        figures = experiment.metrics(of_output(output))
        assert figures["accuracy/mean"] == pytest.approx(3 / 5)


def of_output(output: Batch) -> Any:
    return SimpleNamespace(output=output, step=0, metrics={})


def test_what_could_not_be_judged_is_no_wrong_answer(tiny_recipe: MakeRecipe) -> None:
    experiment = ReasoningExperiment(tiny_recipe())
    assert "eval/failed_share" not in experiment.evaluation(of_output(OUTPUT))
    failed = OUTPUT.with_columns(failure=["", "it is down", "", "it is down", "", ""])
    figures = experiment.evaluation(of_output(failed))
    assert figures["eval/accuracy"] == pytest.approx(3 / 4)
    assert figures["eval/problems"] == 4
    assert figures["eval/failed_share"] == pytest.approx(2 / 6)
    assert experiment.evaluation(of_output(OUTPUT.with_columns(failure=["x"] * 6))) == {}


def test_a_step_in_which_no_group_ends_has_no_figures_of_answers(tiny_recipe: MakeRecipe) -> None:
    """Nor does it alarm anybody: nothing of it was scored."""
    recipe = tiny_recipe(
        samples_per_prompt=2, generation={"max_new_tokens": 6, "tokens_per_step": 3}
    )
    experiment = ReasoningExperiment(recipe)
    unended = OUTPUT.with_columns(reward=[0.0] * 6, begun=["half an answer"] * 6)
    assert experiment.metrics(of_output(unended)) == {"samples": 0.0, "sampling/carried_share": 1.0}
    assert not experiment.alarms(of_output(unended))
    failed = OUTPUT.with_columns(failure=["x", "x", *[""] * 4], begun=[None, None, *["half"] * 4])
    assert any(said.startswith("x; ") for said in experiment.alarms(of_output(failed)))
    with pytest.raises(RunFailed, match="all 6 samples"):
        experiment.alarms(of_output(OUTPUT.with_columns(failure=["x"] * 6)))


def test_rows_that_a_base_model_cannot_write_are_refused_before_a_run(
    tiny_recipe: MakeRecipe, tmp_path: Path
) -> None:
    """Wherever in the file they stand: here behind those of the first step."""
    rows = [{"question": f"{n}+{n}", "answer": str(2 * n)} for n in range(12)]
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
    path = tmp_path / "rows.jsonl"
    rows.insert(9, {"question": turns, "answer": "2"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"task": "jsonl", "path": str(path), "options": {}}
    with pytest.raises(UserError, match="conversations of several turns"):
        ReasoningExperiment(tiny_recipe(data=data, warmup={"steps": 0}))


@pytest.mark.parametrize("name", ["grpo", "ppo", "reinforce++"])
def test_no_group_is_unfilled_where_none_is_compared(
    name: str, tiny_recipe: MakeRecipe, data_file: Path
) -> None:
    """With one sample of a prompt every group was one that teaches nothing."""
    size = 2 if name == "grpo" else 1
    recipe = tiny_recipe(
        **jsonl(data_file, curriculum={}), algorithm={"name": name}, samples_per_prompt=size
    )
    output = OUTPUT.with_columns(tried=[()] * 6, problem=[1, 1, 2, 2, 3, 3])
    figures = ReasoningExperiment(recipe).metrics(of_output(output))
    assert figures["sampling/prompts"] == 6 / size
    assert ("sampling/unfilled_share" in figures) == (name == "grpo")
    assert figures.get("sampling/unfilled_share", 2 / 3) == pytest.approx(2 / 3)


def test_figures_of_a_step(tiny_recipe: MakeRecipe) -> None:
    result = StepResult(
        step=0,
        output=OUTPUT,
        metrics={"loss": 0.25, "grad_norm": 2.0},
        spans=[
            Span(0, "generator.generate", "call", 0.0, 1.5, {}),
            Span(0, "learner.train", "call", 1.5, 2.0, {}),
            Span(0, "learner.train", "finish", 2.0, 2.25, {}),
        ],
        started=0.0,
        seconds=3.0,
        version=1,
        staleness=None,
    )
    figures = ReasoningExperiment(tiny_recipe(samples_per_prompt=2)).metrics(result)
    figures |= step_figures(result)
    assert figures["loss/policy"] == 0.25
    assert figures["train/grad_norm"] == 2.0
    assert figures["seconds/generator.generate"] == 1.5
    assert figures["seconds/learner.train"] == 0.75
    assert figures["throughput/samples_per_s"] == 2
    assert (figures["version"], figures["staleness/mean"]) == (1, 0)
    assert all(type(value) is float for value in figures.values())


@pytest.mark.parametrize(("count", "rows"), [(0, []), (1, [0]), (2, [0, 3]), (9, range(6))])
def test_samples_are_spread_over_the_groups(
    tiny_recipe: MakeRecipe, count: int, rows: list[int]
) -> None:
    result = StepResult(0, OUTPUT, {}, [], 0.0, 1.0, 1, None)
    samples = ReasoningExperiment(tiny_recipe()).samples(result, count)
    assert [sample["item"] for sample in samples] == list(rows)
    for sample in samples:
        assert sample["completion"] == f"t{sample['item']}"
        json.dumps(sample)


def test_a_prompt_without_a_token_is_named() -> None:
    """A tokenizer without bytes leaves out what it does not know; generation refused it late."""
    letters = Tokenizer(models.BPE({letter: number for number, letter in enumerate("abc")}, []))
    tokenizer, names = PreTrainedTokenizerFast(tokenizer_object=letters), Names("f.jsonl")
    problems = [Problem("a", "4", line=1), Problem("\u03b1", "4", line=2)]
    with pytest.raises(UserError, match=r"f\.jsonl:2: .*no token") as caught:
        encode(problems, [7, 8], tokenizer, 5, 2, names)
    assert "vocabulary" in str(caught.value)
