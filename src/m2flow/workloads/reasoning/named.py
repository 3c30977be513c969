"""The task and the rewards that a recipe names, made; what does not fit them is refused.

Nothing here imports torch, so that a dry run can ask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from m2flow.errors import UserError
from m2flow.rewards.reward import WeightedReward
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.data_section import KEYS_OF_TASKS
from m2flow.workloads.reasoning.reward_sections import RewardPart
from m2flow.workloads.reasoning.tasks import (
    TASKS,
    DemonstratedTask,
    Table,
    Task,
    make_task,
    reward_of_task,
)
from m2flow.workloads.reasoning.tasks.mixture import Mixture

OF_PROMPTS = {"max_prompt_tokens", "curriculum"}
"""Keys of `data` that say what is done with a task's problems, and are nothing to the task."""


def task_of(recipe: ReasoningRecipe, table: Table = TASKS) -> Task:
    """The task that a recipe names.

    Args:
        recipe: its `data` name it.
        table: the tasks that there are.

    Raises:
        UserError: a data key or an option is missing or wrong, or the data are.
    """
    data = recipe.data
    if isinstance(data.dataset, dict):
        return _mixture_of(recipe, data.dataset)
    tasks = {key for key, tasks in KEYS_OF_TASKS.items() if data.task in tasks}
    settings: dict[str, Any] = {key: getattr(data, key) for key in tasks - OF_PROMPTS}
    settings = {key: value for key, value in settings.items() if value is not None}
    settings["seed"] = recipe.seed
    if data.task == "jsonl":
        settings["rewards"] = [part.function for part in _parts_of(recipe, table)]
    for option in data.options:
        if option in settings or option in type(data).model_fields:
            raise UserError(
                f"{option} is a key of its own, and no option", key=f"data.options.{option}"
            )
    options = dict(data.options)
    settings |= {"options": options} if data.task == "gym" else options
    return make_task(data.task, table, **settings)


def _mixture_of(recipe: ReasoningRecipe, shares: Mapping[str, int]) -> Task:
    data = recipe.data
    if not shares:
        raise UserError("names no data set", key="data.dataset", value=shares)
    for name, options in data.options.items():
        if name not in shares or not isinstance(options, dict):
            raise UserError(
                "data.dataset names several data sets, and options are those of each by its name",
                key=f"data.options.{name}",
                value=options,
                expected=f"{', '.join(shares)}, each with options",
            )
    tasks = {}
    for name in shares:
        own = data.model_copy(update={"dataset": name, "options": data.options.get(name, {})})
        tasks[name] = task_of(recipe.model_copy(update={"data": own}))
    return Mixture(tasks, shares)


def rewards_of(recipe: ReasoningRecipe, table: Table = TASKS) -> tuple[WeightedReward, ...]:
    """The reward functions that a recipe names, or its task's; all of them can be imported.

    Raises:
        UserError: a function cannot be imported.
    """
    return loaded(_parts_of(recipe, table))


def _parts_of(recipe: ReasoningRecipe, table: Table) -> Sequence[RewardPart]:
    if recipe.reward is None:
        return [RewardPart(function=reward_of_task(recipe.data.task, table))]
    return recipe.reward


def loaded(parts: Sequence[RewardPart], key: str = "reward") -> tuple[WeightedReward, ...]:
    """The functions that parts of a recipe name, under this key.

    Raises:
        UserError: a function cannot be imported.
    """
    found = tuple(WeightedReward(**part.model_dump()) for part in parts)
    for reward in found:
        reward.load(key)
    return found


def check_task(recipe: ReasoningRecipe, task: Task) -> None:
    """Refuse a task that has fewer problems than a step, or nothing for a warm-up.

    Raises:
        UserError: names the key of the recipe.
    """
    if recipe.warmup.steps and not isinstance(task, DemonstratedTask):
        raise UserError(
            f"the task {task.name!r} has no demonstrations to warm up on",
            key="warmup.steps",
            value=recipe.warmup.steps,
            hint="set it to 0",
        )
    if task.num_train is not None and task.num_train < recipe.prompts_per_step:
        raise UserError(
            "a step would ask some problem twice",
            key="prompts_per_step",
            value=recipe.prompts_per_step,
            expected=f"at most the {task.num_train} problems to train on",
        )
