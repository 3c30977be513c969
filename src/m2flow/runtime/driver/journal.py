"""`Journal`: the rollouts that lanes have kept on disk, and what of them a step may use.

A rollout may be used for the step for which it was made, if the version of the weights that made it
is one that may make it now. Files of steps before a checkpoint are deleted once it is there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from m2flow.errors import writing
from m2flow.flow.batch import Batch
from m2flow.flow.graph import FlowGraph, StageNode
from m2flow.flow.rollouts import rollout_stages

_FILE = re.compile(r"step_(\d{6,})-.*\.rollouts")


@dataclass(frozen=True, slots=True)
class Kept:
    """Items of a stage that are there already.

    Attributes:
        node: the stage; of items that have left a loop its first member.
        version: of the weights that made them.
        batch: the items.
    """

    node: int
    version: int
    batch: Batch


class Journal:
    """The journal of one run.

    Args:
        folder: where it lies; lanes make it.
        max_bytes: of what all lanes have there, at most.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder.absolute(), max_bytes

    def steps(self) -> list[int]:
        """The steps of which there are rollouts, in order."""
        return sorted({step for step, _ in self._files()})

    def of_step(
        self, step: int, graph: FlowGraph, num_items: int, max_staleness: int
    ) -> list[Kept]:
        """What need not be made in a step.

        Args:
            step: its number.
            graph: what it runs.
            num_items: its source items.
            max_staleness: how many versions the weights that generate may lag behind.
        """
        files = [path for found, path in self._files() if found == step]
        if not files:
            return []
        from m2flow.runtime.lane.frames import read_frames

        stages = {stage.name: stage.node for stage in rollout_stages(graph)}
        pieces: dict[tuple[int, int], list[Batch]] = {}
        there: dict[int, set[int]] = {node: set() for node in stages.values()}
        for frame in (frame for path in sorted(files) for frame in read_frames(path)):
            node = stages.get(frame.stage)
            lag = step - frame.version
            if node is None or frame.step != step or not 0 <= lag <= max_staleness:
                continue
            limit = num_items * graph.nodes[node].fanout * graph.nodes[node].expands
            new = [x for x in frame.batch.ids if 0 <= x < limit and x not in there[node]]
            some = pieces.setdefault((node, frame.version), [])
            if new and (not some or some[0].columns.keys() == frame.batch.columns.keys()):
                there[node].update(new)
                some.append(frame.batch.take(new))
        kept = []
        for (node, version), some in pieces.items():
            usable = _usable(graph.nodes[node], there[node], num_items)
            batch = Batch.concat(some or [Batch({})])
            if wanted := [item for item in batch.ids if item in usable]:
                kept.append(Kept(node, version, batch.take(wanted)))
        return kept

    def forget_before(self, step: int) -> None:
        """Delete the rollouts of steps that a checkpoint holds."""
        with writing("the journal", self.folder):
            for found, path in self._files():
                if found < step:
                    path.unlink(missing_ok=True)

    def remove(self) -> None:
        """The run is over: nothing will be run again."""
        with writing("the journal", self.folder):
            for _, path in self._files():
                path.unlink(missing_ok=True)
            if self.folder.is_dir() and not any(self.folder.iterdir()):
                self.folder.rmdir()

    def _files(self) -> Iterator[tuple[int, Path]]:
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if match := _FILE.fullmatch(path.name):
                    yield int(match[1]), path


def _usable(node: StageNode, items: set[int], num_items: int) -> set[int]:
    """Items that a step may use: a stage that does not stream makes units as a whole, or not."""
    if node.streaming or node.loop is not None:
        return items
    units = {"item": 1, "group": node.group_size, "step": num_items * node.fanout}
    size = units[node.unit] * node.expands
    counts = Counter(item // size for item in items)
    return {item for item in items if counts[item // size] == size}


def nothing_kept(_step: int, _num_items: int) -> Sequence[Kept]:
    """What need not be made in a step of a run that keeps nothing."""
    return ()


def joined(kept: Sequence[Kept]) -> dict[int, Batch]:
    """By stage all items that are there."""
    nodes = dict.fromkeys(one.node for one in kept)
    return {node: Batch.concat([one.batch for one in kept if one.node == node]) for node in nodes}
