"""Tabular Q-learning (Watkins 1989) in a grid world: environment and policy as a loop of a flow.

An item is an episode. It goes around `loop(env.step, policy.act)` until it is done, and returns to
the lane that holds its state (`sticky`). The learner folds the episodes' transitions and publishes
its table to the policy. Exploration belongs to the episode's seed, so every mode learns the same.

    python examples/tabular_q_learning.py
    python examples/tabular_q_learning.py --mode collocated --lanes cpu:2
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import torch
from torch import Tensor

import m2flow
from m2flow import Batch, Flow, Place, Stream, Worker, loop, stage
from m2flow.algorithms.sampling import sample_tokens

GRID = (
    "S...",
    ".O.O",
    "...O",
    "O..G",
)  # start, holes that end an episode, goal
SIZE, NUM_CELLS = len(GRID), len(GRID) ** 2
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))  # left, down, right, up
BEGIN = -1  # in place of a move: start the episode
MAX_MOVES = 20
EPISODES_PER_STEP, EPSILON, DISCOUNT, LEARNING_RATE = 64, 0.3, 0.95, 0.7

Transition = tuple[int, int, float, int, bool]  # cell, move, reward, next cell, ended there


class GridWorld(Worker):
    """Every episode's state lives here, from its first step to its last."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.cells: dict[int, int] = {}
        self.paths: dict[int, list[Transition]] = {}

    @stage(sticky=True)
    def step(self, episodes: Batch) -> Batch:
        """Carry out each episode's move; `transitions` are handed over when it is done."""
        numbers = episodes["episode"].tolist()
        for episode, move in zip(numbers, episodes["move"].tolist(), strict=True):
            self._move(episode, move)
        done = [self._is_done(episode) for episode in numbers]
        cells = [self.cells[episode] for episode in numbers]
        return episodes.with_columns(
            cell=torch.tensor(cells),
            turn=torch.tensor([len(self.paths[episode]) for episode in numbers]),
            done=done,
            success=[_kind(cell) == "G" for cell in cells],
            transitions=[
                self._forget(episode) if ended else []
                for episode, ended in zip(numbers, done, strict=True)
            ],
        )

    def _move(self, episode: int, move: int) -> None:
        if move == BEGIN:
            self.cells[episode], self.paths[episode] = 0, []
            return
        before = self.cells[episode]
        row, column = divmod(before, SIZE)
        row = min(max(row + MOVES[move][0], 0), SIZE - 1)
        column = min(max(column + MOVES[move][1], 0), SIZE - 1)
        cell = self.cells[episode] = row * SIZE + column
        ended = _kind(cell) in "OG"
        reward = float(_kind(cell) == "G")
        self.paths[episode].append((before, move, reward, cell, ended))

    def _is_done(self, episode: int) -> bool:
        return _kind(self.cells[episode]) in "OG" or len(self.paths[episode]) == MAX_MOVES

    def _forget(self, episode: int) -> list[Transition]:
        del self.cells[episode]
        return self.paths.pop(episode)


def _kind(cell: int) -> str:
    return GRID[cell // SIZE][cell % SIZE]


class Policy(Worker):
    """Epsilon-greedy moves by a table that is published to it; ties are broken by chance."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.value = torch.zeros(NUM_CELLS, len(MOVES), dtype=torch.float64)

    @stage
    def act(self, episodes: Batch) -> Batch:
        value = self.value[episodes["cell"]]
        best = (value == value.amax(1, keepdim=True)).double()
        epsilon = episodes["epsilon"][:, None]
        chances = epsilon / len(MOVES) + (1 - epsilon) * best / best.sum(1, keepdim=True)
        move, _ = sample_tokens(chances.log(), episodes["seed"], episodes["turn"], 1.0)
        # What goes around has the columns of what comes in, so that one call may take both.
        return episodes.only("episode", "seed", "epsilon").with_columns(move=move)

    def install(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.value = weights["value"].clone()


class Learner(Worker):
    """Moves each value towards the mean of its targets, once a step."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.value = torch.zeros(NUM_CELLS, len(MOVES), dtype=torch.float64)
        self.errors, self.counts = torch.zeros_like(self.value), torch.zeros_like(self.value)

    @stage(accumulates=True)
    def learn(self, episodes: Batch) -> Batch:
        for transitions in episodes["transitions"]:
            for cell, move, reward, after, ended in transitions:
                target = reward + (0.0 if ended else DISCOUNT * self.value[after].max())
                self.errors[cell, move] += target - self.value[cell, move]
                self.counts[cell, move] += 1
        return episodes.only("success", "turn")

    @learn.finish
    def learn_finish(self) -> dict[str, float]:
        self.place.all_reduce([self.errors, self.counts])  # over the lanes that hold this worker
        self.value += LEARNING_RATE * self.errors / self.counts.clamp(min=1)
        size = float(self.errors.abs().sum() / self.counts.sum())
        self.errors.zero_()
        self.counts.zero_()
        return {"error": size}

    def weights(self) -> dict[str, Tensor]:
        return {"value": self.value}


class QLearning(Flow):
    """Play episodes to their end, learn from their transitions."""

    env: GridWorld
    policy: Policy
    learner: Learner

    def step(self, episodes: Stream) -> Stream:
        return self.learner.learn(self.evaluate(episodes))

    def evaluate(self, episodes: Stream) -> Stream:
        return loop(self.env.step, self.policy.act, until="done")(episodes)

    def sync(self) -> None:
        self.learner.publish(self.policy)


def episodes(step: int, epsilon: float, seed: int = 0) -> Batch:
    """The episodes of a step before they begin; numbers and seeds differ over the whole run."""
    number = torch.arange(EPISODES_PER_STEP) + (step + 1_000_000 * seed) * EPISODES_PER_STEP
    return Batch(
        {
            "episode": number,
            "seed": number,
            "epsilon": torch.full((EPISODES_PER_STEP,), epsilon, dtype=torch.float64),
            "move": torch.full((EPISODES_PER_STEP,), BEGIN),
        }
    )


def train(
    steps: int, mode: str = "eager", lanes: str = "auto", seed: int = 0
) -> tuple[list[float], Tensor]:
    """Run the flow; the greedy success rate every five steps, from 0 on, and the final table."""
    flow = QLearning(env=GridWorld(), policy=Policy(), learner=Learner())
    successes = []
    with m2flow.launch(
        flow,
        items_per_step=EPISODES_PER_STEP,
        mode=mode,
        lanes=lanes,
        also={"evaluate": EPISODES_PER_STEP},
    ) as run:
        for done in range(0, steps + 1, 5):
            greedy = run.run_method("evaluate", episodes(-1, 0.0, seed)).output
            successes.append(sum(greedy["success"]) / len(greedy))
            moves = greedy["turn"].double().mean()
            print(f"step {done:3d}  greedy success {successes[-1]:.4f}  moves {moves:.4f}")
            for step in range(done, min(done + 5, steps)):
                run.step(episodes(step, EPSILON, seed))
        value = run.worker_call("learner", "weights")["value"]
    return successes, value


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Learn the way across a grid with holes.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--mode", default="eager", help="eager, collocated or disaggregated")
    parser.add_argument("--lanes", default="auto", help="such as cpu:2")
    parser.add_argument("--seed", type=int, default=0)
    train(**vars(parser.parse_args()))
