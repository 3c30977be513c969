"""The live page's server: what it tells, to whom, and how it keeps up with a run."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from m2flow.errors import UserError
from m2flow.observe.dashboard import Dashboard
from m2flow.observe.dashboard import server as dashboard_server
from m2flow.observe.dashboard.following import FollowedRun, differing_keys, runs_in
from m2flow.observe.formatting import told_apart
from m2flow.observe.run_directory import RunDirectory
from tests.observe.conftest import write_fake_run
from tests.runtime.transport.strangers import PATIENCE, SOON, check_nobody_waits


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_fake_run(tmp_path / "first", num_steps=30, planned_steps=80)


@pytest.fixture
def dashboard(run: Path) -> Iterator[Dashboard]:
    with Dashboard([run]) as dashboard:
        yield dashboard


def fetched(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=SOON) as answer:
        return answer.read(), dict(answer.headers)


def refused(url: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as error:
        fetched(url)
    with error.value as answer:
        return answer.code


def test_the_page_and_its_parts_are_all_from_here(dashboard: Dashboard) -> None:
    page, headers = fetched(dashboard.url)
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["Referrer-Policy"] == "no-referrer", "the token is in the address"
    parts = "uplot.js charts.js dashboard.js uplot.css report.css dashboard.css"
    for name in parts.split():
        assert name.encode() in page
        assert fetched(dashboard.url + name)[0]
    assert b"http://" not in page
    assert b"https://" not in page


def test_without_the_token_nothing_is_told(dashboard: Dashboard) -> None:
    root = dashboard.url.removesuffix(f"{dashboard.token}/")
    for path in ("", "data", "wrong/", f"{dashboard.token[:-1]}/data", "%00/data"):
        assert refused(root + path) == 403
    assert refused(dashboard.url + "../../etc/passwd") in (403, 404)
    assert refused(dashboard.url + "static/dashboard.js") == 404
    assert refused(dashboard.url + "details?run=7") == 404


def test_an_address_that_cannot_be_read_is_refused(
    dashboard: Dashboard, capfd: pytest.CaptureFixture[str]
) -> None:
    port = int(dashboard.url.split(":")[2].split("/")[0])
    with socket.create_connection(("127.0.0.1", port), 5) as line:
        line.sendall(b"GET http://[x/ HTTP/1.0\r\n\r\n")
        assert b" 400 " in line.recv(1 << 16).splitlines()[0]
    assert capfd.readouterr() == ("", "")


def test_it_listens_on_loopback_alone(dashboard: Dashboard) -> None:
    assert dashboard.url.startswith("http://127.0.0.1:")
    port = int(dashboard.url.split(":")[2].split("/")[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect(("192.0.2.1", 9))  # nothing is sent: it only chooses the own address
        address = route.getsockname()[0]
    if address.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    with (
        pytest.raises(ConnectionRefusedError),
        socket.create_connection((address, port), timeout=2),
    ):
        pass


def test_a_port_that_is_taken_is_one_line(dashboard: Dashboard, run: Path) -> None:
    port = int(dashboard.url.split(":")[2].split("/")[0])
    with pytest.raises(UserError, match="--port"):
        Dashboard([run], port)
    with pytest.raises(UserError, match="no such run directory"):
        Dashboard([run / "nowhere"])


def test_events_tell_of_new_figures(dashboard: Dashboard, run: Path) -> None:
    with urllib.request.urlopen(dashboard.url + "events", timeout=SOON) as events:
        assert events.headers["Content-Type"].startswith("text/event-stream")
        assert events.readline() == b"data: changed\n"
        assert events.readline() == b"\n"
        RunDirectory(run).append_metrics(31, {"reward/mean": 0.5})
        assert events.readline() == b"data: changed\n"
    told = json.loads(fetched(dashboard.url + "data")[0])
    assert told["last"] == 31
    assert told["runs"] == [{"name": "first", "state": "step 31 of 80", "finished": False}]


def test_details_and_the_report_are_the_reports(dashboard: Dashboard) -> None:
    details = fetched(dashboard.url + "details?run=0")[0].decode()
    report = fetched(dashboard.url + "report?run=0")[0].decode()
    for title in ("Health", "Timeline", "Rollouts", "Configuration"):
        assert f"<h2>{title}</h2>" in details
        assert f"<h2>{title}</h2>" in report
    scripts = re.findall("<script[^>]*>", details)
    assert scripts == ['<script type="application/json">'], "data alone"


def test_a_run_is_followed_while_it_is_written(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", "r")
    followed = FollowedRun(tmp_path / "run")
    followed.refresh()
    assert followed.rows == {}
    directory.append_metrics(1, {"a": 1.0})
    with directory.metrics.open("ab") as file:
        file.write(b'{"step": 2, "a": ')
        file.flush()
        followed.refresh()
        assert [*followed.rows] == [1], "a line that is being written is not there yet"
        file.write(b'2.0}\n{"step": 1, "eval/accuracy": 0.5}\nnonsense\n')
    followed.refresh()
    assert followed.rows[2]["a"] == 2.0
    assert followed.rows[1]["eval/accuracy"] == 0.5
    directory.cut_after(1)
    followed.refresh()
    assert [*followed.rows] == [1], "a run that is resumed goes back"
    directory.append_metrics(2, {"a": 3.0})
    followed.refresh()
    assert followed.rows[2]["a"] == 3.0


def test_differing_keys_are_those_that_differ() -> None:
    one, two = {"seed": "0", "model.layers": "4"}, {"seed": "1", "model.layers": "4", "extra": "x"}
    assert differing_keys([one, two]) == {"seed": ["0", "1"], "extra": ["–", "x"]}
    assert differing_keys([one]) == {}


def test_runs_of_one_name_are_told_apart() -> None:
    assert told_apart([Path("/a/x"), Path("/b/x"), Path("/b/y")]) == ["a/x", "b/x", "b/y"]
    assert told_apart([Path("/a/x"), Path("/b/y")]) == ["x", "y"]
    assert told_apart([Path("/a/x"), Path("/a/x")]) == ["x", "x"]
    assert told_apart([]) == []


def test_without_a_name_the_newest_runs_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_old: Callable[[Path, int], None]
) -> None:
    for age, name in enumerate(["c", "b", "a"]):
        make_old(RunDirectory.create(tmp_path / "runs" / name, "r").path, age)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
        make_old(tmp_path / "runs" / name, age)
    (tmp_path / "runs" / "other").mkdir()
    assert [path.name for path in runs_in(tmp_path / "runs", most=2)] == ["c", "b"]
    assert runs_in(tmp_path / "nowhere", most=2) == []


@pytest.fixture
def make_old() -> Callable[[Path, int], None]:
    import os

    def make(path: Path, age: int) -> None:
        os.utime(path, (1e9 - age, 1e9 - age))

    return make


def test_strangers_hold_up_nobody(
    dashboard: Dashboard, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard_server._DashboardHandler, "timeout", PATIENCE)
    port = int(dashboard.url.split(":")[2].split("/")[0])
    knock = partial(socket.create_connection, ("127.0.0.1", port))
    check_nobody_waits(partial(fetched, dashboard.url + "data"), knock)
    assert capfd.readouterr() == ("", "")


def test_runs_that_another_user_has_closed_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them ended the command in a traceback."""
    for name in ("mine", "theirs"):
        RunDirectory.create(tmp_path / "runs" / name, "r").run.write_text("{}")
    ask = os.stat

    def closed(path: Any, **how: Any) -> os.stat_result:
        if "theirs/" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return ask(path, **how)

    monkeypatch.setattr(os, "stat", closed)
    assert [path.name for path in runs_in(tmp_path / "runs", most=8)] == ["mine"]


def test_a_run_that_was_deleted_is_not_there(
    dashboard: Dashboard, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each look at it was a traceback."""
    shutil.rmtree(run)
    for page in ("details", "report"):
        assert refused(f"{dashboard.url}{page}?run=0") == 404
    assert fetched(dashboard.url + "data")[0]
    assert capfd.readouterr() == ("", "")
