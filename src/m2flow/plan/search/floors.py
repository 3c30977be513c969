"""What a part of a step takes at least, before anything is known of how it is carried out.

No rule of `tree` makes a stage faster than it is alone, on all lanes of the part and in the best of
the chunks that it may be cut into. A worker's stages all stand on the same lanes, in turn, so that
their seconds add up. And a part has so many lanes only (`area`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from m2flow.plan.search.area import Area
from m2flow.plan.search.cuts import Cuts
from m2flow.plan.search.frontier import UNBOUND
from m2flow.plan.search.leaf_states import LeafStates
from m2flow.plan.search.problem import Lanes

Asked = tuple[int, Lanes, int, int]
"""A part or a task, its lanes, round and chunk."""


class Floors:
    """Lower bounds of one search.

    Args:
        leaves: states of the leaves.
        chunks: sizes that are tried, largest first.
        area: bounds by lanes alone.
        cuts: which kinds of lanes a task can use.
    """

    def __init__(self, leaves: LeafStates, chunks: Sequence[int], area: Area, cuts: Cuts) -> None:
        self._leaves, self._area, self._cuts = leaves, area, cuts
        self._finer = dict(pairwise(chunks))
        self._step = int(leaves.problem.num_items)
        tasks = leaves.problem.tasks
        self._streaming = [task.streaming for task in tasks]
        self._workers = tuple(leaves.problem.tasks_of.values())
        self._alone: dict[Asked, float] = {}
        self._seconds: dict[Asked, float] = {}

    def seconds(self, part: int, lanes: Lanes, round_size: int, chunk: int) -> float:
        """Of a step, done in rounds of such chunks or smaller ones."""
        key = (part, lanes, round_size, chunk)
        found = self._seconds.get(key)
        if found is None:
            found = self._area.least_seconds(part, lanes)
            for tasks in self._workers:
                if tasks & part:
                    found = max(found, self._in_turn(tasks & part, lanes, round_size, chunk))
            self._seconds[key] = found
        return found

    def _in_turn(self, tasks: int, lanes: Lanes, round_size: int, chunk: int) -> float:
        return sum(
            self._task(n, lanes, round_size, chunk)
            for n in range(tasks.bit_length())
            if tasks >> n & 1
        )

    def _task(self, index: int, lanes: Lanes, round_size: int, chunk: int) -> float:
        """Of a step of one task, with no more than these lanes."""
        key = (index, lanes, round_size, chunk)
        found = self._alone.get(key)
        if found is None:
            usable = self._cuts.usable(1 << index)
            own = tuple(n if use else 0 for n, use in zip(lanes, usable, strict=True))
            if own != lanes:
                found = self._task(index, own, round_size, chunk)
            elif round_size > chunk and not self._streaming[index]:
                found = self._task(index, lanes, chunk, chunk)
            else:
                found = self._in_chunks(index, lanes, round_size, chunk)
            self._alone[key] = found
        return found

    def _in_chunks(self, index: int, lanes: Lanes, round_size: int, chunk: int) -> float:
        """The same in chunks of this size or smaller ones."""
        more, times = round_size // chunk - 1, self._step / round_size
        states = self._leaves.front(index, lanes, round_size, chunk, UNBOUND)
        found = min((times * (c.first + more * c.period) for c, _ in states), default=math.inf)
        if round_size > chunk:  # in turn with something else, a round is one chunk
            found = min(found, self._task(index, lanes, chunk, chunk))
        finer = self._finer.get(chunk)
        return found if finer is None else min(found, self._task(index, lanes, round_size, finer))
