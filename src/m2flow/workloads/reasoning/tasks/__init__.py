"""Tasks: where problems come from and what an answer is worth. `make_task(name, **settings)`.

A task is imported when it is asked for, so that this package stays light.
"""

from __future__ import annotations

from m2flow.workloads.reasoning.tasks.problem import DemonstratedTask, Problem, Task
from m2flow.workloads.reasoning.tasks.registry import make_task, task_names

__all__ = ["DemonstratedTask", "Problem", "Task", "make_task", "task_names"]
