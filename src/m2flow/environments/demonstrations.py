"""Demonstrations: what an expert saw and did, played in a simulator or read from a file.

They are arrays with a row for each environment step: the parts of an observation by the names of
the environment's spec; `action` [T, A], what was done there; `episode` [T], a number that the rows
of an episode share, which follow each other; and, where the environment has language,
`instruction` [T], its sentences. A file of them is NumPy's `.npz`. NumPy alone, so that they can be
recorded by the interpreter that has the simulator.

    environment = make_environment("metaworld:reach-v3")
    record_demonstrations("reach.npz", environment, expert, seeds=range(100))

Legend: T steps of all episodes, A figures of an action.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from m2flow.environments.environment import Array, Environment
from m2flow.environments.slots import check_observation
from m2flow.environments.spec import EnvironmentSpec, ObservationSpec
from m2flow.errors import UserError

KEY = "warmup.data"

Expert = Callable[[Any], Any]
"""Given the environment, what to do there: float32 [A], or a number where A is 1. Choices are
numbered from 0, wherever a space of Gymnasium begins."""


def played(
    environment: Environment, expert: Expert, seeds: Iterable[int], most_steps: int = 1000
) -> dict[str, Array]:
    """Episodes of an expert; each ends with its success at the latest.

    Args:
        environment: in which it acts; it is not closed.
        expert: who acts.
        seeds: of the episodes.
        most_steps: of an episode, where the environment has no limit.

    Returns:
        the arrays; see the module docstring. Actions out of bounds are those that were taken.

    Raises:
        UserError: what the expert says is no action of the environment, or what is observed is not
            what its spec says, or has the name of another array.
    """
    spec = environment.spec
    _check_names(spec)
    rows: dict[str, list[Any]] = {"action": [], "episode": []}
    for number, seed in enumerate(seeds):
        environment.reset(seed, None)
        for _ in range(spec.max_episode_steps or most_steps):
            observed = environment.observe()
            for part in spec.observations:
                rows.setdefault(part.name, []).append(_seen(observed[part.name], part, spec))
            if spec.instructions is not None:
                rows.setdefault("instruction", []).append(environment.instruction())
            action = _decided(expert(environment), spec)
            rows["action"].append(action)
            rows["episode"].append(number)
            did = environment.step(action)
            if did.terminated or did.truncated or did.success:
                break
    return {name: np.array(column) for name, column in rows.items()}


def _check_names(spec: EnvironmentSpec) -> None:
    """Refuse an environment that gives what demonstrations have an array of their own for."""
    for part in spec.observations:
        if part.name in ("action", "episode"):
            raise UserError(
                f"{spec.name} gives an observation that demonstrations have no room for",
                key="environment.name",
                value=part.name,
                expected="another name: `action` is what was done, `episode` when",
            )


def _seen(observed: Any, part: ObservationSpec, spec: EnvironmentSpec) -> Array:
    """A part of an observation, as the spec has it; a copy."""
    try:
        check_observation(part, observed)
    except ValueError as error:
        raise UserError(
            f"does otherwise than it says: {error}", key="environment.name", value=spec.name
        ) from error
    return np.array(observed, part.dtype)


def _decided(said: Any, spec: EnvironmentSpec) -> Array:
    """What an expert says as an action, float32 [A], within the bounds."""
    try:
        action = np.atleast_1d(np.asarray(said, np.float32))
    except (TypeError, ValueError):
        action = np.empty(0, np.float32)
    fits = action.shape == (spec.action.size,) and bool(np.isfinite(action).all())
    expected = f"{spec.action.size} finite figures in a list or an array"
    if (count := spec.action.num_discrete) is not None:  # the nearest choice is not almost the same
        expected = f"a whole number from 0 to {count - 1}"
        fits = fits and float(action[0]) in range(count)
    if not fits:
        raise UserError(
            "the expert gives no action", key="warmup.expert", value=said, expected=expected
        )
    return spec.action.within(action).astype(np.float32)


def record_demonstrations(
    path: str | Path,
    environment: Environment,
    expert: Expert,
    seeds: Iterable[int],
    most_steps: int = 1000,
) -> None:
    """Play episodes of an expert and write them into a file, for `warmup.data`.

    Args:
        path: of the file, which ends in `.npz`.
        environment, expert, seeds, most_steps: see `played`.
    """
    arrays: dict[str, Any] = {**played(environment, expert, seeds, most_steps)}
    np.savez_compressed(path, **arrays)


def read_demonstrations(path: str, spec: EnvironmentSpec) -> dict[str, Array]:
    """Read a file of demonstrations in an environment; arrays of other names are left alone.

    Raises:
        UserError: it is no such file, or does not fit the environment.
    """
    file_path = Path(path).expanduser()
    if "\0" in path or not zipfile.is_zipfile(file_path):
        raise UserError(
            "is no file of demonstrations", key=KEY, value=path, expected="an .npz file of NumPy"
        )
    _check_names(spec)
    shapes = {part.name: part.shape for part in spec.observations}
    shapes |= {"action": (spec.action.size,), "episode": ()}
    if spec.instructions is not None:
        shapes["instruction"] = ()
    try:
        with np.load(file_path, allow_pickle=False) as file:
            names = sorted(file.files)
            found = {name: file[name] for name in shapes if name in names}
    except Exception as error:
        why = f"cannot be read ({type(error).__name__}: {error})"
        raise UserError(why, key=KEY, value=path, expected="an .npz file of NumPy") from error
    for name in shapes:
        if name not in found:
            raise UserError(
                f"has no array {name!r}, which {spec.name} gives or takes",
                key=KEY,
                value=path,
                expected=", ".join(shapes),
                hint=f"it has {', '.join(names)}",
            )
    for name, shape in shapes.items():
        if found[name].shape != (*found["action"].shape[:1], *shape):
            raise _unfit(name, found[name].shape, f"(steps, {', '.join(map(str, shape))})")
    for part in spec.observations:
        found[part.name] = _as(part.dtype, part.name, found[part.name])
    found["action"] = _as("float32", "action", found["action"])
    _check_rows(found, spec)
    return found


def _as(dtype: str, name: str, column: Array) -> Array:
    """The figures of an array in the dtype of the spec; bytes of pictures are made of nothing."""
    fits = column.dtype == np.uint8 if dtype == "uint8" else column.dtype.kind in "fiu"
    if not fits:
        raise _unfit(name, column.dtype.name, dtype)
    if not np.isfinite(column).all():
        raise _unfit(name, "figures that are not finite", "finite ones")
    return column.astype(dtype, copy=False)


def _check_rows(found: dict[str, Array], spec: EnvironmentSpec) -> None:
    episodes = found["episode"]
    if episodes.dtype.kind not in "iufb":
        raise _unfit("episode", episodes.dtype.name, "numbers")
    if not len(episodes) or len(np.unique(episodes)) != 1 + np.count_nonzero(np.diff(episodes)):
        raise _unfit("episode", "no rows, or rows apart", "the rows of an episode together")
    if spec.instructions is not None and found["instruction"].dtype.kind != "U":
        raise _unfit("instruction", found["instruction"].dtype.name, "text")
    try:
        spec.action.check(found["action"][:, None])
    except UserError as error:
        raise _unfit("action", error.value, str(error.expected)) from error


def _unfit(name: str, value: Any, expected: str) -> UserError:
    return UserError(
        f"array {name!r} does not fit the environment", key=KEY, value=value, expected=expected
    )
