"""A flow of one's own: REINFORCE on points in the plane, whose quadrant is to be named.

Two workers, two functions and a weight edge are the whole program. The flow says what happens in
a step; where it happens is chosen on the command line, and the weights learnt are the same.

    python examples/own_flow.py
    python examples/own_flow.py --mode collocated --lanes cpu:2
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import torch
from torch import Tensor

import m2flow
from m2flow import Batch, Flow, Place, Stream, Worker, stage
from m2flow.algorithms.sampling import sample_tokens

QUADRANTS, POINTS_PER_STEP, GUESSES_PER_POINT = 4, 64, 8
LEARNING_RATE = 0.03


class Guesser(Worker):
    """Guesses several times for each point, by weights that are published to it."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.weight = torch.zeros(2, QUADRANTS, dtype=torch.float64)

    @stage(expands=GUESSES_PER_POINT)
    def guess(self, points: Batch) -> Batch:
        guesses = points.repeat(GUESSES_PER_POINT)
        logits = guesses["point"] @ self.weight
        number = torch.arange(len(guesses)) % GUESSES_PER_POINT
        # What a point draws depends on its seed, and not on the batch that it happens to be in.
        quadrant, _ = sample_tokens(logits, guesses["seed"], number, temperature=1.0)
        return guesses.with_columns(guess=quadrant)

    def install(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.weight = weights["weight"].clone()


@stage
def reward(guesses: Batch) -> Batch:
    """1 for the right quadrant, else 0."""
    right = (guesses["point"] > 0).long() @ torch.tensor([1, 2])
    return guesses.with_columns(reward=(guesses["guess"] == right).double())


@stage(unit="group")
def advantage(guesses: Batch) -> Batch:
    """How much better a guess was than the others at the same point."""
    rewards = guesses["reward"].view(-1, GUESSES_PER_POINT)
    return guesses.with_columns(advantage=(rewards - rewards.mean(1, keepdim=True)).flatten())


class Learner(Worker):
    """Adds up policy gradients; one step of ascent when all guesses are in."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.weight = torch.zeros(2, QUADRANTS, dtype=torch.float64, requires_grad=True)
        self.gradient = torch.zeros_like(self.weight)

    @stage(accumulates=True)
    def train(self, guesses: Batch) -> Batch:
        logprobs = (guesses["point"] @ self.weight).log_softmax(-1)
        chosen = logprobs.gather(1, guesses["guess"][:, None])[:, 0]
        gradient = torch.autograd.grad((chosen * guesses["advantage"]).sum(), self.weight)
        self.gradient += gradient[0]
        return guesses.only("reward")

    @train.finish
    def train_finish(self) -> dict[str, float]:
        self.place.all_reduce([self.gradient])  # over the lanes, however many hold this worker
        self.weight.data += LEARNING_RATE * self.gradient
        norm = float(self.gradient.norm())
        self.gradient.zero_()
        return {"gradient_norm": norm}

    def weights(self) -> dict[str, Tensor]:
        return {"weight": self.weight.detach()}


class NameTheQuadrant(Flow):
    """Guess, compare the guesses at each point with each other, make the better ones likelier."""

    guesser: Guesser
    learner: Learner

    def step(self, points: Stream) -> Stream:
        guesses = self.guesser.guess(points)
        guesses = advantage(reward(guesses))
        return self.learner.train(guesses)

    def sync(self) -> None:
        self.learner.publish(self.guesser)


def points(step: int, seed: int = 0) -> Batch:
    """The points of a step: a function of its number and the run's seed alone."""
    step += 1_000_000 * seed
    generator = torch.Generator().manual_seed(step)
    point = torch.rand(POINTS_PER_STEP, 2, dtype=torch.float64, generator=generator) * 2 - 1
    first = step * POINTS_PER_STEP
    return Batch({"point": point, "seed": torch.arange(first, first + POINTS_PER_STEP)})


def train(steps: int, mode: str = "eager", lanes: str = "auto", seed: int = 0) -> list[float]:
    """Run the flow; the mean reward of each step."""
    flow = NameTheQuadrant(guesser=Guesser(), learner=Learner())
    rewards = []
    with m2flow.launch(flow, items_per_step=POINTS_PER_STEP, mode=mode, lanes=lanes) as run:
        for result in run.steps(points(step, seed) for step in range(steps)):
            rewards.append(float(result.output["reward"].mean()))
            if result.step % 10 == 0 or result.step == steps - 1:
                norm = result.metrics["gradient_norm"]
                print(f"step {result.step:3d}  reward {rewards[-1]:.4f}  gradient {norm:.9f}")
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Name the quadrant of a point.")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--mode", default="eager", help="eager, collocated or disaggregated")
    parser.add_argument("--lanes", default="auto", help="such as cpu:2")
    parser.add_argument("--seed", type=int, default=0)
    train(**vars(parser.parse_args()))
