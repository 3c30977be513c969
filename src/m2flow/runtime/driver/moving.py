"""States of workers as files, on their way from one lane to another.

A worker writes its state with `save` and reads it with `restore`, as for a checkpoint. What lies
between is bytes, which travel from lane to lane as any payload does.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m2flow.engine.messages import CallFailed, CallFinished, ExportWeights, InstallWeights, LaneLost
from m2flow.errors import RunFailed
from m2flow.flow.worker import Worker

if TYPE_CHECKING:
    from m2flow.runtime.driver.carrier import RayCarrier
    from m2flow.runtime.driver.pool import LanePool
    from m2flow.runtime.lane.orders import Fetch


def saves(worker: Worker) -> bool:
    """Whether a worker's state can be moved: it says how to write it, and how to read it."""
    kind = type(worker)
    return kind.save is not Worker.save and kind.restore is not Worker.restore


def files_of(worker: Worker) -> dict[str, Any]:
    """What a worker saves: path below its folder to content, a uint8 tensor of shape [bytes]."""
    import torch

    with _folder(worker) as folder:
        worker.save(folder)
        return {
            str(path.relative_to(folder)): torch.frombuffer(
                bytearray(path.read_bytes()), dtype=torch.uint8
            )
            if path.stat().st_size
            else torch.empty(0, dtype=torch.uint8)
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }


def write_files(files: Mapping[str, Any], worker: Worker) -> None:
    """Have a worker restore such files."""
    with _folder(worker) as folder:
        for path, content in files.items():
            there = folder / path
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_bytes(content.numpy().data)
        worker.restore(folder)


@contextmanager
def _folder(worker: Worker) -> Iterator[Path]:
    """A folder that is gone afterwards, where the worker's lane puts state away."""
    if worker.place.spill is not None:
        worker.place.spill.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="m2flow-state-", dir=worker.place.spill) as name:
        yield Path(name)


# --- on the launcher's side ---------------------------------------------------------------------


def save_state(pool: LanePool, worker: str, gang: tuple[int, ...], number: int) -> Fetch:
    """Have a worker save its state; where the files then lie.

    Args:
        pool: the lanes.
        worker: whose state.
        gang: the lanes of one replica; all of them take part, and the first one keeps the files.
        number: under which they are kept.

    Raises:
        Exception: what the worker raised.
    """
    from m2flow.runtime.lane.orders import STATES, Fetch, Save

    answers = pool.ask_all(dict.fromkeys(gang, lambda asked: Save(asked, worker, number)))
    for answer in answers.values():
        if answer.raised:
            raise pickle.loads(answer.value)
    return Fetch(STATES, number, (0,), lane=gang[0])


def drop_states(pool: LanePool) -> None:
    """Let go of what `save_state` has kept."""
    from m2flow.runtime.lane.orders import STATES, DropStep

    for lane in pool.lanes:
        pool.send(lane.id, DropStep("", STATES))


def carry_out_now(
    carrier: RayCarrier, command: ExportWeights | InstallWeights, seconds: float
) -> None:
    """Carry a command out while no step runs, and wait for its end.

    Raises:
        RunFailed: it failed, with what was raised as its cause; or it took longer than `seconds`.
    """
    carrier.carry_out("step", command)
    waiting = set(command.lanes)
    deadline = time.monotonic() + seconds
    while waiting:
        if time.monotonic() > deadline:
            raise RunFailed(f"lanes {sorted(waiting)} have not answered within {seconds:g} s")
        for report in carrier.wait(1.0):
            match report.event:
                case CallFinished(call=call, lane=lane) if call == command.call:
                    waiting.discard(lane)
                case CallFailed(lane=lane, error=error):
                    raise RunFailed(f"{command} failed on lane {lane}") from error
                case LaneLost(lane=lane, reason=reason):
                    raise RunFailed(f"lane {lane} was lost: {reason}")
