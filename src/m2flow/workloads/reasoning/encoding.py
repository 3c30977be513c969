"""From problems to items: prompts as token ids that fit into the model's context.

What does not fit, or cannot be written in the vocabulary, is refused with the line it came from.
Knows neither recipes nor tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from m2flow.errors import UserError
from m2flow.flow import Batch, Ragged
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


def encode(
    problems: Sequence[Problem],
    seeds: Sequence[int],
    tokenizer: Any,
    context: int | None,
    max_new_tokens: int,
    names: Names = Names(),
) -> Batch:
    """Problems as items.

    Args:
        problems: the problems.
        seeds: one for each; what is sampled for an item depends on its seed alone.
        tokenizer: turns prompts into token ids.
        context: positions of the model; None for no limit.
        max_new_tokens: room that an answer needs.
        names: for messages.

    Raises:
        UserError: a prompt does not fit into the context, or cannot be written in the vocabulary.
    """
    rows = token_rows(problems, tokenizer, context, max_new_tokens, names)
    return Batch(
        {
            "prompt_ids": Ragged.from_rows([torch.tensor(ids) for ids in rows]),
            "prompt": [problem.prompt for problem in problems],
            "answer": [problem.answer for problem in problems],
            "metadata": [dict(problem.metadata) for problem in problems],
            "seed": list(seeds),
        }
    )


def token_rows(
    problems: Sequence[Problem],
    tokenizer: Any,
    context: int | None,
    max_new_tokens: int,
    names: Names,
) -> list[list[int]]:
    """Token ids of each prompt; arguments and errors are those of `encode`."""
    try:
        rows: list[list[int]] = tokenizer([problem.prompt for problem in problems])["input_ids"]
    except Exception as error:
        raise UserError(
            f"the model's tokenizer cannot encode the prompts ({type(error).__name__}: {error})",
            key=names.data,
            expected="text that can be written in its vocabulary",
        ) from error
    too_long = [
        (problem.metadata.get("line", 0), len(ids))
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


def may_not_fit(problem: Problem, context: int | None, max_new_tokens: int) -> bool:
    """Whether only encoding can tell: a text has no more tokens than bytes."""
    if context is None:
        return False
    return len(problem.prompt.encode()) + SPECIAL_TOKENS + max_new_tokens > context


def context_of(folder: str) -> int | None:
    """Positions of the model in a Hugging Face folder; None where it sets no limit.

    Raises:
        UserError: there is no `config.json`, or it cannot be read.
    """
    config = read_json(Path(folder).expanduser() / "config.json", "the architecture")
    positions = config.get("max_position_embeddings")
    return None if positions is None else int(positions)
