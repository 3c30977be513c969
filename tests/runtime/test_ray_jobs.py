"""`ray job submit` runs a recipe, as docs/how-to/run-on-a-cluster.md says."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from m2flow.observe.run_directory import read_metrics

NEEDED = ("aiohttp", "aiohttp_cors", "grpc", "opencensus", "prometheus_client", "requests")
SMALL = """
steps=2 prompts_per_step=2 warmup.steps=2 warmup.samples_per_step=4 evaluation.problems=0
lanes=cpu:2 mode=collocated
""".split()
RAY = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in NEEDED),
        reason="Ray's job server is missing: pip install 'ray[default]'",
    ),
]


@pytest.fixture(scope="module")
def job_server() -> Iterator[str]:
    """The address to which jobs are submitted, of a cluster of this module's own."""
    folder = Path(tempfile.mkdtemp(prefix="m2f-"))  # Ray's sockets need a short path
    ports = {
        name: free_port()
        for name in ("--port", "--dashboard-port", "--dashboard-agent-listen-port")
    }
    words = [f"{name}={port}" for name, port in ports.items()]
    start = [
        *RAY, "start", "--head", "--block", "--num-cpus=2", "--include-dashboard=true",
        "--dashboard-host=127.0.0.1", "--node-ip-address=127.0.0.1", f"--temp-dir={folder}",
        "--disable-usage-stats", *words,
    ]  # fmt: skip
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    environment.pop("RAY_ADDRESS", None)
    with subprocess.Popen(
        start,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as head:
        try:
            assert head.stdout is not None
            for line in head.stdout:
                if "Ray runtime started" in line:
                    break
            else:
                pytest.fail("Ray did not start")
            yield f"http://127.0.0.1:{ports['--dashboard-port']}"
        finally:
            head.terminate()  # Ray ends the others
            try:
                head.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(head.pid, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def submitted(server: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *RAY,
            "job",
            "submit",
            f"--address={server}",
            "--",
            sys.executable,
            "-m",
            "m2flow",
            *words,
        ],
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_job_trains_on_the_cluster_and_ends_with_its_exit_code(
    job_server: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = submitted(job_server, "train", "quickstart", *SMALL, "--run-dir", str(run))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Done: 2 steps" in done.stdout
    assert [row["step"] for row in read_metrics(run)] == [1, 2]
    assert (run / "report.html").is_file()
    refused = submitted(job_server, "train", "quikstart")
    assert refused.returncode != 0
    assert "did you mean quickstart" in refused.stdout
