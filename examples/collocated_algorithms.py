"""Several light algorithms on one lane: the cliff walk of Sutton and Barto (example 6.6).

Q-learning, Sarsa and expected Sarsa are three workers of one flow. On its own lane each would leave
a core idle most of the time; here they take turns on a single one, in one process, and no line of
them says so. `--lanes cpu:1 --mode collocated` makes that lane a process of Ray.

    python examples/collocated_algorithms.py --seed 1
    python examples/collocated_algorithms.py --mode collocated --lanes cpu:1

Expected after 500 episodes, as in the book: Q-learning has found the shortest way, 13 moves along
the cliff, greedily (`greedy`); while it explores, it falls so often that Sarsa, whose way is safer,
gets at least 10 more a walk over the last 100 episodes (`safer`).
"""

from __future__ import annotations

import argparse
import random

import torch

import m2flow
from m2flow import Batch, Flow, Place, Stream, Worker, stage
from m2flow.algorithms.sampling import derive_seed

ROWS, COLUMNS = 4, 12
START, GOAL = (ROWS - 1) * COLUMNS, ROWS * COLUMNS - 1
MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))
EPISODES_PER_STEP, STEPS, MAX_MOVES = 50, 10, 1000
EPSILON, LEARNING_RATE = 0.1, 0.5
EXPECTED = {"greedy": -13.0, "safer": 10.0}


def moved(cell: int, move: int) -> tuple[int, int]:
    """The next cell and the reward; over the cliff it is -100 and back to the start."""
    row = min(max(cell // COLUMNS + MOVES[move][0], 0), ROWS - 1)
    column = min(max(cell % COLUMNS + MOVES[move][1], 0), COLUMNS - 1)
    after = row * COLUMNS + column
    return (START, -100) if START < after < GOAL else (after, -1)


class Walker(Worker):
    """An algorithm: a table of values, and what a move's successor is worth."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.value = torch.zeros(ROWS * COLUMNS, len(MOVES), dtype=torch.float64)

    def worth(self, values: list[float], next_move: int) -> float:
        """What the next cell is worth, whose moves have these values, one of which comes next."""
        raise NotImplementedError

    @stage(accumulates=True)
    def walk(self, episodes: Batch) -> Batch:
        """Walk each episode to its end, learning at every move."""
        table = self.value.tolist()
        gains = [self._walk(table, random.Random(seed)) for seed in episodes["seed"]]
        self.value = torch.tensor(table, dtype=torch.float64)
        return episodes.with_columns(gain=gains)

    def _walk(self, table: list[list[float]], chance: random.Random) -> float:
        cell, move, gain = START, self._choose(table[START], chance), 0.0
        for _ in range(MAX_MOVES):
            after, reward = moved(cell, move)
            gain += reward
            next_move = self._choose(table[after], chance)
            future = 0.0 if after == GOAL else self.worth(table[after], next_move)
            table[cell][move] += LEARNING_RATE * (reward + future - table[cell][move])
            if after == GOAL:
                break
            cell, move = after, next_move
        return gain

    def _choose(self, values: list[float], chance: random.Random) -> int:
        if chance.random() < EPSILON:
            return chance.randrange(len(MOVES))
        best = max(values)
        return chance.choice([move for move, value in enumerate(values) if value == best])

    @walk.finish
    def walk_finish(self) -> dict[str, float]:
        self.place.all_reduce([self.value])  # on several lanes: the mean of their tables
        self.value /= self.place.size
        return {}

    def greedy(self) -> float:
        """What a walk gains that never explores."""
        cell, gain = START, 0.0
        while cell != GOAL and gain > -MAX_MOVES:
            cell, reward = moved(cell, int(self.value[cell].argmax()))
            gain += reward
        return gain


class QLearning(Walker):
    """The best move's value."""

    def worth(self, values: list[float], next_move: int) -> float:
        return max(values)


class Sarsa(Walker):
    """The value of the move that comes next."""

    def worth(self, values: list[float], next_move: int) -> float:
        return values[next_move]


class ExpectedSarsa(Walker):
    """The mean value under the policy."""

    def worth(self, values: list[float], next_move: int) -> float:
        return EPSILON * sum(values) / len(values) + (1 - EPSILON) * max(values)


@stage
def beside(q: Batch, sarsa: Batch, expected: Batch) -> Batch:
    """What the three have gained in the same episodes."""
    return Batch({"q": q["gain"], "sarsa": sarsa["gain"], "expected": expected["gain"]}, q.ids)


class CliffWalk(Flow):
    """Three algorithms walk the same episodes."""

    q: QLearning
    sarsa: Sarsa
    expected: ExpectedSarsa

    def step(self, episodes: Stream) -> Stream:
        return beside(
            self.q.walk(episodes), self.sarsa.walk(episodes), self.expected.walk(episodes)
        )


def episodes(seed: int, step: int) -> Batch:
    """The episodes of a step: seeds of its number alone."""
    return Batch({"seed": [derive_seed(seed, step, n) for n in range(EPISODES_PER_STEP)]})


def train(seed: int = 0, mode: str = "eager", lanes: str = "cpu:1") -> dict[str, float]:
    """Run the flow; what the algorithms have gained in the last 100 episodes."""
    flow = CliffWalk(q=QLearning(), sarsa=Sarsa(), expected=ExpectedSarsa())
    gains: list[dict[str, float]] = []
    with m2flow.launch(flow, items_per_step=EPISODES_PER_STEP, mode=mode, lanes=lanes) as run:
        for result in run.steps(episodes(seed, step) for step in range(STEPS)):
            gains.append({k: sum(v) / len(v) for k, v in result.output.columns.items()})
            told = "  ".join(f"{name} {gain:7.2f}" for name, gain in gains[-1].items())
            print(f"step {result.step:2d}  {told}")
        greedy = run.worker_call("q", "greedy")
    late = {name: (gains[-1][name] + gains[-2][name]) / 2 for name in gains[-1]}
    print(f"greedy {greedy:.0f}  safer {late['sarsa'] - late['q']:.1f}")
    return {"greedy": greedy, "safer": late["sarsa"] - late["q"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Three algorithms walk along a cliff.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", default="eager", help="eager or collocated")
    parser.add_argument("--lanes", default="cpu:1", help="such as cpu:1")
    train(**vars(parser.parse_args()))
