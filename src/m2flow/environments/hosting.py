"""`make_environments`: several environments by name, here or in processes of their own.

`hosted` is the same with the environment's options in a mapping: one of them may have the name of
an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from m2flow.environments import rendering
from m2flow.environments.deadlines import Deadlines
from m2flow.environments.process import Source
from m2flow.environments.processes import ProcessEnvironments
from m2flow.environments.protocol import VectorEnvironment
from m2flow.environments.registry import maker, needs_renderer, variables_of
from m2flow.environments.serial import SerialEnvironments


def make_environments(
    name: str,
    num_envs: int,
    *,
    processes: int = 0,
    copy: bool = True,
    deadlines: Deadlines | None = None,
    python: str | None = None,
    **options: Any,
) -> VectorEnvironment:
    """Several equal environments.

    Args:
        name: "family:task" or "module:Class"; see `registry.make_environment`.
        num_envs: how many.
        processes: in how many processes; 0 for this very one, where a hang or a crash of the
            simulator is not contained.
        copy, deadlines: see `ProcessEnvironments`.
        python: interpreter of the processes, with the simulator installed; None for this one.
        options: of the environment.

    Raises:
        UserError: the name or an option is wrong, or something is not installed.
    """
    return hosted(
        name,
        options,
        num_envs,
        processes=processes,
        copy=copy,
        deadlines=deadlines,
        python=python,
    )


def hosted(
    name: str,
    options: dict[str, Any],
    num_envs: int,
    *,
    processes: int = 0,
    copy: bool = True,
    deadlines: Deadlines | None = None,
    python: str | None = None,
    gpus: Sequence[str] = (),
) -> VectorEnvironment:
    """See `make_environments`, whose arguments these are.

    Args:
        gpus: numbers of the accelerators on whose first one processes are to draw, where they can
            be told; see `rendering.device_variables`.
    """
    if python is None:
        maker(name, options)  # refuses before a process is started
    variables = variables_of(name, options)
    if not processes:
        rendering.use_here(variables, required=needs_renderer(name, options))
        return SerialEnvironments(maker(name, options), num_envs)
    variables = {**variables, **rendering.device_variables(variables, gpus)}
    source = Source(name, options, python, variables)
    return ProcessEnvironments(source, num_envs, processes, deadlines=deadlines, copy=copy)
