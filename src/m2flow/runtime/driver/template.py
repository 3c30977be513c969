"""`LaneTemplate`: the process of which lanes of cores on this machine are forks.

Knows nothing of Ray, which is not to be imported before its cluster is started.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from m2flow.engine.plan import LaneSpec
from m2flow.runtime.driver.cluster import RayCluster, is_here, signals_are_not_heard

LANE = Path(__file__).parents[1] / "lane"


def any_process_does(lane: LaneSpec) -> bool:
    """Whether any process can be the lane: not where Ray gives it a GPU, or a setup of its own."""
    return lane.gpu is None and lane.reserved_for is None


class LaneTemplate:
    """A process that does a lane's imports, and then forks; see `m2flow.runtime.lane.template`.

    It starts at once, and nobody waits for it but lanes that are to be forks. It ends with the
    launcher, or when it is closed; lanes are started without it then.

    Args:
        modules: what it imports; none of them may import Ray.

    Attributes:
        command: what Ray is to start instead of Python.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        name = f"m2flow-{uuid.uuid4().hex}"
        asking = (sys.executable, "-I", "-S", str(LANE / "ask_template.py"), name)
        self.command = shlex.join(asking)
        # Lanes set their number of threads later; with more than one now, BLAS would start some.
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "OMP_NUM_THREADS": "1"}
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(f"\0{name}")  # it has no file that could be left behind
            listener.listen(128)
            with signals_are_not_heard():
                self._process = subprocess.Popen(
                    [sys.executable, str(LANE / "template.py"), str(listener.fileno()), *modules],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=environment,
                    pass_fds=[listener.fileno()],
                    start_new_session=True,
                )

    @property
    def process_id(self) -> int:
        """Of the process."""
        return self._process.pid

    def close(self) -> None:
        """End it; lanes that are its forks go on."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def cluster_of(
    lanes: Sequence[LaneSpec], modules: Sequence[str] = ("torch",)
) -> tuple[RayCluster, LaneTemplate | None]:
    """The cluster for lanes; if it is our own, with the template of those that can be forks.

    Args:
        lanes: what is to be started on it.
        modules: what the template imports, beside the start of Ray.

    Raises:
        UserError, RunFailed: as of `RayCluster`; no template is left then.
    """
    forks = is_here() and any(map(any_process_does, lanes))
    template = LaneTemplate(modules) if forks else None
    try:
        return RayCluster(lanes), template
    except BaseException:
        if template is not None:
            template.close()
        raise
