"""`m2flow doctor`: what this machine has, what is missing, and the command that mends it.

Every check looks at one thing and returns findings; a check that fails becomes a finding and
stops no other. What must be installed is read from m2flow's own metadata, so that the list
cannot drift from `pyproject.toml`. Nothing on the machine is changed, and torch and Ray are
imported by their checks alone.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import shlex
import shutil
import socket
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

from m2flow.errors import UserError
from m2flow.plan.machine import CGROUP, PROC, read_text, usable_cores, usable_memory

Status = Literal["ok", "warn", "missing", "optional"]

GIB = 2**30
OPEN_FILES, PORTS = 4096, 1000
"""The fewest that a process should be allowed, and the fewest that a machine should have free."""
SHM = Path("/dev/shm")
SOURCE_TREE = Path(__file__).parents[3]
MODULE_NAMES = {"pyyaml": "yaml", "pillow": "PIL"}  # where pip's name is not Python's
STATUS_STYLES = {"ok": "green", "warn": "yellow", "missing": "bold red", "optional": "dim"}

# How a package that is there but broken fails at import, and a file of the system at reading.
EXPECTED_FAILURES = (ImportError, OSError, RuntimeError, ValueError, AttributeError, TypeError)


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: what was looked at.
        status: `ok`; `warn` (it works, slower or less safely than it could); `missing` (m2flow
            cannot do its main job without it); `optional` (an extra that is not installed).
        detail: what was found.
        fix: the command that mends it, or what to do; None where nothing needs mending.
    """

    name: str
    status: Status
    detail: str
    fix: str | None = None


@dataclass(frozen=True)
class Requirements:
    """What m2flow declares that it needs: for its main job, and by extra."""

    core: Sequence[Requirement]
    extras: Mapping[str, Sequence[Requirement]]


def run_doctor(*, as_json: bool = False) -> int:
    """Print all findings, as a table or as JSON; 0 if the core works, 1 if something is missing."""
    findings = diagnose()
    works = all(finding.status != "missing" for finding in findings)
    if as_json:
        report = {"works": works, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(report, indent=2))
    else:
        print_findings(findings, Console())
    return 0 if works else 1


def run_links(*, as_json: bool = False) -> int:
    """Print what the ways between lanes cost, measured now, as a table or as JSON."""
    import ray
    import torch

    from m2flow.engine.plan import LaneSpec
    from m2flow.plan.file import to_json
    from m2flow.runtime.driver.cluster import RayCluster
    from m2flow.runtime.driver.pool import LanePool

    cluster = RayCluster(())
    if torch.cuda.is_available():  # two lanes on one GPU, and one on another GPU if there is one
        lanes = [LaneSpec(0, "gpu", gpu=0), LaneSpec(1, "gpu", gpu=0, reserved_for="links")]
        lanes += [LaneSpec(2, "gpu", gpu=1)] if torch.cuda.device_count() > 1 else []
    else:
        lanes = [LaneSpec(0), LaneSpec(1)]
    machines = sum(node["Alive"] for node in ray.nodes())
    lanes += [LaneSpec(len(lanes) + node, node=node) for node in range(1, machines)]
    with (
        redirect_stdout(sys.stderr) if as_json else nullcontext(),  # Ray prints what lanes print
        LanePool(lanes, cluster=cluster) as pool,
    ):
        table = pool.measure_links()
    if as_json:
        print(to_json(table))
    else:
        Console().print(table.render())
    return 0


def diagnose() -> list[Check]:
    """All findings for this machine and this interpreter, in the order of the report."""
    checks: dict[str, Callable[[], list[Check]]] = {
        "Python": check_python,
        "CPU cores": check_cores,
        "memory": check_memory,
        "shared memory": check_shared_memory,
        "disk": check_disk,
        "open files": check_open_files,
        "ports": check_ports,
        "bfloat16 on CPU": check_cpu_bfloat16,
        "packages": check_packages,
        "GPU": check_gpu,
        "rendering": check_rendering,
        "extras": check_extras,
    }
    return [finding for name, check in checks.items() for finding in isolated(name, check)]


def isolated(name: str, check: Callable[[], list[Check]]) -> list[Check]:
    """The check's findings; where it fails, one finding that says how."""
    try:
        return check()
    except EXPECTED_FAILURES as error:
        return [Check(name, "warn", f"could not be checked: {_one_line(error)}")]


def print_findings(findings: Sequence[Check], console: Console) -> None:
    """A table of the findings; under it, ready to copy, what mends them."""
    table = Table(box=None, pad_edge=False)
    for heading in ("", "status", "found"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        verdict = Text(finding.status, STATUS_STYLES[finding.status])
        table.add_row(Text(finding.name), verdict, Text(finding.detail))
    console.print(table)
    for status, heading in (
        ("missing", "m2flow does not work without:"),
        ("warn", "Worth mending:"),
        ("optional", "Extras, when you want them:"),
    ):
        fixes = [finding for finding in findings if finding.status == status and finding.fix]
        if fixes:
            console.print(f"\n{heading}", style="bold")
        for finding in fixes:
            console.print(Text(f"  {finding.name:<16} {finding.fix}"), soft_wrap=True)


# The machine


def check_python() -> list[Check]:
    """The interpreter that runs, and whether it belongs to a virtual environment."""
    version = ".".join(map(str, sys.version_info[:3]))
    place = "" if sys.prefix != sys.base_prefix else ", not in a virtual environment"
    return [Check("Python", "ok", f"{version}{place} ({sys.executable})")]


def check_cores(proc: Path = PROC, cgroup: Path = CGROUP) -> list[Check]:
    """The cores that may be used; on a machine without a GPU they are the lanes."""
    cores = usable_cores(proc, cgroup)
    detail = f"{cores:g} usable of {os.cpu_count()}"
    if cores < 2:
        fix = "give this job two cores or more (docker run --cpus, taskset, cpuset)"
        return [Check("CPU cores", "warn", f"{detail}: stages cannot overlap", fix)]
    return [Check("CPU cores", "ok", detail)]


def check_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> list[Check]:
    """Memory: each lane is a process of its own that imports torch."""
    available, total = usable_memory(proc, cgroup)
    detail = f"{_gib(available)} available of {_gib(total)}"
    if available < 4 * GIB:
        fix = "close other programs, or raise this job's memory limit"
        return [Check("memory", "warn", f"{detail}: a run wants 4 GiB", fix)]
    return [Check("memory", "ok", detail)]


def check_shared_memory(shm: Path = SHM) -> list[Check]:
    """Room in /dev/shm, which holds Ray's object store."""
    if not shm.is_dir():
        detail = f"{shm} is not there: Ray's object store falls back to files"
        return [Check("shared memory", "warn", detail)]
    usage = shutil.disk_usage(shm)
    detail = f"{_gib(usage.free)} free of {_gib(usage.total)} in {shm}"
    if usage.free < 2 * GIB:
        fix = f"docker run --shm-size=8g, or: mount -o remount,size=8g {shm}"
        detail += ": below 2 GiB, Ray's object store falls back to files"
        return [Check("shared memory", "warn", detail, fix)]
    return [Check("shared memory", "ok", detail)]


def check_disk(places: Sequence[Path] | None = None) -> list[Check]:
    """Free disk where runs are written (here) and where Ray spills (the temporary directory)."""
    places = places or [Path.cwd(), Path(tempfile.gettempdir())]
    free = {place: shutil.disk_usage(place).free for place in places}
    detail = ", ".join(f"{_gib(count)} free in {place}" for place, count in free.items())
    if min(free.values()) < 5 * GIB:
        fix = "free some space, or name a larger disk with --run-dir and TMPDIR"
        return [Check("disk", "warn", detail, fix)]
    return [Check("disk", "ok", detail)]


def check_open_files() -> list[Check]:
    """How many files and sockets a process may have open: each of Ray's processes has hundreds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= OPEN_FILES:
        shown = "no limit" if soft == unlimited else f"{soft:,} for a process"
        return [Check("open files", "ok", shown)]
    detail = f"{soft:,} for a process: long runs of many lanes want {OPEN_FILES:,}"
    fix = f"ulimit -n {OPEN_FILES}"
    if hard != unlimited and hard < OPEN_FILES:
        fix = f"docker run --ulimit nofile={OPEN_FILES}, or nofile in /etc/security/limits.conf"
    return [Check("open files", "warn", detail, fix)]


def check_ports(proc: Path = PROC) -> list[Check]:
    """Whether processes of this machine reach each other, and how many ports they have for it."""
    first, last = 32768, 60999  # Linux's own
    if found := read_text(proc / "sys/net/ipv4/ip_local_port_range").split():
        first, last = map(int, found)
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        detail = f"no connection within this machine, which Ray needs: {_one_line(error)}"
        return [Check("ports", "missing", detail, "ip link set lo up")]
    detail = f"{last - first + 1:,} to choose from ({first} to {last}); loopback answers"
    if last - first < PORTS:
        fix = "sysctl -w net.ipv4.ip_local_port_range='32768 60999'"
        return [Check("ports", "warn", f"{detail}: a run wants {PORTS:,}", fix)]
    return [Check("ports", "ok", detail)]


def check_cpu_bfloat16(proc: Path = PROC) -> list[Check]:
    """Whether this CPU multiplies bfloat16 in hardware; where it does not, bfloat16 is emulated."""
    flags = set(read_text(proc / "cpuinfo").split())
    found = sorted(flags & {"avx512_bf16", "amx_bf16", "bf16"})  # the last is Arm's name
    detail = f"fast ({', '.join(found)})" if found else "emulated: float32 is the faster choice"
    return [Check("bfloat16 on CPU", "ok", detail)]


# The software


def declared_requirements() -> Requirements:
    """What m2flow declares, as it was installed; else as the source tree of this file says.

    Raises:
        OSError: m2flow is neither installed nor in its source tree.
    """
    try:
        names = metadata.metadata("m2flow").get_all("Provides-Extra") or []
        declared = [Requirement(line) for line in metadata.requires("m2flow") or []]
    except metadata.PackageNotFoundError:
        project = tomllib.loads((SOURCE_TREE / "pyproject.toml").read_text())["project"]
        extras = project["optional-dependencies"].items()
        return Requirements(
            [Requirement(line) for line in project["dependencies"]],
            {extra: [Requirement(line) for line in lines] for extra, lines in extras},
        )
    core = [one for one in declared if _applies(one, extra="")]
    rest = [one for one in declared if one not in core]
    return Requirements(
        core, {name: [one for one in rest if _applies(one, name)] for name in names}
    )


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def check_packages(requirements: Requirements | None = None) -> list[Check]:
    """One finding for each package of the core: is it there, does it import, is it in range?"""
    return [check_package(one) for one in (requirements or declared_requirements()).core]


def check_package(requirement: Requirement) -> Check:
    """Whether one package is there, can be imported, and has a version in its range."""
    name, install = requirement.name, _pip_install(_pip_form(requirement))
    version = _version(requirement)
    if version is None:
        return Check(name, "missing", "not installed", install)
    try:
        importlib.import_module(MODULE_NAMES.get(name.lower(), name.replace("-", "_")))
    except EXPECTED_FAILURES as error:
        detail = f"{version} is installed and does not import: {_one_line(error)}"
        return Check(name, "missing", detail, f"{install} --force-reinstall")
    if not requirement.specifier.contains(version, prereleases=True):
        detail = f"{version} is outside the range {requirement.specifier}"
        return Check(name, "warn", detail, install)
    return Check(name, "ok", version)


def check_gpu(proc: Path = PROC) -> list[Check]:
    """The GPUs that torch can use, or why it cannot use those that are there."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # torch warns where it could say why a driver is too old
        usable = torch.cuda.is_available()
    if usable:
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        listed = ", ".join(f"{gpu.name} ({_gib(gpu.total_memory)})" for gpu in gpus)
        driver = re.search(r"\d+\.\d[\d.]*", read_text(proc / "driver/nvidia/version"))
        listed += f"; driver {driver[0]}" if driver else ""
        return [Check("GPU", "ok", f"{listed}; CUDA {torch.version.cuda}")]
    if shutil.which("nvidia-smi") is None:
        return [Check("GPU", "ok", "none: lanes are sets of CPU cores")]
    if torch.version.cuda is None:
        detail = f"there is an NVIDIA driver, but torch {torch.__version__} is a build for CPU"
        wanted = next(one for one in declared_requirements().core if one.name == "torch")
        fix = f"{_pip_install(_pip_form(wanted))} --force-reinstall"
        return [Check("GPU", "warn", detail, fix)]
    reason = f": {_one_line(caught[0].message)}" if caught else ""
    detail = f"torch, built for CUDA {torch.version.cuda}, finds none{reason}"
    return [Check("GPU", "warn", detail, "nvidia-smi  # is the driver loaded, and new enough?")]


def check_rendering() -> list[Check]:
    """What simulators of each kind draw pictures with, where there is no screen."""
    from m2flow.environments.rendering import HOW_TO, backends, choose

    found = {backend.name: backend.detail for backend in backends()}
    checks = []
    for renderer in HOW_TO:
        name = f"{renderer} pictures"
        try:
            chosen = choose(renderer)
        except UserError as error:
            detail = str(error).removesuffix(f"; {error.hint}")
            checks.append(Check(name, "optional", detail, error.hint))
        else:
            why = found.get(chosen, "as MUJOCO_GL says")
            checks.append(Check(name, "ok", f"{chosen}: {why}"))
    return checks


def check_extras(requirements: Requirements | None = None) -> list[Check]:
    """One finding for each extra: its versions, or the command that installs what it lacks."""
    findings = []
    for extra, wanted in (requirements or declared_requirements()).extras.items():
        name = f"extra {extra}"
        versions = {one.name: _version(one) for one in wanted}
        absent = [package for package, version in versions.items() if version is None]
        if absent:
            detail = f"without {', '.join(absent)}"
            findings.append(Check(name, "optional", detail, _install_extra(extra)))
        else:
            detail = ", ".join(f"{package} {version}" for package, version in versions.items())
            findings.append(Check(name, "ok", detail))
    return findings


def _install_extra(extra: str) -> str:
    # Through m2flow itself, never the package alone: pip then keeps torch within its range.
    try:
        metadata.version("m2flow")
    except metadata.PackageNotFoundError:
        return _pip_install("-e", f"{SOURCE_TREE}[{extra}]")
    return _pip_install(f"m2flow[{extra}]")


def _pip_install(*arguments: str) -> str:
    return shlex.join([sys.executable, "-m", "pip", "install", *arguments])


def _pip_form(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{requirement.specifier}"


def _version(requirement: Requirement) -> str | None:
    try:
        return metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return None


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"


def _one_line(error: object) -> str:
    """What the error says, on one line; its type where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
