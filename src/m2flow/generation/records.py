"""What goes into the generation engine and comes out of it: requests and completions.

A completion is token ids, the log-probability under which each was drawn, and the versions of the
weights that drew them; text is derived from it elsewhere and never encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from m2flow.errors import RunFailed, UserError

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw.

    Temperature 0 is greedy. `top_k`, `top_p` and `min_p` are those of
    `m2flow.algorithms.sampling.likeliest`. Requests beside each other have the same of these four.
    Any of the stop tokens ends the completion, and so does the token with which one of the stop
    strings becomes part of its text (`stop_strings`).
    """

    max_new_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_strings: tuple[str, ...] = ()

    @property
    def distribution(self) -> tuple[float, int, float, float]:
        """What is drawn from, the logits apart."""
        return self.temperature, self.top_k, self.top_p, self.min_p


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """A finished request. Ordinary CPU tensors, so that a loss may use them.

    Attributes:
        token_ids: int64 [T], the stop token included where one was drawn.
        logprobs: float32 (float64 of a float64 engine) [T], of each token when it was drawn.
        token_versions: int64 [T], of the weights that drew each token.
        current_version: of the weights that were installed when the request ended.
    """

    id: int
    token_ids: Tensor = field(repr=False)
    logprobs: Tensor = field(repr=False)
    token_versions: Tensor = field(repr=False)
    current_version: int
    finish_reason: FinishReason

    @property
    def versions(self) -> tuple[int, int]:
        """Of the oldest and the newest weights that drew a token.

        Where an aborted request has no token, the version installed when it was aborted, twice.
        """
        if not len(self.token_versions):
            return self.current_version, self.current_version
        return int(self.token_versions.min()), int(self.token_versions.max())

    def check(self, most: int) -> None:
        """Refuse an answer that a request for at most so many tokens cannot have.

        Raises:
            RunFailed: it has no token, or more than memory and packing were planned for.
        """
        if not 0 < len(self.token_ids) <= most:
            raise RunFailed(
                f"the engine gave item {self.id} {len(self.token_ids)} tokens; "
                f"it was asked for 1 to {most}"
            )


@dataclass(frozen=True, slots=True)
class Begun:
    """What was drawn of a completion before: it counts as drawn, and the rest follows.

    Attributes:
        token_ids, logprobs, versions: of each token, as in `Completion`.
    """

    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    versions: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to be drawn.

    Requests with the same prompt, submitted together or while one of them still waits, share one
    prefill.

    Args:
        id: unique among the requests that the engine holds.
        prompt_ids: int64 [P], or a sequence of Python integers; not empty.
        seed: int64; token t of the completion is drawn with `uniform(seed, t)`.
        begun: its first tokens, where they were drawn earlier; fewer than its limit. Their keys and
            values are computed again.
    """

    id: int
    prompt_ids: Sequence[int] | Tensor
    seed: int
    params: SamplingParams
    begun: Begun = Begun()

    def check(self, prompt: Sequence[int], *, vocab_size: int, context: int) -> None:
        """Refuse a request that a model cannot answer.

        Args:
            prompt: `prompt_ids` as Python integers.
            vocab_size: tokens that the model has.
            context: tokens that prompt and completion may have together.

        Raises:
            UserError: the prompt is empty, holds an id outside the vocabulary, or is too long.
        """
        key, new = f"request {self.id}", self.params.max_new_tokens
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
        if len(prompt) + new > context:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and {new} new ones "
                f"do not fit the context of {context}",
                key=key,
                hint="lower max_new_tokens, or drop long prompts",
            )
