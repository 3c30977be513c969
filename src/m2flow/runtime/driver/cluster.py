"""The Ray cluster a run uses: the one that is there, or one of its own that ends with it."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from m2flow.engine.plan import LaneSpec


def require_token() -> None:
    """Have the clusters that this process starts refuse whoever does not know a secret.

    What the user has set counts. The secret stays the same as long as the process lives. Ray reads
    the mode and the secret once, when it is imported or first used, so it is told to read again.
    """
    import ray._raylet

    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if os.environ["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    raylet: Any = ray._raylet  # what Ray's own tests use; there is no public way
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


class RayCluster:
    """A connection to Ray.

    `RAY_ADDRESS`, or a connection that exists already, is used as it is. Otherwise a cluster is
    started on this machine, with a temporary directory and a secret of its own, and shut down by
    `close`.
    """

    def __init__(self, lanes: Sequence[LaneSpec]) -> None:
        import ray

        self._folder: Path | None = None
        self._ours = not ray.is_initialized()
        if not self._ours:
            return
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # lanes do the work: nobody goes first
        if os.environ.get("RAY_ADDRESS"):
            ray.init(logging_level=logging.ERROR)
            return
        require_token()
        self._folder = Path(tempfile.mkdtemp(prefix="m2flow-ray-"))
        ray.init(
            address="local",
            num_cpus=max(1, sum(len(lane.cores) for lane in lanes)),
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=True,
            _temp_dir=str(self._folder),
        )

    def close(self) -> None:
        """Disconnect; a cluster that was started here is ended and its files removed."""
        import ray

        if self._ours:
            ray.shutdown()
            self._ours = False
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
