"""A request on its way: the tokens drawn so far and the versions that drew them.

Host-side bookkeeping only; where its keys and values lie is the engine's business.
"""

from __future__ import annotations

import torch
from torch import Tensor

from m2flow.generation.records import Completion, FinishReason, Request


class RunningSequence:
    """One request from submission to completion."""

    __slots__ = (
        "_limit",
        "_marked",
        "_stop",
        "_versions",
        "logprobs",
        "number",
        "prompt",
        "request",
        "stopped",
        "tokens",
    )

    def __init__(self, request: Request) -> None:
        ids = request.prompt_ids
        self.request = request
        self.number = -1
        """In order of submission, which the engine counts."""
        self.prompt: tuple[int, ...] = tuple(ids.tolist() if isinstance(ids, Tensor) else ids)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.stopped = False
        self._limit = request.params.max_new_tokens
        self._stop = frozenset(request.params.stop_token_ids)
        self._versions: tuple[int, int] | None = None
        self._marked = 0

    @property
    def length(self) -> int:
        """Tokens of prompt and completion so far."""
        return len(self.prompt) + len(self.tokens)

    @property
    def context(self) -> tuple[int, ...]:
        """Prompt and completion so far: what is prefilled when it gets a slot."""
        return (*self.prompt, *self.tokens)

    def take(self, token: int, logprob: float) -> bool:
        """Appends a drawn token; True when the completion has ended by it."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.stopped = token in self._stop
        return self.stopped or len(self.tokens) == self._limit

    def mark(self, version: int) -> None:
        """Notes that the tokens taken since the last mark were drawn by `version`."""
        if len(self.tokens) > self._marked:
            first = self._versions[0] if self._versions else version
            self._versions, self._marked = (first, version), len(self.tokens)

    def completion(
        self, reason: FinishReason, dtype: torch.dtype, current_version: int
    ) -> Completion:
        """The finished record; `mark` comes first."""
        return Completion(
            id=self.request.id,
            token_ids=torch.tensor(self.tokens, dtype=torch.int64),
            logprobs=torch.tensor(self.logprobs, dtype=dtype),
            versions=self._versions or (current_version, current_version),
            finish_reason=reason,
        )
