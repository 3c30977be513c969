"""A Ray cluster that does not come up, and a machine without shared memory: one line, at once."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from packaging.requirements import Requirement
from ray._private import services

from m2flow.errors import RunFailed, UserError
from m2flow.runtime.driver import ahead
from m2flow.runtime.driver import cluster as cluster_module
from m2flow.runtime.driver.cluster import RayCluster
from m2flow.runtime.transport import sweeping
from tests.cli.conftest import m2flow, refused, tiny

__all__ = ["m2flow", "refused", "tiny"]


class Starts:
    """Stands for `ray.init`, which fails at first."""

    def __init__(self, failures: int) -> None:
        self.failures, self.folders = failures, []

    def __call__(self, **settings: Any) -> None:
        self.folders.append(Path(settings["_temp_dir"]).parent)
        assert stat.S_IMODE(self.folders[-1].stat().st_mode) == 0o700
        if len(self.folders) <= self.failures:
            raise Exception("The current node timed out during startup.\nThis could happen")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder whose path is short enough for Ray's sockets."""
    folder = Path(tempfile.mkdtemp(prefix="m2f-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> Callable[[int], Starts]:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)

    def patched(failures: int) -> Starts:
        made = Starts(failures)
        monkeypatch.setattr(ray, "init", made)
        return made

    return patched


def test_a_cluster_of_ones_own_asks_for_a_token(
    starts: Callable[[int], Starts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Ray starts, and known to Ray, which reads its settings when it is imported."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # what is set in the test is taken back behind it
        monkeypatch.delenv(name)
    made, told = starts(0), list[tuple[str | None, int, int]]()

    def read(_: str) -> None:
        secret = os.environ.get("RAY_AUTH_TOKEN", "")
        told.append((os.environ.get("RAY_AUTH_MODE"), len(secret), len(made.folders)))

    loader = SimpleNamespace(reset_cache=lambda: None)
    raylet = ray._raylet  # type: ignore[attr-defined]
    monkeypatch.setattr(raylet, "Config", SimpleNamespace(initialize=read))
    monkeypatch.setattr(
        raylet, "AuthenticationTokenLoader", SimpleNamespace(instance=lambda: loader)
    )
    RayCluster(()).close()
    assert told == [("token", 64, 0)]
    assert len(made.folders) == 1


def test_a_start_removes_what_dead_launchers_left(
    starts: Callable[[int], Starts], temporary: Path
) -> None:
    """Not what this one has; a folder that was given up after the first try is no longer locked."""
    left, lock = temporary / "m2flow-ray-left", temporary / "m2flow-ray-left.lock"
    left.mkdir()
    lock.write_text("\n".join(sweeping._machine()))
    lock_of_the_living = sweeping._lock(temporary / "m2flow-live.lock")
    assert lock_of_the_living is not None
    made = starts(0)
    cluster = RayCluster(())
    deadline = time.monotonic() + 60
    while left.exists() or lock.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (folder,) = made.folders
    there = {folder, temporary / f"{folder.name}.lock", temporary / "m2flow-live.lock"}
    assert set(temporary.iterdir()) == there
    cluster.close()
    assert [path.name for path in temporary.iterdir()] == ["m2flow-live.lock"]
    os.close(lock_of_the_living)


def test_ray_has_room_for_its_sockets_where_the_temporary_folder_has_a_long_path(
    starts: Callable[[int], Starts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in jobs of a scheduler. Ray was tried twice, and the machine called overloaded."""
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    made = starts(0)
    cluster = RayCluster(())
    (folder,) = made.folders
    socket = folder / "ray/session_2026-01-01_00-00-00_000000_9999999/sockets/plasma_store"
    assert len(os.fsencode(socket)) <= 107
    assert Path(f"{folder}.lock").exists(), "it is swept if this process is killed"
    cluster.close()
    assert not folder.exists()
    assert not Path(f"{folder}.lock").exists()


def test_no_room_for_rays_sockets_is_one_line(
    starts: Callable[[int], Starts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 60)))
    monkeypatch.setattr(cluster_module, "SHORT", tmp_path / "none")
    made = starts(0)
    with pytest.raises(UserError, match=r"^TMPDIR: .*; expected a path of at most 19 characters$"):
        RayCluster(())
    assert not made.folders


def test_a_ray_that_knows_no_tokens_does_not_fit() -> None:
    """An older one would start, and let in whoever calls."""
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    wanted = [Requirement(one) for one in declared["project"]["dependencies"]]
    (ray_wanted,) = [one for one in wanted if one.name == "ray"]
    assert "2.52.0" in ray_wanted.specifier
    assert "2.51.9" not in ray_wanted.specifier


def test_a_start_that_times_out_is_tried_again(starts: Callable[[int], Starts]) -> None:
    made = starts(1)
    cluster = RayCluster(())
    first, second = made.folders
    assert not first.exists()
    assert second.exists()
    cluster.close()
    assert not second.exists()


def test_a_start_that_times_out_twice_is_one_line(starts: Callable[[int], Starts]) -> None:
    made = starts(9)
    with pytest.raises(RunFailed) as caught:
        RayCluster(())
    assert str(caught.value).startswith(
        "Ray has not come up on this machine, in two tries: Exception: The current node timed out"
    )
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert len(made.folders) == 2
    assert not any(folder.exists() for folder in made.folders)


def test_a_start_whose_first_process_ends_says_what_it_has_logged(
    monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    """`ray.init` says only that it has waited for a file: the port of one that has ended."""
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_gcs_server_port_wait_time_s", "3")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = temporary / "gcs_server"
        port = f"--gcs_server_port={taken.getsockname()[1]}"
        server.write_text(f'#!/bin/sh\nexec {services.GCS_SERVER_EXECUTABLE} "$@" {port}\n')
        server.chmod(0o700)
        monkeypatch.setattr(services, "GCS_SERVER_EXECUTABLE", str(server))
        with pytest.raises(RunFailed) as caught:
            RayCluster(())
    assert "; gcs_server: server_ Failed to start the grpc server" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(temporary.glob("m2flow-ray-*"))


MISMATCH = """Version mismatch: The cluster was started with:
    Ray: 2.59.0
    Python: 3.11.4
This process on 10.0.0.1:6379 was started with:
    Ray: 2.60.0
    Python: 3.11.2
"""


@pytest.mark.parametrize(
    ("said", "tries", "shown"),
    [
        (MISMATCH, 1, f"RuntimeError: {' '.join(MISMATCH.split())}"),
        (
            "Failed to connect to GCS.\nIs it up?",
            2,
            "RuntimeError: Failed to connect to GCS. Is it up?",
        ),
    ],
)
def test_a_cluster_that_cannot_be_joined_is_one_line(
    said: str, tries: int, shown: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Which versions do not fit was cut off, and an overloaded machine blamed."""
    tried = list[str | None]()

    def init(address: str | None, **_: Any) -> None:
        tried.append(address)
        raise RuntimeError(said)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(RunFailed) as caught:
        RayCluster(())
    assert str(caught.value) == f"the Ray cluster at 10.0.0.1:6379 cannot be joined: {shown}"
    assert len(tried) == tries


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "http://10.0.0.1:8265"])
def test_an_address_of_another_server_is_refused_before_anything_starts(
    tiny: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ahead, "_start", lambda *_: pytest.fail("lanes were started"))
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was connected"))
    words = ["mode=collocated", "lanes=cpu:2", "--run-dir", "run"]
    for line in (refused("train", tiny, *words), refused("doctor", "--links")):
        assert line.startswith("RAY_ADDRESS: lanes cannot be driven from outside the cluster")
        assert f"(got {address!r}); expected HOST:PORT, on a machine of the cluster" in line
        assert "ray job submit" in line
    assert not Path("run").exists()


def test_a_run_without_shared_memory_is_refused_before_anything_is_written(
    tiny: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "FOLDER", Path("/proc/self"))  # nobody can make files there
    monkeypatch.setattr(ahead, "_start", lambda *_: pytest.fail("lanes were started"))
    line = refused("train", tiny, "mode=collocated", "lanes=cpu:2", "--run-dir", "run")
    assert line.startswith("/proc/self: lanes hand items over in shared memory")
    assert "run --mode eager" in line
