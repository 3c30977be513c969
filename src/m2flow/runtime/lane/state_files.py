"""A worker's state as files in memory, on their way from one lane to another.

A worker writes its state with `save` and reads it with `restore`, as for a checkpoint. What lies
between is bytes, which travel from lane to lane as any payload does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from m2flow.flow.worker import Worker


def saves(worker: Worker) -> bool:
    """Whether a worker's state can be moved: it says how to write it, and how to read it."""
    kind = type(worker)
    return kind.save is not Worker.save and kind.restore is not Worker.restore


def files_of(worker: Worker) -> dict[str, Any]:
    """What a worker saves: path below its folder to content, a uint8 tensor of shape [bytes]."""
    import numpy
    import torch

    with _folder(worker) as folder:
        worker.save(folder)
        return {
            str(path.relative_to(folder)): torch.from_numpy(numpy.fromfile(path, numpy.uint8))
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
