"""Several tasks as one, each with a share of the problems."""

from __future__ import annotations

from collections.abc import Mapping

from m2flow.workloads.reasoning.tasks.problem import Problem, Task


class Mixture:
    """Tasks whose problems take turns.

    In each round of as many problems as the weights come to, every task has its weight of them,
    spread evenly.

    Args:
        tasks: by any name; they generate their problems.
        weights: by the same names, at least 1 each.
    """

    characters: str | None = None
    num_train: int | None = None

    def __init__(self, tasks: Mapping[str, Task], weights: Mapping[str, int]) -> None:
        self.name = " + ".join(tasks)
        turns = [
            ((n + 0.5) / weight, task) for task, weight in weights.items() for n in range(weight)
        ]
        self._round = [task for _, task in sorted(turns)]
        self._tasks, self._weights = tasks, weights

    def train(self, index: int) -> Problem:
        """Training problem number `index`: the next one of the task whose turn it is."""
        task, number = self._turn(index)
        return self._tasks[task].train(number)

    def held_out(self, count: int) -> list[Problem]:
        """`count` problems in the same turns; fewer where a task has fewer."""
        turns = [self._turn(index) for index in range(count)]
        needed = {task: number + 1 for task, number in turns}
        found = {task: self._tasks[task].held_out(number) for task, number in needed.items()}
        return [found[task][number] for task, number in turns if number < len(found[task])]

    def _turn(self, index: int) -> tuple[str, int]:
        """Whose turn it is, and how many it has had before."""
        rounds, place = divmod(index, len(self._round))
        task = self._round[place]
        return task, rounds * self._weights[task] + self._round[:place].count(task)
