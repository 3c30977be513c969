"""A dead tool, a hanging tool and an oversized answer cost one trajectory, and the run goes on."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from m2flow.flow import Batch, Place
from m2flow.generation.records import Completion
from m2flow.runtime.driver.launch import launch
from m2flow.workloads.agentic.config import ToolPart
from m2flow.workloads.agentic.dialect import CUT
from m2flow.workloads.agentic.episodes import begin_episodes, with_turns
from m2flow.workloads.agentic.experiment import AgenticExperiment
from m2flow.workloads.agentic.workers import ToolUser
from m2flow.workloads.reasoning.workers import ModelSource

MakeRecipe = Any
pytestmark = pytest.mark.usefixtures("one_thread")
SERVER = Path(__file__).parents[2] / "tools" / "mcp_server.py"


def shaky(formula: str) -> str:
    """Compute a formula; by its last digit raise, hang, or say too much."""
    from m2flow.tools.calculator import calculate

    match formula.strip()[-1:]:
        case "7":
            raise OSError("no disk")
        case "8":
            time.sleep(20)
        case "9":
            return "9" * 10_000_000
    return calculate(formula)


SHAKY_SERVER = ToolPart(
    tool="mcp",
    options={
        "command": [sys.executable, str(SERVER)],
        "env": {"PYTHONPATH": os.pathsep.join(sys.path)},
        "only": ["shaky"],
    },
)


def test_the_run_goes_on_without_them(tiny_recipe: MakeRecipe, warmed: ModelSource) -> None:
    recipe = tiny_recipe(
        tools=f"{__name__}:shaky",
        prompts_per_step=12,
        samples_per_prompt=4,
        minibatches=1,
        episode={"tool_deadline_seconds": 0.5, "max_result_tokens": 20, "tool_concurrency": 16},
    )
    experiment = AgenticExperiment(recipe, warmed)
    with launch(experiment.flow(), items_per_step=12, mode="eager") as run:
        results = [run.step(experiment.batch(step)) for step in range(2)]
    failed = finished = cut = 0
    for result in results:
        output, figures = result.output, experiment.metrics(result)
        assert len(output) == 48
        for reason, failure, turns in zip(
            output["finish_reason"], output["failure"], output["turns"], strict=True
        ):
            assert (reason == "tool") == bool(failure)
            if failure:
                failed += 1
                assert failure.startswith("tool shaky: "), failure
                assert turns[-1]["text"].rstrip("]").rstrip()[-1:] in ("7", "8")
            finished += reason == "stop"
            cut += any(CUT in turn["result"] for turn in turns)
        assert figures["tools/failed_share"] == sum(map(bool, output["failure"])) / 48
        assert figures["train/grad_norm"] >= 0
        assert all("shaky" in alarm for alarm in experiment.alarms(result) if "tool" in alarm)
    assert cut >= 1
    assert finished >= 20
    assert 2 <= failed < 48


def called(user: ToolUser, texts: list[str], place: Place = Place()) -> Batch:  # noqa: B008
    """Trajectories behind a first turn each, with what the tools answered to it."""
    user.load(place)
    tokenizer = user.model.tokenizer()
    drawn = [
        Completion(
            item,
            torch.tensor(ids := tokenizer(text)["input_ids"]),
            torch.full((len(ids),), -1.0),
            torch.zeros(len(ids), dtype=torch.int64),
            0,
            "stop",
        )
        for item, text in enumerate(texts)
    ]
    prompts = Batch({"seed": list(range(len(texts)))})
    episodes = begin_episodes(prompts, samples_per_prompt=1, greedy=False)
    found: Batch = user.call(with_turns(episodes, drawn))
    user.close()
    return found


def test_calls_of_a_turn_that_ends_its_trajectory_are_counted(
    tiny_recipe: MakeRecipe, warmed: ModelSource
) -> None:
    """They had run, and figures did not say so."""
    episode = tiny_recipe(episode={"max_tokens": 10}).episode
    shaky_tool = ToolPart(tool=f"{__name__}:shaky")
    user = ToolUser(warmed, episode, ["shaky"], [shaky_tool])
    found = called(user, ["[2*7]", "[20*6]", "[2/0]", "[2*6]"])
    assert found["finish_reason"] == ["tool", "length", "length", "stop"]
    (failed,), (long,), (wrong,), _ = found["turns"]
    assert [turn.tools for turn in (failed, long, wrong)] == [("shaky",)] * 3
    assert [turn.errors for turn in (failed, long, wrong)] == [0, 0, 1]
    assert min(turn.seconds for turn in (failed, long, wrong)) > 0
    assert [turn.result_end for turn in (failed, long)] == [5, 6]


def test_a_stage_makes_progress_with_each_call_of_a_tool(
    tiny_recipe: MakeRecipe, warmed: ModelSource
) -> None:
    """All calls stood under one deadline, and tools that are slow but work ended the run."""
    heard: list[int] = []
    place = Place(goes_on=lambda: heard.append(threading.get_ident()))
    user = ToolUser(warmed, tiny_recipe().episode, ["calculator"], [ToolPart(tool="calculator")])
    called(user, ["[2*7]", "[2*6]", "#12", "[2/0]"], place)
    assert heard == [threading.get_ident()] * 3


def test_behind_a_turn_that_a_text_has_ended_comes_the_end_token(
    tiny_recipe: MakeRecipe, chat_folder: Path
) -> None:
    """A chat template writes it before a tool's answer; `generation.stop` had left it out."""
    episode = tiny_recipe(episode={"max_tokens": 200}).episode
    user = ToolUser(
        ModelSource(str(chat_folder)), episode, ["calculator"], [ToolPart(tool="calculator")]
    )
    call = '<tool_call>{"name": "calculator", "arguments": {"formula": "2*6"}}</tool_call>'
    found = called(user, [call])
    tokenizer = user.model.tokenizer()
    text = tokenizer.decode(found["completion_ids"][0])
    assert text == f"{call}<eos>(answer)12(end)(assistant)"
    assert found["loss_mask"][0].sum() == len(call)


def test_real_processes_that_die_or_hang_cost_their_trajectories(
    tiny_recipe: MakeRecipe, warmed: ModelSource
) -> None:
    pytest.importorskip("mcp", reason="needs the extra mcp")
    calls = ["[2*7]", "[2*8]", "[2*9]", "[2*6]", "[2/0]", "#12"]
    episode = tiny_recipe().episode.model_copy(update={"tool_deadline_seconds": 5.0})
    tokenizer = warmed.tokenizer()
    found = called(ToolUser(warmed, episode, ["shaky"], [SHAKY_SERVER]), calls)
    died, hung, *others = found["tool_failure"]
    assert died.startswith("tool shaky: ")
    assert hung.startswith("tool shaky: no answer in time")
    assert others == [""] * 4
    assert found["finish_reason"] == ["tool", "tool", "stop", "stop", "stop", "stop"]
    assert found["done"].tolist() == [True, True, False, False, False, True]
    texts = [tokenizer.decode(row) for row in found["completion_ids"].rows()]
    assert texts[2].startswith("[2*9]{99999")
    assert texts[2].endswith(f"{CUT}}}")
    assert texts[3] == "[2*6]{12}"
    assert texts[4].startswith("[2/0]{")
    assert [turns[0].errors for turns in found["turns"]][4] == 1
