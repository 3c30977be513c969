"""Environments by name: "family:task", or the dotted path of a class, "my_module:MyEnvironment".

A family is an adaptor beside this file and a row in `FAMILIES`. Everything that a user may get
wrong is found here, before a process is started: unknown family, task or option, a package that is
not installed, assets that are absent. Imports no simulator until it is asked for one, and no torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from m2flow.environments import rendering
from m2flow.environments.environment import Environment
from m2flow.environments.gymnasium import GymnasiumEnvironment, is_gymnasium
from m2flow.environments.rewarded import RewardedEnvironment, reward_at
from m2flow.errors import UserError, suggestion
from m2flow.user_code import user_module

KEY = "environment"
REWARD = "reward_function"
"""The option of every environment that names a function of the user's; see `rewarded.py`."""


@dataclass(frozen=True, slots=True)
class Family:
    """A suite of tasks and its adaptor.

    Attributes:
        adaptor: module and class of the adaptor; `tasks()` of it lists the tasks' names, and
            `Class(task, **options)` is an Environment.
        package: the module that must be importable.
        extra: the extra of m2flow that brings it.
        renderer: what draws its pictures, "mujoco" or "vulkan"; see `rendering.py`.
        pixels: height and width of its pictures where the option `pixels` is not given.
        draws_always: it needs the renderer for observations without pictures too.
        light: it runs in the lane's own process, unless a recipe says otherwise, and whatever draws
            its pictures is its own matter.
    """

    adaptor: tuple[str, str]
    package: str
    extra: str
    renderer: str = "mujoco"
    pixels: int = 0
    draws_always: bool = False
    light: bool = False


FAMILIES = {
    "envpool": Family(
        ("m2flow.environments.envpool", "EnvPoolEnvironment"), "envpool", "envpool", light=True
    ),
    "gymnasium": Family(
        ("m2flow.environments.gymnasium", "GymnasiumEnvironment"),
        "gymnasium",
        "embodied",
        light=True,
    ),
    "libero": Family(
        ("m2flow.environments.libero", "LiberoEnvironment"),
        "libero",
        "libero",
        pixels=256,
        draws_always=True,
    ),
    "maniskill": Family(
        ("m2flow.environments.maniskill", "ManiSkillEnvironment"),
        "mani_skill",
        "maniskill",
        "vulkan",
        draws_always=True,
    ),
    "metaworld": Family(
        ("m2flow.environments.metaworld", "MetaWorldEnvironment"),
        "metaworld",
        "metaworld",
    ),
    "table": Family(
        ("m2flow.environments.table", "TableEnvironment"), "numpy", "embodied", light=True
    ),
}


def make_environment(name: str, **options: Any) -> Environment:
    """One environment.

    Args:
        name: "family:task" or "module:Class", whose class is an `Environment` or a
            `gymnasium.Env`.
        options: keyword arguments of the adaptor or class; and, of any of them, `reward_function`,
            the dotted path of what rewards in its place.

    Raises:
        UserError: see the module docstring.
    """
    return maker(name, options)()


def maker(name: str, options: dict[str, Any]) -> Callable[[], Environment]:
    """What makes such environments, checked as far as that goes without making one.

    Raises:
        UserError: see the module docstring.
    """
    path = options.get(REWARD)
    if path is not None:
        make = maker(name, {key: value for key, value in options.items() if key != REWARD})
        reward = reward_at(path)
        return lambda: RewardedEnvironment(make(), reward)
    head, colon, task = name.partition(":")
    if not (head and colon and task):
        raise UserError(
            "names no environment",
            key=KEY,
            value=name,
            expected='"family:task" or "module:Class"',
            hint=f"families: {', '.join(sorted(FAMILIES))}",
        )
    if head not in FAMILIES:
        return _maker_of_class(name, head, task, options)
    family = FAMILIES[head]
    if (missing := not_installed(name)) is not None:
        raise missing
    module, attribute = family.adaptor
    adaptor = getattr(importlib.import_module(module), attribute)
    _check_options(name, adaptor, options, reserved=("task",))
    registers, _, own = task.rpartition(":") if head == "gymnasium" else ("", "", task)
    if registers and user_module(registers) is None:  # Gymnasium imports it again where it is made
        raise UserError(
            "there is no module of this name, which would register the environment",
            key=KEY,
            value=registers,
            hint="install its package, or put it on PYTHONPATH",
        )
    tasks: Sequence[str] = adaptor.tasks()
    if own not in tasks:
        hint = suggestion(own, tasks)
        if head == "gymnasium" and not registers:
            hint += "; what a package registers when it is imported is gymnasium:PACKAGE:ID"
        raise UserError(f"{head} has no such task", key=KEY, value=own, hint=hint)
    return lambda: adaptor(task, **options)


def not_installed(name: str) -> UserError | None:
    """What is to be said where the package of that environment's family is not there."""
    family = FAMILIES.get(name.partition(":")[0])
    if family is None or importlib.util.find_spec(family.package) is not None:
        return None
    return UserError(
        f"needs {family.package}, which is not installed",
        key=KEY,
        value=name,
        hint=f'run: pip install "m2flow[{family.extra}]"',
    )


def is_light(name: str) -> bool:
    """Whether that environment runs in the lane's own process unless a recipe says otherwise."""
    family = FAMILIES.get(name.partition(":")[0])
    return family is None or family.light


def needs_renderer(name: str, options: Mapping[str, Any]) -> bool:
    """Whether the observations of that environment need a back end for rendering."""
    if is_light(name):
        return False
    family = FAMILIES[name.partition(":")[0]]
    return family.draws_always or bool(options.get("pixels", family.pixels))


def variables_of(name: str, options: Mapping[str, Any]) -> Mapping[str, str]:
    """Environment variables that must be set before the simulator of that name is imported.

    Raises:
        UserError: its observations need a back end for rendering, and none works here.
    """
    family = FAMILIES.get(name.partition(":")[0])
    if family is None:
        return {}
    return rendering.variables(family.renderer, required=needs_renderer(name, options))


def _maker_of_class(
    name: str, module: str, attribute: str, options: dict[str, Any]
) -> Callable[[], Environment]:
    loaded = user_module(module)
    if loaded is None:
        raise UserError(
            "there is neither a family nor a module of this name",
            key=KEY,
            value=module,
            hint=suggestion(module, FAMILIES),
        )
    found = getattr(loaded, attribute, None)
    if found is None:
        classes = [key for key, value in vars(loaded).items() if inspect.isclass(value)]
        raise UserError(
            f"{module} has no such class",
            key=KEY,
            value=attribute,
            hint=suggestion(attribute, classes) if classes else None,
        )
    if inspect.isclass(found) and issubclass(found, Environment):
        _check_options(name, found, options)
        return lambda: found(**options)
    if is_gymnasium(found):
        ours = ("pixels", "motion")
        _check_options(name, found, {key: options[key] for key in options if key not in ours})
        return lambda: GymnasiumEnvironment.of_class(name, found, **options)
    raise UserError(
        "is no environment",
        key=KEY,
        value=name,
        expected="a subclass of m2flow.environments.Environment or of gymnasium.Env",
    )


def _check_options(
    name: str, target: Any, options: dict[str, Any], reserved: Sequence[str] = ()
) -> None:
    """Refuse an option that the class does not know, and the lack of one that it needs.

    Args:
        name: of the environment, for errors.
        target: the class.
        options: as the user gives them.
        reserved: parameters of the class that m2flow sets itself.
    """
    parameters = inspect.signature(target).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    names = [
        key
        for key, each in parameters.items()
        if key not in reserved and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    for key in options:
        if key not in names and not takes_all:
            raise UserError(
                f"{name} has no such option",
                key=f"{KEY}.options.{key}",
                hint=suggestion(key, names) if names else "it takes none",
            )
    for key in names:
        if parameters[key].default is inspect.Parameter.empty and key not in options:
            raise UserError(f"{name} needs this option", key=f"{KEY}.options.{key}")
