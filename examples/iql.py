"""Offline RL: implicit Q-learning (Kostrikov et al. 2021, arXiv 2110.06169) from a fixed data set.

A point in the plane was pushed about at random, and now and then it came to its goal. Nothing else
is ever tried: what is learnt comes from the recorded transitions alone. An item is a transition;
the critic says how much better its action was than usual, the actor imitates the better ones, and
the critic learns `V` by expectiles of `Q`, so that no action is judged that is not in the data.

    python examples/iql.py --seed 1
    python examples/iql.py --mode collocated --lanes cpu:2

Expected after 200 steps: within 25 moves the actor reaches the goal from at least 70 % of 64 far
starts (`success`); pushed at random, as in the data, the point does so from less than 1 % of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import torch
from torch import Tensor, nn

import m2flow
from m2flow import Batch, Flow, Place, Stream, Worker, stage
from m2flow.algorithms.sampling import derive_seed

GOAL, RADIUS, REACH, MAX_MOVES = torch.tensor([0.8, 0.8]), 0.2, 0.2, 25
EPISODES, BATCH, STEPS, LEARNING_RATE = 2000, 256, 200, 2e-3
DISCOUNT, EXPECTILE, INVERSE_TEMPERATURE, POLYAK = 0.9, 0.9, 16.0, 0.1
EXPECTED = {"success": 0.7}


def moved(place: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """The next place, and whether the goal is reached."""
    after = (place + REACH * action.clamp(-1, 1)).clamp(-1, 1)
    return after, (after - GOAL).norm(dim=-1) < RADIUS


def recorded(seed: int) -> dict[str, Tensor]:
    """Transitions of random walks from random starts."""
    chance = torch.Generator().manual_seed(seed)
    place = torch.rand(EPISODES, 2, generator=chance) * 2 - 1
    rows: list[tuple[Tensor, ...]] = []
    going = torch.ones(EPISODES, dtype=torch.bool)
    for _ in range(MAX_MOVES):
        action = torch.rand(EPISODES, 2, generator=chance) * 2 - 1
        after, ended = moved(place, action)
        rows.append((place[going], action[going], after[going], ended[going].float()))
        place, going = after, going & ~ended
    names = ("place", "action", "after", "ended")
    return dict(zip(names, map(torch.cat, zip(*rows, strict=True)), strict=True))


def network(inputs: int, outputs: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(inputs)
        hidden = [nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
        return nn.Sequential(*hidden, nn.Linear(64, outputs))


class Recording(Worker):
    """The data set."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def load(self, place: Place) -> None:
        super().load(place)
        self.columns = recorded(self.seed)

    @stage
    def read(self, numbers: Batch) -> Batch:
        """The transitions that the items' seeds point at."""
        rows = numbers["seed"] % len(self.columns["place"])
        return Batch({name: column[rows] for name, column in self.columns.items()}, numbers.ids)


class Trained(Worker):
    """Networks whose losses are summed over items, and one optimizer step for a step's items."""

    def begin(self, place: Place, *networks: nn.Module) -> None:
        super().load(place)
        self.parameters = [p for module in networks for p in module.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, LEARNING_RATE)
        self.optimizer.zero_grad()

    def update(self) -> None:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.place.all_reduce(gradients)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient / BATCH
        self.optimizer.step()
        self.optimizer.zero_grad()


class Critic(Trained):
    """Two estimates of Q, of which the lower one counts, and V."""

    def load(self, place: Place) -> None:
        self.q, self.target, self.v = network(4, 2), network(4, 2), network(2, 1)
        self.begin(place, self.q, self.v)

    @stage
    def judge(self, rows: Batch) -> Batch:
        """Add `advantage`, Q - V."""
        with torch.no_grad():
            value = self.v(rows["place"])[:, 0]
            return rows.with_columns(advantage=self._lower_q(rows) - value)

    def _lower_q(self, rows: Batch) -> Tensor:
        return self.target(torch.cat([rows["place"], rows["action"]], 1)).amin(1)

    @stage(accumulates=True)
    def learn(self, rows: Batch) -> Batch:
        with torch.no_grad():
            future = DISCOUNT * (1 - rows["ended"]) * self.v(rows["after"])[:, 0]
            lower = self._lower_q(rows)
        error = lower - self.v(rows["place"])[:, 0]
        weight = torch.where(error > 0, EXPECTILE, 1 - EXPECTILE)
        both = self.q(torch.cat([rows["place"], rows["action"]], 1))
        loss = (weight * error.square()).sum()
        loss = loss + (both - (rows["ended"] - 1 + future)[:, None]).square().sum()
        loss.backward()
        return rows.only("ended")

    @learn.finish
    def learn_finish(self) -> None:
        self.update()
        for old, new in zip(self.target.parameters(), self.q.parameters(), strict=True):
            old.data.lerp_(new.data, POLYAK)


class Actor(Trained):
    """Imitates recorded actions, the better ones more: advantage-weighted regression."""

    def load(self, place: Place) -> None:
        self.mean = network(2, 2)
        self.begin(place, self.mean)

    @stage(accumulates=True)
    def imitate(self, rows: Batch) -> Batch:
        weight = (INVERSE_TEMPERATURE * rows["advantage"]).exp().clamp(max=100.0)
        errors = (self.mean(rows["place"]) - rows["action"]).square().sum(1)
        (weight * errors).sum().backward()
        return rows

    @imitate.finish
    def imitate_finish(self) -> None:
        self.update()

    def weights(self) -> Mapping[str, Tensor]:
        return dict(self.mean.state_dict())


class IQL(Flow):
    """Read transitions, weigh them, learn from them."""

    data: Recording
    critic: Critic
    actor: Actor

    def step(self, numbers: Stream) -> Stream:
        rows = self.critic.judge(self.data.read(numbers))
        return self.critic.learn(self.actor.imitate(rows))


def success(weights: Mapping[str, Tensor], seed: int) -> float:
    """The share of 64 starts in the far quarter from which the actor reaches the goal."""
    mean = network(2, 2)
    mean.load_state_dict(dict(weights))
    place = -torch.rand(64, 2, generator=torch.Generator().manual_seed(seed))
    reached = torch.zeros(64, dtype=torch.bool)
    with torch.no_grad():
        for _ in range(MAX_MOVES):
            place, ended = moved(place, mean(place))
            reached |= ended
    return float(reached.float().mean())


def train(seed: int = 0, mode: str = "eager", lanes: str = "auto") -> dict[str, float]:
    """Run the flow; from how many far starts the actor reaches the goal."""
    flow = IQL(data=Recording(seed), critic=Critic(), actor=Actor())
    found = 0.0
    batches = (
        Batch({"seed": torch.tensor([derive_seed(seed, step, n) for n in range(BATCH)])})
        for step in range(STEPS)
    )
    with m2flow.launch(flow, items_per_step=BATCH, mode=mode, lanes=lanes) as run:
        for result in run.steps(batches):
            if result.step % 50 == 49:
                found = success(run.worker_call("actor", "weights"), seed)
                print(f"step {result.step + 1:3d}  success {found:.3f}")
    return {"success": found}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Learn from a fixed data set.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", default="eager", help="eager or collocated")
    parser.add_argument("--lanes", default="auto", help="such as cpu:2")
    train(**vars(parser.parse_args()))
