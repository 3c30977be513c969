"""What `m2flow train` and the command line itself refuse: at once, in one line, writing nothing.

Each refusal also leaves the working directory byte for byte as it was; see the fixture `refused`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from m2flow.plan.machine import available_cores
from m2flow.workloads.reasoning.data import DEFAULT_TEMPLATE

Refused = Callable[..., str]
M2flow = Callable[..., Any]

TEMPLATE_BYTES = len(DEFAULT_TEMPLATE) - len("{question}")
LINES = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(40)]


def write_lines(path: str, rows: list[Any]) -> str:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def jsonl(path: str, *more: str) -> list[str]:
    """Overrides that make the tiny recipe read a file; its prompts need some context."""
    return [
        "data={task: jsonl}",
        f"data.path={path}",
        "warmup.steps=0",
        "model.max_position_embeddings=256",
        *more,
    ]


# The command line


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["trian", "tiny.yaml"], ["trian", "train"]),
        (["train"], ["recipe", "m2flow train --help"]),
        (["train", "tiny.yaml", "--steps", "4"], ["--steps", "no such option", "steps=VALUE"]),
        (
            ["train", "tiny.yaml", "--prompts-per-step", "4"],
            ["; keys of the recipe are given as prompts_per_step=VALUE; see"],
        ),
        (["train", "tiny.yaml", "--dryrun"], ["--dryrun", "did you mean '--dry-run'?"]),
        (["train", "tiny.yaml", "--run-dir"], ["--run-dir", "requires an argument"]),
        (["train", "tiny.yaml", "--mode", "nonsense"], ["mode", "'nonsense'", "collocated"]),
        (["train", "tiny.yaml", "--mode", "eagre"], ["mode", "did you mean 'eager'?"]),
        (["eval", "m", "--data", "d", "--samples", "many"], ["--samples", "integer"]),
        (["eval", "m", "--data", "d", "--limt", "3"], ["--limt", "did you mean '--limit'?"]),
        (["report", "nowhere"], ["no such run directory", "'nowhere'"]),
        (["report", "."], ["holds neither run.json nor metrics.jsonl"]),
        (["plan", "tiny.yaml", "--reuse-profile"], ["--reuse-profile", "--profile FILE"]),
        (["eval", "nowhere"], ["MODEL: no such file or folder", "'nowhere'"]),
        (["profile", "tiny.yaml", "--out", "tiny.yaml/p.json"], ["--out: cannot be written"]),
    ],
)
def test_words_that_make_no_command(
    tiny: Path, refused: Refused, words: list[str], parts: list[str]
) -> None:
    line = refused(*words)
    for part in parts:
        assert part in line


# Lanes and plans


@pytest.mark.parametrize("command", ["train", "plan"])
@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("lanes=cpu:64", ["lanes", "'cpu:64'", f"at most cpu:{len(available_cores())}"]),
        ("lanes=gpu:64", ["lanes", "'gpu:64'"]),
        ("lanes=cpu:0", ["lanes", "'cpu:0'", "cpu:N"]),
        ("lanes=two", ["lanes", "'two'", "cpu:N, gpu:N or auto"]),
        ("lanes=cpu", ["lanes", "'cpu'", "such as cpu:2"]),
        ("mode=disaggregated", ["mode", "needs two lanes", "1 lanes", "--mode collocated"]),
    ],
)
def test_lanes_that_cannot_be(
    tiny: Path, refused: Refused, command: str, override: str, parts: list[str]
) -> None:
    line = refused(command, tiny, override)
    for part in parts:
        assert part in line


def plan_file(m2flow: M2flow, change: Callable[[dict[str, Any]], object]) -> str:
    """A plan of the tiny recipe, changed, as a file."""
    plan = json.loads(m2flow("plan", "tiny.yaml", "--json").out)
    change(plan)
    Path("plan.json").write_text(json.dumps(plan))
    return "plan.json"


def rename(table: str, old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(plan: dict[str, Any]) -> None:
        plan[table][new] = plan[table].pop(old, {})

    return change


@pytest.mark.parametrize("command", ["train", "plan"])
@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            rename("stages", "", "learner.trian"),
            ["stages.learner.trian", "not in the flow", "'learner.train'"],
        ),
        (rename("placements", "verifier", "verifer"), ["placements", "verifier"]),
        (rename("placements", "verifier", "critic"), ["placements.verifier", "no placement"]),
        (lambda plan: plan.pop("lanes"), ["plan.json", "lanes", "missing"]),
        (lambda plan: plan.update(lanes=[]), ["lanes", "at least one lane"]),
        (
            lambda plan: plan["lanes"][0].update(kind="gpu"),
            ["lanes: lane 0 of kind gpu names no accelerator; expected"],
        ),
        (
            lambda plan: plan["lanes"][0].update(gpu=0),
            ["lanes: lane 0 of kind cpu names accelerator 0; expected"],
        ),
        (
            lambda plan: plan.update(deadline_seconds=1e15),
            ["deadline_seconds: is too long (got 1000000000000000.0); expected at most 1,000,000"],
        ),
        (lambda plan: plan.update(lane=3), ["plan.json", "lane", "did you mean 'lanes'?"]),
        (lambda plan: plan.update(max_staleness="1"), ["max_staleness", "'1'", "int"]),
        (lambda plan: plan.update(order=["learner.trian"]), ["order.learner.trian"]),
        (
            lambda plan: plan["placements"]["learner"].update(replicas=[[7]]),
            ["placements.learner", "lane", "got 7"],
        ),
        (
            lambda plan: plan["stages"].update({"learner.train": {"chunk": 0}}),
            ["stages.learner.train.chunk", "got 0", "at least 1"],
        ),
    ],
)
def test_a_plan_that_does_not_fit(
    tiny: Path,
    m2flow: M2flow,
    refused: Refused,
    command: str,
    change: Callable[[dict[str, Any]], object],
    parts: list[str],
) -> None:
    line = refused(command, tiny, "--plan", plan_file(m2flow, change))
    for part in parts:
        assert part in line


def test_an_unknown_worker_in_a_plan(tiny: Path, m2flow: M2flow, refused: Refused) -> None:
    def add(plan: dict[str, Any]) -> None:
        plan["placements"]["generater"] = {"replicas": [[0]]}

    line = refused("train", tiny, "--plan", plan_file(m2flow, add))
    assert "placements.generater" in line
    assert "did you mean 'generator'?" in line


def test_a_plan_file_that_is_none(tiny: Path, refused: Refused) -> None:
    assert "--plan: there is no such plan file (got 'no.json')" in refused(
        "train", tiny, "--plan", "no.json"
    )
    Path("text.json").write_text("lanes: 3")
    line = refused("train", tiny, "--plan", "text.json")
    assert "text.json" in line
    assert "not JSON" in line
    Path("list.json").write_text("[]")
    assert "expected an object" in refused("plan", tiny, "--plan", "list.json")


def test_a_plan_of_a_larger_machine(tiny: Path, m2flow: M2flow, refused: Refused) -> None:
    def move(plan: dict[str, Any]) -> None:
        plan["lanes"][0]["cores"] = [4000]

    path = plan_file(m2flow, move)
    line = refused("train", tiny, "--plan", path)
    assert "lane 0" in line
    assert "4000" in line
    assert m2flow("plan", tiny, "--plan", path, "--explain").code == 0, "to look at it is allowed"


def test_an_eager_plan_cannot_split_a_worker(
    tiny: Path, m2flow: M2flow, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    def split(plan: dict[str, Any]) -> None:
        plan["lanes"] = [{"id": 0}, {"id": 1}]
        plan["placements"]["learner"]["replicas"] = [[0], [1]]

    line = refused("train", tiny, "--plan", plan_file(m2flow, split))
    assert "placements.learner" in line
    assert "one process" in line


def test_a_mode_beside_a_plan(tiny: Path, refused: Refused) -> None:
    line = refused("train", tiny, "--mode", "eager", "--plan", "plan.json")
    assert "--mode" in line
    assert "--plan plan.json" in line


# The data


def test_a_file_that_is_not_there(tiny: Path, refused: Refused) -> None:
    write_lines("train.jsonl", LINES)
    line = refused("train", tiny, *jsonl("trian.jsonl"))
    assert "trian.jsonl: no such file; did you mean 'train.jsonl'?" in line
    assert "no folder 'nowhere'" in refused("train", tiny, *jsonl("nowhere/x.jsonl"))
    line = refused("train", tiny, *jsonl("train.jsonl", "data.eval_path=evil.jsonl"))
    assert "evil.jsonl: no such file" in line


def test_a_file_is_needed(tiny: Path, refused: Refused) -> None:
    line = refused("train", tiny, "data={task: jsonl}", "warmup.steps=0")
    assert line.startswith("data.path: the jsonl task needs it")
    line = refused("train", tiny, "data={task: gym}", "warmup.steps=0")
    assert line.startswith("data.dataset: the gym task needs it")


def test_a_malformed_line(tiny: Path, refused: Refused) -> None:
    Path("bad.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in LINES[:6]) + '{"question": "What is\n'
    )
    line = refused("train", tiny, *jsonl("bad.jsonl"))
    assert line.startswith("bad.jsonl:7: is not valid JSON")
    assert "on_bad_row" in line
    line = refused("train", tiny, *jsonl("bad.jsonl", "data.on_bad_row=ignore"))
    assert "data.on_bad_row" in line
    assert "'fail' or 'skip'" in line


def test_malformed_lines_may_be_skipped(tiny: Path, m2flow: M2flow) -> None:
    Path("bad.jsonl").write_text(
        "".join(json.dumps(row) + "\n{\n" for row in LINES), encoding="utf-8"
    )
    skip = jsonl("bad.jsonl", "data.on_bad_row=skip", "steps=1", "evaluation.problems=0")
    outcome = m2flow("train", tiny, *skip, "--run-dir", "run")
    assert outcome.code == 0, outcome.err
    samples = [json.loads(line) for line in Path("run/samples.jsonl").read_text().splitlines()]
    assert {sample["answer"] for sample in samples} <= {row["answer"] for row in LINES}


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([], ["data.jsonl", "no rows"]),
        ([{"text": "2+3", "answer": "5"}], ["data.jsonl:1", "question", "'text'"]),
        ([{"question": "2+3"}], ["data.jsonl:1", "answer"]),
        ([{"question": "2+3", "answer": "5"}], ["data.options.held_out_rows", "a single row"]),
    ],
)
def test_a_file_without_problems(
    tiny: Path, refused: Refused, rows: list[Any], parts: list[str]
) -> None:
    line = refused("train", tiny, *jsonl(write_lines("data.jsonl", rows)))
    for part in parts:
        assert part in line


@pytest.mark.parametrize("long_line", [1, 33, 40])
def test_a_prompt_longer_than_the_context(tiny: Path, refused: Refused, long_line: int) -> None:
    """Wherever it stands in the file: the last rows are held out, the rest are shuffled."""
    rows = [dict(row) for row in LINES]
    rows[long_line - 1]["question"] = "x" * 200
    path = write_lines("long.jsonl", rows)
    line = refused("train", tiny, *jsonl(path, "model.max_position_embeddings=200"))
    assert line.startswith(f"long.jsonl:{long_line}:")
    assert "generation.max_new_tokens = 6" in line
    assert "model.max_position_embeddings = 200" in line
    assert f"a prompt of {200 + TEMPLATE_BYTES} tokens" in line


def test_a_prompt_that_just_fits(tiny: Path, m2flow: M2flow) -> None:
    path = write_lines(
        "long.jsonl", [dict(row, question=f"{n:0200}") for n, row in enumerate(LINES)]
    )
    context = 200 + TEMPLATE_BYTES + 6
    fits = jsonl(path, f"model.max_position_embeddings={context}", "steps=1")
    assert m2flow("train", tiny, *fits, "--run-dir", "run").code == 0
    assert m2flow("train", tiny, *fits, "generation.max_new_tokens=7").code == 2


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["data.options.min_digit=2"], ["data.options.min_digit", "min_digits"]),
        (["data.options.min_digits=7"], ["data.options.min_digits", "(7, 1)"]),
        (["data.options.min_digits=abc"], ["data.options", "abc"]),
        (["data.options.seed=3"], ["data.options.seed", "key of its own"]),
        (["generation.max_new_tokens=64"], ["data", "max_position_embeddings = 64"]),
        (["model.hidden_size=30"], ["model.hidden_size", "got 30", "a multiple of"]),
        (["model.num_key_value_heads=3"], ["model.num_key_value_heads", "got 3"]),
        (["model.path=nowhere"], ["nowhere", "does not exist"]),
    ],
)
def test_settings_of_the_task_and_the_model(
    tiny: Path, refused: Refused, overrides: list[str], parts: list[str]
) -> None:
    line = refused("train", tiny, *overrides)
    for part in parts:
        assert part in line


def test_a_warm_up_needs_demonstrations(tiny: Path, refused: Refused) -> None:
    overrides = jsonl(write_lines("train.jsonl", LINES), "warmup.steps=5")
    line = refused("train", tiny, *overrides)
    assert "warmup.steps" in line
    assert "no demonstrations" in line
    assert "set it to 0" in line


# reasoning-gym


def gym(*more: str) -> list[str]:
    settings = ["data={task: gym, dataset: chain_sum}", "warmup.steps=0"]
    return [*settings, "model.max_position_embeddings=512", *more]


def test_reasoning_gym_is_not_installed(
    tiny: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    line = refused("train", tiny, *gym())
    assert line.startswith("data.task: reasoning-gym is not installed")
    assert 'pip install "m2flow[gym]"' in line


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("data.dataset=chian_sum", ["data.dataset", "'chian_sum'", "'chain_sum'"]),
        ("data.options.min_term=2", ["data.options.min_term", "did you mean 'min_terms'?"]),
        ("data.options.min_terms=abc", ["data.options.min_terms: is wrong (got 'abc'); expected"]),
        ("data.options.min_terms=-2", ["data.options", "chain_sum refuses", "-2"]),
        ("data.template=nothing", ["data.template", "{question}", "'nothing'"]),
    ],
)
def test_data_sets_of_reasoning_gym(
    tiny: Path, refused: Refused, override: str, parts: list[str]
) -> None:
    pytest.importorskip("reasoning_gym")
    line = refused("train", tiny, *gym(override))
    for part in parts:
        assert part in line


# The model


def break_config(model: Path) -> None:
    (model / "config.json").write_text("{")


def cut_weights(model: Path) -> None:
    with (model / "model.safetensors").open("rb+") as file:
        file.truncate(1000)


def remove(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


BROKEN_MODELS = [
    (shutil.rmtree, ["model", "does not exist"]),
    (remove("config.json"), ["config.json", "missing"]),
    (break_config, ["config.json"]),
    (remove("tokenizer_config.json"), ["tokenizer_config.json", "missing"]),
    (remove("model.safetensors"), ["weights", "missing"]),
    (cut_weights, ["model.safetensors", "cut off or damaged"]),
]


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize(("break_it", "parts"), BROKEN_MODELS)
def test_a_model_that_is_not_whole(
    run: Path,
    refused: Refused,
    break_it: Callable[[Path], None],
    parts: list[str],
    warmup: int,
) -> None:
    shutil.move(run / "warmup", "model")
    break_it(Path("model"))
    overrides = ["model.path=model", f"warmup.steps={warmup}"]
    line = refused("train", "tiny.yaml", *overrides, "--run-dir", "other")
    for part in parts:
        assert part in line


# Where it is written


def test_a_directory_that_holds_a_run(run: Path, refused: Refused) -> None:
    line = refused("train", "tiny.yaml", "--run-dir", run)
    assert "--run-dir: holds a run already" in line
    assert "'run'" in line
    assert "add --resume" in line


def test_a_directory_that_cannot_be(tiny: Path, refused: Refused) -> None:
    Path("file").write_text("")
    assert "is a file" in refused("train", tiny, "--run-dir", "file")
    line = refused("train", tiny, "--run-dir", "file/below")
    assert "--run-dir: nothing can be written in file" in line


def test_a_directory_that_may_not_be_written(
    tiny: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = os.mkdir

    def locked(path: str | Path, mode: int = 0o777, **place: Any) -> None:
        if Path(path).parent.name == "locked":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        make(path, mode, **place)

    Path("locked").mkdir()
    monkeypatch.setattr(os, "mkdir", locked)
    line = refused("train", tiny, "--run-dir", "locked/run")
    assert "--run-dir: nothing can be written in locked: Permission denied" in line


def test_a_directory_that_is_a_link_to_nothing(tiny: Path, refused: Refused) -> None:
    """As to a disk that is not mounted: it was a traceback, after everything had been loaded."""
    Path("run").symlink_to("/not/mounted/run")
    line = refused("train", tiny, "--run-dir", "run")
    assert line == (
        "--run-dir: is a link to what is not there (got 'run'); expected a directory; "
        "make /not/mounted/run, or remove the link"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["report", "theirs/run"],
        ["doctor", "theirs/run"],
        ["dash", "theirs/run"],
        ["eval", "theirs/run/checkpoints/latest"],
        ["train", "theirs/run/config.yaml"],
        ["plan", "theirs/run/config.yaml"],
        ["profile", "tiny.yaml", "--out", "theirs/profile.json"],
        ["plan", "tiny.yaml", "--plan", "theirs/plan.json"],
        ["plan", "tiny.yaml", "--profile", "theirs/profile.json"],
        ["plan", "tiny.yaml", "--cluster", "1x8xH100", "--model", "theirs/model"],
        ["eval", "theirs/run/checkpoints/latest", "--data", "sums.jsonl"],
        ["train", "tiny.yaml", "model.path=theirs/model"],
        ["train", "tiny.yaml", "data={task: jsonl, path: theirs/d.jsonl}", "--dry-run"],
        ["train", "quickstart-embodied", "warmup={data: theirs/moves, steps: 1}", "--dry-run"],
    ],
)
def test_what_another_user_has_closed(
    tiny: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """It was a traceback: Python says of such a path neither that it is there nor that it is not.

    Later Pythons say that it is not there.
    """
    ask = os.stat

    def closed(path: Any, **how: Any) -> os.stat_result:
        if str(path).startswith("theirs/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return ask(path, **how)

    Path("theirs").mkdir()
    monkeypatch.setattr(os, "stat", closed)
    assert "theirs/" in refused(*words)


@pytest.mark.parametrize("path", ["/proc/run", "x" * 300])
def test_a_directory_that_nobody_can_make(tiny: Path, refused: Refused, path: str) -> None:
    """Not even root, whom the system allows to write anywhere."""
    line = refused("train", tiny, "--run-dir", path)
    assert line.startswith("--run-dir: nothing can be written in ")
    assert "--resume" not in line


@pytest.mark.parametrize("length", [236, 300])
def test_a_name_that_is_too_long_for_a_directory(tiny: Path, refused: Refused, length: int) -> None:
    """It was a traceback, after everything had been loaded."""
    line = refused("train", tiny, f"name={'x' * length}")
    assert line.startswith("name: is too long for the name of a directory (got 'xxx")
    assert line.endswith("shorten it, or name a directory with --run-dir")


@pytest.mark.parametrize("override", ["lane_memory=10KB", "generation.cache_gb=1e-6"])
@pytest.mark.parametrize("mine", [None, "notes.txt", "films/mine.webp"])
def test_a_run_refused_before_its_first_step_leaves_none(
    tiny: Path, refused: Refused, override: str, mine: str | None
) -> None:
    """By the plan, or in the evaluation: the model of the warm-up has been written by then."""
    if mine is not None:
        Path("new", mine).parent.mkdir(parents=True)
        Path("new", mine).write_text("mine")
    refused("train", tiny, "warmup.steps=1", override, "--run-dir", "new")


def test_a_resume_that_is_refused_removes_nothing(run: Path, m2flow: M2flow) -> None:
    shutil.rmtree(run / "checkpoints")  # it begins again
    before = set(run.rglob("*"))
    outcome = m2flow("train", "tiny.yaml", "lane_memory=10KB", "--run-dir", run, "--resume")
    assert "placements.generator" in outcome.error
    assert before <= set(run.rglob("*"))


def test_a_logger_whose_package_is_missing(
    tiny: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    line = refused("train", tiny, "logger=[jsonl, tensorboard]")
    assert "tensorboard package is not installed" in line
    assert "pip install 'm2flow[dash]'" in line


# A refusal is quick: it does not wait for the warm-up


def test_nothing_is_computed_before_a_refusal(
    run: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    def computed(*arguments: object, **options: object) -> None:
        raise AssertionError("something was computed")

    monkeypatch.setattr("m2flow.workloads.reasoning.experiment.train_supervised", computed)
    monkeypatch.setattr(torch.nn.Module, "__call__", computed)
    for words in (
        ["lanes=cpu:64"],
        [f"name={'x' * 300}"],
        ["data.options.min_digits=7"],
        ["generation.max_new_tokens=64"],
        ["--run-dir", "run"],
        ["--resume"],
        ["--run-dir", "run", "--resume", "seed=3", "steps=4"],
        ["--run-dir", "run", "--resume"],
    ):
        refused("train", "tiny.yaml", *words)
