"""Hierarchical RL: one policy says where to go, another goes there (Dietterich 2000: the taxi).

A passenger waits at one of four landmarks of a grid and wants to another one. The manager sees
where passenger and destination are, and picks a landmark; the driver sees its own cell and that
landmark, and moves. Both act in one loop, the manager whenever the last landmark is reached; each
has a learner of its own that publishes to it. A move teaches the driver about all four landmarks.

    python examples/hierarchical.py --seed 1
    python examples/hierarchical.py --mode collocated --lanes cpu:2

Expected after 30 steps, greedily: every passenger is delivered, by the fewest moves there are
(`delivered` and `shortest` are 1.0; at first 0).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

import m2flow
from m2flow import Batch, Flow, Place, Stream, Worker, loop, stage
from m2flow.algorithms.sampling import derive_seed, sample_tokens

SIZE, IN_TAXI = 5, 4
LANDMARKS = torch.tensor([0, 4, 20, 24])
MOVES = torch.tensor([[0, -1], [1, 0], [0, 1], [-1, 0]])
MAX_MOVES, TRIPS_PER_STEP, STEPS = 60, 64, 30
EPSILON, DISCOUNT, LEARNING_RATE = 0.3, 0.9, 0.5
EXPECTED = {"delivered": 1.0, "shortest": 1.0}


def drawn(value: Tensor, trips: Batch, head: int) -> Tensor:
    """Epsilon-greedy choices among the columns of `value`; ties are broken by chance."""
    best = (value == value.amax(1, keepdim=True)).double()
    epsilon = trips["epsilon"][:, None]
    chances = epsilon / value.shape[1] + (1 - epsilon) * best / best.sum(1, keepdim=True)
    return sample_tokens(chances.log(), trips["seed"], 2 * trips["turn"] + head, 1.0)[0]


class Table(Worker):
    """Choices by a table of values that is published to it."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def load(self, place: Place) -> None:
        super().load(place)
        self.value = torch.zeros(*self.shape, dtype=torch.float64)

    def install(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.value = weights["value"].clone()


class Manager(Table):
    """Where passenger and destination are -> the landmark to go to next."""

    @stage
    def choose(self, trips: Batch) -> Batch:
        turn = trips["turn"][:, None]
        choice = drawn(self.value[trips["passenger"], trips["destination"]], trips, head=0)
        goal = torch.where(trips["goal"] < 0, choice, trips["goal"])
        goals = trips["goals"].scatter(1, turn, goal[:, None])
        return trips.with_columns(goal=goal, goals=goals)


class Driver(Table):
    """The landmark to go to and the taxi's cell -> a move."""

    @stage
    def move(self, trips: Batch) -> Batch:
        turn = trips["turn"][:, None]
        cell = trips["cells"].gather(1, turn)[:, 0]
        move = drawn(self.value[trips["goal"], cell], trips, head=1)
        return trips.with_columns(moves=trips["moves"].scatter(1, turn, move[:, None]))


@stage
def drive(trips: Batch) -> Batch:
    """Carry out the move; a passenger gets in and out where the taxi has reached its goal."""
    turn = trips["turn"][:, None]
    cell = trips["cells"].gather(1, turn)[:, 0]
    way = MOVES[trips["moves"].gather(1, turn)[:, 0]]
    row = (cell // SIZE + way[:, 0]).clamp(0, SIZE - 1)
    column = (cell % SIZE + way[:, 1]).clamp(0, SIZE - 1)
    cell = row * SIZE + column
    goal, passenger = trips["goal"], trips["passenger"]
    arrived = cell == LANDMARKS[goal]
    delivered = arrived & (passenger == IN_TAXI) & (goal == trips["destination"])
    passenger = torch.where(arrived & (goal == passenger), IN_TAXI, passenger)
    done = delivered | (trips["turn"] + 1 == MAX_MOVES)
    return trips.with_columns(
        cells=trips["cells"].scatter(1, turn + 1, cell[:, None]),
        passengers=trips["passengers"].scatter(1, turn + 1, passenger[:, None]),
        arrivals=trips["arrivals"].scatter(1, turn, arrived[:, None]),
        goal=torch.where(arrived, -1, goal),
        passenger=passenger,
        delivered=delivered,
        turn=trips["turn"] + 1,
        done=done.tolist(),
    )


class Learner(Table):
    """Q-learning on a table: each value moves towards the mean of its targets, once a step."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.errors = torch.zeros(2, *self.shape, dtype=torch.float64)  # sum, count

    def fold(self, at: tuple[Tensor, ...], reward: Tensor, after: Tensor) -> None:
        """Add the errors at these entries; `after` is the value of what follows, 0 at an end."""
        target = reward + DISCOUNT * after
        self.errors[0].index_put_(at, target - self.value[at], accumulate=True)
        self.errors[1].index_put_(at, torch.ones_like(target), accumulate=True)

    def update(self) -> dict[str, float]:
        self.place.all_reduce([self.errors])
        error, count = self.errors
        self.value += LEARNING_RATE * error / count.clamp(min=1)
        self.errors.zero_()
        return {}

    def weights(self) -> dict[str, Tensor]:
        return {"value": self.value}


class DriverLearner(Learner):
    """What a move is worth on the way to each landmark: 1 for arriving."""

    @stage(accumulates=True)
    def learn(self, trips: Batch) -> Batch:
        made = torch.arange(MAX_MOVES) < trips["turn"][:, None]
        before, after = trips["cells"][:, :-1][made], trips["cells"][:, 1:][made]
        for goal, cell in enumerate(LANDMARKS):
            arrived = (after == cell).double()
            future = self.value[goal, after].amax(1) * (1 - arrived)
            at = (torch.full_like(before, goal), before, trips["moves"][made])
            self.fold(at, arrived, future)
        return trips

    @learn.finish
    def learn_finish(self) -> dict[str, float]:
        return self.update()


class ManagerLearner(Learner):
    """What a landmark is worth next: 1 for delivering."""

    @stage(accumulates=True)
    def learn(self, trips: Batch) -> Batch:
        made = trips["arrivals"]  # decisions that were carried out; false after the trip's end
        destination = trips["destination"][:, None].expand_as(made)[made]
        # A decision's passenger is the one that the taxi has set out with, unchanged until then.
        before, after = trips["passengers"][:, :-1][made], trips["passengers"][:, 1:][made]
        goal = trips["goals"][made]
        delivered = ((before == IN_TAXI) & (goal == destination)).double()
        future = self.value[after, destination].amax(1) * (1 - delivered)
        self.fold((before, destination, goal), delivered, future)
        return trips.only("delivered", "turn")

    @learn.finish
    def learn_finish(self) -> dict[str, float]:
        return self.update()


class Taxi(Flow):
    """Two policies in one loop, each with its learner."""

    manager: Manager
    driver: Driver
    manager_learner: ManagerLearner
    driver_learner: DriverLearner

    def step(self, trips: Stream) -> Stream:
        return self.manager_learner.learn(self.driver_learner.learn(self.evaluate(trips)))

    def evaluate(self, trips: Stream) -> Stream:
        return loop(self.manager.choose, self.driver.move, drive, until="done")(trips)

    def sync(self) -> None:
        self.manager_learner.publish(self.manager)
        self.driver_learner.publish(self.driver)


def trips(seed: int, step: int, epsilon: float) -> Batch:
    """The trips of a step before they begin: a function of the seed and the step's number."""
    seeds = torch.tensor([derive_seed(seed, step, number) for number in range(TRIPS_PER_STEP)])
    passenger = seeds % 4
    nothing = torch.zeros(TRIPS_PER_STEP, MAX_MOVES + 1, dtype=torch.int64)
    return Batch(
        {
            "seed": seeds,
            "epsilon": torch.full((TRIPS_PER_STEP,), epsilon, dtype=torch.float64),
            "turn": nothing[:, 0],
            "cells": nothing + _first(seeds // 16 % SIZE**2),
            "passenger": passenger,
            "passengers": nothing + _first(passenger),
            "destination": (passenger + 1 + seeds // 4 % 3) % 4,
            "goal": torch.full((TRIPS_PER_STEP,), -1),
            "goals": nothing[:, 1:],
            "moves": nothing[:, 1:],
            "arrivals": nothing[:, 1:].bool(),
            "delivered": nothing[:, 0].bool(),
        }
    )


def _first(values: Tensor) -> Tensor:
    """[N, MAX_MOVES + 1] with the values in the first column."""
    return torch.nn.functional.pad(values[:, None], (0, MAX_MOVES))


def fewest_moves(trips: Batch) -> Tensor:
    """From the taxi's first cell to the passenger, and on to the destination.

    A passenger who waits where the taxi stands gets in with a move against the wall.
    """
    cells = [
        trips["cells"][:, 0],
        LANDMARKS[trips["passengers"][:, 0]],
        LANDMARKS[trips["destination"]],
    ]
    first, second = (
        (a // SIZE - b // SIZE).abs() + (a % SIZE - b % SIZE).abs() for a, b in pairwise(cells)
    )
    return first.clamp(min=1) + second


def train(seed: int = 0, mode: str = "eager", lanes: str = "auto") -> dict[str, float]:
    """Run the flow; how the greedy policies do at the end."""
    tables = ((5, 4, 4), (4, SIZE**2, 4))  # passenger, destination, goal; goal, cell, move
    flow = Taxi(
        manager=Manager(*tables[0]),
        driver=Driver(*tables[1]),
        manager_learner=ManagerLearner(*tables[0]),
        driver_learner=DriverLearner(*tables[1]),
    )
    found: dict[str, float] = {}
    with m2flow.launch(
        flow, items_per_step=TRIPS_PER_STEP, mode=mode, lanes=lanes, also={"evaluate": 64}
    ) as run:
        for done in range(0, STEPS + 1, 10):
            asked = trips(seed, -1, epsilon=0.0)
            made = run.run_method("evaluate", asked).output
            shortest = made["delivered"] & (made["turn"] == fewest_moves(made))
            found = {
                "delivered": float(made["delivered"].double().mean()),
                "shortest": float(shortest.double().mean()),
            }
            print(f"step {done:3d}  " + "  ".join(f"{k} {v:.3f}" for k, v in found.items()))
            for step in range(done, min(done + 10, STEPS)):
                run.step(trips(seed, step, EPSILON))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A manager and a driver learn to run a taxi.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", default="eager", help="eager, collocated or disaggregated")
    parser.add_argument("--lanes", default="auto", help="such as cpu:2")
    train(**vars(parser.parse_args()))
