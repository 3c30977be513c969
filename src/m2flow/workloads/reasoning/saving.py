"""Checkpoints of a whole run: one for all workers that train, whole or not there."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

from m2flow.workloads.reasoning.workers import Critic


class CallsWorkers(Protocol):
    """The part of a run that is needed here."""

    def worker_call_everywhere(self, worker: str, method: str, *args: Any) -> Any:
        """Call a worker's method on all of its lanes."""
        ...


def save_checkpoint(
    run: CallsWorkers,
    workers: Collection[str],
    checkpoints: Path,
    step: int,
    *,
    extra: dict[str, Any],
    keep: int,
) -> None:
    """Write a checkpoint of the policy, and of the critic if there is one.

    Args:
        run: whose workers are asked.
        workers: names of the flow's workers.
        checkpoints: the run's folder of checkpoints, absolute, which all lanes see.
        step: training steps done.
        extra: JSON to remember.
        keep: how many checkpoints to keep.
    """
    parts = [name for name in (Critic.part,) if name in workers]
    for name in parts:
        run.worker_call_everywhere(name, "save_part", str(checkpoints), step)
    arguments = (str(checkpoints), step, extra, keep, bool(parts))
    run.worker_call_everywhere("learner", "save_checkpoint", *arguments)
