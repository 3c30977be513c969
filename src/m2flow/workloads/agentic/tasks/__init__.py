"""Small tasks that want a tool, beside the tasks of reasoning that read files and data sets.

A demonstration of such a task is a prompt and turns: texts of the model, and calls in the place of
a text. What the tools answer is asked of the tools.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from m2flow.tools import ToolCall
from m2flow.workloads.reasoning.tasks import TASKS as OF_REASONING
from m2flow.workloads.reasoning.tasks import Task

TASKS = {
    "arithmetic": ("m2flow.workloads.agentic.tasks.arithmetic", "Arithmetic", "addition"),
    "lookup": ("m2flow.workloads.agentic.tasks.lookup", "Lookup", "addition"),
    "jsonl": OF_REASONING["jsonl"],
    "gym": OF_REASONING["gym"],
}
"""Name to module, class, and the reward of a recipe that names none."""


@runtime_checkable
class TaskWithTurns(Task, Protocol):
    """A task that can show how it is done with tools, for supervised warm-up."""

    def demonstration(self, index: int) -> tuple[str, list[str | ToolCall]]:
        """(prompt, turns) number `index`; the last turn is a text, and the end token follows it."""
        ...
