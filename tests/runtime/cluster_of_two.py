"""A Ray cluster of two nodes on this machine, as far apart as the machine allows.

    with two_nodes(folder, megabytes_per_second=50, delay_ms=10) as cluster:
        done = cluster.run([sys.executable, "-m", "m2flow", "train", ...], timeout=60)

Each node has a network namespace with an address of its own, a /dev/shm of its own, and half of a
shaped link (shaped_link.py). The host name and the file system stay shared: as on many clusters,
neither says which node one is on. `delay_ms` is one way; a round trip takes twice as long.

Where namespaces are not allowed the nodes are those of Ray's own test cluster, on one address and
with no link between them; a warning says so, and why. Nothing outlives the `with`: the nodes and
all commands run in one process namespace, which ends with it, and with this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

import m2flow

LINK = Path(__file__).with_name("shaped_link.py")
ADDRESSES = ("10.77.0.1", "10.77.0.2")  # as in shaped_link.py
PORT = 6379
OBJECT_STORE_BYTES = 200 * 2**20
START_SECONDS = 60.0

RAY = [sys.executable, "-m", "ray.scripts.scripts", "start"]
ON_EVERY_NODE = [
    "--block",
    "--num-gpus=0",
    f"--object-store-memory={OBJECT_STORE_BYTES}",
    "--disable-usage-stats",
]
STARTED = "Ray runtime started"

TEST_CLUSTER = """
import json, sys
from ray.cluster_utils import Cluster
cluster = Cluster(shutdown_at_exit=True)
nodes = [cluster.add_node(**json.loads(sys.argv[1])) for _ in range(2)]
print(json.dumps([cluster.address, *(node.node_ip_address for node in nodes)]), flush=True)
sys.stdin.read()
cluster.shutdown()
"""


class NoNamespacesError(Exception):
    """This machine does not let us make two separate nodes; the text says what failed."""


def _stays(node: int) -> None:
    raise NotImplementedError(f"node {node} of Ray's test cluster stays as it is")


@dataclass(frozen=True)
class TwoNodes:
    """Two running Ray nodes; the first is the head.

    Attributes:
        how: in words, what the nodes and the link between them are.
        address: what drivers connect to, as RAY_ADDRESS.
        addresses: of the nodes, the head's first.
        apart: whether they have namespaces and a shaped link.
    """

    how: str
    address: str
    addresses: tuple[str, str]
    apart: bool
    _link: IO[str] | None = None
    _enter: tuple[Sequence[str], Sequence[str]] = ((), ())
    _environment: Mapping[str, str] = field(default_factory=dict)
    _begin: Callable[[int], None] = _stays

    def kill_other(self) -> None:
        """End what runs of Ray on the second node, without a word, as if the machine had gone."""
        names = [*self._enter[1], "readlink", "/proc/self/ns/net"]
        namespace = subprocess.run(names, check=True, capture_output=True, text=True).stdout.strip()
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                there = os.readlink(f"/proc/{process.pid}/ns/net") == namespace
                if there and "ray" in " ".join(process.cmdline()):
                    process.send_signal(signal.SIGKILL)

    def start_other(self) -> None:
        """Have a second node join again."""
        self._begin(1)

    def cut(self) -> None:
        """Have the link lose everything from now on, without a word to either side."""
        self._tell_link("c")

    def mend(self) -> None:
        """Have it carry again."""
        self._tell_link("m")

    def _tell_link(self, word: str) -> None:
        assert self._link is not None, "there is no link between nodes of one address"
        self._link.write(word)
        self._link.flush()

    def run(
        self,
        command: Sequence[str | Path],
        *,
        timeout: float,
        node: int = 0,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node to its end, connected to this cluster.

        Args:
            command: the program and its arguments.
            timeout: seconds after which the command and its children are killed; the exit status
                is 124 then, and what it has printed so far is there.
            node: 0 is the head.
            folder: working directory; the caller's by default.
            environment: variables besides those of this process.
        """
        process = self.start(command, timeout, node, folder, environment)
        out, err = process.communicate(timeout=timeout + 30)
        return subprocess.CompletedProcess(list(map(str, command)), process.returncode, out, err)

    def start(
        self,
        command: Sequence[str | Path],
        timeout: float,
        node: int = 0,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """The same, without waiting for its end."""
        limit = ["timeout", "--kill-after=5", str(timeout)]
        return subprocess.Popen(
            [
                *self._enter[node],
                "env",
                "-C",
                str(folder or Path.cwd()),
                *limit,
                *map(str, command),
            ],
            env={**self._environment, "RAY_ADDRESS": self.address, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@contextlib.contextmanager
def two_nodes(
    folder: Path,
    *,
    megabytes_per_second: float = 50,
    delay_ms: float = 10,
    num_cpus: int | None = None,
) -> Iterator[TwoNodes]:
    """Start two Ray nodes; they end with the context.

    Args:
        folder: for Ray's files and logs; its path must be short, since sockets lie in it.
        megabytes_per_second: rate of the link, 10^6 bytes, in each direction.
        delay_ms: what the link adds to every packet, one way.
        num_cpus: CPUs that each node offers to Ray; by default all that this process may use,
            which the nodes then share.
    """
    num_cpus = len(os.sched_getaffinity(0)) if num_cpus is None else num_cpus
    environment = {
        **os.environ,
        "RAY_USAGE_STATS_ENABLED": "0",
        # Else Ray takes the token of this user's local clusters on some nodes and none on others.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "PYTHONPATH": os.pathsep.join(
            [str(Path(m2flow.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        ).rstrip(os.pathsep),
    }
    environment.pop("RAY_ADDRESS", None)
    with contextlib.ExitStack() as ended:
        nodes: list[subprocess.Popen[bytes]] = []
        ended.callback(lambda: [node.wait(60) for node in nodes])  # after their namespaces ended
        try:
            one, other, link = ended.enter_context(namespaces(megabytes_per_second, delay_ms))
        except NoNamespacesError as error:
            how = f"two nodes of Ray's test cluster on one address, no shaped link: {error}"
            warnings.warn(how, stacklevel=3)
            address, addresses = ended.enter_context(_test_cluster(folder, num_cpus, environment))
            yield TwoNodes(how, address, addresses, False, _environment=environment)
            return
        enter = one, other
        address = f"{ADDRESSES[0]}:{PORT}"
        head = ["--head", f"--port={PORT}", "--include-dashboard=false"]

        def begin(node: int) -> None:
            log = folder / f"node{node}.log"
            options = [
                f"--node-ip-address={ADDRESSES[node]}",
                f"--num-cpus={num_cpus}",
                f"--temp-dir={folder / f'ray{node}'}",
            ]
            where = [f"--address={address}"] if node else head
            nodes.append(_start_ray([*enter[node], *RAY, *where, *options], log, environment))
            _wait_for(nodes[-1], log)

        for node in range(2):
            begin(node)
        yield TwoNodes(
            f"two network namespaces, {megabytes_per_second:g} MB/s and {delay_ms:g} ms one way",
            address,
            ADDRESSES,
            True,
            link,
            enter,
            environment,
            begin,
        )


@contextlib.contextmanager
def namespaces(
    megabytes_per_second: float, delay_ms: float
) -> Iterator[tuple[list[str], list[str], IO[str]]]:
    """Two linked namespaces; gives the words before a command that run it in either, and what the
    link is told by."""
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *as_root, *"--net --mount --pid --mount-proc --kill-child".split()]
    try:
        link = subprocess.Popen(
            [*command, sys.executable, str(LINK), str(megabytes_per_second), str(delay_ms)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except FileNotFoundError as error:
        raise NoNamespacesError(str(error)) from error
    assert link.stdin
    assert link.stdout
    assert link.stderr
    try:
        ready = link.stdout.readline()
        if not ready:
            raise NoNamespacesError(link.stderr.read().strip().rpartition("\n")[2])
        first = Path(f"/proc/{link.pid}/task/{link.pid}/children").read_text().split()[0]
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        outer = ["nsenter", "--target", first, *user, "--mount", "--pid"]
        one, other = (
            [*outer, "nsenter", "--target", str(holder), "--net", "--mount"]
            for holder in json.loads(ready)
        )
        yield one, other, link.stdin
        if link.poll() is not None:
            raise AssertionError(f"the link broke: {link.stderr.read()}")
    finally:
        link.stdin.close()  # the link's cue to end; the kernel ends all else in its namespace
        try:
            link.wait(60)
        except subprocess.TimeoutExpired:
            link.kill()
            link.wait()
        link.stdout.close()
        link.stderr.close()


def _start_ray(
    command: Sequence[str], log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    with log.open("w") as output:
        return subprocess.Popen(
            [*command, *ON_EVERY_NODE],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _wait_for(node: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a node says that it has started."""
    until = time.monotonic() + START_SECONDS
    while STARTED not in log.read_text():
        assert node.poll() is None, f"the node did not start:\n{log.read_text()}"
        assert time.monotonic() < until, f"the node hangs:\n{log.read_text()}"
        time.sleep(0.05)


@contextlib.contextmanager
def _test_cluster(
    folder: Path, num_cpus: int, environment: Mapping[str, str]
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Ray's test cluster, in a process of its own: Ray keeps settings for the life of a process."""
    options = {"num_cpus": num_cpus, "num_gpus": 0, "object_store_memory": OBJECT_STORE_BYTES}
    cluster = subprocess.Popen(
        [sys.executable, "-c", TEST_CLUSTER, json.dumps(options)],
        env={**environment, "RAY_TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert cluster.stdin
    assert cluster.stdout
    try:
        ready = cluster.stdout.readline()
        assert ready, "Ray's test cluster did not start"
        address, one, other = json.loads(ready)
        yield address, (one, other)
    finally:
        cluster.stdin.close()
        cluster.wait(30)
        cluster.stdout.close()
