"""What every generation engine promises, and the records that go in and come out.

An engine is stepped by its owner and never runs on its own. A completion is token ids, the
log-probability under which each was drawn, and the versions of the weights that drew them; text
is derived from it elsewhere and never encoded again. What a request draws depends on its prompt,
its seed, its parameters and the weights, and not on what else is running.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw. Temperature 0 is greedy; any of the stop tokens ends the completion."""

    max_new_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """A finished request. Ordinary CPU tensors, so that a loss may use them.

    Attributes:
        token_ids: int64 [T], the stop token included where one was drawn.
        logprobs: float32 (float64 of a float64 engine) [T], of each token when it was drawn.
        versions: of the weights that drew the first and the last token; where an aborted request
            has no token, the version installed when it was aborted, twice.
    """

    id: int
    token_ids: Tensor = field(repr=False)
    logprobs: Tensor = field(repr=False)
    versions: tuple[int, int]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to be drawn.

    Requests with the same prompt, submitted together or while one of them is still here, share
    one prefill.

    Args:
        id: unique among the requests that the engine holds.
        prompt_ids: int64 [P], or a sequence of Python integers; not empty.
        seed: int64; token t of the completion is drawn with `uniform(seed, t)`.
    """

    id: int
    prompt_ids: Sequence[int] | Tensor
    seed: int
    params: SamplingParams


class GenerationEngine(Protocol):
    """Continuous batching: requests come and completions leave at any step."""

    def submit(self, requests: Iterable[Request]) -> None:
        """Queues requests, first in first out; all of them or, if one is wrong, none.

        Raises:
            UserError: a prompt is empty, holds an id outside the vocabulary, or is too long for
                the context with its `max_new_tokens`; a parameter is out of range.
        """

    def step(self) -> list[Completion]:
        """Draws one token for every running request; returns those that finished by it.

        Raises:
            M2FlowError: the weights give logits that are not finite. With other weights installed,
                `drop_caches` clears what they left behind, and no request is lost.
        """

    def abort(self, ids: Iterable[int]) -> list[Completion]:
        """Drops requests and returns what they had drawn. Their slots are free at once. Ids that
        are not here are passed over, since they may have finished the moment before."""

    def install(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replaces all weights, between steps; running requests go on with the new ones.

        Args:
            weights: every parameter under its Hugging Face name, any float dtype and device.

        Raises:
            ValueError: a name is missing or unknown, or a shape is wrong; nothing was replaced.
        """

    def sleep(self) -> None:
        """Gives back the device's memory: weights, and keys and values of running requests, are
        kept elsewhere; caches that no request needs are dropped. Until `wake`, no other method may
        be called that needs them: `step`, `abort`, `install`."""

    def wake(self) -> None:
        """Takes all of it back; requests go on where they were."""

    def drop_caches(self) -> None:
        """Forgets keys and values; running requests wait, and are computed again. None loses a
        token."""

    @property
    def busy(self) -> bool:
        """Whether any request is running or waiting."""

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""

    def state_bytes(self) -> int:
        """Bytes that weights and caches hold on the device, or will hold again after `wake`."""
