"""A Ray cluster of a test module's own, in a private folder; nothing of it is left behind."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray


@contextmanager
def local_cluster(num_cpus: int) -> Iterator[None]:
    """Ray is connected inside; `launch` and `LanePool` use the connection that they find."""
    folder = Path(tempfile.mkdtemp(prefix="m2f-"))  # Ray's sockets need a short path
    try:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            logging_level=logging.ERROR,
            _temp_dir=str(folder),
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
