"""Tasks: where problems come from and what an answer is worth. `make_task(name, **settings)`.

A task is imported when it is asked for, so that this package stays light. Adding one: a file beside
this one and a row in `TASKS`.
"""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Mapping
from typing import Any, TypeAlias

from m2flow.errors import UserError, suggestion
from m2flow.workloads.common.reading import check_option
from m2flow.workloads.reasoning.data_section import KEYS_OF_TASKS
from m2flow.workloads.reasoning.tasks.problem import DemonstratedTask, Problem, Task

__all__ = [
    "TASKS",
    "DemonstratedTask",
    "Problem",
    "Table",
    "Task",
    "make_task",
    "reward_of_task",
]

Table: TypeAlias = Mapping[str, tuple[str, str, str]]

TASKS: Table = {
    "addition": ("m2flow.workloads.reasoning.tasks.addition", "Addition", "addition"),
    "gym": ("m2flow.workloads.reasoning.tasks.gym", "Gym", "gym"),
    "jsonl": ("m2flow.workloads.reasoning.tasks.jsonl", "Jsonl", "math"),
}
"""Name to module, class, and the reward of a recipe that names none."""


def reward_of_task(name: str, table: Table = TASKS) -> str:
    """The reward function that judges answers to a task where the recipe names none."""
    return table[name][2]


def make_task(name: str, table: Table = TASKS, /, **settings: Any) -> Task:
    """The task of that name.

    Args:
        name: a value of the recipe key `data.task`.
        table: the tasks that there are.
        settings: keyword arguments of the task's class, such as `seed` or `path`.

    Raises:
        UserError: unknown or missing setting, one of another type than the class declares, or what
            the task itself refuses; in the words of a recipe.
    """
    module, attribute, _ = table[name]
    task_class = getattr(importlib.import_module(module), attribute)
    parameters = inspect.signature(task_class).parameters
    types = typing.get_type_hints(task_class.__init__)
    for key, value in settings.items():
        if key not in parameters:
            options = [key for key in parameters if key not in (*KEYS_OF_TASKS, "seed", "rewards")]
            raise UserError(
                f"the {name} task has no such option",
                key=f"data.options.{key}",
                hint=suggestion(key, options),
            )
        check_option(f"data.options.{key}", value, types.get(key, Any))
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in settings:
            raise UserError(f"the {name} task needs it", key=f"data.{key}")
    task: Task = task_class(**settings)
    return task
