"""A whole generation by roofline: continuous batching of answers whose lengths differ, to the last.

Replicas get their answers in turn; each decodes as many at once as it may, and takes the next when
one is finished. All running requests grow by a token a step, so between two finishes the step's
seconds are linear in the tokens decoded and a stretch is summed exactly: the cost is a few
operations for each answer, not for each token.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

StepSeconds = Callable[[float, float], float]
"""Seconds of a decoding step, from running requests and tokens in the KV cache."""


@dataclass(frozen=True, slots=True)
class Request:
    """An answer in the making.

    Attributes:
        tokens: still to decode.
        context: tokens that it has in the cache already, or will have on arrival (its prompt).
        whole: tokens of the answer and its prompt when finished.
        group: the number of its prompt.
    """

    tokens: float
    context: float
    whole: float
    group: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """An answer that is done: after how many seconds, its tokens with the prompt, its group."""

    seconds: float
    tokens: float
    group: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """What happened until the last answer, or until it was stopped.

    Attributes:
        finished: in order of time.
        left: requests that were not finished, those that ran first.
        running_seconds: requests running, integrated over seconds and replicas.
        replicas: that generated.
    """

    finished: tuple[Finished, ...]
    left: tuple[Request, ...]
    running_seconds: float
    replicas: int

    @property
    def seconds(self) -> float:
        """Until the last finish."""
        return self.finished[-1].seconds if self.finished else 0.0

    @property
    def tokens(self) -> float:
        return sum(answer.tokens for answer in self.finished)

    def seconds_of_share(self, share: float) -> float:
        """Until this share of the finished answers was there."""
        assert 0 < share <= 1
        return self.finished[math.ceil(share * len(self.finished)) - 1].seconds


def requests(lengths: Sequence[float], prompt_tokens: float, group: int = 1) -> list[Request]:
    """Fresh requests for answers of these lengths, `group` of them in a row for each prompt."""
    return [
        Request(length, prompt_tokens, length + prompt_tokens, n // group)
        for n, length in enumerate(lengths)
    ]


def generate(
    wanted: Sequence[Request],
    replicas: int,
    step: StepSeconds,
    max_running: int,
    until: float = math.inf,
    start: float = 0.0,
) -> Generation:
    """Play the generation of all requests.

    Args:
        wanted: in the order in which their groups are dealt to the replicas in turn.
        replicas: of the model.
        step: seconds of a decoding step of one replica.
        max_running: the most that a replica decodes at once.
        until: seconds after which all stop where they are.
        start: seconds before the first step, as of the prompts' prefill.
    """
    assert replicas >= 1 and max_running >= 1
    finished: list[Finished] = []
    running_left: list[Request] = []
    waiting_left: list[Request] = []
    busy = 0.0
    for replica in range(replicas):
        own = [request for request in wanted if request.group % replicas == replica]
        done, running, waiting, seconds = _one(own, step, max_running, until, start)
        finished += done
        running_left += running
        waiting_left += waiting
        busy += seconds
    finished.sort(key=lambda answer: answer.seconds)
    return Generation(tuple(finished), (*running_left, *waiting_left), busy, replicas)


def _one(
    own: Sequence[Request], step: StepSeconds, max_running: int, until: float, start: float
) -> tuple[list[Finished], list[Request], list[Request], float]:
    finished: list[Finished] = []
    heap: list[tuple[float, int]] = []  # tokens decoded by the replica at the finish; which
    taken, now, decoded, kv_tokens, busy = 0, start, 0.0, 0.0, 0.0
    while (taken < len(own) or heap) and now < until:
        while taken < len(own) and len(heap) < max_running:
            heapq.heappush(heap, (decoded + own[taken].tokens, taken))
            kv_tokens += own[taken].context
            taken += 1
        running = len(heap)
        stretch = heap[0][0] - decoded
        each = step(running, kv_tokens + running * stretch / 2)
        seconds = stretch * each
        if now + seconds > until:
            stretch = (until - now) / each
            seconds = until - now
        now += seconds
        busy += running * seconds
        decoded += stretch
        kv_tokens += running * stretch
        if now >= until:
            break
        while heap and heap[0][0] <= decoded + 1e-9:
            answer = own[heapq.heappop(heap)[1]]
            kv_tokens -= answer.context + answer.tokens
            finished.append(Finished(now, answer.whole, answer.group))
    still = [
        Request(
            at - decoded,
            own[n].context + own[n].tokens - (at - decoded),
            own[n].whole,
            own[n].group,
        )
        for at, n in sorted(heap)
        if at > decoded
    ]
    finished += [Finished(now, own[n].whole, own[n].group) for at, n in heap if at <= decoded]
    return finished, still, list(own[taken:]), busy


def consume(
    arrivals: Sequence[Finished], seconds_per_token: float, ready: float = 0.0
) -> list[Finished]:
    """When a stage that takes answers as they come, one by one, has done each of them.

    Args:
        arrivals: in order of time.
        seconds_per_token: of the stage, all its lanes together.
        ready: seconds before which it cannot start.
    """
    free, done = ready, []
    for answer in arrivals:
        free = max(free, answer.seconds) + answer.tokens * seconds_per_token
        done.append(Finished(free, answer.tokens, answer.group))
    return done


def by_whole_groups(arrivals: Sequence[Finished]) -> list[Finished]:
    """The same answers, each there only when the last of its group is: what advantages need."""
    last: dict[int, float] = {}
    for answer in arrivals:
        last[answer.group] = max(last.get(answer.group, 0.0), answer.seconds)
    there = [Finished(last[answer.group], answer.tokens, answer.group) for answer in arrivals]
    return sorted(there, key=lambda answer: answer.seconds)
