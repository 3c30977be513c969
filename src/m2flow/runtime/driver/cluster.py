"""The Ray cluster a run uses: the one that is there, or one of its own that ends with it."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar

from m2flow.engine.plan import LaneSpec
from m2flow.errors import RunFailed, UserError
from m2flow.runtime.transport.sweeping import SHORT, Sweeper, check_shared_memory, clear_up

SET_UP_WORKER = Path(__file__).parents[1] / "lane" / "set_up_worker.py"

WITHIN = "ray"
"""Ray's folder in one of the cluster's own: Ray opens its folder, with its logs and sockets, to all
users of the machine."""

SOCKET = f"{WITHIN}/session_2026-01-01_00-00-00_000000_9999999/sockets/plasma_store"
"""The longest path of a socket that Ray makes in that folder, such as it is named."""

SOCKET_BYTES = 107
"""The longest path that the kernel takes for a socket."""

LOGGED_ERROR = re.compile(r"^\[\S+ \S+ [CE] [^]]*\] (?:\(\S+\) )?\S+:\d+: *(.+)", re.MULTILINE)
"""A line of a log of Ray's, of an error or a failed check; what it says is the group."""

MISMATCH = "Version mismatch"
"""What Ray says where the cluster has another version of Ray or of Python."""


def require_token() -> None:
    """Have the clusters that this process starts refuse connections without the secret token.

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


def starts_here() -> bool:
    """Whether a `RayCluster` would start a cluster of its own, on this machine."""
    ray = sys.modules.get("ray")  # it is not to be imported for this
    return not os.environ.get("RAY_ADDRESS") and not (ray and ray.is_initialized())


def is_here() -> bool:
    """Whether lanes are on this machine: this process has started the cluster, or would start it.

    A cluster that somebody else has started may have further machines.
    """
    return starts_here() or RayCluster.started_here


def check_address() -> None:
    """Refuse a RAY_ADDRESS that is to be joined and names another kind of server than the cluster.

    Raises:
        UserError: it is that of a Ray client's server, or of a job server.
    """
    address, ray = os.environ.get("RAY_ADDRESS", ""), sys.modules.get("ray")
    if "://" in address and not (ray and ray.is_initialized()):
        raise UserError(
            "lanes cannot be driven from outside the cluster",
            key="RAY_ADDRESS",
            value=address,
            expected="HOST:PORT, on a machine of the cluster",
            hint="or hand the command in with `ray job submit`",
        )


def folder_for_sockets() -> Path:
    """The folder in which a cluster gets its own: the temporary folder, or /tmp where that one's
    path is too long for Ray's sockets.

    Raises:
        UserError: it is, and nobody can write in /tmp.
    """
    temporary = Path(tempfile.gettempdir())
    left = SOCKET_BYTES - len(os.fsencode(Path(_new_name()) / SOCKET)) - 1
    if len(os.fsencode(temporary)) <= left:
        return temporary
    if not os.access(SHORT, os.W_OK | os.X_OK):
        raise UserError(
            f"the path of the temporary folder is too long for Ray's sockets, and {SHORT} cannot "
            "be written",
            key="TMPDIR",
            value=str(temporary),
            expected=f"a path of at most {left} characters",
        )
    return SHORT


def _new_name() -> str:
    return f"m2flow-ray-{secrets.token_hex(4)}"


class RayCluster:
    """A connection to Ray.

    `RAY_ADDRESS`, or a connection that exists already, is used as it is. Otherwise a cluster is
    started on this machine, with a temporary directory and a secret of its own, and shut down by
    `close`. If this process is killed before that, a shell removes the directory. What neither did
    for launchers that are dead is removed meanwhile.

    Attributes:
        sweeper: removes files that are added to it, if this process is killed.
        started_here: whether this process has started the cluster that it is connected to.

    Raises:
        UserError: there is no shared memory, RAY_ADDRESS cannot be joined, or no folder has a path
            that is short enough for Ray's sockets.
        RunFailed: Ray has not come up.
    """

    started_here: ClassVar[bool] = False

    def __init__(self, lanes: Sequence[LaneSpec]) -> None:
        check_shared_memory()
        check_address()
        self._parent = folder_for_sockets() if starts_here() else None
        # Ray would print stacks on SIGTERM, which asks for the end and is no crash. Read on import.
        os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
        import ray

        self._folder: Path | None = None
        self.sweeper = Sweeper()
        threading.Thread(target=clear_up, name="clearing up", daemon=True).start()
        self._ours = not ray.is_initialized()
        if not self._ours:
            return
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # lanes do the work: nobody goes first
        # Its log monitor keeps the files of processes that have ended open, up to this many.
        os.environ.setdefault("RAY_LOG_MONITOR_MAX_OPEN_FILES", "16")
        if os.environ.get("RAY_ADDRESS"):
            self._connect(address=None)
            return
        require_token()
        self._connect(
            address="local",
            num_cpus=max(1, sum(len(lane.cores) for lane in lanes)),
            include_dashboard=False,
            log_to_driver=True,
        )
        RayCluster.started_here = True

    def _connect(self, address: str | None, **settings: Any) -> None:
        """Connect to a cluster, or start one. A second try is made: under load Ray times out.

        Raises:
            RunFailed: it has not come up, or is of other versions.
        """
        import ray

        for tries in (1, 2):
            if address is not None:
                assert self._parent is not None
                self._folder = self._parent / _new_name()
                self.sweeper.guard(self._folder)
                self._folder.mkdir(mode=0o700)
                settings["_temp_dir"] = str(self._folder / WITHIN)
            private = nullcontext() if address is None else _private_settings()
            try:
                with signals_are_not_heard(), private:
                    ray.init(address=address, logging_level=logging.ERROR, **settings)
            except Exception as error:  # noqa: BLE001 - Ray has no type for it
                _shut_down()
                logged = _logged_error(self.logs)
                self._remove_files()
                if tries == 2 or MISMATCH in str(error):
                    self.sweeper.close()
                    raise RunFailed(_why(error, logged, joined=address is None)) from None
            else:
                return

    @property
    def logs(self) -> Path | None:
        """Ray's logs of a cluster that was started here."""
        return None if self._folder is None else self._folder / WITHIN / "session_latest" / "logs"

    def close(self) -> None:
        """Disconnect; a cluster that was started here is ended and its files removed."""
        if self._ours:
            _shut_down()
            self._ours = RayCluster.started_here = False
        self._remove_files()
        self.sweeper.close()

    def _remove_files(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


@contextmanager
def signals_are_not_heard() -> Iterator[None]:
    """Have processes that are started within not hear what the launcher hears: it ends them.

    A terminal tells all of its processes at once that the user interrupts, or has gone, and a
    scheduler all of a job's that its time is over; Ray's would be gone before the step at hand is.
    """
    signals = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _private_settings() -> Iterator[None]:
    """Have a cluster that is started within be of this machine alone, and quickly there.

    Ray has no public way for any of this. A node whose address is 127.0.0.1 binds to nothing else,
    but Ray replaces that one by an address that other machines reach, unless there are to be no
    others. Its script that sets up workers it knows by a name alone, below a folder that an
    absolute path replaces (`set_up_worker.py`). The processes that ask for further machines, and
    that report what the cluster is used for, each import Ray anew while the lanes start.
    """
    from ray._private import ray_constants as constants
    from ray._private.node import Node

    others: list[tuple[Any, str, Any]] = [
        (constants, "ENABLE_RAY_CLUSTER", False),
        (constants, "SETUP_WORKER_FILENAME", str(SET_UP_WORKER)),
        (Node, "start_monitor", _start_nothing),
        (Node, "start_api_server", _start_nothing),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in others]
    for owner, name, value in others:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _start_nothing(*_: Any, **__: Any) -> None:
    """In place of a method that starts a process."""


def _shut_down() -> None:
    """Disconnect, and end the cluster if it was started here.

    Ray would wait for each process that hears no SIGTERM, so it is to kill them at once. What the
    raylet has begun is killed afterwards, as it would have done in the end.
    """
    import psutil
    import ray
    from ray._private import worker

    begun: list[psutil.Process] = []
    if (node := worker._global_node) is not None:
        kill = node.kill_all_processes
        node.kill_all_processes = lambda **_: kill(check_alive=False, allow_graceful=False)
        for raylet in node.all_processes.get("raylet", ()):
            with suppress(psutil.NoSuchProcess):
                begun += psutil.Process(raylet.process.pid).children(recursive=True)
    ray.shutdown()
    for process in begun:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _logged_error(logs: Path | None) -> str:
    """The first error that Ray's processes have logged, in one line; "" if there is none.

    `ray.init` itself says only how long it has waited for a process that has ended.
    """
    if logs is None:
        return ""
    for name in ("gcs_server", "raylet"):
        with suppress(OSError):
            if found := LOGGED_ERROR.search((logs / f"{name}.out").read_text(errors="replace")):
                return f"{name}: {found[1].rpartition('Check failed: ')[2]}"
    return ""


def _why(error: Exception, logged: str, *, joined: bool) -> str:
    """Say in one line why Ray has not come up, on this machine or at RAY_ADDRESS."""
    kind, lines = type(error).__name__, str(error).splitlines() or ["no word"]
    if not joined:
        said = f"{kind}: {lines[0]}" + (f"; {logged}" if logged else "")
        return (
            f"Ray has not come up on this machine, in two tries: {said}; is the machine "
            "overloaded, or full (`m2flow doctor`)?"
        )
    words = " ".join(" ".join(lines).split())
    return f"the Ray cluster at {os.environ['RAY_ADDRESS']} cannot be joined: {kind}: {words}"
