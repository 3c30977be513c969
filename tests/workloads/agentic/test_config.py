"""What an agentic recipe refuses, in one line, before anything starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from m2flow.errors import UserError
from m2flow.flow import Batch
from m2flow.workloads.agentic.config import AgenticRecipe
from m2flow.workloads.agentic.dialect import TagDialect
from m2flow.workloads.agentic.experiment import AgenticExperiment, turn_figures
from m2flow.workloads.agentic.flow import episode_of
from m2flow.workloads.agentic.tasks.lookup import HELD_OUT, KNOWN, Lookup, code, friend, passages
from m2flow.workloads.reasoning.learning import loss_of
from m2flow.workloads.reasoning.workers.columns import kept
from tests.cli.conftest import run_command

MakeRecipe = Any
RECIPES = Path(__file__).parents[3] / "recipes"
CALCULATOR = RECIPES / "agentic-calculator.yaml"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("tools=calculater", r"tools.*is no tool .*did you mean 'calculator'"),
        ("tools=[]", "tools"),
        ("tools=search", "cannot use these options: .*corpus"),
        ("tools=[{tool: search, options: {corpus: nowhere.jsonl}}]", "corpus cannot be read"),
        ("tools=[{tool: mcp, options: {command: [/no/server]}}]", "mcp"),
        ("episode.max_turns=0", r"episode\.max_turns"),
        ("episode.max_tokens=8", r"generation\.max_new_tokens: .*at most episode\.max_tokens = 8"),
        ("episode.call=['', ']']", r"episode\.call"),
        ("episode.tool_deadline_seconds=0", r"episode\.tool_deadline_seconds"),
        (
            "episode.tool_deadline_seconds=1e9",
            r"tool_deadline_seconds.*less than or equal to 1000000",
        ),
        (
            "agent={function: 'my:agent', deadline_seconds: 1e9}",
            r"agent\.deadline_seconds.*less than or equal to 1000000",
        ),
        ("episode.dialect=chat", "cannot write turns of tools"),
        ("episode.credit=turn", r"episode\.credit: .*turn_reward"),
        ("agent=my:agent", r"warmup\.steps: demonstrations are of m2flow's own tools"),
        ("algorithm.name=ppo", r"algorithm\.name: trajectories are compared within groups"),
        ("algorithm.overlong_buffer=2", r"algorithm\.overlong_buffer"),
        (
            "algorithm={equal_groups: drop, further_draws: 2}",
            r"further_draws: is for answers of one",
        ),
        ("judge.path=x", r"judge\.path: is for answers of one turn"),
        ("turn_reward=nobody:knows", "turn_reward: there is no module nobody"),
        ("data.task=addition", r"data\.task"),
        ("data.options={tool_share: 2}", r"data\.options\.tool_share: must be a share"),
        ("episode.max_turn=2", r"episode\.max_turn: unknown key.*max_turns"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(override: str, said: str, tmp_path: Path) -> None:
    import re

    done = run_command(
        "train", CALCULATOR, override, "--mode", "eager", "--run-dir", tmp_path / "run"
    )
    assert done.code == 2, done.err
    lines = [line for line in done.err.splitlines() if line.startswith("error")]
    assert len(lines) == 1, done.err
    assert re.search(said, lines[0]), lines[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("section", "key"),
    [({"episode": {"dialect": "tags"}}, "episode.dialect"),
     ({"episode": {"call": ("<a>", "</a>")}}, "episode.call"),
     ({"episode": {"result": ("<b>", "</b>")}}, "episode.result"),
     ({"data": {"system_prompt": "Be brief."}}, "data.system_prompt")],
)  # fmt: skip
def test_what_an_agent_does_itself_is_refused(
    tiny_recipe: MakeRecipe, section: dict[str, Any], key: str
) -> None:
    with pytest.raises(ValueError, match=rf"{key}: an agent"):
        tiny_recipe(agent="my:agent", warmup={"steps": 0}, **section)


def test_schemas_of_tools_are_told_where_calls_are_json(
    tiny_recipe: MakeRecipe, chat_folder: Path
) -> None:
    """In tags, or where prompts stay as they are, the template's own form would mislead."""
    told = {"model": {"path": str(chat_folder)}, "warmup": {"steps": 0}}
    for changes, wanted in (
        ({}, True), ({"episode": {"dialect": "tags"}}, False), ({"data": {"chat": False}}, False),
    ):  # fmt: skip
        experiment = AgenticExperiment(tiny_recipe(**told, **changes))
        prompt = bytes(t for t in experiment.batch(0)["prompt_ids"][0].tolist() if t < 256)
        assert (b"<tools>" in prompt) is wanted


def test_without_a_chat_template_calls_stand_between_tags(
    tiny_recipe: MakeRecipe, chat_folder: Path
) -> None:
    """Calls were read as JSON in turns of a template that nobody had told of any tool."""
    words = {"model": {"path": str(chat_folder)}, "warmup": {"steps": 0}, "data": {"chat": False}}
    experiment = AgenticExperiment(tiny_recipe(**words))
    assert isinstance(experiment._dialect_of(experiment._starting_tokenizer()), TagDialect)
    workers = experiment.flow().workers
    for name in ("generator", "tools"):
        assert vars(workers[name])["episode"].dialect == "tags"
    for more in ({"episode": {"dialect": "chat"}}, {"agent": "tests.workloads.agentic:some"}):
        with pytest.raises(UserError, match=r"^data\.chat: .*turns of a chat template"):
            episode_of(tiny_recipe(**words, **more))


def distance(start: str, end: str) -> str:
    """Say how far it is."""
    return f"{start} {end}"


def test_a_tool_that_needs_two_arguments_is_refused_between_tags(
    tiny_recipe: MakeRecipe, chat_folder: Path
) -> None:
    """Every call of it was a wrong one."""
    words = {"tools": f"{__name__}:distance", "warmup": {"steps": 0}}
    said = r"^tools: .* needs start, end \(got 'distance'\).*set episode\.dialect to chat"
    with pytest.raises(UserError, match=said) as refused:
        AgenticExperiment(tiny_recipe(**words))
    assert "\n" not in str(refused.value)
    AgenticExperiment(tiny_recipe(**words, model={"path": str(chat_folder)}))


def test_facts_are_found_and_nobody_knows_them_by_heart() -> None:
    facts = passages()
    assert len(facts) == 2 * len({*HELD_OUT, *KNOWN}) == 1200
    name = HELD_OUT[0]
    assert f"{name}: {name} code {code(name)}" in facts
    assert f"{name}: {name} friend {friend(name)}" in facts
    task: Any = Lookup(seed=3)
    held_out = {problem.prompt.split()[0] for problem in task.held_out(64)}
    assert held_out <= set(HELD_OUT)
    asked = [task.train(n) for n in range(300)] + [task.demonstration(n) for n in range(300)]
    names = {(one.prompt if hasattr(one, "prompt") else one[0]).split()[0] for one in asked}
    assert names <= set(KNOWN)
    assert {friend(name) for name in names} <= set(KNOWN)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("count", [20, 512])
def test_held_out_problems_keep_to_the_share_of_friends(share: float, count: int) -> None:
    prompts = [one.prompt for one in Lookup(friend_share=share).held_out(count)]
    assert len(set(prompts)) == len(prompts) <= count
    friends = sum(" friend " in prompt for prompt in prompts)
    assert abs(friends - share * len(prompts)) <= 0.5
    assert len(prompts) == count or friends == len(HELD_OUT) or len(prompts) - friends > 70


def test_a_malformed_call_counts_among_those_that_were_asked() -> None:
    turn = dict.fromkeys(("cut", "seconds", "tokens", "result_tokens"), 0)
    turn = {**turn, "tools": [], "malformed": 1, "errors": 1}
    right = {**turn, "tools": ["search"], "malformed": 0, "errors": 0, "seconds": 2.0}
    output = Batch({"turns": [[turn], [right, turn, turn]], "finish_reason": ["stop", "stop"]})
    assert turn_figures(output)["tools/error_share"] == 0.75
    assert turn_figures(output)["tools/seconds"] == 2.0, "a malformed call takes no time"


def test_a_trajectory_that_has_had_its_turns_was_cut_off(tiny_recipe: MakeRecipe) -> None:
    """`truncated: drop` leaves it out; the share of those that were cut off did not count it."""
    reasons = ["stop", "length", "turns", "stop"]
    turn = {
        "text": "", "tools": [], "malformed": 0, "errors": 0, "cut": 0, "seconds": 0.0,
        "result_tokens": 0,
    }  # fmt: skip
    output = Batch(
        {
            "reward": [1.0, 0.0, 0.0, 1.0],
            "failure": [""] * 4,
            "finish_reason": reasons,
            "num_tokens": [3] * 4,
            "num_prompt_tokens": [4] * 4,
            "turns": [[turn]] * 4,
            "prompt": ["p"] * 4,
            "text": ["t"] * 4,
            "answer": ["a"] * 4,
        }
    )
    kept_B = kept(output, drop_truncated=True)
    assert kept_B.tolist() == [True, False, False, True]
    experiment = AgenticExperiment(tiny_recipe(samples_per_prompt=2))
    result: Any = SimpleNamespace(output=output, step=0, metrics={})
    assert experiment.metrics(result)["length/truncated_share"] == 1 - kept_B.double().mean()
    (alarm,) = experiment.alarms(result)
    assert alarm.startswith("50% of the answers are cut off at episode.max_tokens = 80")
    assert "after episode.max_turns = 3" in alarm


@pytest.mark.parametrize("name", ["dr-grpo", "rloo"])
def test_a_trajectory_s_sum_is_divided_by_what_bounds_it(name: str) -> None:
    """It was divided by the limit of a turn."""
    words = {"algorithm": {"name": name}, "episode": {"max_tokens": 300}}
    assert loss_of(AgenticRecipe.model_validate(words)).token_budget == 300
