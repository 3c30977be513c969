"""Prompts as turns of a conversation, where the model's tokenizer has a chat template."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from m2flow.errors import UserError
from m2flow.models import causal_lm
from m2flow.models.causal_lm import TinySpec, build_tiny
from m2flow.models.chat_template import DATE, written
from m2flow.models.tokenizer import byte_tokenizer
from m2flow.plan import parse_lanes
from m2flow.workloads.common import Examination
from m2flow.workloads.reasoning import evaluation
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.data import DEFAULT_TEMPLATE
from m2flow.workloads.reasoning.encoding import Chat, chat_of, prompt_rows, turn_end
from m2flow.workloads.reasoning.evaluation import answered, as_trained
from m2flow.workloads.reasoning.experiment import ReasoningExperiment
from m2flow.workloads.reasoning.flow import recipe_flow
from m2flow.workloads.reasoning.tasks import Problem, gym
from m2flow.workloads.reasoning.workers.source import TEMPLATES, ModelSource

MakeRecipe = Any

TEMPLATE = (
    "{% if messages[0].role != 'system' %}[default]{% endif %}"
    "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}</{{ turn.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)
"""Of the form that Qwen's have: a system turn of its own where none is given."""


def tokenizer_with_template() -> Any:
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    spec = TinySpec(hidden_size=16, num_hidden_layers=1, intermediate_size=16)
    build_tiny(spec, vocab_size=258, eos_token_id=256, pad_token_id=257, seed=0).save_pretrained(
        path
    )
    tokenizer_with_template().save_pretrained(path)
    return path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    lines = [{"question": f"{a}+{b}", "answer": a + b} for a in range(5) for b in range(4)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def recipe_on(make: MakeRecipe, folder: Path, rows: Path, **data: Any) -> Any:
    return make(
        model={"path": str(folder)},
        warmup={"steps": 0},
        data={"task": "jsonl", "path": str(rows), "template": "{question}=", "options": {}, **data},
    )


def first_prompt(experiment: ReasoningExperiment) -> tuple[str, str]:
    """Of the first problem: the task's prompt, and what the model reads."""
    batch = experiment.batch(0)
    return batch["prompt"][0], byte_tokenizer().decode(batch["prompt_ids"][0])


def test_a_template_is_used_where_there_is_one(
    tiny_recipe: MakeRecipe, folder: Path, rows: Path
) -> None:
    prompt, read = first_prompt(ReasoningExperiment(recipe_on(tiny_recipe, folder, rows)))
    assert read == f"[default]<user>{prompt}</user><assistant>"


def test_the_system_prompt_and_options_reach_the_template(
    tiny_recipe: MakeRecipe, folder: Path, rows: Path
) -> None:
    data = {"system_prompt": "Add.", "chat_options": {"enable_thinking": False}}
    experiment = ReasoningExperiment(recipe_on(tiny_recipe, folder, rows, **data))
    prompt, read = first_prompt(experiment)
    assert read == f"<system>Add.</system><user>{prompt}</user><assistant><think></think>"
    held_out = experiment.held_out()
    assert held_out is not None
    assert byte_tokenizer().decode(held_out["prompt_ids"][0]).startswith("<system>Add.")


DATED = (
    "{% if not date_string is defined %}"
    "{% if strftime_now is defined %}{% set date_string = strftime_now('%d %b %Y') %}"
    "{% else %}{% set date_string = 'never' %}{% endif %}{% endif %}"
    "{% macro hour() %}{{ strftime_now('%-H:%M') }}{% endmacro %}"
    "[{{ date_string }}, {{ hour() }}]{% if tools %}[tools]{% endif %}{{ messages[-1].content }}"
)
"""A template that asks for the date, as Llama 3.2's."""


class Clock(datetime):
    """Tells a day on which the tests do not run."""

    @classmethod
    def now(cls, tz: Any = None) -> Clock:
        return cls(1999, 12, 31, 23, 59)


@pytest.mark.parametrize("named", [False, True])
def test_prompts_are_the_same_on_every_day(named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = {"default": DATED, "tool_use": DATED} if named else DATED
    problems = [Problem("1+1=", "2")]
    today = prompt_rows(tokenizer, problems, Chat())
    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    assert rendered == "[31 Dec 1999, 23:59]", "so transformers tells it"
    assert prompt_rows(tokenizer, problems, Chat()) == today
    assert tokenizer.decode(today[0]) == "[26 Jul 2024, 0:00]1+1="
    chosen = Chat(options={"date_string": "1 Jan 2026", "tools": [{"type": "function"}]})
    (row,) = prompt_rows(tokenizer, problems, chosen)
    assert tokenizer.decode(row) == "[1 Jan 2026, 0:00][tools]1+1="


@pytest.mark.parametrize("form", ["%d %B %Y", "%Y-%m-%d", "%A, %-d. %b %y", "%H:%M:%S", "%j"])
def test_a_date_has_the_form_that_its_template_asks_for(form: str) -> None:
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = f"\n {{{{- strftime_now({form!r}) }}}}\n"
    text = written(tokenizer, [{"role": "user", "content": ""}], {})
    assert text == DATE.strftime(form)


IM = (
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen's base models have it, whose end token is not that of a turn."""


@pytest.mark.parametrize(
    ("template", "special", "end"),
    [
        (IM, ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
        (IM, ["<|im_start|>", "<|im_end|>", "<|im_end|>\n"], "<|im_end|>\n"),
        (IM, ["<|im_start|>"], None),
        (IM.replace("<|im_end|>", " {{ eos_token }}"), [], "<eos>"),
        ("{{ raise_exception('no turns of a model') }}", ["<|im_end|>"], None),
        (TEMPLATE, ["<|im_end|>"], None),
        ("<|im_start|>nothing that was said", ["<|im_start|>"], None),
        (None, ["<|im_end|>"], None),
    ],
)
def test_what_ends_the_turn_of_a_model(
    template: str | None, special: list[str], end: str | None
) -> None:
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    found = turn_end(tokenizer, {})
    assert found == (tokenizer.eos_token if end == "<eos>" else end)


@pytest.mark.parametrize("chat", [None, False])
def test_answers_end_with_the_models_turn(
    tiny_recipe: MakeRecipe, folder: Path, rows: Path, chat: bool | None
) -> None:
    """Of a base model, whose end token is another one; it had gone on with further turns."""
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = IM
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(folder)
    recipe = recipe_on(tiny_recipe, folder, rows, chat=chat)
    generator = recipe_flow(recipe, ModelSource(str(folder), "float32")).generator
    ids, strings = generator.model.ends(generator.stop_strings())
    turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    own = set(generator.model.stop_ids())
    assert turn not in own
    assert set(ids) == (own if chat is False else {*own, turn})
    assert strings == ()


def test_no_lane_reads_a_tokenizer_to_find_no_template(
    tiny_recipe: MakeRecipe, folder: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane that comes back after a loss loads at once."""
    tokenizer: Any = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    for name in TEMPLATES:
        (folder / name).unlink(missing_ok=True)
    generator = recipe_flow(
        recipe_on(tiny_recipe, folder, rows), ModelSource(str(folder))
    ).generator
    monkeypatch.setattr(causal_lm, "load_tokenizer", None)
    assert generator.stop_strings() == ()
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": IM}))
    with pytest.raises(TypeError):
        generator.stop_strings()


def test_it_can_be_left_out(tiny_recipe: MakeRecipe, folder: Path, rows: Path) -> None:
    prompt, read = first_prompt(
        ReasoningExperiment(recipe_on(tiny_recipe, folder, rows, chat=False))
    )
    assert read == prompt


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"chat": True}, r"data\.chat: the model's tokenizer has no chat template"),
        ({"system_prompt": "Add."}, "are for a chat template, and none is used"),
        ({"chat_options": {"enable_thinking": False}}, "are for a chat template, and none is used"),
    ],
)
def test_what_needs_a_template_is_refused_without_one(
    tiny_recipe: MakeRecipe, folder: Path, rows: Path, data: dict[str, Any], why: str
) -> None:
    byte_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(UserError, match=why):
        ReasoningExperiment(recipe_on(tiny_recipe, folder, rows, **data))


TRAINED = (
    "{% for turn in messages %}{% if turn.role == 'tool' %}{% continue %}{% endif %}"
    "{% generation %}{{ turn.content }}{{ eos_token }}{% endgeneration %}{% endfor %}"
    "{% set effort = reasoning_effort | default('low') %}"
    "{% macro shown(what) %}{{ what }}{{ builtin }}{% endmacro %}{{ shown(effort) }}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ raise_exception('none') if not messages }}"
)
"""With what transformers adds to the language, and variables of all kinds."""


@pytest.mark.parametrize(
    ("template", "options", "said"),
    [
        (TEMPLATE, {"enable_thinkin": False}, ["did you mean 'enable_thinking'"]),
        (TEMPLATE, {"effort": "low"}, ["'effort'", "that it reads: enable_thinking"]),
        (TEMPLATE, {"enable_thinking": False, "thinking": False}, ["{'thinking': False}"]),
        (TEMPLATE, {"add_generation_prompt": False}, ["'add_generation_prompt'"]),
        (TEMPLATE, {"tools": []}, ["'tools'"]),
        (TEMPLATE, {"turn": 1}, ["'turn'"]),
        (IM, {"enable_thinking": False}, ["'enable_thinking'", "expected none"]),
        (TRAINED, {"effort": 1}, ["'effort'", "builtin, eos_token, reasoning_effort"]),
        (TRAINED, {"what": 1}, ["'what'", "builtin, eos_token, reasoning_effort"]),
        (TEMPLATE, {"enable_thinking": "false"}, ["is a text", "expected enable_thinking: false,"]),
        (TEMPLATE, {"enable_thinking": "True"}, ["is a text", "expected enable_thinking: true,"]),
        ("{% for turn in messages %}{{ turn", {"a": 1}, ["cannot be read", "TemplateSyntaxError"]),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(
    template: str, options: dict[str, Any], said: list[str]
) -> None:
    """A mistyped switch was passed over, and a text is true whatever it says."""
    tokenizer: Any = byte_tokenizer()
    for templates in (template, {"default": template, "other": "{{ enable_thinkin }}"}):
        tokenizer.chat_template = templates
        with pytest.raises(UserError, match=r"^data\.chat_options: ") as caught:
            chat_of(tokenizer, None, None, options)
        assert "\n" not in str(caught.value)
        assert all(part in str(caught.value) for part in said), caught.value


def test_options_of_templates_without_a_default_are_one_line() -> None:
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = {"rag": TEMPLATE, "tool_use": TEMPLATE}
    with pytest.raises(UserError, match=r"^data\.chat_options: .*cannot be read \(ValueError: "):
        chat_of(tokenizer, None, None, {"enable_thinking": False})


@pytest.mark.parametrize(
    ("template", "options"),
    [
        (TEMPLATE, {"enable_thinking": False}),
        (DATED, {"date_string": "1 Jan 2026", "tools": [{"type": "function"}]}),
        (TRAINED, {"reasoning_effort": "high", "builtin": "true-false", "eos_token": ""}),
        ({"plain": IM, "long": TEMPLATE}, {"chat_template": "long", "enable_thinking": True}),
        ({"default": IM, "tool_use": DATED}, {"date_string": "", "tools": [{"type": "function"}]}),
    ],
)
def test_options_that_a_template_reads_are_taken(template: Any, options: dict[str, Any]) -> None:
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = template
    assert chat_of(tokenizer, None, "Add.", options) == Chat("Add.", options)


def test_tools_choose_the_template_whose_variables_count() -> None:
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": DATED}
    schemas, dated = [{"type": "function"}], {"date_string": "1 Jan 2026"}
    chat = chat_of(tokenizer, None, None, dated, tools=schemas)
    assert chat == Chat(None, {"tools": schemas, **dated})
    with pytest.raises(UserError, match="enable_thinking"):
        chat_of(tokenizer, None, None, {"enable_thinking": False}, tools=schemas)
    tokenizer.chat_template = IM
    assert chat_of(tokenizer, None, tools=schemas) == Chat(None, {"tools": schemas})


def test_options_that_would_change_nothing_are_refused_wherever_they_are_said(
    tiny_recipe: MakeRecipe, folder: Path, rows: Path
) -> None:
    wrong = {"chat_options": {"enable_thinkin": False}}
    with pytest.raises(UserError, match=r"^data\.chat_options: .*did you mean 'enable_thinking'"):
        ReasoningExperiment(recipe_on(tiny_recipe, folder, rows, **wrong))
    judged = tiny_recipe(judge={"path": str(folder), **wrong})
    with pytest.raises(UserError, match=r"^judge\.chat_options: .*did you mean 'enable_thinking'"):
        ReasoningExperiment(judged)
    asked = Examination(folder, rows, max_new_tokens=2, **wrong)
    with pytest.raises(UserError, match=r"^--chat-option: .*did you mean 'enable_thinking'"):
        answered(asked)


def test_a_conversation_must_fit_into_the_context(
    tiny_recipe: MakeRecipe, folder: Path, rows: Path
) -> None:
    """The last rows are read too where only the turns around them are too long."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 60}))
    fits = recipe_on(tiny_recipe, folder, rows)
    ReasoningExperiment(fits)
    with pytest.raises(UserError, match="does not fit into the model's context"):
        ReasoningExperiment(recipe_on(tiny_recipe, folder, rows, system_prompt="x" * 20))


def test_a_template_that_fails_is_one_line(
    tiny_recipe: MakeRecipe, folder: Path, rows: Path
) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('only two turns') }}")
    with pytest.raises(UserError, match="only two turns"):
        ReasoningExperiment(recipe_on(tiny_recipe, folder, rows))


def test_special_tokens_are_not_added_twice() -> None:
    class Adding:
        """Puts a token before every text, as Llama's tokenizer does."""

        chat_template = TEMPLATE

        def apply_chat_template(self, turns: Any, **_: Any) -> str:
            return "".join(turn["content"] for turn in turns)

        def __call__(self, texts: list[str], add_special_tokens: bool = True) -> Any:
            first = [0] if add_special_tokens else []
            return {"input_ids": [[*first, len(text)] for text in texts]}

    abc = Problem("abc", "")
    assert prompt_rows(Adding(), [abc], None) == [[0, 3]]
    assert prompt_rows(Adding(), [abc], Chat(system="xy")) == [[5]]
    assert chat_of(Adding(), None) == Chat()
    assert chat_of(byte_tokenizer(), None) is None


def test_a_prompt_is_no_text_that_has_ended() -> None:
    class Ending:
        """Puts a token behind every text, as tokenizers with `add_eos_token` do."""

        eos_token_id = 9

        def __call__(self, texts: list[str]) -> Any:
            return {"input_ids": [[*map(len, text), 9] for text in texts]}

    assert prompt_rows(Ending(), [Problem("abc", ""), Problem("", "")], None) == [[1, 1, 1], [9]]


def test_examinations_speak_as_training_does(
    folder: Path, rows: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    text = Chat.text

    def noted(chat: Chat, tokenizer: Any, prompt: str, before: Any) -> str:
        read.append(text(chat, tokenizer, prompt, before))
        return read[-1]

    monkeypatch.setattr(Chat, "text", noted)
    asked = Examination(
        folder, rows, max_new_tokens=2, limit=1, template="{question}=", lanes=parse_lanes("cpu:1"),
        system_prompt="Add.",
    )  # fmt: skip
    answered(asked)
    assert read == ["<system>Add.</system><user>0+0=</user><assistant>"]
    answered(replace(asked, chat_options={"enable_thinking": False}))
    assert read[-1] == f"{read[0]}<think></think>"


def checkpoint_of(recipe: ReasoningRecipe, run: Path) -> Path:
    """Where a checkpoint of such a run would lie."""
    checkpoint = run / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    (run / "config.yaml").write_text(json.dumps(recipe.model_dump(mode="json")))
    return checkpoint


def test_sums_are_asked_as_they_stand(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    asked = Examination(checkpoint_of(tiny_recipe(), tmp_path), None)
    assert as_trained(asked, None).template == "{question}"


def test_a_checkpoint_is_asked_as_its_run_has_trained(
    tiny_recipe: MakeRecipe, folder: Path, rows: Path, tmp_path: Path
) -> None:
    data = {"chat_options": {"enable_thinking": False}, "system_prompt": "Be brief."}
    recipe = recipe_on(tiny_recipe, folder, rows, **data)
    generation = recipe.generation.model_copy(update={"stop": ("#",), "max_new_tokens": 7})
    recipe = recipe.model_copy(update={"generation": generation})
    asked = Examination(checkpoint_of(recipe, tmp_path / "run"), rows)
    trained = as_trained(asked, 1000)
    assert (trained.chat_options, trained.system_prompt) == tuple(data.values())
    assert (trained.stop, trained.max_new_tokens) == (("#",), 7)
    assert trained.template == recipe.data.template is not None
    wanted = replace(
        asked, chat=True, chat_options={"a": 1}, system_prompt="", stop=(), max_new_tokens=9,
        template="{question}?", temperature=0.5, reward="number", dtype="bfloat16",
    )  # fmt: skip
    assert as_trained(wanted, 1000) == wanted
    bare = as_trained(replace(asked, chat=False), 1000)
    assert (bare.chat_options, bare.system_prompt) == ({}, None)


def test_a_checkpoint_of_generated_problems_is_asked_for_tags_as_they_were(
    tiny_recipe: MakeRecipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe(data={"task": "gym", "dataset": "chain_sum"})
    asked = Examination(checkpoint_of(recipe, tmp_path / "run"), tmp_path / "rows.jsonl")
    assert as_trained(asked, None).template == gym.DEFAULT_TEMPLATE


def test_a_model_that_no_run_has_made_is_asked_as_real_ones_are(folder: Path, rows: Path) -> None:
    asked = Examination(folder, rows)
    lengths = [as_trained(asked, size).max_new_tokens for size in (1000, 32768, None)]
    assert lengths == [500, 4096, 4096]
    alone = as_trained(asked, None)
    assert (alone.template, alone.stop, alone.chat_options) == (DEFAULT_TEMPLATE, (), {})
    assert (alone.chat, alone.system_prompt) == (None, None)
    assert [as_trained(replace(asked, samples=n), None).temperature for n in (1, 2)] == [0, 1]


def test_what_an_engine_does_not_compute_in_is_refused(folder: Path, rows: Path) -> None:
    asked = Examination(folder, rows, dtype="float16", lanes=parse_lanes("cpu:1"))
    with pytest.raises(UserError, match=r"--dtype: is unknown .*float32 or bfloat16"):
        answered(asked)


@pytest.mark.parametrize("chat", [None, False])
def test_what_is_asked_reaches_the_generator(
    folder: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, chat: bool | None
) -> None:
    class Made(Exception):
        pass

    def made(model: Any, **settings: Any) -> Any:
        raise Made(settings)

    monkeypatch.setattr(evaluation, "Generator", made)
    asked = Examination(
        folder, rows, dtype="float64", cache_gb=0.5, stop=("#",), max_new_tokens=3, chat=chat,
        template="{question}=", lanes=parse_lanes("cpu:1"),
    )  # fmt: skip
    with pytest.raises(Made) as caught:
        answered(asked)
    (settings,) = caught.value.args
    wanted = {"dtype": "float64", "cache_gb": 0.5, "stop": ("#",), "max_new_tokens": 3}
    assert settings.items() >= wanted.items()
    assert settings["chat_options"] == (None if chat is False else {})
