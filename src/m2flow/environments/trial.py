"""A first step of an environment that runs in a lane's own process, before anything is started.

What it does otherwise than its spec says would go wrong in every episode, and is found here, in one
line. An environment that fails now and then is no mistake: it has a few attempts.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import numpy as np

from m2flow.environments.environment import Array, Environment, Transition
from m2flow.environments.slots import BREAKS, RESET_ATTEMPTS, check_shape
from m2flow.environments.spec import ActionSpec, EnvironmentSpec
from m2flow.errors import UserError
from m2flow.user_code import where_raised

KEY = "environment.name"


def made(name: str, make: Callable[[], Environment]) -> Environment:
    """Make an environment, and see that it says what it is.

    Args:
        name: as a recipe has it, for errors.
        make: makes it.

    Raises:
        UserError: making it has raised something, or it has no spec of one environment.
    """
    try:
        environment = make()
    except UserError:
        raise
    except BREAKS as error:
        raise _refused(name, "it cannot be made", error) from error
    spec = getattr(environment, "spec", None)
    if not isinstance(spec, EnvironmentSpec) or spec.num_envs != 1:
        raise UserError(
            "the environment does not say what it takes and gives",
            key=KEY,
            value=name,
            expected="`self.spec = EnvironmentSpec(..., num_envs=1, ...)` in `__init__`",
        )
    return environment


def try_out(environment: Environment, name: str, seconds: float) -> None:
    """Begin an episode, take a step, and close the environment; in a thread, which may hang.

    Args:
        environment: one of its kind, to be used by nobody else.
        name: as a recipe has it, for errors.
        seconds: that all of it may take.

    Raises:
        UserError: what is wrong with it.
    """
    found: queue.SimpleQueue[UserError | None] = queue.SimpleQueue()
    threading.Thread(target=_tried, args=(environment, name, found), daemon=True).start()
    try:
        error = found.get(timeout=seconds)
    except queue.Empty:
        raise UserError(
            f"the environment has not come back from its first step within {seconds:g} s",
            key=KEY,
            value=name,
            hint="with environment.processes=1 one that hangs costs an episode",
        ) from None
    if error is not None:
        raise error


def _tried(environment: Environment, name: str, found: queue.SimpleQueue[UserError | None]) -> None:
    wrong: UserError | None = None
    for attempt in range(RESET_ATTEMPTS):
        try:
            wrong = None
            _first_step(environment, name, attempt)
            break
        except UserError as error:
            wrong = error
            break
        except BREAKS as error:
            wrong = _refused(name, "its first step cannot be taken", error)
    try:
        environment.close()
    except BREAKS as error:
        wrong = wrong or _refused(name, "it cannot be closed", error)
    found.put(wrong)


def _first_step(environment: Environment, name: str, seed: int) -> None:
    environment.reset(seed, None)
    _look(environment)
    did = environment.step(_any_action(environment.spec.action))
    if not isinstance(did, Transition):
        raise UserError(
            f"`step` gives a {type(did).__name__}", key=KEY, value=name, expected="a Transition"
        )
    _look(environment)


def _look(environment: Environment) -> None:
    seen = environment.observe()
    for part in environment.spec.observations:
        check_shape(part, seen[part.name])
        np.empty(part.shape, part.dtype)[...] = seen[part.name]


def _any_action(spec: ActionSpec) -> Array:
    """The one in the middle, as float32 [A]; of choices the first."""
    if spec.num_discrete is not None:
        return np.zeros(1, np.float32)
    low, high = np.array(spec.low), np.array(spec.high)
    bounded = np.isfinite(low) & np.isfinite(high)
    middle = np.where(bounded, (low + high) / 2, np.clip(0.0, low, high))
    return middle.astype(np.float32)


def _refused(name: str, what: str, error: BaseException) -> UserError:
    said = (str(error).splitlines() or [""])[0]
    reason = f"{type(error).__name__}: {said}".removesuffix(": ")
    return UserError(f"{what}: {reason} ({where_raised(error)})", key=KEY, value=name)
