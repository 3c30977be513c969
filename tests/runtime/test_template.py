"""The process of which lanes are forks, and what is started where there is none."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import pytest
from ray._private import ray_constants
from ray._private.node import Node

from m2flow.engine.plan import LaneSpec
from m2flow.runtime.driver import template as driver
from m2flow.runtime.driver.cluster import SET_UP_WORKER, RayCluster
from m2flow.runtime.driver.pool import LanePool
from m2flow.runtime.driver.template import LANE, LaneTemplate
from tests.runtime.local_cluster import local_cluster

SCRIPT = """
import json, os, sys
import numpy
print(json.dumps({
    "parent": os.getppid(), "group": os.getpgid(0) == os.getpid(), "arguments": sys.argv[1:],
    "folder": os.getcwd(), "said": os.environ.get("SAID"), "home": os.environ.get("HOME"),
    "name": __name__, "drawn": numpy.random.random(), "said by": sys.stdin.read(),
}))
"""
TWO_THREADS = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


@pytest.fixture(scope="module")
def template() -> Iterator[LaneTemplate]:
    made = LaneTemplate(["json"])
    yield made
    made.close()


def run(
    template: LaneTemplate, folder: Path, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What the script says that is started as Ray would start it."""
    return started(template.command, folder, environment)


def started(
    asking: str, folder: Path, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What the script says that is started by a command."""
    (folder / "script.py").write_text(SCRIPT)
    command = [*shlex.split(asking), str(folder / "script.py"), "--one", "two words"]
    done = subprocess.run(
        command,
        input="hello",
        env={**os.environ, "SAID": "this", **(environment or {})},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_a_fork_is_what_python_would_have_been(template: LaneTemplate, tmp_path: Path) -> None:
    said = run(template, tmp_path)
    assert said["parent"] == template.process_id
    assert said["group"]
    assert said["name"] == "__main__"
    assert said["arguments"] == ["--one", "two words"]
    assert said["folder"] == str(tmp_path)
    assert said["said"] == "this"
    assert said["said by"] == "hello"


def test_forks_know_nothing_of_each_other(template: LaneTemplate, tmp_path: Path) -> None:
    """Neither the environment nor the random numbers of the one before."""
    first = run(template, tmp_path, {"HOME": "/first"})
    second = run(template, tmp_path, {"SAID": "that"})
    assert (first["home"], second["home"]) == ("/first", os.environ.get("HOME"))
    assert second["said"] == "that"
    assert first["drawn"] != second["drawn"]


def test_without_a_template_python_is_started(tmp_path: Path) -> None:
    closed = LaneTemplate([])
    closed.close()
    said = run(closed, tmp_path)
    assert said["parent"] == os.getpid()
    assert said["arguments"] == ["--one", "two words"]


def test_a_template_with_two_threads_has_no_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread would be missing from the fork, with whatever lock it holds."""
    (tmp_path / "two_threads.py").write_text(TWO_THREADS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    threaded = LaneTemplate(["two_threads"])
    try:
        assert run(threaded, tmp_path)["parent"] == os.getpid()
        assert psutil.pid_exists(threaded.process_id)
    finally:
        threaded.close()


def test_it_ends_with_its_launcher(tmp_path: Path) -> None:
    (tmp_path / "launcher.py").write_text(
        "import os, signal\n"
        "from m2flow.runtime.driver.template import LaneTemplate\n"
        "print(LaneTemplate([]).process_id, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    launcher = [sys.executable, str(tmp_path / "launcher.py")]
    said = subprocess.run(launcher, capture_output=True, text=True, timeout=60, check=False)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(said.stdout)).wait(timeout=60)


@pytest.mark.parametrize(
    ("context", "who"),
    [
        ({"py_executable": f"{sys.executable} -I"}, "worker"),
        ({"py_executable": sys.executable, "env_vars": {"ONE": "1"}}, "Ray's own"),
        ({}, "Ray's own"),
    ],
)
def test_a_worker_is_set_up_at_once_where_no_more_than_a_python_is_asked_for(
    context: dict[str, Any], who: str, tmp_path: Path
) -> None:
    say = "import json, sys; print(json.dumps([{!r}, sys.argv[1:], sys.flags.isolated]))"
    (tmp_path / "worker.py").write_text(say.format("worker"))
    (tmp_path / "setup_worker.py").write_text(say.format("Ray's own"))
    asked = {"command_prefix": [], "env_vars": {}, "override_worker_entrypoint": None, **context}
    options = ["--language=PYTHON", f"--serialized-runtime-env-context={json.dumps(asked)}"]
    script = [str(tmp_path / "worker.py"), "--one", "two words"]
    command = [sys.executable, str(SET_UP_WORKER), *script, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    own = [*script, *options]
    expected = [who, script[1:], 1] if who == "worker" else [who, own, 0]
    assert json.loads(done.stdout) == expected


def test_lanes_are_forks_of_it_and_so_are_those_in_their_place() -> None:
    with LanePool([LaneSpec(0, cores=(0,))], spares=1) as pool:
        number = pool.addresses[0].process_id
        template = psutil.Process(number).ppid()
        assert str(LANE / "template.py") in psutil.Process(template).cmdline()
        pool.restart([0])
        other = pool.addresses[0].process_id
        assert other != number
        assert psutil.Process(other).ppid() == template
    assert not psutil.pid_exists(template)


def test_lanes_of_a_cluster_of_somebody_else_are_no_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have further machines, on which there is no template."""
    with local_cluster(1):
        monkeypatch.setattr(RayCluster, "started_here", False)
        with LanePool([LaneSpec(0)]) as pool:
            parent = psutil.Process(pool.addresses[0].process_id).ppid()
            assert str(LANE / "template.py") not in psutil.Process(parent).cmdline()
        monkeypatch.undo()
        with LanePool([LaneSpec(0)]) as pool:
            parent = psutil.Process(pool.addresses[0].process_id).ppid()
            assert str(LANE / "template.py") in psutil.Process(parent).cmdline()


def test_clusters_that_are_started_here_set_workers_up_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And start nothing that looks for further machines, or draws a page that is not served.

    What says so to Ray is private: a later Ray may not heed it.
    """
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = ray_constants.ENABLE_RAY_CLUSTER, Node.start_monitor, Node.start_api_server
    cluster = RayCluster(())
    try:
        below = psutil.Process().children(recursive=True)
        (raylet,) = [one for one in below if one.name() == "raylet"]
        assert str(SET_UP_WORKER) in " ".join(raylet.cmdline())
        programs = {Path(word).name for one in below for word in one.cmdline()}
        assert programs >= {"gcs_server", "log_monitor.py"}
        assert not programs & {"monitor.py", "dashboard.py"}
    finally:
        cluster.close()
    assert ray_constants.SETUP_WORKER_FILENAME == "setup_worker.py"
    after = ray_constants.ENABLE_RAY_CLUSTER, Node.start_monitor, Node.start_api_server
    assert after == before, "other clusters of this process"


# --- other users ----------------------------------------------------------------------------------

OF_ANOTHER_USER = """
import os, sys
sys.path.insert(0, {lane!r})
{imported}
{name}.user_of = lambda line: os.getuid() + 1
{name}.main()
"""


def test_the_template_serves_no_other_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has come runs Python of its own; nothing is forked."""
    imported = "from m2flow.runtime.lane import template"
    text = OF_ANOTHER_USER.format(lane=str(LANE), imported=imported, name="template")
    (tmp_path / "template.py").write_text(text)
    shutil.copy(LANE / "ask_template.py", tmp_path)
    monkeypatch.setattr(driver, "LANE", tmp_path)
    made = LaneTemplate(["json"])
    try:
        assert run(made, tmp_path)["parent"] == os.getpid()
        assert psutil.Process(made.process_id).children() == []
    finally:
        made.close()


def test_the_template_of_another_user_is_told_nothing(tmp_path: Path) -> None:
    """Not the environment, above all: whoever has the address may have taken it."""
    text = OF_ANOTHER_USER.format(
        lane=str(LANE), imported="import ask_template", name="ask_template"
    )
    (tmp_path / "asking.py").write_text(text)
    name = f"m2flow-{tmp_path.name}-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        listener.settimeout(60)
        asking = shlex.join([sys.executable, "-I", "-S", str(tmp_path / "asking.py"), name])

        def heard() -> bytes:
            with listener.accept()[0] as line:
                return line.recv(1)

        with ThreadPoolExecutor(1) as thread:
            first = thread.submit(heard)
            assert started(asking, tmp_path)["parent"] == os.getpid()
            assert first.result() == b""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can come as another user")
def test_the_kernel_says_which_user_has_come(template: LaneTemplate, tmp_path: Path) -> None:
    name = shlex.split(template.command)[-1]
    wanted = json.dumps([["script.py"], dict(os.environ), str(tmp_path)]).encode()
    with socket.socket(socket.AF_UNIX) as line:
        os.seteuid(65534)
        try:
            line.connect(f"\0{name}")
        finally:
            os.seteuid(0)
        with suppress(BrokenPipeError, ConnectionResetError):  # it has hung up
            socket.send_fds(line, [len(wanted).to_bytes(8, "big")], [0, 1, 2])
            line.sendall(wanted)
            assert line.recv(1) == b""
    assert psutil.Process(template.process_id).children() == []


def test_who_says_a_byte_at_a_time_holds_up_the_others_for_no_more_than_the_limit(
    template: LaneTemplate, tmp_path: Path
) -> None:
    """Each byte began the time anew, so that a lane waited for as long as bytes came."""
    name = shlex.split(template.command)[-1]
    over = Event()

    def drip() -> None:
        with socket.socket(socket.AF_UNIX) as line, suppress(OSError):
            line.connect(f"\0{name}")
            line.sendall((1 << 40).to_bytes(8, "big"))
            while not over.wait(0.2):
                line.sendall(b"[")

    with ThreadPoolExecutor(1) as thread:
        thread.submit(drip)
        try:
            assert run(template, tmp_path)["parent"] == template.process_id
        finally:
            over.set()


@pytest.mark.timeout(60)
def test_a_template_that_does_not_answer_is_done_without(tmp_path: Path) -> None:
    name = f"m2flow-{tmp_path.name}-{os.getpid()}"
    program = "import ask_template; ask_template.ANSWER_SECONDS = 0.2; ask_template.main()"
    (tmp_path / "asking.py").write_text(f"import sys; sys.path.insert(0, {str(LANE)!r}); {program}")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        asking = shlex.join([sys.executable, "-I", "-S", str(tmp_path / "asking.py"), name])

        def keep_silent() -> None:
            with listener.accept()[0] as line:
                while line.recv(1 << 16):  # until who has come gives up
                    pass

        with ThreadPoolExecutor(1) as thread:
            thread.submit(keep_silent)
            assert started(asking, tmp_path)["parent"] == os.getpid()
