"""A lane as a Ray actor: one process that owns one accelerator, or a fixed set of CPU cores.

Ray starts the process where it belongs, watches over it and ends it. What the lane does, it is told
over its control line (`LaneExecutor`). Torch is not imported before the process has bound itself to
its cores and set its thread count.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from m2flow.engine.plan import LaneSpec
from m2flow.plan.machine import usable_cores
from m2flow.runtime.lane.stacks import STACKS, listen
from m2flow.runtime.transport.lines import Line, LineClosed, Waiting
from m2flow.runtime.transport.listening import LOOPBACK, ListenerAddress, family_of
from m2flow.runtime.transport.sweeping import own_folder, sweep
from m2flow.signals import leave_the_end_to_the_parent

if TYPE_CHECKING:  # they import torch
    from m2flow.runtime.lane.exchange import Exchange
    from m2flow.runtime.transport.peering import PeerAddress

VISIBLE = "CUDA_VISIBLE_DEVICES"

LAUNCHER = -1
"""The launcher's position, where a lane would have its own."""

ALONE_SECONDS = 0.3
"""How long a call may go on once the launcher is gone. Ray ends the process after a second."""

SWITCH_SECONDS = 0.001
"""How long a thread may keep the interpreter while another one waits: peers wait for payloads."""


lines: dict[int, Line] = {}
"""Control lines of the lanes of this process, by lane."""


@dataclass(frozen=True, slots=True)
class LaneAddress:
    """How to reach a lane.

    Attributes:
        node: Ray's id of the machine it is on.
        host: that machine's address; a loopback address if all lanes are on one machine.
        process_id: of the lane's process.
        line: where its launcher may come.
        peer: where other lanes ask for payloads.
        meeting_port: where this lane would keep the store of process groups; None if all lanes are
            on one machine, where a file is the store.
    """

    node: str
    host: str
    process_id: int
    line: ListenerAddress
    peer: PeerAddress
    meeting_port: int | None


class LaneProcess:
    """The actor: `ready` brings the lane up, `serve` carries out orders until it is closed.

    A spare one is asked to `warm` up, and to `become` the lane whose process has ended.

    Args:
        lane: what the lane is.
        position: its place among the lanes of its pool.
        folder: the pool's, on the launcher's machine; on another one its name alone, in the
            temporary folder there.
        key: the pool's secret.
        link: the one way that payloads are to take; None for the fastest.
        one_node: whether launcher and lanes are all on one machine; nothing listens to others then.
        beside: where lanes share a process, the exchanges of those that are up (`shared`).
    """

    def __init__(
        self,
        lane: LaneSpec,
        position: int,
        folder: str,
        key: bytes,
        link: str | None,
        one_node: bool = False,
        beside: dict[int, Exchange] | None = None,
    ) -> None:
        leave_the_end_to_the_parent()
        self.one_node, self.key, self.link, self.beside = one_node, key, link, beside
        self.folder = Path(tempfile.gettempdir()) / folder
        self.become(lane, position)
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    def become(self, lane: LaneSpec, position: int) -> None:
        """Be this lane from now on; to be called before `ready`."""
        self.lane, self.position = lane, position
        self.num_threads = max(1, len(lane.cores))
        os.environ["OMP_NUM_THREADS"] = str(self.num_threads)

    def warm(self, modules: Sequence[str]) -> None:
        """Import what any lane needs, and what its workers will need."""
        for module in ("m2flow.runtime.lane.executor", *modules):
            importlib.import_module(module)

    @ray.method(concurrency_group="objects")
    def visible_gpus(self) -> str:
        """Which GPUs the process sees, as CUDA_VISIBLE_DEVICES has them."""
        return _given_gpus() or os.environ.get(VISIBLE, "")

    def ready(self, visible: str | None = None) -> LaneAddress:
        """Bind to the lane's cores, and wait for the launcher and for peers from now on.

        Args:
            visible: the GPU of the lane beside which this one stands, if it has none of its own.
        """
        self._bind()
        if self.lane.gpu is not None and (sees := visible or _given_gpus()):
            # Ray may have been told not to. CUDA looks when it is first used: not yet.
            os.environ[VISIBLE] = sees
        sys.setswitchinterval(SWITCH_SECONDS)
        import torch

        torch.set_num_threads(self.num_threads)
        own_folder(self.folder)
        listen(self.folder, self.position)
        node = ray.get_runtime_context().get_node_id()
        host = LOOPBACK if self.one_node else str(ray.util.get_node_ip_address())
        reached_at = None if self.one_node else host
        from m2flow.runtime.lane.exchange import Exchange
        from m2flow.runtime.transport.cuda_ipc import devices_here

        # Left by a process of the lane that was killed: the launcher clears its own machine alone.
        sweep(f"{self.folder.name}-{self.position}-")
        self._exchange = Exchange(
            self.lane.id,
            self.position,
            node,
            reached_at,
            self.folder,
            self.key,
            self.link,
            None if self.lane.gpu is None else devices_here(),
            self.beside,
        )
        self._meeting: socket.socket | None = None
        if not self.one_node:  # held, so that nobody else takes the port
            self._meeting = socket.create_server((host, 0), family=family_of((host, 0)))
        self._waiting = Waiting(reached_at, self.key)
        return LaneAddress(
            node,
            host,
            os.getpid(),
            self._waiting.address,
            self._exchange.address,
            None if self._meeting is None else self._meeting.getsockname()[1],
        )

    def serve(self, peers: Mapping[int, PeerAddress], seconds: float) -> None:
        """Carry out orders until the launcher closes the lane, or is gone.

        Args:
            peers: the addresses of all lanes of the pool, by number.
            seconds: longest to wait for the launcher.
        """
        self._bind()
        leave_the_end_to_the_parent()  # for what this thread begins
        import torch

        from m2flow.runtime.lane.context import LaneContext
        from m2flow.runtime.lane.executor import LaneExecutor
        from m2flow.runtime.transport.groups import LaneGroups, NoGroups

        torch.set_num_threads(self.num_threads)  # a setting of the thread
        self._exchange.introduce(peers)
        kind = LaneGroups if self.beside is None else NoGroups
        groups = kind(self.position, len(peers), self._meeting)
        line = lines[self.lane.id] = self._waiting.accept(seconds)
        device = "cpu" if self.lane.gpu is None else "cuda:0"
        host = str(ray.util.get_node_ip_address())
        context = LaneContext(
            self.lane.id, self.position, device, self.num_threads, groups, host, self.folder
        )
        executor = LaneExecutor(self.lane.id, line, self._exchange, context)
        over = threading.Event()
        watch = threading.Thread(target=self._end_with_launcher, args=(line, over), daemon=True)
        watch.start()
        try:
            executor.run()
        except LineClosed:
            self._clear_up()  # the launcher has ended without a word: so does the lane
        finally:
            over.set()
            groups.close()
            self._exchange.close()
            (self.folder / STACKS.format(self.position)).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # others still have their files there
                self.folder.rmdir()

    def _end_with_launcher(self, line: Line, over: threading.Event) -> None:
        """End the process when the launcher is gone, also in the middle of a call."""
        line.await_end()
        if not over.wait(ALONE_SECONDS):
            self._clear_up()
            self._exchange.close()
            os._exit(1)

    def _clear_up(self) -> None:
        """Remove what the launcher can no longer remove."""
        sweep(f"{self.folder.name}-{LAUNCHER}-")
        shutil.rmtree(self.folder, ignore_errors=True)

    def _bind(self) -> None:
        """Bind the calling thread, and every thread that it starts, to the lane's cores.

        Not where a quota gives less than the cores that are there: which of them others use, such
        as the containers beside this one, only the kernel knows.
        """
        there = os.sched_getaffinity(0)
        has_quota = usable_cores() < len(there)
        if self.lane.cores and set(self.lane.cores) <= there and not has_quota:
            os.sched_setaffinity(0, self.lane.cores)


def _given_gpus() -> str:
    """The GPUs that Ray has set aside for this process, as CUDA_VISIBLE_DEVICES has them."""
    return ",".join(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))
