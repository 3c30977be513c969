"""DAgger (Ross et al. 2011, arXiv 1011.0686): a scripted expert corrects what the student does.

The student moves the hand on the table, and so decides which states are seen; for each of them the
expert says what it would have done. The learner keeps all of that and trains the student to do
likewise, by maximum likelihood. The environment is `table:red`, with the things' places in its
state; any environment with a method `expert` would do.

    python examples/dagger.py
    python examples/dagger.py --mode collocated --lanes cpu:2
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

import m2flow
from m2flow import Batch, Flow, Place, Stream, Worker, loop, stage
from m2flow.algorithms.sampling import derive_seed
from m2flow.environments.registry import make_environment
from m2flow.models.policies.actor_critic import ActorCritic, mlp_actor_critic

EPISODES_PER_STEP, UPDATES_PER_STEP, LEARNING_RATE = 32, 60, 3e-3


def make_student() -> ActorCritic:
    """The same one on every lane: its first weights follow from a seed."""
    spec = make_environment("table:red", privileged=True).spec
    (size,) = spec.observation("state").shape
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return mlp_actor_critic(
            size,
            actions="gaussian",
            low=spec.action.low,
            high=spec.action.high,
            hidden=(64, 64),
            normalise=False,
        )


class Tables(Worker):
    """A table for each episode, and what was seen and shown there."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.tables: dict[int, Any] = {}
        self.lessons: dict[int, list[tuple[Tensor, Tensor]]] = {}

    @stage(sticky=True)
    def begin(self, episodes: Batch) -> Batch:
        """Lay out a table for each episode."""
        numbers = episodes["episode"].tolist()
        for number, seed in zip(numbers, episodes["seed"].tolist(), strict=True):
            self.tables[number] = make_environment("table:red", privileged=True)
            self.tables[number].reset(seed, None)
            self.lessons[number] = []
        return episodes.only("episode").with_columns(state=self._states(numbers))

    @stage(sticky=True)
    def step(self, episodes: Batch) -> Batch:
        """Ask the expert, then do as the student does; `lessons` come with the last step."""
        numbers = episodes["episode"].tolist()
        columns = (episodes["state"], episodes["action"].numpy())
        done, success = [], []
        for number, state, action in zip(numbers, *columns, strict=True):
            table, lessons = self.tables[number], self.lessons[number]
            lessons.append((state, torch.from_numpy(table.expert())))
            took = table.step(action.astype(np.float64))
            done.append(took.terminated or len(lessons) == table.spec.max_episode_steps)
            success.append(took.success)
        return episodes.only("episode").with_columns(
            state=self._states(numbers),
            done=done,
            success=success,
            lessons=[
                self._forget(number) if ended else []
                for number, ended in zip(numbers, done, strict=True)
            ],
        )

    def _states(self, numbers: list[int]) -> Tensor:
        states = [self.tables[number].observe()["state"] for number in numbers]
        return torch.from_numpy(np.stack(states))

    def _forget(self, number: int) -> list[tuple[Tensor, Tensor]]:
        del self.tables[number]
        return self.lessons.pop(number)


class Student(Worker):
    """Acts greedily, on weights that are published to it."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.policy = make_student()

    @stage
    def act(self, episodes: Batch) -> Batch:
        with torch.inference_mode():
            seeds = [0] * len(episodes)  # nothing is drawn
            decided = self.policy.act({"state": episodes["state"]}, seeds=seeds, greedy=True)
        # What goes around the loop has the columns of what comes into it.
        return episodes.only("episode", "state").with_columns(action=decided.actions[:, 0].cpu())

    def install(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.policy.load_state_dict(dict(weights))


class Learner(Worker):
    """Keeps all lessons of all steps, and trains on them as a whole."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.policy = make_student()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), LEARNING_RATE)
        self.gradients = [torch.zeros_like(p) for p in self.policy.parameters()]
        for parameter, gradient in zip(self.policy.parameters(), self.gradients, strict=True):
            parameter.grad = gradient
        self.lessons: list[tuple[Tensor, Tensor]] = []

    @stage(accumulates=True)
    def train(self, episodes: Batch) -> Batch:
        self.lessons += [lesson for lessons in episodes["lessons"] for lesson in lessons]
        return episodes.only("success")

    @train.finish
    def train_finish(self) -> dict[str, float]:
        totals = torch.zeros(2)
        for _ in range(UPDATES_PER_STEP):
            totals = torch.tensor([0.0, float(len(self.lessons))])
            if self.lessons:
                states, shown = map(torch.stack, zip(*self.lessons, strict=True))
                judged = self.policy.evaluate({"state": states}, shown[:, None])
                loss = -judged.logprobs.sum()
                loss.backward()
                totals[0] = loss.detach()
            # Over the lanes, however many hold this worker, with or without lessons of their own.
            self.place.all_reduce([*self.gradients, totals])
            for gradient in self.gradients:
                gradient /= totals[1]
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)
        return {"loss": float(totals[0] / totals[1]), "lessons": float(totals[1])}

    def weights(self) -> dict[str, Tensor]:
        return dict(self.policy.state_dict())


class DAgger(Flow):
    """The student acts, the expert says what it would have done, the student learns that."""

    tables: Tables
    student: Student
    learner: Learner

    def step(self, episodes: Stream) -> Stream:
        seen = self.tables.begin(episodes)
        return self.learner.train(loop(self.student.act, self.tables.step)(seen))

    def sync(self) -> None:
        self.learner.publish(self.student)


def episodes(step: int, seed: int = 0) -> Batch:
    """The episodes of a step: a function of its number and the run's seed alone."""
    numbers = range(step * EPISODES_PER_STEP, (step + 1) * EPISODES_PER_STEP)
    seeds = [derive_seed(seed, number) for number in numbers]
    return Batch({"episode": torch.tensor(numbers), "seed": torch.tensor(seeds)})


def train(steps: int, mode: str = "eager", lanes: str = "auto", seed: int = 0) -> list[float]:
    """Run the flow; the share of each step's episodes that succeeded."""
    flow = DAgger(tables=Tables(), student=Student(), learner=Learner())
    successes = []
    with m2flow.launch(flow, items_per_step=EPISODES_PER_STEP, mode=mode, lanes=lanes) as run:
        for result in run.steps(episodes(step, seed) for step in range(steps)):
            successes.append(sum(result.output["success"]) / EPISODES_PER_STEP)
            found = result.metrics
            print(
                f"step {result.step:2d}  success {successes[-1]:.2f}  "
                f"loss {found['loss']:6.3f}  lessons {found['lessons']:.0f}"
            )
    return successes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Imitate an expert where the student errs.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--mode", default="eager", help="eager, collocated or disaggregated")
    parser.add_argument("--lanes", default="auto", help="such as cpu:2")
    parser.add_argument("--seed", type=int, default=0)
    train(**vars(parser.parse_args()))
