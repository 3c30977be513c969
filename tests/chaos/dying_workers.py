"""A flow of workers that kill their own process in the middle of something.

The toy flow counts in integers, so that results can be compared without tolerance. A worker kills
its own process when it comes to the moment that a test has named; a file tells that it has done so.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import m2flow
from m2flow import Batch, Flow, Stream, Worker, stage
from m2flow.engine.plan import LaneSpec, Placement, Plan
from m2flow.errors import ProcessEnded
from m2flow.flow import Layout
from m2flow.runtime.driver.launch import Run
from m2flow.runtime.driver.pool import LanePool
from m2flow.runtime.driver.runner import StepResult

ray = pytest.importorskip("ray")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this module

ITEMS, SAMPLES, STEPS = 6, 4, 4
LANES = tuple(LaneSpec(number) for number in range(3))


@dataclass(frozen=True)
class Death:
    """When a process kills itself: at a moment in a step, and so many times in all.

    It is killed, takes a "segfault", as in a simulator, or calls "exit". With `beside` it lives:
    what is gone is a process that a worker has started. With `after` it waits until the learner has
    noted that line.

    `notes` is the file where the learner notes what it does, line by line.
    """

    moment: str = ""
    version: int = 0
    folder: str = ""
    times: int = 1
    by: str = "kill"
    beside: bool = False
    notes: str = ""
    after: str = ""

    def note(self, *lines: str) -> None:
        if self.notes:
            with Path(self.notes).open("a") as file:
                file.writelines(f"{line}\n" for line in lines)

    def noted(self) -> list[str]:
        path = Path(self.notes)
        return path.read_text().splitlines() if path.exists() else []

    def at(self, moment: str, version: int) -> None:
        if (moment, version) != (self.moment, self.version):
            return
        while self.after and self.after not in self.noted():
            time.sleep(0.01)
        for number in range(self.times):
            with suppress(FileExistsError):
                (Path(self.folder) / str(number)).touch(exist_ok=False)  # one process alone can
                if self.beside:
                    raise ProcessEnded("the scorer was ended by SIGKILL\nand more")
                if self.by == "segfault":
                    ctypes.string_at(0)
                if self.by == "exit":
                    os._exit(7)
                os.kill(os.getpid(), signal.SIGKILL)


class Sampler(Worker):
    """Takes what has come after each sample; it dies when it has handed half of them on."""

    def __init__(self, death: Death) -> None:
        self.samples, self.weight, self.version, self.death = SAMPLES, 0, 0, death

    def load(self, place: Any) -> None:
        super().load(place)
        self.version = place.version
        self.death.at("load", self.version)

    @stage(streaming=True, expands="samples")
    def generate(self, prompts: Batch) -> Generator[Batch, Batch | None, None]:
        pending = prompts.repeat(self.samples)
        half = len(pending) // 2
        while len(pending):
            if len(pending) == half:
                self.death.at("generate", self.version)
            first = pending.select([0])
            sample = torch.tensor(first.ids) % self.samples
            y = first["x"] * 3 + sample * sample + self.weight
            fed = yield first.with_columns(y=y)
            pending = pending.select(range(1, len(pending)))
            if fed is not None:
                more = fed.repeat(self.samples)
                pending = Batch.concat([pending, more]) if len(pending) else more

    @stage
    def answer(self, prompts: Batch) -> Batch:
        self.death.at("answer", self.version)
        return prompts.with_columns(y=prompts["x"] + self.weight)

    def install(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self.death.at("install", version)
        self.weight, self.version = int(weights["w"]), version


class Judge(Worker):
    """Gives points."""

    def __init__(self, death: Death) -> None:
        self.death = death

    @stage
    def score(self, batch: Batch) -> Batch:
        self.death.at("score", int(batch["x"].min()) // ITEMS)
        return batch.with_columns(a=batch["y"] % 17)


class Learner(Worker):
    """Learns a number; it moves away from where it began with every mini-batch."""

    def __init__(self, death: Death) -> None:
        self.w = self.sum = self.steps = 0
        self.death = death

    def load(self, place: Any) -> None:
        super().load(place)
        self.steps = 2 * place.version

    @stage
    def logprobs(self, batch: Batch) -> Batch:
        return batch.with_columns(z=batch["y"] * 2 + self.w)

    @stage(accumulates=True, minibatches=2)
    def train(self, batch: Batch) -> None:
        self.death.note(*(f"folds {item} of {self.steps}" for item in batch.ids))
        self.sum += int((batch["a"] * (torch.tensor(batch.ids) + 1) + batch["z"]).sum())
        self._at("train")

    @train.finish
    def train_finish(self) -> dict[str, float]:
        self._at("finish")
        self.death.note(f"ends {self.steps}")
        total = torch.tensor([self.sum])
        self.place.all_reduce([total])
        self.w, self.sum, self.steps = (self.w * 7 + int(total)) % 1009, 0, self.steps + 1
        return {"total": float(total), "w": float(self.w)}

    def _at(self, moment: str) -> None:
        """Only where the learner's second half of a step is under way."""
        if self.steps % 2:
            self.death.at(moment, self.steps // 2)

    def weights(self) -> dict[str, torch.Tensor]:
        self.death.at("publish", self.steps // 2)
        return {"w": torch.tensor(self.w)}

    def discard(self) -> None:
        self.sum = 0

    def state(self) -> int:
        self.death.at("asked", self.steps // 2)
        return self.w

    def save(self) -> dict[str, torch.Tensor]:
        self.death.at("save", self.steps // 2)
        return {"state": torch.tensor([self.w, self.steps])}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.w, self.steps = state["state"].tolist()


class Pair(Learner):
    """A learner on a gang of two lanes, which take part in each call together."""

    collective = True

    def layouts(self, kind: str, lanes: int) -> tuple[Layout, ...]:
        return (Layout("pair", 2),) if lanes >= 2 else ()


class Training(Flow):
    sampler: Sampler
    judge: Judge
    learner: Learner

    def step(self, prompts: Stream) -> Stream:
        samples = self.judge.score(self.sampler.generate(prompts))
        return self.learner.train(self.learner.logprobs(samples))

    def evaluate(self, prompts: Stream) -> Stream:
        return self.sampler.answer(prompts)

    def sync(self) -> None:
        self.learner.publish(self.sampler)


def plan(**spots: tuple[tuple[int, ...], ...]) -> Plan:
    placements = {worker: Placement(replicas) for worker, replicas in spots.items()}
    return Plan("custom", LANES, placements, deadline_seconds=60.0)


APART = plan(sampler=((0,),), judge=((1,),), learner=((2,),))
TOGETHER = plan(sampler=((0,), (1,), (2,)), judge=((0,), (1,)), learner=((0,), (1,), (2,)))
"""The learner has three replicas, which sum over a process group."""

GANG = Plan(
    "custom",
    LANES,
    {
        "sampler": Placement(((0,),)),
        "judge": Placement(((1,),)),
        "learner": Placement(((1, 2),), layout="pair"),
    },
    deadline_seconds=60.0,
)
"""The learner's only replica is two lanes."""


def prompts(step: int) -> Batch:
    return Batch({"x": torch.arange(ITEMS) + ITEMS * step})


def start(chosen: Plan, death: Death, pool: LanePool | None, **options: Any) -> Run:
    judge, learner = options.pop("judge", Judge)(death), options.pop("learner", Learner)(death)
    flow = Training(sampler=Sampler(death), judge=judge, learner=learner)
    where = {"mode": "eager"} if pool is None else {"plan": chosen, "lanes": pool}
    also = {"evaluate": ITEMS}
    return m2flow.launch(flow, items_per_step=ITEMS, also=also, **where, **options)


@dataclass
class Seen:
    """What a run has given."""

    steps: list[StepResult]
    figures: list[Any]


def seen(run: Run) -> Seen:
    """Train, evaluate, ask the learner, and train on."""
    steps, figures = [], []
    for part in (range(2), range(2, STEPS)):
        steps += run.steps(prompts(step) for step in part)
        evaluated = run.run_method("evaluate", prompts(9)).output
        figures += [evaluated["y"].tolist(), run.worker_call("learner", "state")]
    figures += [(r.step, r.version, r.metrics, r.output["z"].tolist()) for r in steps]
    return Seen(steps, figures)
