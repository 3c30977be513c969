"""Self-play between two copies: the game of Nim, in which who takes the last stone wins.

Two workers hold copies of one table and move in turn, `loop(first.move, second.move)`; the learner
publishes to both. What a position is worth to me is minus what it is worth to my opponent, who is
as good as I am: `Q(s, a) = -max Q(s - a, .)`, and 1 for the last stone.

    python examples/self_play.py --seed 1
    python examples/self_play.py --mode disaggregated --lanes cpu:2

Expected after 30 steps: in every position that can be won, the table takes what leaves a multiple
of four (the share `optimal` is 1.0; at first 0.36).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import torch
from torch import Tensor

import m2flow
from m2flow import Batch, Flow, Place, Stream, Worker, loop, stage
from m2flow.algorithms.sampling import derive_seed, sample_tokens

STONES, TAKES = 15, 3
GAMES_PER_STEP, STEPS, EPSILON, LEARNING_RATE = 64, 30, 0.3, 0.7
EXPECTED = {"optimal": 1.0}


def new_table() -> Tensor:
    """[stones left, stones taken - 1], -inf for more than there are."""
    legal = torch.arange(1, TAKES + 1) <= torch.arange(STONES + 1)[:, None]
    return torch.where(legal, 0.0, -torch.inf).double()


class Player(Worker):
    """Epsilon-greedy moves by a table that is published to it; ties are broken by chance."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.value = new_table()

    @stage
    def move(self, games: Batch) -> Batch:
        turn = games["turn"]
        left = STONES - games["takes"].sum(1)
        value = self.value[left]
        best = (value == value.amax(1, keepdim=True)).double()
        legal = value.isfinite().double()
        chances = EPSILON * legal / legal.sum(1, keepdim=True)
        chances += (1 - EPSILON) * best / best.sum(1, keepdim=True)
        take = sample_tokens(chances.log(), games["seed"], turn, 1.0)[0] + 1
        takes = games["takes"].scatter(1, turn[:, None], take[:, None])
        return games.with_columns(takes=takes, turn=turn + 1, done=(left == take).tolist())

    def install(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.value = weights["value"].clone()


class Learner(Worker):
    """Moves each value towards the mean of its targets, once a step."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.value = new_table()
        self.errors = torch.zeros(2, *self.value.shape, dtype=torch.float64)  # sum, count

    @stage(accumulates=True)
    def learn(self, games: Batch) -> Batch:
        for takes in games["takes"].tolist():
            left = STONES
            for take in filter(None, takes):
                after = left - take
                target = 1.0 if after == 0 else -float(self.value[after].max())
                self.errors[0, left, take - 1] += target - float(self.value[left, take - 1])
                self.errors[1, left, take - 1] += 1
                left = after
        return games.only("turn")

    @learn.finish
    def learn_finish(self) -> dict[str, float]:
        self.place.all_reduce([self.errors])
        error, count = self.errors
        self.value += LEARNING_RATE * error / count.clamp(min=1)
        size = float(error.abs().sum() / count.sum())
        self.errors.zero_()
        return {"error": size}

    def weights(self) -> dict[str, Tensor]:
        return {"value": self.value}


class SelfPlay(Flow):
    """Two copies play each other; what both did teaches the table they are copies of."""

    first: Player
    second: Player
    learner: Learner

    def step(self, games: Stream) -> Stream:
        return self.learner.learn(loop(self.first.move, self.second.move, until="done")(games))

    def sync(self) -> None:
        self.learner.publish(self.first, self.second)


def games(seed: int, step: int) -> Batch:
    """The games of a step: seeds of its number alone, and nothing taken yet."""
    seeds = [derive_seed(seed, step, number) for number in range(GAMES_PER_STEP)]
    zeros = torch.zeros(GAMES_PER_STEP, dtype=torch.int64)
    takes = torch.zeros(GAMES_PER_STEP, STONES + 1, dtype=torch.int64)
    return Batch({"seed": torch.tensor(seeds), "turn": zeros, "takes": takes})


def optimal(value: Tensor) -> float:
    """The share of the positions that can be won in which the best move is the right one."""
    winnable = [left for left in range(1, STONES + 1) if left % (TAKES + 1)]
    best = value[winnable].argmax(1) + 1
    return float((best == torch.tensor(winnable) % (TAKES + 1)).float().mean())


def train(seed: int = 0, mode: str = "eager", lanes: str = "auto") -> dict[str, float]:
    """Run the flow; how good the table is at the end."""
    flow = SelfPlay(first=Player(), second=Player(), learner=Learner())
    with m2flow.launch(flow, items_per_step=GAMES_PER_STEP, mode=mode, lanes=lanes) as run:
        for result in run.steps(games(seed, step) for step in range(STEPS)):
            if result.step % 10 == 0:
                moves = float(result.output["turn"].double().mean())
                print(
                    f"step {result.step:3d}  error {result.metrics['error']:.4f}  moves {moves:.2f}"
                )
        share = optimal(run.worker_call("learner", "weights")["value"])
    print(f"optimal {share:.3f}")
    return {"optimal": share}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Learn Nim by playing against a copy.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", default="eager", help="eager, collocated or disaggregated")
    parser.add_argument("--lanes", default="auto", help="such as cpu:2")
    train(**vars(parser.parse_args()))
