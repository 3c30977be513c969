"""No code makes objects of what lies on a disk, and `make audit` says what it has found, or not."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

PROJECT = Path(__file__).parents[1]
SOURCES = sorted((PROJECT / "src").rglob("*.py"))


def unmarked(
    source: str, called: Callable[[ast.Attribute], bool], word: str, wanted: object
) -> Iterator[int]:
    """Lines on which a function is called, or handed on, without a literal argument."""
    tree = ast.parse(source)
    safe = {
        id(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for one in node.keywords
        if one.arg == word and isinstance(one.value, ast.Constant) and one.value.value is wanted
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and called(node) and id(node) not in safe:
            yield node.lineno


RUN_WHAT_THEY_READ = ("torch.jit.load", "torch.hub", "torch.package", "FileSystemReader")
"""What of torch runs code of what it reads, or unpickles it (`.metadata` of a distributed
checkpoint)."""


def unsafe_loads(source: str) -> Iterator[int]:
    """Lines on which `torch.load` is called, or handed on, without `weights_only=True`, and those
    with what runs what it reads, whatever it is told."""
    yield from unmarked(source, lambda x: ast.unparse(x) == "torch.load", "weights_only", True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names = {one.name for one in node.names}
            names |= {f"{node.module}.{name}" for name in names} | {str(node.module)}
            if names & {"torch.load", *RUN_WHAT_THEY_READ}:
                yield node.lineno
        elif isinstance(node, ast.Attribute) and (
            ast.unparse(node) in RUN_WHAT_THEY_READ or node.attr in RUN_WHAT_THEY_READ
        ):
            yield node.lineno


def trusting_reads(source: str) -> Iterator[int]:
    """Lines on which transformers may run, or ask whether to run, code of a model folder."""
    names = ("from_pretrained", "from_config")
    return unmarked(source, lambda x: x.attr in names, "trust_remote_code", False)


def test_torch_loads_weights_only() -> None:
    found = [f"{path}:{line}" for path in SOURCES for line in unsafe_loads(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "torch.load(f, weights_only=safe)",
        "from torch import load",
        "read = torch.load",
        "torch.jit.load(f)",
        "torch.hub.load(f, 'model')",
        "from torch.distributed.checkpoint import FileSystemReader",
        "dcp.FileSystemReader(f)",
    ],
)
def test_what_would_load_more_is_found(source: str) -> None:
    assert list(unsafe_loads(source)) == [1]
    assert list(unsafe_loads("torch.load(f, weights_only=True)")) == []


def test_no_code_of_a_model_folder_is_run() -> None:
    found = [f"{path}:{line}" for path in SOURCES for line in trusting_reads(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "AutoConfig.from_pretrained(f)",
        "auto.from_pretrained(f, trust_remote_code=True)",
        "AutoModel.from_config(f, trust_remote_code=None)",
        "read = AutoTokenizer.from_pretrained",
    ],
)
def test_what_would_run_code_is_found(source: str) -> None:
    assert list(trusting_reads(source)) == [1]
    assert list(trusting_reads("AutoConfig.from_pretrained(f, trust_remote_code=False)")) == []


def unpickled_files(source: str) -> Iterator[int]:
    """Lines on which objects are, or may be, made of what lies in a file.

    `pickle.loads` of what comes from a process that has proved the secret is allowed where lint
    says so, but of a file's content it is not; neither is numpy with pickles allowed. Sees a file
    that is read in the same expression, so such modules keep their names.
    """
    tree = ast.parse(source)
    modules = ("pickle", "cloudpickle", "dill", "joblib", "shelve")
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                if any(one.name in modules and one.asname for one in names):
                    yield node.lineno
            case ast.ImportFrom(module=str(module), names=names) if module in modules:
                if any(one.name in ("load", "loads", "Unpickler", "open") for one in names):
                    yield node.lineno
            case ast.Attribute(value=ast.Name(id=module), attr="load" | "Unpickler" | "open"):
                if module in modules:
                    yield node.lineno
            case ast.Call(func=ast.Attribute(attr="loads", value=ast.Name(id=module)), args=args):
                reads = ("open", "read_bytes", "read", "readline")
                named = {x.attr for x in ast.walk(args[0]) if isinstance(x, ast.Attribute)}
                named |= {x.id for x in ast.walk(args[0]) if isinstance(x, ast.Name)}
                if module in modules and named & set(reads):
                    yield node.lineno
    numpy = unmarked(
        source, lambda x: ast.unparse(x) in ("np.load", "numpy.load"), "allow_pickle", False
    )
    yield from numpy


def test_no_file_is_unpickled() -> None:
    """Lint allows pickles in the folders of lanes, of whatever comes."""
    found = [f"{path}:{line}" for path in SOURCES for line in unpickled_files(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "pickle.load(f)",
        "cloudpickle.load(f)",
        "pickle.loads(path.read_bytes())",
        "pickle.loads(open(f, 'rb').read())",
        "pickle.Unpickler(f)",
        "from pickle import load",
        "import pickle as p",
        "from cloudpickle import loads",
        "np.load(f)",
        "np.load(f, allow_pickle=True)",
        "numpy.load(f, allow_pickle=may)",
    ],
)
def test_what_would_unpickle_a_file_is_found(source: str) -> None:
    assert list(unpickled_files(source)) == [1]
    assert list(unpickled_files("np.load(f, allow_pickle=False); pickle.loads(frame)")) == []


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("import pickle\n\npickle.load(open('x'))\n", "S301"),
        ("import pickle\n\npickle.loads(b'')\n", "S301"),
        ("import marshal\n\nmarshal.loads(b'')\n", "S302"),
        ("eval('1')\n", "S307"),
        ("exec('1')\n", "S102"),
        ("import yaml\n\nyaml.load('1', yaml.Loader)\n", "S506"),
    ],
)
def test_lint_refuses_what_runs_what_it_reads(source: str, code: str) -> None:
    words = ["check", "--output-format", "concise", "--stdin-filename", "src/m2flow/observe/new.py"]
    ruff = [sys.executable, "-m", "ruff", *words]
    ran = subprocess.run(
        ruff, check=False, cwd=PROJECT, input=source, capture_output=True, text=True
    )
    assert f" {code} " in ran.stdout


# --- make audit ---------------------------------------------------------------------------------

STAND_IN = """
import sys

content = {content!r}
with open({asked!r}, "w") as asked, open(sys.argv[sys.argv.index("--requirement") + 1]) as given:
    asked.write(given.read())
if content is None:
    sys.exit("ERROR: no route to host")
open(sys.argv[sys.argv.index("--output") + 1], "w").write(content)
"""

KNOWN = """{"dependencies": [
  {"name": "safe", "version": "1.0", "vulns": []},
  {"name": "odd", "skip_reason": "not found"},
  {"name": "old", "version": "2.0", "vulns": [{"id": "X-1", "fix_versions": ["2.1", "3.0"]}]}
]}"""


def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", PROJECT / ".ci" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FINE = '{"dependencies": [{"name": "a", "version": "1", "vulns": []}]}'
UNKNOWN = '{"dependencies": [{"name": "a", "skip_reason": "x"}, {"name": "b", "skip_reason": "x"}]}'
NOTHING = "audit: nothing was compared, the advisories cannot be had: "
FOUND = """old 2.0: X-1; mended in 2.1 or 3.0
audit: 2 packages compared, 1 advisories; not known to the service: odd
"""


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        (KNOWN, 1, FOUND),
        (FINE, 0, "audit: 1 packages compared, 0 advisories\n"),
        (None, 2, f"{NOTHING}ERROR: no route to host\n"),
        (UNKNOWN, 2, f"{NOTHING}the service knows none of 2 packages\n"),
        ("half", 2, f"{NOTHING}exit code 0\n"),
    ],
)
def test_an_audit_says_what_it_has_found(
    content: str | None, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "pip_audit.py"
    program.write_text(STAND_IN.format(content=content, asked=str(tmp_path / "asked")))
    pinned = tmp_path / "constraints.txt"
    pinned.write_text("a==1\n")
    ran = (sys.executable, str(program))
    assert audit().main(str(pinned), "torch==2.13.0", program=ran) == code
    assert capsys.readouterr().out == said
    assert (tmp_path / "asked").read_text() == "a==1\n\ntorch==2.13.0"
