"""The doctor against made-up machines and made-up installations, small enough to check by eye."""

from __future__ import annotations

import io
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tomllib
import types
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from rich.console import Console

from m2flow.cli import doctor
from m2flow.cli.doctor import GIB, Check, Requirements
from m2flow.environments import rendering
from m2flow.environments.rendering import Backend
from m2flow.runtime.driver import pool

PROJECT = Path(__file__).parents[2]


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def make_proc(
    folder: Path, *, total_gib: int = 16, available_gib: int = 8, group: str = "0::/"
) -> Path:
    meminfo = f"MemTotal: {total_gib * 2**20} kB\nMemAvailable: {available_gib * 2**20} kB\n"
    return write(folder / "proc", {"meminfo": meminfo, "self/cgroup": f"{group}\n"})


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("group", "files", "cores"),
    [
        ("0::/", {}, 8),
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": "1600000 100000"}, 8),
        ("0::/job/step", {"job/cpu.max": "300000 100000", "job/step/cpu.max": "max 100000"}, 3),
        ("0::/job/step", {"job/cpu.max": "300000 100000", "other/cpu.max": "100000 100000"}, 3),
        ("2:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        (
            "3:memory:/x\n2:cpu,cpuacct:/job",
            {"cpu/job/cpu.cfs_quota_us": "200000", "cpu/job/cpu.cfs_period_us": "100000"},
            2,
        ),
    ],
)
def test_cores_are_the_least_of_affinity_and_quota(
    tmp_path: Path, group: str, files: dict[str, str], cores: float
) -> None:
    cgroup = write(tmp_path / "cgroup", files)
    assert doctor.usable_cores(make_proc(tmp_path, group=group), cgroup) == cores


@pytest.mark.usefixtures("eight_cores")
def test_one_core_is_worth_a_warning(tmp_path: Path) -> None:
    cgroup = write(tmp_path / "cgroup", {"cpu.max": "100000 100000"})
    (finding,) = doctor.check_cores(make_proc(tmp_path), cgroup)
    assert finding.status == "warn"
    assert "1 usable of 64" in finding.detail


@pytest.mark.parametrize(
    ("group", "files", "available_gib", "total_gib"),
    [
        ("0::/", {}, 8, 16),
        ("0::/", {"memory.max": "max", "memory.current": "1"}, 8, 16),
        ("0::/", {"memory.max": str(6 * GIB), "memory.current": str(GIB)}, 5, 6),
        ("0::/", {"memory.max": str(12 * GIB), "memory.current": str(GIB)}, 8, 12),
        ("0::/", {"memory.max": str(2 * GIB), "memory.current": str(3 * GIB)}, 0, 2),
        ("4:memory:/", {"memory/memory.limit_in_bytes": str(2**63 - 4096)}, 8, 16),
        (
            "4:memory:/job",
            {
                "memory/job/memory.limit_in_bytes": str(4 * GIB),
                "memory/job/memory.usage_in_bytes": str(GIB),
            },
            3,
            4,
        ),
        (
            "0::/job",
            {
                "job/memory.max": str(4 * GIB),
                "job/memory.current": str(3 * GIB),
                "job/memory.stat": f"anon {GIB}\nfile {2 * GIB}\ninactive_file {2 * GIB}\n",
            },
            3,
            4,
        ),
        (
            "4:memory:/job",
            {
                "memory/job/memory.limit_in_bytes": str(4 * GIB),
                "memory/job/memory.usage_in_bytes": str(3 * GIB),
                "memory/job/memory.stat": f"cache {2 * GIB}\ntotal_inactive_file {GIB}\n",
            },
            2,
            4,
        ),
    ],
)
def test_memory_is_the_least_of_machine_and_cgroup(
    tmp_path: Path, group: str, files: dict[str, str], available_gib: int, total_gib: int
) -> None:
    cgroup = write(tmp_path / "cgroup", files)
    measured = doctor.usable_memory(make_proc(tmp_path, group=group), cgroup)
    assert measured == (available_gib * GIB, total_gib * GIB)


def test_little_memory_is_worth_a_warning(tmp_path: Path) -> None:
    proc = make_proc(tmp_path, total_gib=4, available_gib=3)
    (finding,) = doctor.check_memory(proc, tmp_path)
    assert finding == Check(
        "memory",
        "warn",
        "3.0 GiB available of 4.0 GiB: a run wants 4 GiB",
        "close other programs, or raise this job's memory limit",
    )


@pytest.mark.parametrize(("free_gib", "status"), [(1, "warn"), (64, "ok")])
def test_room_in_shared_memory_and_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_gib: int, status: str
) -> None:
    usage = types.SimpleNamespace(free=free_gib * GIB, total=64 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    for (finding,) in (doctor.check_shared_memory(tmp_path), doctor.check_disk([tmp_path])):
        assert finding.status == status
        assert (finding.fix is not None) == (status == "warn")
        assert f"{free_gib}.0 GiB free" in finding.detail


@pytest.mark.parametrize(
    ("limits", "status", "fix"),
    [
        ((65536, 65536), "ok", None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), "ok", None),
        ((1024, 1_048_576), "warn", "ulimit -n 4096"),
        ((1024, resource.RLIM_INFINITY), "warn", "ulimit -n 4096"),
        ((1024, 1024), "warn", "docker run --ulimit nofile=4096, "),
    ],
)
def test_few_open_files_are_worth_a_warning(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], status: str, fix: str | None
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits)
    (finding,) = doctor.check_open_files()
    assert finding.status == status
    assert (finding.fix or "").startswith(fix or "")


@pytest.mark.parametrize(
    ("range_", "status", "says"),
    [
        ("32768\t60999\n", "ok", "28,232 to choose from"),
        ("", "ok", "28,232 to choose from"),
        ("60000\t60099", "warn", "a run wants 1,000"),
    ],
)
def test_ports(tmp_path: Path, range_: str, status: str, says: str) -> None:
    proc = write(tmp_path, {"sys/net/ipv4/ip_local_port_range": range_})
    (finding,) = doctor.check_ports(proc)
    assert finding.status == status
    assert says in finding.detail
    assert (finding.fix is not None) == (status == "warn")


def test_a_machine_that_does_not_reach_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(doctor.socket, "create_connection", fail)
    (finding,) = doctor.check_ports()
    assert (finding.status, finding.fix) == ("missing", "ip link set lo up")


def test_a_machine_without_dev_shm(tmp_path: Path) -> None:
    (finding,) = doctor.check_shared_memory(tmp_path / "absent")
    assert finding.status == "warn"


@pytest.mark.parametrize(
    ("cpuinfo", "detail"),
    [
        ("flags : fpu avx2 avx512f", "emulated: float32 is the faster choice"),
        ("flags : fpu avx512_bf16 amx_bf16", "fast (amx_bf16, avx512_bf16)"),
        ("Features : fp asimd bf16 i8mm", "fast (bf16)"),
    ],
)
def test_bfloat16_is_read_from_the_flags_of_the_cpu(
    tmp_path: Path, cpuinfo: str, detail: str
) -> None:
    (finding,) = doctor.check_cpu_bfloat16(write(tmp_path, {"cpuinfo": cpuinfo}))
    assert finding.detail == detail


@pytest.mark.parametrize(
    ("works", "says", "mujoco", "vulkan"),
    [
        (("egl", "osmesa", "vulkan"), "", "osmesa: there", "vulkan: there"),
        (("egl",), "", "egl: there", None),
        (("egl", "osmesa"), "egl", "egl: there", None),
        ((), "glfw", "glfw: as MUJOCO_GL says", None),
        (("vulkan",), "", None, "vulkan: there"),
        (("egl", "vulkan"), "osmesa", None, "vulkan: there"),
    ],
)
def test_the_back_end_that_each_kind_of_simulator_takes(
    monkeypatch: pytest.MonkeyPatch,
    works: tuple[str, ...],
    says: str,
    mujoco: str | None,
    vulkan: str | None,
) -> None:
    """With Vulkan alone MuJoCo cannot draw; that another library works told nothing of it."""
    monkeypatch.setenv("MUJOCO_GL", says)
    monkeypatch.setattr(rendering, "_has_gpu", lambda: False)
    monkeypatch.setattr(
        rendering, "probe", lambda n: Backend(n, n in works, "there" if n in works else "absent")
    )
    checks = {check.name: check for check in doctor.check_rendering()}
    for kind, chosen in (("mujoco", mujoco), ("vulkan", vulkan)):
        check = checks.pop(f"{kind} pictures")
        if chosen is not None:
            assert check == Check(f"{kind} pictures", "ok", chosen)
        else:
            assert check.status == "optional"
            tried = (says or "osmesa") if kind == "mujoco" else "vulkan"
            assert f"{tried}: absent" in check.detail
            assert check.fix == rendering.HOW_TO[kind]
            assert check.fix not in check.detail
    assert not checks


def test_a_package_that_is_there() -> None:
    assert doctor.check_package(Requirement("pyyaml>=1")) == Check(
        "pyyaml", "ok", metadata.version("pyyaml")
    )


def test_a_package_that_is_absent_comes_with_the_command_that_installs_it() -> None:
    finding = doctor.check_package(Requirement("no-such-package[fast]>=2,<3"))
    assert (finding.status, finding.detail) == ("missing", "not installed")
    assert finding.fix is not None
    *pip, wanted = shlex.split(finding.fix)
    assert pip == [sys.executable, "-m", "pip", "install"]
    assert Requirement(wanted) == Requirement("no-such-package[fast]>=2,<3")


def test_a_package_out_of_range() -> None:
    finding = doctor.check_package(Requirement("pyyaml>=99"))
    assert finding.status == "warn"
    assert ">=99" in finding.detail


def test_a_package_that_does_not_import_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build of torch whose shared libraries are absent is installed and still of no use."""
    files = {
        "broken_thing.py": "raise OSError('libcudart.so.13: cannot open shared object file')",
        "broken_thing-1.5.dist-info/METADATA": "Name: broken-thing\nVersion: 1.5\n",
    }
    monkeypatch.syspath_prepend(write(tmp_path, files))
    finding = doctor.check_package(Requirement("broken-thing>=1"))
    assert finding.status == "missing"
    assert "libcudart.so.13" in finding.detail
    assert finding.fix is not None
    assert finding.fix.endswith("--force-reinstall")


def test_extras_are_optional() -> None:
    here, absent = Requirement("pyyaml>=1"), Requirement("no-such-package")
    full, lacking = doctor.check_extras(Requirements([], {"a": [here], "b": [here, absent]}))
    assert (full.name, full.status) == ("extra a", "ok")
    assert (lacking.name, lacking.status) == ("extra b", "optional")
    assert lacking.detail == "without no-such-package"
    assert lacking.fix is not None
    assert "[b]" in lacking.fix


def test_requirements_come_from_pyproject_installed_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    core = {Requirement(line) for line in project["dependencies"]}
    extras = {
        name: {Requirement(line) for line in lines}
        for name, lines in project["optional-dependencies"].items()
    }

    def not_installed(name: str) -> object:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "metadata", not_installed)
    in_source_tree = doctor.declared_requirements()
    assert set(in_source_tree.core) == core
    assert {name: set(lines) for name, lines in in_source_tree.extras.items()} == extras

    lines = list(project["dependencies"])
    for name, wanted in project["optional-dependencies"].items():
        lines += [f'{line}; extra == "{name}"' for line in wanted]
    provides = types.SimpleNamespace(get_all=lambda key: list(extras))
    monkeypatch.setattr(doctor.metadata, "metadata", lambda name: provides)
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: lines)
    installed = doctor.declared_requirements()
    assert set(installed.core) == core
    assert {name: {one.name for one in wanted} for name, wanted in installed.extras.items()} == {
        name: {one.name for one in wanted} for name, wanted in extras.items()
    }


def fake_torch(*, cuda: str | None, gpus: int = 0, warning: str | None = None) -> types.ModuleType:
    def is_available() -> bool:
        if warning:
            warnings.warn(warning, stacklevel=1)
        return gpus > 0

    torch = types.ModuleType("torch")
    gpu = types.SimpleNamespace(name="NVIDIA H200", total_memory=140 * GIB)
    vars(torch).update(
        __version__="2.13.0",
        version=types.SimpleNamespace(cuda=cuda),
        cuda=types.SimpleNamespace(
            is_available=is_available,
            device_count=lambda: gpus,
            get_device_properties=lambda index: gpu,
        ),
    )
    return torch


@pytest.mark.parametrize(
    ("torch", "driver", "status", "says"),
    [
        (fake_torch(cuda=None), False, "ok", "none"),
        (fake_torch(cuda="13.0", gpus=2), True, "ok", "NVIDIA H200 (140.0 GiB), NVIDIA H200"),
        (fake_torch(cuda=None), True, "warn", "a build for CPU"),
        (fake_torch(cuda="13.0", warning="driver too old"), True, "warn", "driver too old"),
    ],
    ids=["no GPU", "two GPUs", "CPU build beside a GPU", "driver too old"],
)
def test_gpus(
    monkeypatch: pytest.MonkeyPatch, torch: types.ModuleType, driver: bool, status: str, says: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi" if driver else None)
    (finding,) = doctor.check_gpu()
    assert finding.status == status
    assert says in finding.detail


def test_the_driver_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build"
    monkeypatch.setitem(sys.modules, "torch", fake_torch(cuda="13.0", gpus=1))
    proc = write(tmp_path, {"driver/nvidia/version": line})
    (finding,) = doctor.check_gpu(proc)
    assert "; driver 560.35.03; CUDA 13.0" in finding.detail


def test_a_check_that_fails_becomes_a_finding() -> None:
    def check() -> list[Check]:
        raise OSError("no such\nthing")

    assert doctor.isolated("disk", check) == [
        Check("disk", "warn", "could not be checked: no such thing")
    ]


def test_a_mistake_in_a_check_is_not_hidden() -> None:
    def check() -> list[Check]:
        raise KeyError("a programming mistake")

    with pytest.raises(KeyError):
        doctor.isolated("disk", check)


SOUND = Check("Python", "ok", "3.11.7")
ABSENT = Check("ray", "missing", "not installed", "python -m pip install 'ray[a]>=2'")
EXTRA = Check(
    "extra gym", "optional", "without reasoning-gym", "python -m pip install 'm2flow[gym]'"
)


@pytest.mark.parametrize(
    ("findings", "code"), [([SOUND], 0), ([SOUND, EXTRA], 0), ([SOUND, ABSENT, EXTRA], 1)]
)
def test_exit_code_and_json(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    findings: list[Check],
    code: int,
) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda: findings)
    assert doctor.run_doctor(as_json=True) == code
    report = json.loads(capsys.readouterr().out)
    assert report["works"] == (code == 0)
    assert [Check(**row) for row in report["findings"]] == findings


def test_commands_are_printed_whole_and_ready_to_copy() -> None:
    """A narrow terminal folds the table, never a command; `[a]` is no markup."""
    out = io.StringIO()
    doctor.print_findings([SOUND, ABSENT, EXTRA], Console(file=out, width=40))
    lines = out.getvalue().splitlines()
    for finding in (ABSENT, EXTRA):
        assert sum(line.endswith(finding.fix or "") for line in lines if line) >= 1


def test_the_report_on_this_machine() -> None:
    """The real thing, in a process of its own: the core that runs these tests is found to work."""
    code = (
        "import sys; from m2flow.cli.doctor import run_doctor; sys.exit(run_doctor(as_json=True))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    report = json.loads(ran.stdout)
    by_name = {row["name"]: row for row in report["findings"]}
    assert ran.returncode == 0, ran.stderr
    assert report["works"]
    assert by_name["torch"]["detail"] == metadata.version("torch")
    assert not [row for row in report["findings"] if "could not be checked" in row["detail"]]


def test_the_links_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real thing: two lanes are started, asked by every link, and ended."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    started: list[str] = []

    class Noted(pool.LanePool):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self.folder.name)

    monkeypatch.setattr(pool, "LanePool", Noted)
    assert doctor.run_links(as_json=True) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["costs"]["node"].keys() == {"shared", "stream"}
    assert all(1e-6 < cost["latency_seconds"] < 1 for cost in table["costs"]["node"].values())
    (name,) = started  # other tests run at the same time, so only this pool's blocks are looked at
    assert not list(Path("/dev/shm").glob(f"{name}*"))


def test_nothing_heavy_is_imported_with_the_module() -> None:
    code = (
        "import sys; import m2flow.cli.doctor; print(sorted({'torch', 'ray'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
