"""Two nodes with a slow link between them train what one process trains."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime import cluster_of_two
from tests.runtime.cluster_of_two import NoNamespacesError, TwoNodes, two_nodes

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml"

SHORT = """
steps=3 prompts_per_step=8 samples_per_prompt=4 evaluation.problems=0
data.options.min_digits=1 data.options.max_digits=2 model.dtype=float64
""".split()
"""Short sums, which a short warm-up gets right at times. float64, so that no rounding changes a
draw."""

ACROSS = """
import socket, sys, time
PAYLOAD, PINGS = 20_000_000, 20
if sys.argv[1] == "answer":
    server = socket.create_server(("", 7000))
    print("there", flush=True)
    end, _ = server.accept()
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(PINGS):
        end.sendall(end.recv(1))
    left = PAYLOAD
    while left:
        left -= len(end.recv(1 << 20))
    end.sendall(b"!")
else:
    end = socket.create_connection((sys.argv[2], 7000))
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    def seconds(payload):
        start = time.perf_counter()
        end.sendall(payload)
        end.recv(1)
        return time.perf_counter() - start
    pings = sorted(seconds(b"!") for _ in range(PINGS))
    print(pings[0], pings[PINGS // 2], PAYLOAD / seconds(bytes(PAYLOAD)) / 1e6)
"""

ON_EACH_NODE = """
import json, os, time
import numpy, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ray.init(logging_level="ERROR")

@ray.remote
class OnNode:
    def describe(self):
        with open("/dev/shm/m2flow-seen-by-one-node", "x"):
            pass
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
    def make(self):
        return numpy.arange(5_000_000, dtype=numpy.uint8)
    def add_up(self, numbers):
        return int(numbers.astype(numpy.int64).sum())

here = ray.get_runtime_context().get_node_id()
nodes = sorted((node["NodeID"] for node in ray.nodes()), key=lambda node: node != here)
head, worker = (
    OnNode.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
    for node in nodes
)
made = head.make.remote()
ray.wait([made], fetch_local=False)
print(json.dumps({
    "nodes": nodes,
    "described": ray.get([head.describe.remote(), worker.describe.remote()]) if {apart} else None,
    "sum": ray.get(worker.add_up.remote(made)),
}))
"""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """For Ray's files: a short path, since sockets lie below it."""
    folder = Path(tempfile.mkdtemp(prefix="m2flow-two-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[TwoNodes]:
    """One pair of nodes for this file; which kind of pair stands in the test's output."""
    with two_nodes(folder) as nodes:
        print(f"two nodes: {nodes.how}")
        yield nodes


def test_the_link_is_as_slow_as_it_should_be(cluster: TwoNodes) -> None:
    if not cluster.apart:
        pytest.skip(f"there is no link to measure: {cluster.how}")
    for sender, receiver in ((0, 1), (1, 0)):
        answering = cluster.start([sys.executable, "-c", ACROSS, "answer"], 120, receiver)
        assert answering.stdout is not None
        assert answering.stdout.readline() == "there\n"
        address = cluster.addresses[receiver]
        done = cluster.run([sys.executable, "-c", ACROSS, "ask", address], timeout=120, node=sender)
        answering.communicate(timeout=120)
        assert done.returncode == 0, done.stderr
        fastest, median, rate = map(float, done.stdout.split())
        print(f"round trip {median * 1e3:.1f} ms, {rate:.1f} MB/s")
        assert fastest >= 0.020, "10 ms each way"
        assert median < 0.040
        assert 5 < rate < 55  # a busy machine may be slower than the link


def test_ray_has_two_separate_nodes(cluster: TwoNodes) -> None:
    script = textwrap.dedent(ON_EACH_NODE).replace("{apart}", str(cluster.apart))
    done = cluster.run([sys.executable, "-c", script], timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(set(found["nodes"])) == 2
    assert found["sum"] == sum(n % 256 for n in range(5_000_000))
    if cluster.apart:  # a file in /dev/shm that both could make stands in neither's way
        assert found["described"] == [
            [node, address] for node, address in zip(found["nodes"], cluster.addresses, strict=True)
        ]


def train(cluster: TwoNodes, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """The figures of each step of the short quick start, run by a driver on the head."""
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "m2flow",
        "train",
        QUICKSTART,
        "--run-dir",
        folder / "run",
    ]
    folder.mkdir()
    done = cluster.run([*command, *SHORT, *overrides], timeout=140, folder=folder)
    assert done.returncode == 0, f"{cluster.how}\n{done.stdout}\n{done.stderr}"
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def test_quick_start_across_two_nodes_equals_eager(cluster: TwoNodes, tmp_path: Path) -> None:
    eager = train(cluster, tmp_path / "eager", "mode=eager", "lanes=cpu:1", "warmup.steps=150")
    warmed_up = f"model.path={tmp_path / 'eager/run/warmup'}"
    across = train(
        cluster,
        tmp_path / "across",
        *("mode=disaggregated", "lanes=2xcpu:1", "warmup.steps=0", warmed_up),
    )
    plan = json.loads((tmp_path / "across/run/plan.json").read_text())
    assert [lane["node"] for lane in plan["lanes"]] == [0, 1]
    assert [row["step"] for row in eager] == [1, 2, 3]
    assert any(row["train/grad_norm"] > 0 for row in eager), "else nothing was learned or sent"
    for exact in ("step", "reward/mean", "tokens/generated", "version"):
        assert [row[exact] for row in across] == [row[exact] for row in eager], exact
    for close in ("loss/policy", "train/grad_norm"):
        expected = [row[close] for row in eager]
        assert [row[close] for row in across] == pytest.approx(expected, rel=1e-4, abs=1e-6), close


def test_nothing_outlives_the_nodes() -> None:
    try:
        with cluster_of_two.namespaces(50, 10) as (enter, _, _):
            started = subprocess.Popen(
                [*enter, "sh", "-c", "(trap '' TERM HUP; sleep 1000) & echo there; wait"],
                stdout=subprocess.PIPE,
                text=True,
            )
            assert started.stdout is not None
            assert started.stdout.readline() == "there\n"
    except NoNamespacesError as error:
        pytest.skip(f"no namespaces on this machine: {error}")
    with started:
        assert started.stdout.read() == "", "ends once no process is left that could write"
    assert started.returncode != 0


def test_where_namespaces_are_not_allowed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the nodes are those of Ray's own test cluster, and a warning says so."""
    monkeypatch.setattr(cluster_of_two, "LINK", Path("no-such-script.py"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with two_nodes(folder, num_cpus=1) as cluster:
            assert not cluster.apart
            script = ON_EACH_NODE.replace("{apart}", "False")
            done = cluster.run([sys.executable, "-c", script], timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(set(json.loads(done.stdout.splitlines()[-1])["nodes"])) == 2
    assert any("no shaped link" in str(warning.message) for warning in caught)
