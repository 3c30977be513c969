"""Soft actor-critic (Haarnoja et al. 2018, arXiv 1812.05905) as an asynchronous flow.

A puck on a table is to be pushed to a place and stopped there. Acting and learning are stages like
any others; what makes the flow asynchronous is one number of its plan, `max_staleness`: the next
episodes begin with weights that are one update older, while the learner is still at work on those
before. Off-policy learning does not mind. With `--lanes cpu:2` both really go on at the same time.

    python examples/asynchronous_sac.py --seed 1
    python examples/asynchronous_sac.py --mode disaggregated --lanes cpu:2
    python examples/asynchronous_sac.py --staleness 0        # synchronous, for comparison

Expected after 15 steps: over the last quarter of an episode the puck is on average nearer than 0.15
to its place (`nearness` at least -0.15; without learning about -2).
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

import m2flow
from m2flow import Batch, Flow, Place, Stream, Worker, loop, stage
from m2flow.algorithms.sac import actor_loss, critic_loss, polyak, soft_targets, temperature_loss
from m2flow.algorithms.sampling import derive_seed, uniform
from m2flow.plan import build_plan, parse_lanes

MOVES, EPISODES, STEPS = 24, 16, 15
UPDATES, BATCH, DISCOUNT, LEARNING_RATE, POLYAK = 40, 128, 0.9, 3e-3, 0.02
EXPECTED = {"nearness": -0.15}


class Actor(nn.Module):
    """[N, 4] way to the goal and velocity -> [N, 2] actions in (-1, 1) and log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, seen: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.layers(seen).chunk(2, dim=1)
        log_std = log_std.clamp(-5, 1)
        raw = mean + log_std.exp() * noise
        normal = -0.5 * noise.square() - log_std - 0.5 * torch.log(torch.tensor(2 * torch.pi))
        slope = 2 * (torch.log(torch.tensor(2.0)) - raw - nn.functional.softplus(-2 * raw))
        return raw.tanh(), (normal - slope).sum(1)


class Critics(nn.Module):
    """Two estimates of Q: [2, N]."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.both = nn.ModuleList(
                nn.Sequential(
                    nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
                )
                for _ in range(2)
            )

    def forward(self, seen: Tensor, action: Tensor) -> Tensor:
        return torch.stack([one(torch.cat([seen, action], 1))[:, 0] for one in self.both])


class Player(Worker):
    """Draws actions by weights that are published to it; the noise belongs to the episode."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.actor = Actor()

    @stage
    def act(self, episodes: Batch) -> Batch:
        turn, seed = episodes["turn"], episodes["seed"]
        drawn = uniform(seed[:, None], 2 * turn[:, None] + torch.arange(2))
        noise = torch.special.ndtri(drawn.clamp(1e-6, 1 - 1e-6)).float()
        with torch.inference_mode():
            action, _ = self.actor(episodes["seen"][torch.arange(len(turn)), turn], noise)
        actions = episodes["actions"].clone()
        actions[torch.arange(len(turn)), turn] = action
        return episodes.with_columns(actions=actions)

    def install(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.actor.load_state_dict(dict(weights))


@stage
def slide(episodes: Batch) -> Batch:
    """Push the puck; the way to its place gets shorter by its velocity, which friction takes."""
    turn, rows = episodes["turn"], torch.arange(len(episodes))
    way, velocity = episodes["seen"][rows, turn].chunk(2, dim=1)
    velocity = 0.7 * velocity + 0.15 * episodes["actions"][rows, turn]
    seen = episodes["seen"].clone()
    seen[rows, turn + 1] = torch.cat([way - velocity, velocity], 1)
    done = turn + 1 == MOVES
    return episodes.with_columns(seen=seen, turn=turn + 1, done=done.tolist())


class Learner(Worker):
    """Replay, actor, critics and temperature; a number of updates once a step's episodes are in."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.actor, self.critics = Actor(), Critics()
        self.target = copy.deepcopy(self.critics)
        self.log_temperature = nn.Parameter(torch.tensor(-2.0))
        groups = [[*self.critics.parameters()], [*self.actor.parameters()], [self.log_temperature]]
        self.optimizers = [torch.optim.Adam(group, LEARNING_RATE) for group in groups]
        self.memory: list[dict[str, Tensor]] = []
        self.chance = torch.Generator().manual_seed(place.rank)

    @stage(accumulates=True)
    def learn(self, episodes: Batch) -> Batch:
        before, after = episodes["seen"][:, :-1], episodes["seen"][:, 1:]
        distance = after[..., :2].norm(dim=-1)
        self.memory.append(
            {
                "before": before.flatten(0, 1),
                "after": after.flatten(0, 1),
                "action": episodes["actions"].flatten(0, 1),
                "reward": -distance.flatten(),
            }
        )
        return episodes.only("seed").with_columns(nearness=-distance[:, -MOVES // 4 :].mean(1))

    @learn.finish
    def learn_finish(self) -> dict[str, float]:
        memory = {name: torch.cat([part[name] for part in self.memory]) for name in self.memory[0]}
        self.memory = [memory]
        for _ in range(UPDATES):
            drawn = torch.randint(len(memory["reward"]), (BATCH,), generator=self.chance)
            self._update({name: column[drawn] for name, column in memory.items()})
        return {"temperature": float(self.log_temperature.detach().exp())}

    def _update(self, rows: Mapping[str, Tensor]) -> None:
        temperature = self.log_temperature.exp()
        with torch.no_grad():
            action, logprobs = self.actor(rows["after"], self._noise())
            future = self.target(rows["after"], action)
            discounts = torch.full((BATCH,), DISCOUNT)  # episodes are cut off and do not end
            goals = soft_targets(rows["reward"], discounts, future, logprobs, temperature)
        self._descend(0, critic_loss(self.critics(rows["before"], rows["action"]), goals))
        action, logprobs = self.actor(rows["before"], self._noise())
        self._descend(1, actor_loss(self.critics(rows["before"], action), logprobs, temperature))
        self._descend(2, temperature_loss(self.log_temperature, logprobs, target_entropy=-2.0))
        polyak(self.target, self.critics, POLYAK)

    def _noise(self) -> Tensor:
        return torch.randn(BATCH, 2, generator=self.chance)

    def _descend(self, which: int, losses: Tensor) -> None:
        optimizer = self.optimizers[which]
        parameters = optimizer.param_groups[0]["params"]
        gradients = torch.autograd.grad(losses.mean(), parameters)
        self.place.all_reduce(gradients)  # over the lanes, each of which draws from its own memory
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient / self.place.size
        optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return dict(self.actor.state_dict())


class SAC(Flow):
    """Play episodes, learn from all that were played so far."""

    player: Player
    learner: Learner

    def step(self, episodes: Stream) -> Stream:
        return self.learner.learn(loop(self.player.act, slide, until="done")(episodes))

    def sync(self) -> None:
        self.learner.publish(self.player)


def episodes(seed: int, step: int) -> Batch:
    """The episodes of a step before they begin: a function of the seed and the step's number."""
    seeds = torch.tensor([derive_seed(seed, step, number) for number in range(EPISODES)])
    seen = torch.zeros(EPISODES, MOVES + 1, 4)
    seen[:, 0, :2] = uniform(seeds[:, None], 1000 + torch.arange(2)).float() * 2 - 1
    turn, actions = torch.zeros_like(seeds), torch.zeros(EPISODES, MOVES, 2)
    return Batch({"seed": seeds, "turn": turn, "seen": seen, "actions": actions})


def train(
    seed: int = 0, mode: str = "eager", lanes: str = "cpu:1", staleness: int = 1
) -> dict[str, float]:
    """Run the flow; how near the puck is in the last three steps."""
    flow = SAC(player=Player(), learner=Learner())
    plan = build_plan(mode, flow.trace(), parse_lanes(lanes), EPISODES)
    plan = replace(plan, max_staleness=staleness)
    found: list[float] = []
    with m2flow.launch(flow, items_per_step=EPISODES, plan=plan) as run:
        for result in run.steps(episodes(seed, step) for step in range(STEPS)):
            found.append(float(result.output["nearness"].mean()))
            if result.step % 5 == 0 or result.step == STEPS - 1:
                temperature = result.metrics["temperature"]
                print(f"step {result.step:2d}  {found[-1]:7.3f}  temperature {temperature:.4f}")
    return {"nearness": sum(found[-3:]) / 3}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Push a puck to its place, while still learning.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", default="eager", help="eager, collocated or disaggregated")
    parser.add_argument("--lanes", default="cpu:1", help="such as cpu:2")
    parser.add_argument("--staleness", type=int, default=1, help="steps that acting may run ahead")
    train(**vars(parser.parse_args()))
