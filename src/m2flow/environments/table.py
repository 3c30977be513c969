"""A table seen from above, drawn by NumPy: bring the hand to the thing that the sentence names.

Four things of four colours and two shapes lie at places that are drawn anew in each episode; the
hand moves by a limited way a step. Arriving at the thing that was asked for solves the task;
arriving at another one ends the episode unsolved. The reward is the way that a step comes nearer,
and 1 for arriving. In the task "reach" the sentence names any of the four, so no policy does better
than one in four without reading it; in the task "red" it is always the red ball. The task "around"
is "reach" made easy to see and quick to do: the hand begins in the middle and moves further in a
step, and larger things lie on a grey cloth, one towards each corner. Needs no simulator, no GPU and
no renderer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from m2flow.environments.environment import Array, Environment, Transition, seed_of
from m2flow.environments.spec import ActionSpec, EnvironmentSpec, ObservationSpec, image_spec
from m2flow.errors import UserError

THINGS = ("red ball", "green block", "blue ball", "yellow block")
COLOURS = np.array([[220, 50, 47], [70, 160, 60], [38, 100, 210], [220, 180, 20]], np.uint8)
HAND = (40, 40, 45)
NEAR = 0.22
"""The hand is at a thing from this distance on, on a table of side 2."""
APART = 0.65
"""Least distance between two things, and between the hand and each."""


@dataclass(frozen=True)
class TableTask:
    """What is asked for, and what the table looks like; its side is 2.

    Attributes:
        asked: how many of the things may be asked for.
        around: the things lie around the hand, and not anywhere.
        reach: longest way of the hand in a step.
        size: radius of a thing.
        cloth: colour of the table.
    """

    asked: int = len(THINGS)
    around: bool = False
    reach: float = 0.12
    size: float = 0.2
    cloth: tuple[int, int, int] = (235, 230, 220)


TASKS = {
    "reach": TableTask(),
    "around": TableTask(around=True, reach=0.2, size=0.3, cloth=(122, 122, 122)),
    "red": TableTask(asked=1),
}


class TableEnvironment(Environment):
    """One table.

    Args:
        task: a name of `TASKS`.
        pixels: side of the picture.
        privileged: the state says where all things are, and not the hand alone.
        max_episode_steps: after how many steps an episode is truncated.
        pace: bounds of the share of its longest way that the expert goes in a step; drawn anew in
            each step.

    Raises:
        UserError: the bounds are no two shares.
    """

    def __init__(
        self,
        task: str,
        pixels: int = 32,
        privileged: bool = False,
        max_episode_steps: int = 24,
        pace: Sequence[float] = (1.0, 1.0),
    ) -> None:
        self._task, self._pixels, self._privileged = TASKS[task], pixels, privileged
        if len(pace) != 2 or not 0 < pace[0] <= pace[1] <= 1:
            raise UserError(
                "bounds the expert's steps in no way",
                key="environment.options.pace",
                value=list(pace),
                expected="two shares above 0 and up to 1, the smaller one first",
            )
        self._least_pace, self._most_pace = pace
        axis = (np.arange(pixels) + 0.5) / pixels * 2 - 1
        self._x, self._y = np.meshgrid(axis, axis)
        size = 2 + 2 * len(THINGS) * privileged
        self.spec = EnvironmentSpec(
            f"table:{task}",
            1,
            (image_spec("image", pixels, pixels), ObservationSpec("state", (size,))),
            ActionSpec(2, (-1.0,) * 2, (1.0,) * 2),
            max_episode_steps=max_episode_steps,
            instructions=tuple(f"reach the {thing}" for thing in THINGS),
            restores="saved",
        )

    @staticmethod
    def tasks() -> list[str]:
        """Names of the tasks."""
        return list(TASKS)

    def reset(self, seed: int, initial_state: int | None) -> None:
        random = np.random.default_rng(seed_of(seed, initial_state))
        places = _around(random) if self._task.around else _anywhere(random)
        self._places, self._hand = np.array(places[1:]), places[0]
        self._asked = int(random.integers(self._task.asked))
        self._random = random

    def step(self, action: Array) -> Transition:
        before = self._distances()[self._asked]
        self._hand = np.clip(self._hand + self._task.reach * np.clip(action, -1, 1), -1, 1)
        distances = self._distances()
        at = distances < NEAR
        solved = bool(at[self._asked])
        reward = float(before - distances[self._asked]) + solved
        return Transition(reward, terminated=bool(at.any()), success=solved)

    def _distances(self) -> Array:
        """From the hand to each thing."""
        return np.linalg.norm(self._places - self._hand, axis=1)

    def observe(self) -> Mapping[str, Array]:
        state = [self._hand, *(self._places if self._privileged else ())]
        return {"image": self._drawn(), "state": np.concatenate(state).astype(np.float32)}

    def state(self) -> tuple[Array, Array, int]:
        return self._places, self._hand, self._asked

    def restore(self, state: tuple[Array, Array, int]) -> None:
        self._places, self._hand, self._asked = state

    def instruction(self) -> str:
        assert self.spec.instructions is not None
        return self.spec.instructions[self._asked]

    def render(self) -> Array:
        return np.kron(self._drawn(), np.ones((4, 4, 1), np.uint8))

    def expert(self) -> Array:
        """The way to the thing that was asked for, around the others; float32 [2] in [-1, 1]."""
        way = self._places[self._asked] - self._hand
        way /= max(1e-6, float(np.linalg.norm(way)))
        for number, place in enumerate(self._places):
            away = self._hand - place
            distance = float(np.linalg.norm(away))
            if number != self._asked and distance < 2.2 * NEAR:
                way += (2.2 * NEAR - distance) / NEAR * away / distance
        way *= self._random.uniform(self._least_pace, self._most_pace)
        return (way / max(1.0, float(np.abs(way).max()))).astype(np.float32)

    def _drawn(self) -> Array:
        task = self._task
        picture = np.full((self._pixels, self._pixels, 3), task.cloth, np.uint8)
        for number, (x, y) in enumerate(self._places):
            across, along = np.abs(self._x - x), np.abs(self._y - y)
            ball = across**2 + along**2 < task.size**2
            block = np.maximum(across, along) < 0.9 * task.size
            picture[ball if number % 2 == 0 else block] = COLOURS[number]
        across, along = np.abs(self._x - self._hand[0]), np.abs(self._y - self._hand[1])
        picture[(np.minimum(across, along) < 0.05) & (np.maximum(across, along) < 0.16)] = HAND
        return picture


def _anywhere(random: np.random.Generator) -> list[Array]:
    """Places of the hand and the things, far enough from each other."""
    places: list[Array] = []
    while len(places) < len(THINGS) + 1:
        place = random.uniform(-0.8, 0.8, 2)
        if all(np.linalg.norm(place - other) >= APART for other in places):
            places.append(place)
        elif random.uniform() < 0.05:  # no room is left: begin again
            places.clear()
    return places


def _around(random: np.random.Generator) -> list[Array]:
    """The hand in the middle, the things around it in any order, a quarter turn apart or so."""
    sides = random.permutation(len(THINGS)) + random.uniform(-0.1, 0.1, len(THINGS))
    angles, ways = (sides + 0.5) * np.pi / 2, random.uniform(0.6, 0.75, len(THINGS))
    places = np.stack([np.cos(angles), np.sin(angles)], axis=1) * ways[:, None]
    return [np.zeros(2), *places]
