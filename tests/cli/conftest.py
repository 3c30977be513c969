"""The command line in this process, and one tiny run that the tests share and copy."""

from __future__ import annotations

import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest

from m2flow.cli.app import main
from m2flow.engine.plan import Plan
from m2flow.plan import read_plan

TINY = """\
workload: reasoning
name: tiny
mode: eager
lanes: cpu:1
steps: 3
prompts_per_step: 4
samples_per_prompt: 4
model: {hidden_size: 32, num_hidden_layers: 1, intermediate_size: 64, max_position_embeddings: 64}
data: {task: addition, options: {min_digits: 1, max_digits: 1, thinking_share: 0}}
warmup: {steps: 40, samples_per_step: 32, learning_rate: 2e-2}
optimizer: {learning_rate: 3e-3}
generation: {max_new_tokens: 6}
evaluation: {every: 2, problems: 5}
checkpoint: {every: 2}
"""
"""Learns enough in its warm-up that some rewards differ, so that the weights move."""


@dataclass(frozen=True)
class Outcome:
    """What a command left behind: its exit code, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line on standard error of a command that refused its input."""
        assert self.code == 2, (self.code, self.err)
        assert self.err.startswith("error: "), self.err
        assert self.err.count("\n") == 1, self.err
        assert self.err.endswith("\n"), self.err
        return self.err.removeprefix("error: ").strip()

    @property
    def plan(self) -> Plan:
        """The plan that a command printed, read from a file as a person would keep it."""
        with NamedTemporaryFile("w", suffix=".json") as file:
            file.write(self.out)
            file.flush()
            return read_plan(file.name)


M2flow = Callable[..., Outcome]


def run_command(*words: object) -> Outcome:
    """`m2flow WORDS` through its entry point, in this process."""
    out, err, argv = StringIO(), StringIO(), sys.argv
    sys.argv = ["m2flow", *map(str, words)]
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as stopped:
            main()
    finally:
        sys.argv = argv
    code = stopped.value.code
    return Outcome(code if isinstance(code, int) else 0, out.getvalue(), err.getvalue())


def predicted_plan(printed: str) -> tuple[str, ...]:
    """Of a plan that was printed: mode, seconds a step, what takes most of it and its share in per
    cent, gigabytes of the fullest lane, and of its limit."""
    found = re.search(
        r"^plan: (\w+), \d+ lanes, ([\d.]+) s .*?^bottleneck: ([\w.]+)\b.*?\((\d+)%\)"
        r".*?^memory: at most ([\d.]+) GB of ([\d.]+) GB",
        printed,
        re.DOTALL | re.MULTILINE,
    )
    assert found is not None, printed
    return found.groups()


@pytest.fixture(scope="session")
def m2flow() -> M2flow:
    return run_command


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny recipe in a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY)
    return Path("tiny.yaml")


@pytest.fixture
def signals_are_heard() -> Iterator[None]:
    """Also where the tests themselves run under `nohup`, or behind the `&` of a script."""
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGHUP, hang_up)
    signal.signal(signal.SIGINT, interrupt)


@pytest.fixture
def refused(m2flow: M2flow) -> Callable[..., str]:
    """Runs a command that must be refused: one line, and no file made, changed or lost."""

    def run(*words: object) -> str:
        before = contents(Path())
        outcome = m2flow(*words)
        assert contents(Path()) == before
        return outcome.error

    return run


def contents(folder: Path) -> dict[str, bytes | str | None]:
    """Every file, link and folder below a folder, hidden ones included, with what it holds."""
    found: dict[str, bytes | str | None] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path)] = str(path.readlink())
        else:
            found[str(path)] = path.read_bytes() if path.is_file() else None
    return found


@pytest.fixture(scope="session")
def finished(m2flow: M2flow, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of the tiny recipe, carried out once; tests must not change it."""
    folder = tmp_path_factory.mktemp("finished")
    recipe = folder / "tiny.yaml"
    recipe.write_text(TINY)
    outcome = m2flow("train", recipe, "--run-dir", folder / "run")
    assert outcome.code == 0, outcome.err
    return folder / "run"


@pytest.fixture
def run(tiny: Path, finished: Path) -> Path:
    """A copy of the finished run, `run`, beside its recipe."""
    shutil.copytree(finished, "run", symlinks=True)
    return Path("run")
