"""Agents of others, over HTTP: their trajectories are token-exact, and train as those of a loop."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from m2flow.errors import RunFailed, UserError
from m2flow.flow import Batch, Place
from m2flow.generation.records import Completion
from m2flow.models.causal_lm import load_model
from m2flow.plan import parse_lanes
from m2flow.runtime.driver.launch import launch
from m2flow.tools import ToolCall
from m2flow.workloads.agentic.config import AgenticRecipe, EpisodeSection
from m2flow.workloads.agentic.dialect import ChatDialect
from m2flow.workloads.agentic.endpoint import server as endpoint
from m2flow.workloads.agentic.endpoint.conversation import Conversation, RefusedRequest
from m2flow.workloads.agentic.episodes import begin_episodes
from m2flow.workloads.agentic.evaluation import examine
from m2flow.workloads.agentic.experiment import AgenticExperiment
from m2flow.workloads.common.workload import Examination
from m2flow.workloads.reasoning.workers import ModelSource
from tests.workloads.agentic import some_agents
from tests.workloads.agentic.conftest import chat_tokenizer, save_chat_model
from tests.workloads.agentic.test_record import rolled_out

MakeRecipe = Any
AGENTS = "tests.workloads.agentic.some_agents"
pytestmark = pytest.mark.usefixtures("one_thread")

CHAT: dict[str, Any] = {
    "generation": {"max_new_tokens": 90},
    "episode": {"max_turns": 3, "max_tokens": 400, "max_result_tokens": 300},
    "warmup": {"steps": 120, "samples_per_step": 16, "learning_rate": 1e-2},
}


@pytest.fixture(scope="module")
def chat_recipe(tiny_recipe: MakeRecipe, chat_folder: Path) -> AgenticRecipe:
    """A recipe on a model with a chat template."""
    recipe: AgenticRecipe = tiny_recipe(model={"path": str(chat_folder)}, **CHAT)
    return recipe


@pytest.fixture(scope="module")
def talks(chat_recipe: AgenticRecipe, tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """A model that has seen calls of the calculator in that template."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return AgenticExperiment(chat_recipe).prepare(tmp_path_factory.mktemp("talks"))
    finally:
        torch.set_num_threads(threads)


def with_agent(recipe: AgenticRecipe, name: str, **agent: Any) -> AgenticRecipe:
    data = recipe.model_dump() | {
        "agent": {"function": f"{AGENTS}:{name}", **agent},
        "warmup": {"steps": 0},
    }
    return AgenticRecipe.model_validate(data)


def hosted(experiment: Any, batch: Batch, seen: dict[int, list[list[int]]]) -> Batch:
    """All trajectories of a batch, as agents make them; `seen` is told what the engine saw."""
    generator = experiment.flow().generator
    generator.load(Place())
    submit = generator.engine.submit

    def spy(requests: list[Any]) -> None:
        for request in requests:
            seen[request.id].append(list(request.prompt_ids))
        submit(requests)

    generator.engine.submit = spy
    return Batch.concat([some for some in generator.host(batch) if len(some)])


def check_record(episodes: Batch, seen: dict[int, list[list[int]]], model: Any) -> None:
    """Each turn's context is what stands before it, and what was drawn is as likely as is said."""
    for row, item in enumerate(episodes.ids):
        prompt, ids, mask, logprobs = (
            episodes[name][row].tolist()
            for name in ("prompt_ids", "completion_ids", "loss_mask", "behaviour_logprobs")
        )
        turns = episodes["turns"][row]
        assert seen[item] == [prompt + ids[: turn.begin] for turn in turns]
        drawn = {place for turn in turns for place in range(turn.begin, turn.end)}
        assert [place in drawn for place in range(len(ids))] == mask
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
        plain = [float(logits[len(prompt) - 1 + t, token]) for t, token in enumerate(ids)]
        wanted = [p if mine else 0.0 for p, mine in zip(plain, mask, strict=True)]
        assert logprobs == pytest.approx(wanted, abs=1e-3)


def test_the_record_is_what_the_model_saw_over_random_dialogues(
    chat_recipe: AgenticRecipe, chat_folder: Path
) -> None:
    recipe = with_agent(chat_recipe, "wander")
    recipe = recipe.model_copy(update={"prompts_per_step": 32})
    source = ModelSource(str(chat_folder))
    experiment = AgenticExperiment(recipe, source)
    seen: dict[int, list[list[int]]] = defaultdict(list)
    episodes = hosted(experiment, experiment.batch(0), seen)
    assert sorted(episodes.ids) == list(range(128))
    assert not any(episodes["tool_failure"]), {*episodes["tool_failure"]}
    assert sum(len(turns) > 1 for turns in episodes["turns"]) > 40
    check_record(episodes, seen, load_model(chat_folder, torch.float32))


@pytest.mark.parametrize("agent", ["by_hand", "with_client", "with_streams"])
def test_trajectories_are_those_of_the_loop(
    agent: str, chat_recipe: AgenticRecipe, talks: ModelSource
) -> None:
    if agent != "by_hand":
        pytest.importorskip("openai", reason="needs the extra agents")
    inside = AgenticExperiment(chat_recipe, talks)
    batch = inside.batch(0)
    loop = rolled_out(inside, batch, defaultdict(list))
    outside = AgenticExperiment(with_agent(chat_recipe, agent), talks)
    seen: dict[int, list[list[int]]] = defaultdict(list)
    found = hosted(outside, outside.batch(0).with_columns(prompt_ids=batch["prompt_ids"]), seen)
    assert sorted(found.ids) == sorted(loop.ids)
    names = ("prompt_ids", "completion_ids", "loss_mask")
    equal = with_calls = 0
    for item in loop.ids:
        one, other = loop.take([item]), found.take([item])
        if any(turn.errors > len(turn.tools) for turn in one["turns"][0]):
            continue  # a call that cannot be read is no call to others, and ends their loop
        for name in names:
            assert one[name][0].tolist() == other[name][0].tolist(), (item, name, one["turns"][0])
        logprobs = other["behaviour_logprobs"][0].tolist()
        assert one["behaviour_logprobs"][0].tolist() == pytest.approx(logprobs, abs=1e-5)
        assert one["finish_reason"] == other["finish_reason"]
        assert [t.tools for t in one["turns"][0]] == [t.tools for t in other["turns"][0]]
        equal += 1
        with_calls += len(one["turns"][0]) > 1
    assert equal >= 12
    assert with_calls >= 4


def test_the_record_of_a_framework_is_what_the_model_saw(
    chat_recipe: AgenticRecipe, talks: ModelSource
) -> None:
    pytest.importorskip("agents", reason="needs the extra agents")
    recipe = with_agent(chat_recipe, "with_framework")
    experiment = AgenticExperiment(recipe, talks)
    seen: dict[int, list[list[int]]] = defaultdict(list)
    episodes = hosted(experiment, experiment.batch(0), seen)
    assert not any(episodes["tool_failure"]), episodes["tool_failure"]
    check_record(episodes, seen, load_model(talks.path, torch.float32))
    assert any(turn.tools == ("calculator",) for turns in episodes["turns"] for turn in turns)


def test_training_through_the_endpoint_is_training_by_the_loop(
    chat_recipe: AgenticRecipe, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Client and framework: the loop's samples, figures and weights over two steps of a seed."""
    for package in ("openai", "agents"):
        pytest.importorskip(package, reason="needs the extra agents")
    recipe = AgenticRecipe.model_validate(
        chat_recipe.model_dump()
        | {"reward": f"{__name__}:uneven", "optimizer": {"learning_rate": 1e-3}, "minibatches": 2}
        | {"warmup": {**CHAT["warmup"], "steps": 250}}  # writes no call that cannot be read
    )
    source = AgenticExperiment(recipe).prepare(tmp_path_factory.mktemp("talks well"))
    wide = ModelSource(source.path, "float64")

    def trained(recipe: AgenticRecipe) -> tuple[list[Batch], list[Any], dict[str, torch.Tensor]]:
        settings = recipe.model_dump() | {"warmup": {"steps": 0}}
        settings["model"] = {**settings["model"], "dtype": "float64"}
        experiment = AgenticExperiment(AgenticRecipe.model_validate(settings), wide)
        with launch(experiment.flow(), items_per_step=4, mode="eager") as run:
            results = [run.step(experiment.batch(step)) for step in range(2)]
            weights = run.worker_call("learner", "parameters")
        return [r.output for r in results], [experiment.metrics(r) for r in results], weights

    samples, figures, weights = trained(recipe)
    start = load_model(source.path, torch.float64).state_dict()
    assert all(not torch.equal(start[name], tensor) for name, tensor in weights.items())
    assert [row["tools/error_share"] for row in figures] == [0.0] * 2
    assert all(row["tools/calls"] > 0.3 and row["reward/std"] > 0 for row in figures)
    for agent in ("with_client", "with_framework"):
        found, told, reached = trained(with_agent(recipe, agent))
        for ours, theirs in zip(samples, found, strict=True):
            theirs = theirs.take(ours.ids)
            for name in ("text", "reward", "finish_reason", "num_tokens", "num_prompt_tokens"):
                assert theirs[name] == ours[name], (agent, name)
            assert theirs["advantage"] == pytest.approx(ours["advantage"], abs=1e-9)
        for row, wanted in zip(told, figures, strict=True):
            assert row.keys() == wanted.keys()
            for name in row.keys() - {"tools/seconds"}:  # of the loop's tools alone
                assert row[name] == pytest.approx(wanted[name], abs=1e-7, nan_ok=True), name
        for name, tensor in weights.items():
            assert float((tensor - reached[name]).abs().max()) < 1e-9, (agent, name)


def uneven(prompt: str, completion: str, completion_ids: Any, row: Any) -> float:
    """Worth something else for nearly each text, so that every group has something to learn."""
    return sum(completion_ids) % 7 / 7


def test_what_is_not_served_is_refused(chat_recipe: AgenticRecipe, chat_folder: Path) -> None:
    recipe = with_agent(chat_recipe, "rude").model_copy(update={"samples_per_prompt": 1})
    experiment = AgenticExperiment(recipe, ModelSource(str(chat_folder)))
    batch = experiment.batch(0).select([0])
    hosted(experiment, batch, defaultdict(list))
    told = some_agents.SEEN.pop(batch["prompt"][0])
    assert [status for status, _ in told] == [401, 404, *[400] * 6, 200, 400, 400, 400]
    for status, content in told:
        assert status == 200 or content["error"]["message"]
    assert "each trajectory is one conversation" in told[9][1]["error"]["message"]
    plain = told[8][1]
    message, end, usage = some_agents.SEEN.pop("stream")
    assert message["choices"][0]["delta"] == plain["choices"][0]["message"]
    assert end["choices"][0]["finish_reason"] == plain["choices"][0]["finish_reason"]
    assert usage["usage"] == plain["usage"]
    assert {part["object"] for part in (message, end, usage)} == {"chat.completion.chunk"}


def test_the_recipes_temperature_may_be_said_in_an_evaluation_too(
    chat_recipe: AgenticRecipe, chat_folder: Path
) -> None:
    experiment = AgenticExperiment(with_agent(chat_recipe, "exact"), ModelSource(str(chat_folder)))
    generator = experiment.flow().generator
    generator.load(Place())
    for greedy in (False, True):
        found = [some for some in generator.host(experiment.batch(0), greedy=greedy) if len(some)]
        assert not any(Batch.concat(found)["tool_failure"]), greedy


def test_an_evaluation_of_an_agent_names_no_tools(
    chat_recipe: AgenticRecipe, chat_folder: Path, tmp_path: Path
) -> None:
    """The agent has its own, and the run knows none of them."""
    words = {"workload": "agentic"} | with_agent(chat_recipe, "wander").model_dump(mode="json")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(words))
    found = examine(Examination(chat_folder, recipe, limit=3, lanes=parse_lanes("cpu:1")))
    assert found["about"] == "3 held-out problems"


def test_an_agent_that_fails_costs_its_trajectory(
    chat_recipe: AgenticRecipe, talks: ModelSource
) -> None:
    recipe = with_agent(chat_recipe, "troubled", deadline_seconds=15.0)
    some_agents.SEEN.pop("troubled", None)
    experiment = AgenticExperiment(recipe, talks)
    with launch(experiment.flow(), items_per_step=4, mode="eager") as run:
        result = run.step(experiment.batch(0))
    failures = [why for why in result.output["failure"] if why]
    assert len(failures) == 3, failures
    told = " | ".join(sorted(failures))
    assert "did not end within 15 s" in told
    assert "asked nothing of the policy" in told
    assert "RuntimeError: no idea" in told
    assert experiment.metrics(result)["reward/failed_share"] == 3 / 16


def test_an_agent_that_outgrows_the_models_context_is_cut_off(
    chat_recipe: AgenticRecipe, tmp_path: Path
) -> None:
    """It counted as one that had finished; and what was left of the context was not used."""
    recipe = with_agent(chat_recipe, "goes_on")
    experiment = AgenticExperiment(recipe, ModelSource(str(save_chat_model(tmp_path, 100))))
    episodes = hosted(experiment, experiment.batch(0), defaultdict(list))
    assert not any(episodes["tool_failure"]), episodes["tool_failure"]
    assert set(episodes["finish_reason"]) == {"length"}
    assert all(len(turns) == 1 for turns in episodes["turns"])
    for prompt, ids, mask in zip(
        episodes["prompt_ids"].rows(),
        episodes["completion_ids"].rows(),
        episodes["loss_mask"].rows(),
        strict=True,
    ):
        assert len(prompt) + len(ids) <= 100
        assert bool(mask[-1]), "what nobody reads is not kept"


def test_an_agent_whose_first_request_is_too_long_costs_its_trajectory(
    chat_recipe: AgenticRecipe, tmp_path: Path
) -> None:
    recipe = with_agent(chat_recipe, "verbose")
    experiment = AgenticExperiment(recipe, ModelSource(str(save_chat_model(tmp_path, 100))))
    episodes = hosted(experiment, experiment.batch(0), defaultdict(list))
    said = "the agent's first request does not fit the model's context"
    assert set(episodes["tool_failure"]) == {said}


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ("no_module:f", r"agent\.function: there is no module no_module"),
        (f"{AGENTS}:nobody", r"agent\.function: .* has no nobody"),
        (f"{AGENTS}:BOX", r"agent\.function: BOX is no function"),
        ("solve", r"agent\.function: names no function"),
    ],
)
def test_a_wrong_agent_is_refused(agent: str, said: str, chat_recipe: AgenticRecipe) -> None:
    data = chat_recipe.model_dump() | {"agent": agent, "warmup": {"steps": 0}}
    with pytest.raises(UserError, match=said):
        AgenticExperiment(AgenticRecipe.model_validate(data))


def test_an_agent_needs_a_chat_template(tiny_recipe: MakeRecipe) -> None:
    with pytest.raises(UserError, match="cannot write turns of tools"):
        AgenticExperiment(tiny_recipe(agent=f"{AGENTS}:by_hand", warmup={"steps": 0}))


@pytest.mark.parametrize("length", [0, 91])
@pytest.mark.parametrize("by_agents", [False, True])
def test_an_engine_that_breaks_its_word_is_named(
    chat_recipe: AgenticRecipe, talks: ModelSource, by_agents: bool, length: int
) -> None:
    """No tokens, or more than were asked for: memory and the packing were planned for others."""
    recipe = with_agent(chat_recipe, "by_hand") if by_agents else chat_recipe
    experiment = AgenticExperiment(recipe, talks)
    generator = experiment.flow().generator
    generator.load(Place())
    step = generator.engine.step

    def wrong(*arguments: Any) -> Any:
        some = torch.ones(length, dtype=torch.int64)
        return [replace(one, token_ids=some) for one in step(*arguments)]

    generator.engine.step = wrong
    problems = experiment.batch(0).select([0])
    episodes = begin_episodes(problems, samples_per_prompt=2, greedy=False)
    with pytest.raises(RunFailed, match=rf"item \d+ {length} tokens; it was asked for 1 to 90$"):
        list(generator.host(problems)) if by_agents else generator.turn(episodes)
    assert not generator.engine.busy, "what had begun was dropped"


HELLO = [{"role": "user", "content": "hello"}]


def conversation() -> Conversation:
    tokenizer = chat_tokenizer()
    return talk_of(tokenizer, ChatDialect(tokenizer, 100))


def talk_of(tokenizer: Any, dialect: ChatDialect) -> Conversation:
    return Conversation(tokenizer, dialect, EpisodeSection(), item=0, seed=0, stop_ids=[256])


def said(text: str) -> Completion:
    ids = torch.tensor([*chat_tokenizer()(text)["input_ids"], 256])
    return Completion(0, ids, torch.full((len(ids),), -1.0), torch.zeros_like(ids), 0, "stop")


@pytest.mark.parametrize(
    ("arguments", "same"),
    [
        ('{"word":"\u00e9t\u00e9","times":1}', True),
        ('{ "times": 1, "word": "\\u00e9t\u00e9" }', True),
        ('{"word": "\u00e9t\u00e9", "times": 2}', False),
        ('{"word": "\u00e9t\u00e9", "times": true}', False),
        ("no JSON", False),
        ({"word": "\u00e9t\u00e9", "times": 1}, False),
    ],
)
def test_arguments_of_a_call_may_be_written_anew(arguments: Any, same: bool) -> None:
    """Frameworks read them and write them with other spaces, other escapes, another order."""
    talk = conversation()
    talk.extend(HELLO, [])
    told = '{"name": "f", "arguments": {"word": "\u00e9t\u00e9", "times": 1}}'
    reply = talk.take(said(f"<tool_call>{told}</tool_call>"))
    (call,) = reply["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"word": "\u00e9t\u00e9", "times": 1}
    call = {**call, "function": {**call["function"], "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
    again = [*HELLO, {**reply, "tool_calls": [call]}, answer]
    if same:
        assert talk.extend(again, []) is None
    else:
        with pytest.raises(RefusedRequest, match="each trajectory is one conversation"):
            talk.extend(again, [])


def test_a_reply_that_calls_has_its_thoughts_whole() -> None:
    """It was cut where they name the tags."""
    talk = conversation()
    talk.extend(HELLO, [])
    thoughts = "<think>A call stands in <tool_call> tags.</think>"
    reply = talk.take(said(f'{thoughts}<tool_call>{{"name": "f"}}</tool_call>'))
    assert reply["content"] == thoughts
    assert len(reply["tool_calls"]) == 1


def test_a_call_that_an_agent_shows_is_written_as_the_policy_writes_its_own() -> None:
    """Its arguments, which OpenAI's API has as a text, were a text in the template's JSON too."""
    told = {"name": "f", "arguments": {"word": "\u00e9t\u00e9", "times": 1}}
    function = {**told, "arguments": json.dumps(told["arguments"])}
    call = {"id": "shown", "type": "function", "function": function}
    shown = [
        {"role": "user", "content": "show"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "shown", "content": "ok"},
    ]
    talk = conversation()
    talk.extend([*shown, *HELLO], [])
    reply = talk.take(said("hi"))
    talk.extend([*shown, *HELLO, reply, *shown, *HELLO], [])
    tokenizer = chat_tokenizer()
    for text in (talk.prompt_ids, talk.ids):
        assert ChatDialect(tokenizer, 100).calls(text) == [ToolCall("f", told["arguments"])]


def in_parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_a_content_in_parts_is_one_text_whoever_says_it() -> None:
    """Templates wrote nothing of it, or could not: a tool's answer alone had been made one text."""

    def talked(content: Callable[..., Any]) -> Conversation:
        talk = conversation()
        first = [
            {"role": "system", "content": content("Be ", "brief.")},
            {"role": "user", "content": content("1", "+2=")},
        ]
        talk.extend(first, [])
        reply = {**talk.take(said("3")), "content": content("3")}
        talk.extend([*first, reply, {"role": "user", "content": content("and ", "3+4?")}], [])
        return talk

    found, wanted = talked(in_parts), talked(lambda *texts: "".join(texts))
    assert bytes(wanted.prompt_ids) == b"(system)Be brief.(end)(user)1+2=(end)(assistant)"
    assert (found.prompt_ids, found.ids) == (wanted.prompt_ids, wanted.ids)


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_part_that_is_no_text_is_named(role: str) -> None:
    content = [*in_parts("What is this?"), {"type": "image_url", "image_url": {"url": "data:"}}]
    with pytest.raises(RefusedRequest, match="must be text, and a part is 'image_url'"):
        conversation().extend([{"role": role, "content": content}], [])


def test_a_trajectory_that_was_handed_on_takes_nothing_more() -> None:
    """A reply that was drawn too late would have grown it while its columns are read."""
    talk = conversation()
    talk.extend(HELLO, [])
    talk.close()
    with pytest.raises(RefusedRequest, match="has ended"):
        talk.take(said("late"))
    with pytest.raises(RefusedRequest, match="has ended"):
        talk.extend(HELLO, [])
    assert (talk.ids, talk.mask, talk.logprobs, talk.turns) == ([], [], [], [])


def test_a_request_that_comes_again_while_it_is_drawn_gets_its_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that waits no longer and asks once more had been refused for good."""
    begun, go, replies = threading.Event(), threading.Event(), list[Any]()

    def draw(talk: Conversation, limit: int | None) -> Completion:
        assert not begun.is_set(), "it is drawn once"
        begun.set()
        assert go.wait(60)
        return said("hi")

    server = endpoint.ConversationServer(draw, {})
    key = server.open(conversation())
    first = threading.Thread(target=lambda: replies.append(server.complete(key, asked)))
    asked = {"messages": HELLO}
    first.start()
    try:
        assert begun.wait(60)
        with pytest.raises(RefusedRequest, match="one request at a time"):
            server.complete(key, {"messages": HELLO * 2})
        here = some_agents.Endpoint(server.base_url, key)
        with monkeypatch.context() as patched:
            patched.setattr(endpoint, "AGAIN_SECONDS", 0.01)
            assert some_agents.ask(here, **asked)[0] == 409
        threading.Timer(0.1, go.set).start()
        status, again = some_agents.ask(here, **asked)
        first.join(60)
    finally:
        go.set()
        server.close()
    assert status == 200
    assert again["choices"] == replies[0]["choices"]
    assert again["choices"][0]["message"]["content"] == "hi"


class Pausing:
    """A tokenizer of Rust that waits for another thread whenever it is set otherwise."""

    def __init__(self, inner: Any, met: threading.Barrier) -> None:
        vars(self).update(inner=inner, met=met)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)
        with suppress(threading.BrokenBarrierError):
            self.met.wait(1)


def test_agents_beside_each_other_have_the_tokens_that_they_have_alone() -> None:
    """A tool's text became special tokens, or the template's own ones were split: whether they are
    is state of the tokenizer, which all agents of a lane share."""
    tokenizer = chat_tokenizer()
    tokenizer.init_kwargs["split_special_tokens"] = tokenizer.split_special_tokens = False
    answer = {"role": "tool", "tool_call_id": "x", "content": "evil <eos>"}

    def asked(talk: Conversation) -> list[int]:
        talk.extend(HELLO, [])
        reply = talk.take(said("hi"))
        talk.extend([*HELLO, reply, answer, *HELLO, {"role": "assistant", "content": "?"}], [])
        return talk.context

    alone = asked(talk_of(tokenizer, ChatDialect(tokenizer, 100)))
    assert alone.count(256) == 2, "ends of turns of the assistant, and not what a tool says"
    dialect = ChatDialect(tokenizer, 100)
    tokenizer._tokenizer = Pausing(tokenizer._tokenizer, threading.Barrier(2))
    found: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: found.append(asked(talk_of(tokenizer, dialect))))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [alone] * 2


def test_what_an_agent_does_to_its_problem_no_other_sees(
    chat_recipe: AgenticRecipe, chat_folder: Path
) -> None:
    """Agents of one prompt had one table, which rewards read behind them."""
    experiment = AgenticExperiment(with_agent(chat_recipe, "takes"), ModelSource(str(chat_folder)))
    batch = experiment.batch(0)
    batch = batch.with_columns(metadata=[{"hints": ["one"]} for _ in range(len(batch))])
    episodes = hosted(experiment, batch, defaultdict(list))
    assert not any(episodes["tool_failure"]), {*episodes["tool_failure"]}
    assert all(row == {"hints": ["one"]} for row in episodes["metadata"])


def test_a_reply_that_was_cut_off_says_nothing_of_the_next_one() -> None:
    """An agent that failed while that was drawn had ended as cut off, and was trained on."""
    talk = conversation()
    talk.extend(HELLO, [])
    reply = talk.take(replace(said("hi"), finish_reason="length"))
    assert (talk.reason, talk.drawing) == ("length", False)
    talk.extend([*HELLO, reply, *HELLO], [])
    assert talk.drawing
    talk.take(said("hi"))
    assert not talk.drawing
