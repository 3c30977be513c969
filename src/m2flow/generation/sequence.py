"""A request on its way: the tokens drawn so far and the versions that drew them.

Host-side bookkeeping only; where its keys and values lie is the engine's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from m2flow.generation.records import Completion, FinishReason, Request
from m2flow.generation.stop_strings import StopStrings, TextOf


class RunningSequence:
    """One request from submission to completion."""

    __slots__ = (
        "_limit",
        "_stop",
        "_stop_strings",
        "ended",
        "in_flight",
        "logprobs",
        "number",
        "prefix",
        "prompt",
        "request",
        "stopped",
        "tokens",
        "versions",
    )

    def __init__(self, request: Request, text_of: TextOf | None = None) -> None:
        ids = request.prompt_ids
        self.request = request
        self.number = -1
        """In order of submission, which the engine counts."""
        self.prompt: tuple[int, ...] = tuple(ids.tolist() if isinstance(ids, Tensor) else ids)
        self.tokens = list(request.begun.token_ids)
        self.logprobs = list(request.begun.logprobs)
        self.stopped = self.ended = False
        self.in_flight = 0
        """Tokens that are being drawn, and are not known here yet."""
        self.prefix = (-1, 0)
        """Number of the prefill that it began from in its slot, and the tokens of that."""
        self._limit = request.params.max_new_tokens
        assert len(self.tokens) < self._limit, "a completion that has begun is not at its end"
        self._stop = frozenset(request.params.stop_token_ids)
        self.versions = list(request.begun.versions)
        """Of the weights that drew the tokens, up to the last `mark`."""
        strings = request.params.stop_strings
        assert text_of is not None or not strings, "an engine without text finds no stop strings"
        self._stop_strings: StopStrings | None = None
        if strings and text_of is not None:
            self._stop_strings = watched = StopStrings(strings, text_of)
            for token in self.tokens:
                watched.completed_by(token)

    @property
    def length(self) -> int:
        """Tokens of prompt and completion so far, those in flight included."""
        return len(self.prompt) + len(self.tokens) + self.in_flight

    @property
    def at_limit(self) -> bool:
        """Whether the completion ends by its length, once what is in flight has come."""
        return len(self.tokens) + self.in_flight >= self._limit

    @property
    def context(self) -> tuple[int, ...]:
        """Prompt and completion so far: what is prefilled when it gets a slot."""
        return (*self.prompt, *self.tokens)

    def take(self, token: int, logprob: float) -> None:
        """Appends a drawn token that has come, unless the completion has ended before it."""
        self.in_flight -= 1
        if self.ended:
            return
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.stopped = token in self._stop or (
            self._stop_strings is not None and self._stop_strings.completed_by(token)
        )
        self.ended = self.stopped or len(self.tokens) == self._limit

    def mark(self, version: int) -> None:
        """Notes that the tokens taken since the last mark were drawn by `version`."""
        self.versions += [version] * (len(self.tokens) - len(self.versions))

    def completion(
        self, reason: FinishReason, dtype: torch.dtype, current_version: int
    ) -> Completion:
        """The finished record; `mark` comes first."""
        return Completion(
            id=self.request.id,
            token_ids=_column(self.tokens, np.int64),
            logprobs=_column(self.logprobs, np.float64).to(dtype),
            token_versions=_column(self.versions, np.int64),
            current_version=current_version,
            finish_reason=reason,
        )


def _column(values: Sequence[float], dtype: Any) -> Tensor:
    """A tensor of numbers, in half the time that torch takes to look at them."""
    return torch.from_numpy(np.array(values, dtype=dtype))
