"""What the native engine can be asked for; everything else is the user's mistake, in one line."""

from __future__ import annotations

import math
from typing import Any

from m2flow.errors import UserError
from m2flow.generation.sequence import RunningSequence


def check_engine(config: Any, *, max_running: int, context: int, cache_tokens: int) -> None:
    """Raises `UserError` where an engine with these limits could not run."""
    if max_running < 1:
        raise UserError("nothing could run", key="max_running", value=max_running, expected=">= 1")
    if not 2 <= context <= config.max_position_embeddings:
        raise UserError(
            "the model has no such context",
            key="context",
            value=context,
            expected=f"2 to {config.max_position_embeddings} tokens",
        )
    if cache_tokens < context:
        raise UserError(
            "the cache could not hold one sequence",
            key="cache_tokens",
            value=cache_tokens,
            expected=f"at least the context of {context} tokens",
        )


def check_request(sequence: RunningSequence, *, vocab_size: int, context: int) -> None:
    """Raises `UserError` where a request cannot be answered."""
    prompt, params = sequence.prompt, sequence.request.params
    key = f"request {sequence.request.id}"
    if not prompt:
        raise UserError("the prompt is empty", key=key)
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise UserError(
            "the prompt holds a token that the model does not have",
            key=key,
            value=max(prompt) if max(prompt) >= vocab_size else min(prompt),
            expected=f"ids from 0 to {vocab_size - 1}",
            hint="tokenizer and model do not belong together",
        )
    if params.max_new_tokens < 1:
        raise UserError(
            "at least one token is drawn", key="max_new_tokens", value=params.max_new_tokens
        )
    if not (params.temperature >= 0 and math.isfinite(params.temperature)):
        raise UserError(
            "no distribution", key="temperature", value=params.temperature, expected=">= 0"
        )
    if len(prompt) + params.max_new_tokens > context:
        raise UserError(
            f"a prompt of {len(prompt)} tokens and {params.max_new_tokens} new ones "
            f"do not fit the context of {context}",
            key=key,
            hint="lower max_new_tokens, drop long prompts, or raise the context",
        )
