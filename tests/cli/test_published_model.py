"""A folder of Qwen2.5-7B-Instruct and eight H100, as a new user meets them: from folder to plan.

The accelerators are those that a stand-in of `nvidia-smi` tells of; the weights have no numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from m2flow.plan import machine
from m2flow.workloads.common import read_recipe
from m2flow.workloads.reasoning.experiment import ReasoningExperiment
from tests.cli.qwen_folder import SYSTEM, write_qwen_folder

M2flow = Callable[..., Any]

SMI = """#!/bin/sh
for n in 0 1 2 3 4 5 6 7; do
  case "$1" in
    *=index,uuid,memory.total*) echo "$n, GPU-0000000$n, 81559" ;;
    *=index,uuid,name*) echo "$n, GPU-0000000$n, NAME" ;;
  esac
done
"""

SIZES = re.compile(r"^ +(.+?) {2,}([0-9.]+) ([KMGT]?B)")
POWERS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen_folder(tmp_path_factory.mktemp("models") / "Qwen2.5-7B-Instruct", shards=True)


@pytest.fixture
def words(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The recipe, and what a user says beside it, in a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    lines = [{"question": f"What is {n} + 5?", "answer": str(n + 5)} for n in range(400)]
    Path("train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["qwen2.5-7b-grpo-math", f"model.path={folder}", "data.path=train.jsonl"]


@pytest.fixture
def accelerators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have the machine's driver tell of eight accelerators of a name."""

    def arrange(name: str) -> None:
        driver = tmp_path / "nvidia-smi"
        driver.write_text(SMI.replace("NAME", name))
        driver.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(8))))
        machine._asked.cache_clear()

    yield arrange
    machine._asked.cache_clear()


def sizes(lines: list[str]) -> list[tuple[int, str, float]]:
    """Rows of a memory account: indentation, name, bytes."""
    found = []
    for line in lines:
        if (row := SIZES.match(line)) is not None:
            indent = len(line) - len(line.lstrip())
            found.append((indent, row[1].strip(), float(row[2]) * POWERS[row[3]]))
    return found


def check_account(out: str, limit: float) -> None:
    """Every gigabyte has an owner, the sums are right, and each worker fits into the limit."""
    told = out[out.index("memory of each of 8 gpu lanes (0 to 7), at most ") :].splitlines()[1:]
    rows = sizes(told)
    workers = [n for n, (indent, *_) in enumerate(rows) if indent == 2]
    named = [rows[n][1] for n in workers[:2]]
    assert named == ["generator", "learner"]
    for n in workers[:2]:
        parts = []
        for indent, _, size in rows[n + 1 :]:
            if indent == 2:
                break
            parts.append(size)
        assert rows[n][2] == pytest.approx(sum(parts), rel=0.02)
        assert 0 < rows[n][2] <= limit
    purposes = {name for indent, name, _ in rows if indent == 4}
    assert purposes == {
        "weights", "keys and values", "activations", "logits", "float32 weights", "gradients",
        "moments", "gathered weights", "scattered gradients",
    }  # fmt: skip
    assert "more than the limit: it does not fit" not in out


def test_a_dry_run_begins_with_a_plan_that_fits(
    words: list[str], m2flow: M2flow, accelerators: Callable[[str], None]
) -> None:
    """It began with all of the training state on each lane: 143 GB of 77."""
    accelerators("NVIDIA H100 80GB HBM3")
    outcome = m2flow("train", *words, "--dry-run")
    assert (outcome.code, outcome.err) == (0, "")
    assert "by a profile computed from the data sheet of the H100" in outcome.out
    assert re.search(r"learner\.train +2048 items, 1 replica\(s\) of 8 lanes as fsdp8", outcome.out)
    assert "max_new_tokens: 8192" in outcome.out
    check_account(outcome.out, 77e9)
    assert "what a run would miss" not in outcome.out


def test_the_plan_of_a_run_is_the_one_that_a_dry_run_begins_with(
    words: list[str], m2flow: M2flow, accelerators: Callable[[str], None]
) -> None:
    """`m2flow plan` showed a collocated plan, with which no run on such lanes begins."""
    accelerators("NVIDIA H100 80GB HBM3")
    shown = m2flow("plan", *words, "--explain")
    assert shown.code == 0
    assert "a run begins with this plan, by a profile computed from the data sheet of the H100" in (
        shown.err
    )
    _, plan = shown.out.split("plan: ")
    assert plan.split("\n", 1)[1].strip() in m2flow("train", *words, "--dry-run").out
    assert m2flow("plan", *words, "--json").plan.placements["learner"].layout == "fsdp8"


def test_accelerators_that_no_data_sheet_is_of_count_by_their_memory(
    words: list[str], m2flow: M2flow, accelerators: Callable[[str], None]
) -> None:
    accelerators("NVIDIA Graphics Device")
    outcome = m2flow("train", *words, "--dry-run")
    assert outcome.code == 0, outcome.err
    assert "with the rates of an H100, as no figures of these" in outcome.out
    check_account(outcome.out, 77e9)


def test_a_mode_that_does_not_fit_says_so(
    words: list[str], m2flow: M2flow, accelerators: Callable[[str], None]
) -> None:
    accelerators("NVIDIA H100 80GB HBM3")
    outcome = m2flow("train", *words, "mode=collocated", "--dry-run")
    assert outcome.code == 0, outcome.err
    assert re.search(r"learner +145 GB  more than the limit: it does not fit", outcome.out)
    divided = m2flow("train", *words, "mode=collocated", "layouts.learner=fsdp8", "--dry-run")
    check_account(divided.out, 77e9)


def test_a_plan_for_eight_lanes_of_80_gb_that_are_not_here(
    words: list[str], m2flow: M2flow
) -> None:
    outcome = m2flow("plan", *words, "--cluster", "1x8xH100", "--explain")
    assert (outcome.code, outcome.err) == (0, "")
    assert "answers of 2212 tokens in the mean, of 8192 at most" in outcome.out
    assert re.search(r"memory: at most [0-9.]+ GB of 72 GB on a lane", outcome.out)
    assert re.search(r"learner: lanes 0-7 in gangs of ([48]) as fsdp\1", outcome.out)
    check_account(outcome.out, 72e9)


def test_lanes_that_are_not_here_lead_to_the_plan_of_a_cluster(
    words: list[str], m2flow: M2flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    refused = m2flow("train", *words, "--dry-run").error
    assert refused.startswith("lanes: asks for more lanes than the machine has (got 'gpu:8')")
    assert "m2flow plan RECIPE --cluster 1x8xH100" in refused


def test_problems_are_turns_of_a_conversation(words: list[str]) -> None:
    """The ids are the published ones, and an answer ends where the generation config says."""
    experiment = ReasoningExperiment(read_recipe(words[0], words[1:]))
    batch = experiment.batch(0)
    tokenizer = experiment.model.tokenizer()
    ids = batch["prompt_ids"][0].tolist()
    prompt = batch["prompt"][0]
    assert tokenizer.decode(ids) == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert [token for token in ids if token >= 151643] == [
        151644, 151645, 151644, 151645, 151644,
    ]  # fmt: skip
    assert experiment.model.stop_ids() == (151645, 151643)
    ends = experiment.model.ends(("<|im_start|>", "</answer>"))
    assert ends == ((151645, 151643, 151644), ("</answer>",))
    said = ReasoningExperiment(read_recipe(words[0], [*words[1:], "data.system_prompt=Be brief."]))
    text = tokenizer.decode(said.batch(0)["prompt_ids"][0])
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    plain = ReasoningExperiment(read_recipe(words[0], [*words[1:], "data.chat=false"]))
    assert tokenizer.decode(plain.batch(0)["prompt_ids"][0]) == plain.batch(0)["prompt"][0]


@pytest.mark.parametrize(
    ("gone", "told"),
    [
        (
            "tokenizer_config.json",
            "tokenizer_config.json is missing, which describes the tokenizer",
        ),
        ("model-00002-of-00004.safetensors", "1 of 4 weight files are missing: model-00002-of"),
        ("model.safetensors.index.json", "the weights are missing: neither"),
    ],
)
def test_a_dry_run_tells_what_a_run_would_miss(
    words: list[str], folder: Path, m2flow: M2flow, gone: str, told: str
) -> None:
    copy = Path("model")
    copy.mkdir()
    for file in folder.iterdir():
        if file.name != gone:
            (copy / file.name).symlink_to(file)
    said = [words[0], "model.path=model", "data.path=nowhere.jsonl", "lanes=cpu:1"]
    outcome = m2flow("train", *said, "--dry-run")
    assert outcome.code == 0, outcome.err
    missed = outcome.out[outcome.out.index("what a run would miss:") :].splitlines()
    assert any(line.startswith("  model.path: ") and told in line for line in missed)
    assert "  data.path: there is no nowhere.jsonl" in missed
