"""Services that keep figures, offline: what they were given can be read from their own files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from m2flow.errors import UserError
from m2flow.observe import loggers
from m2flow.observe.loggers import SERVICES, Entry, MlflowLogger, check_services
from m2flow.observe.metrics_log import MetricsLog
from m2flow.observe.progress import Progress
from m2flow.observe.run_directory import RunDirectory, read_document, read_metrics

WRITE = """
from m2flow.observe.metrics_log import MetricsLog
from m2flow.observe.run_directory import RunDirectory
from m2flow.observe.progress import Progress

class Loud(Progress):
    def note(self, text):
        raise AssertionError(text)

run = RunDirectory.create("run", "r")
run.write_config({"steps": 4, "model": {"path": None}})
for steps in ([0, 1, 2], [3]):
    log = MetricsLog(run, ["jsonl", "SERVICE"], None if steps[0] == 0 else 2, Loud())
    for step in steps:
        log.add(step, {"reward/mean": step / 8, "train/grad_norm": float("nan")})
    log.close()
"""

READ_MLFLOW = """
import mlflow
client = mlflow.MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("m2flow").experiment_id])
print(run.info.status, run.info.run_name)
print([(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "reward/mean")])
"""

READ_TRACKIO = """
import json, sqlite3
(path,) = __import__("pathlib").Path("trackio").glob("m2flow.db")
rows = sqlite3.connect(path).execute("select run_name, step, metrics from metrics order by step")
rows = [(name, step, json.loads(metrics)["reward/mean"]) for name, step, metrics in rows]
assert len({name for name, _, _ in rows}) == 1
print([(step, value) for _, step, value in rows])
"""

FOUR = "[(0, 0.0), (1, 0.125), (2, 0.25), (3, 0.375)]"


def offline(folder: Path, program: str) -> str:
    """Run a program whose services may reach nothing but `folder`; what it printed."""
    folder.mkdir(exist_ok=True)
    variables = {
        "HOME": str(folder),
        "WANDB_MODE": "offline",
        "SWANLAB_MODE": "offline",
        "TRACKIO_DIR": str(folder / "trackio"),
        "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"the {package} extra is missing")


@needs("mlflow")
def test_mlflow_reads_back_what_was_logged(tmp_path: Path) -> None:
    offline(tmp_path, WRITE.replace("SERVICE", "mlflow").replace("grad_norm", "grad_norm#2"))
    assert offline(tmp_path, READ_MLFLOW).splitlines() == ["FINISHED run", FOUR]


def mlflow_in_place_of_a_server(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """MLflow's client; what it is given stays in it."""
    client, module = Mock(), Mock()
    client.search_runs.return_value = []
    module.MlflowClient.return_value = client
    module.entities.Metric = lambda key, *_: key
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return client


def test_mlflow_is_given_names_that_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other names it refuses all figures of a step."""
    client = mlflow_in_place_of_a_server(monkeypatch)
    log = MlflowLogger(Entry("id", "run", str(tmp_path), {}))
    log.add(1, {"seconds/x.y#2": 1.0, "loss/</a>\n": 1.0, "eval/pass@4 k-1_b:é": 1.0})
    names = client.log_batch.call_args.kwargs["metrics"]
    assert names == ["seconds/x.y_2", "loss/_/a__", "eval/pass_4 k-1_b:é"]


def test_what_mlflow_refuses_is_told_when_it_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told at the end of the run, or a thousand steps later."""
    client = mlflow_in_place_of_a_server(monkeypatch)
    sent: list[Future[None]] = []

    def log_batch(*_: object, **__: object) -> Any:
        sent.append(Future())
        return SimpleNamespace(_operation_futures=[sent[-1]], wait=sent[-1].result)

    client.log_batch.side_effect = log_batch
    log = MlflowLogger(Entry("id", "run", str(tmp_path), {}))
    for step in range(4):
        log.add(step, {"reward/mean": 1.0})
    sent[0].set_result(None)
    log.add(4, {"reward/mean": 1.0})
    sent[1].set_exception(ValueError("Invalid metric name"))
    with pytest.raises(ValueError, match="Invalid metric name"):
        log.add(5, {"reward/mean": 1.0})


def test_so_many_requests_to_mlflow_are_on_their_way_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = mlflow_in_place_of_a_server(monkeypatch)
    sent: list[Mock] = []
    client.log_batch.side_effect = lambda *_, **__: sent.append(Mock()) or sent[-1]
    log = MlflowLogger(Entry("id", "run", str(tmp_path), {}))
    for step in range(loggers.MLFLOW_AHEAD + 5):
        log.add(step, {"reward/mean": 1.0})
    assert [one.wait.called for one in sent].count(True) == 5
    log.close(failed=False)
    assert all(one.wait.call_count == 1 for one in sent)


@needs("trackio")
def test_trackio_reads_back_what_was_logged(tmp_path: Path) -> None:
    offline(tmp_path, WRITE.replace("SERVICE", "trackio"))
    assert offline(tmp_path, READ_TRACKIO).splitlines() == [FOUR]


@needs("wandb")
def test_wandb_writes_one_run_offline(tmp_path: Path) -> None:
    offline(tmp_path, WRITE.replace("SERVICE", "wandb"))
    number = read_document(tmp_path / "run" / "run.json")["id"]  # type: ignore[index]
    sought = [b"reward/mean", *(str(step / 8).encode() for step in (1, 2, 3))]
    content, deadline = b"", time.monotonic() + 60
    while not all(text in content for text in sought):  # its service writes on after the program
        assert time.monotonic() < deadline, content
        time.sleep(0.1)
        files = sorted(tmp_path.glob(f"run/wandb/offline-run-*-{number}/run-{number}.wandb"))
        content = b"".join(file.read_bytes() for file in files)


@needs("swanlab")
def test_swanlab_writes_one_run_offline(tmp_path: Path) -> None:
    offline(tmp_path, WRITE.replace("SERVICE", "swanlab"))
    number = read_document(tmp_path / "run" / "run.json")["id"]  # type: ignore[index]
    files = sorted((tmp_path / "run" / "swanlab").glob(f"run-*{number}*/*.swanlab"))
    assert files
    assert b"reward/mean" in b"".join(file.read_bytes() for file in files)


# What holds of every service, with one that this file makes


class Recorded:
    """A service in memory, which fails at a step if it is told to."""

    fails_at = -1

    def __init__(self, entry: Entry) -> None:
        self.entry, self.steps, self.failed = entry, list[int](), None
        made.append(self)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise ConnectionError("the service\nis gone")
        self.steps.append(step)

    def close(self, failed: bool) -> None:
        self.failed = failed


class Notes(Progress):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


made: list[Recorded] = []


@pytest.fixture
def opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[MetricsLog, Notes]]:
    made.clear()
    monkeypatch.setattr(loggers, "SERVICES", {"wandb": Recorded, "mlflow": Recorded})
    run = RunDirectory.create(tmp_path / "run", "r")
    run.write_config({"steps": 3})
    notes = Notes()
    return lambda *names: (MetricsLog(run, ["jsonl", *names], progress=notes), notes)


def test_a_resumed_run_has_the_same_id(opened: Callable[..., tuple[MetricsLog, Notes]]) -> None:
    opened("wandb")[0].close()
    opened("wandb", "mlflow")[0].close()
    assert len({one.entry.id for one in made}) == 1
    assert made[0].entry.config == {"steps": 3}
    assert made[0].failed is False


def test_a_service_that_fails_is_told_once_and_left_out(
    opened: Callable[..., tuple[MetricsLog, Notes]], tmp_path: Path
) -> None:
    log, notes = opened("wandb", "mlflow")
    made[0].fails_at = 1
    for step in range(4):
        log.add(step, {"reward/mean": 0.5})
    log.close()
    assert notes.said == ["wandb is left out from here on: ConnectionError: the service is gone"]
    assert (made[0].steps, made[1].steps) == ([0], [0, 1, 2, 3])
    assert (made[0].failed, made[1].failed) == (None, False)
    assert len(read_metrics(tmp_path / "run")) == 4


def test_a_run_that_fails_is_closed_as_failed(
    opened: Callable[..., tuple[MetricsLog, Notes]],
) -> None:
    log, _ = opened("wandb")
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        log.close()
    assert made[0].failed is True


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_missing_package_is_named_with_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(UserError, match=rf"logger: the {name} package .*m2flow\[{name}\]"):
        check_services(["jsonl", name])
