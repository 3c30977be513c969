"""From problems to items: prompts as token ids that fit into the model's context.

A model that was tuned on conversations has a chat template beside its tokenizer, and does badly
without it: what it reads then looks like nothing it has seen. So where there is one, a problem is
the user's turn of a conversation, and the model begins the next turn.

What does not fit, or cannot be written in the vocabulary, is refused with the line it came from.
Knows neither recipes nor tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from m2flow.errors import UserError
from m2flow.flow import Batch, Ragged
from m2flow.generation.supported import limit_of
from m2flow.models.chat_template import check_options, written
from m2flow.models.folder import read_json
from m2flow.workloads.reasoning.tasks import Problem

SPECIAL_TOKENS = 8
"""More than any tokenizer puts around a text."""


@dataclass(frozen=True)
class Names:
    """What a person calls the data, and the sizes that a prompt must fit into."""

    data: str = "data"
    max_new_tokens: str = "generation.max_new_tokens"
    context: str = "model.max_position_embeddings"


@dataclass(frozen=True)
class Chat:
    """How a problem becomes a conversation.

    Attributes:
        system: what stands before the user's turn; None for what the template itself puts there.
        options: further variables of the template, such as `enable_thinking`.
    """

    system: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def text(self, tokenizer: Any, prompt: str, before: Sequence[Mapping[str, str]] = ()) -> str:
        """The conversation up to where the model is to answer.

        Args:
            tokenizer: whose template is filled.
            prompt: the user's turn.
            before: turns before it; one of the system stands in for `system`.
        """
        turns = [*map(dict, before), {"role": "user", "content": prompt}]
        if self.system is not None and turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": self.system})
        return written(tokenizer, turns, self.options, add_generation_prompt=True)


def turn_end(tokenizer: Any, options: Mapping[str, Any]) -> str | None:
    """The special token with which a chat template ends what the model says; None for none.

    A base model's end token is another one, such as `<|endoftext|>` beside `<|im_end|>`.

    Args:
        tokenizer: with the template, or without one.
        options: variables of the template.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    said = "m2flow said"
    turns = [{"role": "user", "content": "m2flow asked"}, {"role": "assistant", "content": said}]
    try:
        text = written(tokenizer, turns, options)
    except Exception:  # noqa: BLE001, a template's own code: it need not write the model's turns
        return None
    _, found, rest = text.rpartition(said)
    if not found:
        return None
    special = [str(one) for one in tokenizer.added_tokens_decoder.values() if one.special]
    fitting = [one for one in special if rest.lstrip().startswith(one)]
    return max(fitting, key=len, default=None)


def chat_of(
    tokenizer: Any,
    wanted: bool | None,
    system: str | None = None,
    options: Mapping[str, Any] | None = None,
    key: str = "data.chat",
    options_key: str = "data.chat_options",
    tools: Sequence[Mapping[str, Any]] = (),
) -> Chat | None:
    """How problems become conversations for a model; None where they stay as they are.

    Args:
        tokenizer: the model's.
        wanted: whether to; None where the tokenizer has a template.
        system, options: as for `Chat`.
        key, options_key: of `wanted` and of `options`, for messages.
        tools: of which a template is told too, unless the options say which.

    Raises:
        UserError: there is no template and one is asked for; or there is and it is refused what
            only it could use; or an option would change nothing that it writes.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if wanted and not has_template:
        raise UserError(
            "the model's tokenizer has no chat template",
            key=key,
            value=True,
            hint="a base model has none: leave it out, and say in the prompt what is wanted",
        )
    if wanted is None:
        wanted = has_template
    if not wanted and (system is not None or options):
        raise UserError(
            "a system prompt and options are for a chat template, and none is used",
            key=key,
            value=False,
            hint="put the text into the prompt's own template",
        )
    if not wanted:
        return None
    options = options or {}
    check_options(tokenizer, options, tools or None, options_key)
    return Chat(system, {"tools": tools, **options} if tools else options)


def prompt_rows(
    tokenizer: Any, problems: Sequence[Problem], chat: Chat | None, key: str = "data"
) -> list[list[int]]:
    """Token ids of prompts, as turns of a conversation where `chat` says so.

    Raises:
        UserError: under the name `key`, if they cannot be written so.
    """
    if chat is None and any(problem.before for problem in problems):
        raise UserError(
            "holds conversations of several turns, which only a chat template can write",
            key=key,
            hint="take a model whose tokenizer has one, or rows whose question is a text",
        )
    rows: list[list[int]]
    try:
        if chat is None:
            rows = tokenizer([problem.prompt for problem in problems])["input_ids"]
            # Some tokenizers end every text: a policy would have to go on behind that end.
            end = [getattr(tokenizer, "eos_token_id", None)]
            return [row[:-1] if row[1:][-1:] == end else row for row in rows]
        texts = [_written(chat, tokenizer, problem, key) for problem in problems]
        # The template has written special tokens; the tokenizer would add some of them again.
        rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"the model's tokenizer cannot encode the prompts ({type(error).__name__}: {error})",
            key=key,
            expected="text that can be written in its vocabulary",
        ) from error
    return rows


def _written(chat: Chat, tokenizer: Any, problem: Problem, key: str) -> str:
    """The conversation of a problem, in the tokenizer's own template, which may refuse it."""
    try:
        return chat.text(tokenizer, problem.prompt, problem.before)
    except Exception as error:
        raise UserError(
            "the chat template of the model's tokenizer cannot write the prompts "
            f"({type(error).__name__}: {error})",
            key=key,
            hint="mend the template in the model's folder, or set data.chat to false",
        ) from error


def encode(
    problems: Sequence[Problem],
    seeds: Sequence[int],
    tokenizer: Any,
    context: int | None,
    max_new_tokens: int,
    names: Names = Names(),
    chat: Chat | None = None,
) -> Batch:
    """Problems as items.

    Args:
        problems: the problems.
        seeds: one for each; what is sampled for an item depends on its seed alone.
        tokenizer: turns prompts into token ids.
        context: positions of the model; None for no limit.
        max_new_tokens: room that an answer needs.
        names: for messages.
        chat: how a prompt becomes a conversation; None for the prompt alone.

    Raises:
        UserError: a prompt does not fit into the context, or cannot be written in the vocabulary,
            or nothing of it can.
    """
    rows = token_rows(problems, tokenizer, context, max_new_tokens, names, chat)
    batch = Batch(
        {
            "prompt_ids": Ragged.from_rows([torch.tensor(ids) for ids in rows]),
            "prompt": [problem.prompt for problem in problems],
            "answer": [problem.answer for problem in problems],
            "metadata": [dict(problem.metadata) for problem in problems],
            "seed": list(seeds),
        }
    )
    if not any(problem.before for problem in problems):
        return batch
    return batch.with_columns(before=[tuple(problem.before) for problem in problems])


def token_rows(
    problems: Sequence[Problem],
    tokenizer: Any,
    context: int | None,
    max_new_tokens: int,
    names: Names,
    chat: Chat | None = None,
) -> list[list[int]]:
    """Token ids of each prompt; arguments and errors are those of `encode`."""
    rows = prompt_rows(tokenizer, problems, chat, names.data)
    for problem, ids in zip(problems, rows, strict=True):
        if not ids:
            raise UserError(
                "its prompt has no token: the model's tokenizer leaves out all of it",
                key=f"{names.data}:{problem.line}" if problem.line else names.data,
                value=problem.prompt,
                expected="text that can be written in its vocabulary",
            )
    too_long = [
        (problem.line, len(ids))
        for problem, ids in zip(problems, rows, strict=True)
        if context is not None and len(ids) + max_new_tokens > context
    ]
    if too_long:
        line, length = min(too_long)
        others = f", and {len(too_long) - 1} more like it," if len(too_long) > 1 else ""
        raise UserError(
            f"a prompt of {length} tokens{others} does not fit into the model's context: "
            f"with {names.max_new_tokens} = {max_new_tokens} it comes to {length + max_new_tokens}",
            key=f"{names.data}:{line}" if line else names.data,
            expected=f"at most {names.context} = {context}",
            hint=f"shorten the prompt, or lower {names.max_new_tokens}",
        )
    return rows


def may_not_fit(
    problem: Problem, context: int | None, max_new_tokens: int, around: int = SPECIAL_TOKENS
) -> bool:
    """Whether only encoding can tell: a text has no more tokens than bytes.

    Args:
        problem, context, max_new_tokens: as for `encode`.
        around: tokens that stand around a text at most.
    """
    if context is None:
        return False
    texts = (problem.prompt, *(turn["content"] for turn in problem.before))
    around += SPECIAL_TOKENS * len(problem.before)
    return sum(len(text.encode()) for text in texts) + around + max_new_tokens > context


def context_of(folder: str) -> int | None:
    """Positions of the model in a Hugging Face folder; None where it sets no limit.

    Raises:
        UserError: there is no `config.json`, or it cannot be read.
    """
    return limit_of_folder(folder)[1]


def limit_of_folder(folder: str) -> tuple[str, int | None]:
    """The key of its `config.json` that says so, and `context_of`; errors are the same."""
    return limit_of(read_json(Path(folder).expanduser() / "config.json", "the architecture"))
