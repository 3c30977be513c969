"""Environments for the tests: a deterministic counter, and one that fails when it is told to.

Loaded by dotted path in processes of their own, so this file knows NumPy and m2flow alone.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from m2flow.environments.environment import Environment, Transition, seed_of
from m2flow.environments.spec import ActionSpec, EnvironmentSpec, ObservationSpec, image_spec

SENTENCES = ("go left", "go right")


class Walk(Environment):
    """A point on a plane; each step moves it and adds noise of the episode's seed."""

    def __init__(
        self, limit: int = 20, goal: float = 3.0, size: int = 8, restores: str = "replayed"
    ) -> None:
        self.goal = goal
        self.spec = EnvironmentSpec(
            "toy:walk",
            1,
            (ObservationSpec("state", (2,)), image_spec("image", size, size)),
            ActionSpec(2, (-1.0, -1.0), (1.0, 1.0)),
            max_episode_steps=limit,
            instructions=SENTENCES,
            restores=restores,
        )
        self.closed = False

    def reset(self, seed, initial_state):
        self.random = np.random.default_rng(seed_of(seed, initial_state))
        self.place = self.random.uniform(-1, 1, 2)
        self.sentence = SENTENCES[int(self.random.integers(2))]

    def step(self, action):
        self.place = self.place + action + self.random.normal(0, 0.01, 2)
        solved = bool(self.place[0] > self.goal)
        return Transition(float(self.place[0]), terminated=solved, success=solved)

    def observe(self):
        size = self.spec.observation("image").shape[0]
        shade = int(abs(self.place[0]) * 20) % 256
        return {"state": self.place, "image": np.full((size, size, 3), shade, np.uint8)}

    def instruction(self):
        return self.sentence

    def render(self):
        return self.observe()["image"]

    def state(self):
        return self.place, self.random.bit_generator.state

    def restore(self, state):
        self.place, self.random.bit_generator.state = state

    def close(self):
        self.closed = True


class Faulty(Walk):
    """Fails as a file in `folder` says, and then removes that file.

    Args:
        folder: `step` and `reset` look there for a file of the name kill, hang, nan, raise (in a
            step) or noreset (which holds the number of times).
    """

    refusals = 0
    """Resets in this process that are still to fail; a simulator may be made anew for each."""

    def __init__(self, folder: str, **options) -> None:
        super().__init__(**options)
        self.folder = Path(folder)

    def taken(self, name: str) -> str | None:
        """What the file holds, which is gone then; of several processes one alone sees it."""
        own = self.folder / f"{name}-{os.getpid()}"
        try:
            (self.folder / name).rename(own)
        except FileNotFoundError:
            return None
        held = own.read_text()
        own.unlink()
        return held

    def told(self, name: str) -> bool:
        """Whether the file was there."""
        return self.taken(name) is not None

    def reset(self, seed, initial_state):
        if self.refuses():
            raise RuntimeError("no reset today")
        super().reset(seed, initial_state)

    def refuses(self) -> bool:
        """Whether this reset is to fail: one process finds the file, and fails so often there."""
        if not Faulty.refusals:
            Faulty.refusals = int(self.taken("noreset") or 0)
        if Faulty.refusals:
            Faulty.refusals -= 1
            return True
        return False

    def step(self, action):
        if self.told("kill"):
            os.kill(os.getpid(), 9)
        if self.told("hang"):
            time.sleep(3600)
        if self.told("raise"):
            raise RuntimeError("the gripper came off")
        did = super().step(action)
        if self.told("nan"):
            self.place = self.place * np.nan
        return did


class Broken(Walk):
    """Never resets."""

    def reset(self, seed, initial_state):
        raise RuntimeError("no licence")


class Stuck(Walk):
    """Never comes back from a reset with the seed 7."""

    def reset(self, seed, initial_state):
        if seed == 7:
            time.sleep(3600)
        super().reset(seed, initial_state)


class Threads(Walk):
    """Rewards with the number of threads that its process is told to use."""

    def step(self, action):
        return super().step(action)._replace(reward=float(os.environ["OMP_NUM_THREADS"]))


class Slow(Walk):
    """Takes its time for each step."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def step(self, action):
        time.sleep(self.seconds)
        return super().step(action)


class Reserved(Walk):
    """Its options have the names of arguments of `make_environments`, and of adaptors."""

    def __init__(self, *args, task: str, name: str, num_envs: int, copy: int = 0) -> None:
        super().__init__()
        self.info = {"task": task, "name": name, "num_envs": num_envs, "copy": copy}

    def step(self, action):
        return super().step(action)._replace(reward=float(self.info["num_envs"]))


class Unmakeable(Walk):
    """Ends its process when it is made."""

    def __init__(self) -> None:
        os.write(2, b"no such display\n")
        os._exit(3)


def go_right(environment):
    """An expert."""
    return [1.0, 0.0]
