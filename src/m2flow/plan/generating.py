"""A whole generation by roofline: continuous batching of answers whose lengths differ, to the last.

Replicas get their answers in turn; each decodes as many at once as it may, and takes the next when
one is finished. All running requests grow by a token a step, so between two finishes the step's
seconds are linear in the tokens decoded and a stretch is summed exactly: the cost is a few
operations for each answer, not for each token.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

StepSeconds = Callable[[float, float], float]
"""Seconds of a decoding step, from running requests and tokens in the KV cache."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """An answer to be made.

    Attributes:
        tokens: to decode.
        prompt: tokens that it begins with in the cache.
        group: the number of its prompt.
    """

    tokens: float
    prompt: float
    group: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """An answer that is done: after how many seconds, its tokens with the prompt, its group."""

    seconds: float
    tokens: float
    group: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """The answers of a generation, in order of time."""

    finished: tuple[Finished, ...]

    @property
    def seconds(self) -> float:
        """Until the last finish."""
        return self.finished[-1].seconds if self.finished else 0.0

    @property
    def tokens(self) -> float:
        """Of all answers and their prompts."""
        return sum(answer.tokens for answer in self.finished)


def requests(lengths: Sequence[float], prompt_tokens: float, group: int = 1) -> list[Wanted]:
    """Answers of these lengths, `group` of them in a row for each prompt."""
    return [Wanted(length, prompt_tokens, n // group) for n, length in enumerate(lengths)]


def generate(
    wanted: Sequence[Wanted],
    replicas: int,
    step: StepSeconds,
    max_running: int,
    start: float = 0.0,
) -> Generation:
    """Play the generation of all answers.

    Args:
        wanted: in the order in which their groups are dealt to the replicas in turn.
        replicas: of the model.
        step: seconds of a decoding step of one replica.
        max_running: the most that a replica decodes at once.
        start: seconds before the first step, as of the prompts' prefill.
    """
    assert replicas >= 1 and max_running >= 1
    finished: list[Finished] = []
    for replica in range(replicas):
        own = [answer for answer in wanted if answer.group % replicas == replica]
        finished += _one(own, step, max_running, start)
    finished.sort(key=lambda answer: answer.seconds)
    return Generation(tuple(finished))


def _one(
    own: Sequence[Wanted], step: StepSeconds, max_running: int, start: float
) -> list[Finished]:
    finished: list[Finished] = []
    heap: list[tuple[float, int]] = []  # tokens decoded by the replica at the finish; which
    taken, now, decoded, kv_tokens = 0, start, 0.0, 0.0
    while taken < len(own) or heap:
        while taken < len(own) and len(heap) < max_running:
            heapq.heappush(heap, (decoded + own[taken].tokens, taken))
            kv_tokens += own[taken].prompt
            taken += 1
        running = len(heap)
        stretch = heap[0][0] - decoded
        now += stretch * step(running, kv_tokens + running * stretch / 2)
        decoded += stretch
        kv_tokens += running * stretch
        while heap and heap[0][0] <= decoded + 1e-9:
            answer = own[heapq.heappop(heap)[1]]
            kv_tokens -= answer.prompt + answer.tokens
            finished.append(Finished(now, answer.prompt + answer.tokens, answer.group))
    return finished


def by_whole_groups(arrivals: Sequence[Finished]) -> list[Finished]:
    """The same answers, each there only when the last of its group is: what advantages need."""
    last: dict[int, float] = {}
    for answer in arrivals:
        last[answer.group] = max(last.get(answer.group, 0.0), answer.seconds)
    there = [Finished(last[answer.group], answer.tokens, answer.group) for answer in arrivals]
    return sorted(there, key=lambda answer: answer.seconds)
