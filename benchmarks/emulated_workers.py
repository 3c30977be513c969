"""Workers whose stages wait as long as their prices say instead of computing. Items are real.

A stage makes the tensors that it would hand on (token ids, log-probabilities, images), of realistic
size, and then waits until the price of its call has passed. What an item costs depends on the item:
an answer has as many tokens as was drawn for it. A generator goes by rounds, in each of which every
running answer grows by one token, as the real one does: it has a running limit and a queue, takes
items in between two rounds, and hands finished answers on once they are a quarter of those at work.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush

import torch
from ray import cloudpickle

from m2flow import Batch, Place, Ragged, Worker, stage
from m2flow.plan.profile import Quantiles
from m2flow.runtime.lane.shared import await_order

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this file

HANDED_ON = 4
"""A generator hands finished answers on once they are 1 / HANDED_ON of those that run."""

WEIGHTS = 1 << 18
"""Floats that a worker publishes: 1 MB. How long an install takes is a price."""

IMAGE = (3, 224, 224)
"""Of an observation, in bytes: what OpenVLA looks at."""


@dataclass(frozen=True)
class Price:
    """What a call takes: `call` seconds, and `each` for every item or token of it."""

    call: float
    each: float

    def seconds(self, count: float) -> float:
        return self.call + self.each * count


@dataclass(frozen=True)
class State:
    """A worker's state on a lane.

    Attributes:
        num_bytes: that it is said to take.
        move: seconds of an onload or an offload.
        install: seconds of taking published weights over.
    """

    num_bytes: int
    move: float
    install: float = 0.0


def until(deadline: float) -> None:
    """Wait for a moment of `time.perf_counter`; one that has passed already is not waited for."""
    left = deadline - time.perf_counter()
    if left > 0:
        time.sleep(left)


class Waiting(Worker):
    """What all of them have: a state of some size, moved and installed in a known time."""

    def __init__(self, state: State) -> None:
        self.state = state

    def load(self, place: Place) -> None:
        super().load(place)
        self._weights = {"weights": torch.zeros(WEIGHTS)}

    def offload(self) -> None:
        time.sleep(self.state.move)

    def onload(self) -> None:
        time.sleep(self.state.move)

    def state_bytes(self) -> int:
        return self.state.num_bytes

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self._weights

    def install(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        until(time.perf_counter() + self.state.install)


# --- answers --------------------------------------------------------------------------------------


@cache
def _values(dtype: torch.dtype) -> torch.Tensor:
    """What items are cut from."""
    return torch.ones(1 << 16, dtype=dtype)


@dataclass
class _Rounds:
    """The answers that one call is making.

    Attributes:
        price: of a round, by answers that run.
        admit: seconds in which nothing grows while a prompt is taken in.
        limit: answers that run at once.
        now: the moment up to which rounds have been played.
        grown: tokens that each answer has grown by that runs since the beginning.
    """

    price: Price
    admit: float
    limit: int
    now: float = field(default_factory=time.perf_counter)
    grown: int = 0
    _queue: deque[tuple[int, int]] = field(default_factory=deque)
    _running: list[tuple[int, int]] = field(default_factory=list)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def busy(self) -> bool:
        return bool(self._running or self._queue)

    def take(self, answers: list[tuple[int, int]], prompts: int) -> None:
        """Take in answers, as (item, tokens)."""
        self.now += self.admit * prompts
        self._queue += answers
        self._fill()

    def _fill(self) -> None:
        while self._queue and len(self._running) < self.limit:
            item, tokens = self._queue.popleft()
            heappush(self._running, (self.grown + tokens, item))

    def next_end(self) -> float:
        """When the next answer is finished."""
        rounds = self._running[0][0] - self.grown
        return self.now + rounds * self.price.seconds(self.running)

    def play(self, moment: float) -> list[int]:
        """Go on to the end of the round that runs at a moment, or to the next finish if that is
        earlier; the answers that are finished then."""
        round_seconds = self.price.seconds(self.running)
        to_finish = self._running[0][0] - self.grown
        rounds = min(to_finish, max(0, -(-(moment - self.now) // round_seconds)))
        self.grown += int(rounds)
        self.now += rounds * round_seconds
        finished = []
        while self._running and self._running[0][0] <= self.grown:
            finished.append(heappop(self._running)[1])
        self._fill()
        return finished


class EmulatedGenerator(Waiting):
    """Makes answers of drawn lengths, at the pace of rounds.

    Args:
        lengths: tokens of answers; a prompt's column `drawn` says for each of its answers which
            share of all answers is shorter.
        round_price: of a round, by running answers.
        admit: of taking a prompt in.
        limit: answers that run at once on a lane.
        group: answers to a prompt.
    """

    def __init__(
        self,
        state: State,
        lengths: Quantiles,
        round_price: Price,
        admit: float,
        limit: int,
        group: int,
    ) -> None:
        super().__init__(state)
        self.lengths, self.round_price, self.admit = lengths, round_price, admit
        self.limit, self.group = limit, group

    @stage(streaming=True, expands="group")
    def generate(self, prompts: Batch) -> Generator[Batch, Batch | None, None]:
        """One prompt in, a group of answers out, each when it is finished."""
        rounds = _Rounds(self.round_price, self.admit, self.limit)
        origin: dict[int, tuple[Batch, int]] = {}
        self._take(rounds, origin, prompts)
        finished: list[int] = []
        while rounds.busy:
            end = rounds.next_end()
            woken = await_order(self.place.lane, max(0.0, end - time.perf_counter()))
            finished += rounds.play(min(end, time.perf_counter()) if woken else end)
            until(rounds.now)
            ready = finished and len(finished) * HANDED_ON >= rounds.running
            if ready or woken:
                batch = self._made(origin, finished) if ready else Batch({}, [])
                finished = [] if ready else finished
                arrived = yield batch
                if arrived is not None:
                    self._take(rounds, origin, arrived)

    def _take(self, rounds: _Rounds, origin: dict[int, tuple[Batch, int]], prompts: Batch) -> None:
        answers = prompts.repeat(self.group)
        tokens = []
        for row, (item, drawn) in enumerate(zip(answers.ids, answers["drawn"], strict=True)):
            origin[item] = (answers, row)
            tokens.append((item, self._tokens(item, drawn)))
        rounds.take(tokens, len(prompts))

    def _tokens(self, item: int, drawn: torch.Tensor) -> int:
        return max(1, round(self.lengths.at(float(drawn[item % self.group]))))

    def _made(self, origin: dict[int, tuple[Batch, int]], items: list[int]) -> Batch:
        rows_of: dict[int, tuple[Batch, list[int]]] = {}
        for item in items:
            batch, row = origin.pop(item)
            rows_of.setdefault(id(batch), (batch, []))[1].append(row)
        made = []
        for batch, rows in rows_of.values():
            some = batch.select(rows)
            drawn = zip(some.ids, some["drawn"], strict=True)
            counts = [self._tokens(item, shares) for item, shares in drawn]
            made.append(
                some.with_columns(
                    completion_ids=_ragged(torch.int32, counts),
                    behaviour_logprobs=_ragged(torch.float32, counts),
                )
            )
        return Batch.concat(made)


def _ragged(dtype: torch.dtype, counts: list[int]) -> Ragged:
    return Ragged.from_rows([_values(dtype)[:count] for count in counts])


class PerToken(Waiting):
    """Waits for every token of the answers it is given.

    Args:
        price: of a call and of each token.
        finish: seconds of a `finish`.
        minibatches: of a step.
    """

    def __init__(
        self, state: State, price: Price, finish: float = 0.0, minibatches: int = 1
    ) -> None:
        super().__init__(state)
        self.price, self.finish, self.minibatches = price, finish, minibatches

    def _deadline(self, answers: Batch) -> float:
        tokens = sum(answers["completion_ids"].lengths)
        return time.perf_counter() + self.price.seconds(tokens)


class EmulatedScorer(PerToken):
    """One pass over answers that gives a number for each token: log-probabilities, values."""

    @stage
    def score(self, answers: Batch) -> Batch:
        """Adds `scored`."""
        deadline = self._deadline(answers)
        counts = list(answers["completion_ids"].lengths)
        output = answers.with_columns(scored=_ragged(torch.float32, counts))
        until(deadline)
        return output


class EmulatedTrainer(PerToken):
    """Folds answers in, and steps at the end of each mini-batch."""

    @stage(accumulates=True, minibatches="minibatches")
    def train(self, answers: Batch) -> Batch:
        """Hands the rewards on."""
        until(self._deadline(answers))
        return answers.only("reward")

    @train.finish
    def train_finish(self) -> dict[str, float]:
        until(time.perf_counter() + self.finish)
        return {"loss": 0.0}


@stage(unit="group")
def advantage(answers: Batch, *, group: int) -> Batch:
    """Adds `reward` and `advantage`, the reward less the mean of its group."""
    rewards = torch.tensor([float(item % 2) for item in answers.ids])
    means = rewards.view(-1, group).mean(1).repeat_interleave(group)
    return answers.with_columns(reward=rewards, advantage=rewards - means)


@stage
def estimate(scored: Batch, valued: Batch) -> Batch:
    """Adds `reward` and `advantages`, one for each token."""
    return scored.with_columns(
        reward=torch.tensor([float(item % 2) for item in scored.ids]), advantages=valued["scored"]
    )


# --- episodes -------------------------------------------------------------------------------------


class EmulatedWorld(Waiting):
    """Environments that give an image after each turn."""

    def __init__(self, state: State, price: Price) -> None:
        super().__init__(state)
        self.price = price

    @stage(sticky=True)
    def move(self, episodes: Batch) -> Batch:
        """Carries the action out."""
        deadline = time.perf_counter() + self.price.seconds(len(episodes))
        image = torch.ones((len(episodes), *IMAGE), dtype=torch.uint8)
        output = episodes.with_columns(image=image, turn=episodes["turn"] + 1)
        until(deadline)
        return output


class EmulatedPolicy(Waiting):
    """Acts on images."""

    def __init__(self, state: State, price: Price) -> None:
        super().__init__(state)
        self.price = price

    @stage
    def act(self, episodes: Batch) -> Batch:
        """Adds an action of seven tokens."""
        deadline = time.perf_counter() + self.price.seconds(len(episodes))
        output = episodes.with_columns(
            action=torch.ones((len(episodes), 7)),
        )
        until(deadline)
        return output


class EpisodeTrainer(Waiting):
    """Trains on whole episodes."""

    def __init__(
        self, state: State, price: Price, finish: float, minibatches: int, turns: int
    ) -> None:
        super().__init__(state)
        self.price, self.finish = price, finish
        self.minibatches, self.turns = minibatches, turns

    @stage(accumulates=True, minibatches="minibatches")
    def train(self, episodes: Batch) -> Batch:
        """Hands the number of turns on."""
        until(time.perf_counter() + self.price.seconds(len(episodes)))
        return episodes.only("turn")

    @train.finish
    def train_finish(self) -> dict[str, float]:
        until(time.perf_counter() + self.finish)
        return {"loss": 0.0}
