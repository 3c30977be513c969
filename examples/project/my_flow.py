"""A flow of one's own: a player finds out which of four arms pays most often.

python my_flow.py
python my_flow.py --mode collocated --lanes cpu:2
"""

import argparse

import torch

import m2flow
from m2flow import Batch, Flow, Place, Stream, Worker, stage
from m2flow.algorithms.sampling import sample_tokens, uniform

CHANCES = torch.tensor([0.2, 0.4, 0.9, 0.6], dtype=torch.float64)
TURNS_PER_STEP, LEARNING_RATE = 64, 1.0
FIRST, SECOND = torch.tensor(0), torch.tensor(1)  # of the numbers that a seed gives


@stage
def pay(turns: Batch) -> Batch:
    """1 where the pulled arm pays: drawn from the seed of the turn, and from nothing else."""
    won = uniform(turns["seed"], SECOND) < CHANCES[turns["arm"]]
    return turns.with_columns(reward=won.double())


class Player(Worker):
    """Pulls arms by a softmax over preferences, and learns them by policy gradients."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.preference = torch.zeros(len(CHANCES), dtype=torch.float64)
        self.gradient = torch.zeros_like(self.preference)

    @stage
    def pull(self, turns: Batch) -> Batch:
        logits = self.preference.expand(len(turns), -1)
        arm, _ = sample_tokens(logits, turns["seed"], FIRST, 1.0)
        return turns.with_columns(arm=arm)

    @stage(accumulates=True)
    def learn(self, turns: Batch) -> Batch:
        pulled = torch.nn.functional.one_hot(turns["arm"], len(CHANCES)).double()
        better = turns["reward"] - CHANCES.mean()
        self.gradient += ((pulled - self.preference.softmax(0)) * better[:, None]).sum(0)
        return turns

    @learn.finish
    def learn_finish(self) -> dict[str, float]:
        self.place.all_reduce([self.gradient])  # over the lanes, however many hold this worker
        self.preference += LEARNING_RATE * self.gradient / TURNS_PER_STEP
        self.gradient.zero_()
        return {"best_arm": float(self.preference.argmax())}


class Bandit(Flow):
    """Pull, be paid, learn."""

    player: Player

    def step(self, turns: Stream) -> Stream:
        return self.player.learn(pay(self.player.pull(turns)))


def train(steps: int, mode: str = "eager", lanes: str = "auto") -> list[float]:
    """The mean reward of each step."""
    rewards = []
    with m2flow.launch(
        Bandit(player=Player()), items_per_step=TURNS_PER_STEP, mode=mode, lanes=lanes
    ) as run:
        for step in range(steps):
            seeds = torch.arange(TURNS_PER_STEP) + step * TURNS_PER_STEP
            result = run.step(Batch({"seed": seeds}))
            rewards.append(float(result.output["reward"].mean()))
            print(f"step {step:2d}  reward {rewards[-1]:.3f}")
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Find the arm that pays.")
    parser.add_argument("--mode", default="eager", help="eager, collocated, auto, ...")
    parser.add_argument("--lanes", default="auto", help="such as cpu:2")
    options = parser.parse_args()
    train(40, options.mode, options.lanes)
