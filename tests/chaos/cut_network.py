"""Runs across two nodes, and the link between them, which can be cut."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.chaos.disturbed import DISTURBED, Strike
from tests.runtime.cluster_of_two import TwoNodes, two_nodes

END_SECONDS = 240.0
QUIET_SECONDS = 60.0


@contextmanager
def linked() -> Iterator[TwoNodes]:
    folder = Path(tempfile.mkdtemp(prefix="m2c-"))  # short: Ray's sockets lie there
    try:
        with two_nodes(folder) as cluster:
            if not cluster.apart:
                pytest.skip(f"there is no link to cut: {cluster.how}")
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start_disturbed(
    cluster: TwoNodes, folder: Path, strike: Strike, *words: str
) -> subprocess.Popen[str]:
    """A run of `tiny.yaml` in the folder, across both nodes."""
    command = [sys.executable, DISTURBED, json.dumps(asdict(strike)), "train", "tiny.yaml", *words]
    temporary = folder / "temporary"
    temporary.mkdir()
    return cluster.start(
        [*command, "lanes=2xcpu:1", "--run-dir", "run"],
        END_SECONDS,
        folder=folder,
        environment={"TMPDIR": str(temporary)},
    )


def hit(run: subprocess.Popen[str], folder: Path) -> bool:
    """Wait for the moment of the strike; False if the run has ended before."""
    deadline = time.monotonic() + END_SECONDS
    while not (folder / "hit").exists():
        if run.poll() is not None:
            return False
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return True


def lanes_on(cluster: TwoNodes) -> list[int]:
    """Processes of lanes on either node."""
    there = set()
    for node in (0, 1):
        done = cluster.run(["stat", "-Lc", "%i", "/proc/self/ns/net"], timeout=20, node=node)
        there.add(int(done.stdout))
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (
                b"ray::LaneProcess" in (process / "cmdline").read_bytes()
                and (process / "ns/net").stat().st_ino in there
            ):
                found.append(int(process.name))
    return found


def in_shared_memory(cluster: TwoNodes) -> list[str]:
    """Files of lanes and launchers in the shared memory of either node, which is its own."""
    find = ["find", "/dev/shm", "-name", "m2flow-*"]
    done = [cluster.run(find, timeout=20, node=node) for node in (0, 1)]
    return [name for one in done for name in one.stdout.split()]


def wait_until_quiet(cluster: TwoNodes, folder: Path) -> None:
    """Wait until no lane is left, nor a folder of their pool, nor its files in shared memory."""
    deadline = time.monotonic() + QUIET_SECONDS
    temporary = folder / "temporary"
    while left := [*lanes_on(cluster), *temporary.glob("m2flow-*"), *in_shared_memory(cluster)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.5)
