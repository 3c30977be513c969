"""Lanes in processes of their own, without Ray, which do one thing after another all at once.

    with LaneProcesses(4) as lanes:
        found = lanes(function, argument)      # function(groups, argument) on each of them

Each has joined the world of all. An error on one of them is the test's: the others may wait for it
in a collective, so they are of no more use. They are forked from a server that has imported what is
slow to import, once.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from m2flow.runtime.transport.groups import STORE, LaneGroups

REPOSITORY = str(Path(__file__).resolve().parents[2])
TIMEOUT_SECONDS = 60.0
SLOW_TO_IMPORT = [
    "tests.training.first_import",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.qwen2.modeling_qwen2",
    "m2flow.training.policy",
]


class LaneProcesses:
    """Args: count: how many lanes."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(SLOW_TO_IMPORT)
        self._folder = tempfile.TemporaryDirectory(prefix="m2flow-lanes-")
        store = Path(self._folder.name) / f"{STORE}0"
        if REPOSITORY not in sys.path:  # it is sent along: functions are found by their names
            sys.path.append(REPOSITORY)
        self._lanes = []
        for lane in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(lane, count, store, there), daemon=True)
            process.start()
            self._lanes.append((process, here))
        self._answers()

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(groups, *arguments)` gives on each lane; importable by name."""
        for _, pipe in self._lanes:
            pipe.send((function, arguments))
        return self._answers()

    @property
    def pids(self) -> list[int]:
        """The processes' numbers, lane by lane."""
        return [process.pid for process, _ in self._lanes]

    def _answers(self) -> list[Any]:
        answers = []
        for lane, (_, pipe) in enumerate(self._lanes):
            assert pipe.poll(TIMEOUT_SECONDS), f"lane {lane} does not answer"
            good, answer = pipe.recv()
            assert good, f"on lane {lane}:\n{answer}"
            answers.append(answer)
        return answers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process, _ in self._lanes:
            process.terminate()
        for process, pipe in self._lanes:
            process.join()
            pipe.close()
        self._folder.cleanup()


def _serve(lane: int, count: int, store: Path, pipe: Connection) -> None:
    import torch

    try:
        torch.set_num_threads(1)
        groups = LaneGroups(lane, count)
        groups.init(store, timeout_seconds=30)
        pipe.send((True, None))
        while True:
            function, arguments = pipe.recv()
            pipe.send((True, function(groups, *arguments)))
    except BaseException:  # noqa: BLE001  (told to the test)
        pipe.send((False, traceback.format_exc()))
