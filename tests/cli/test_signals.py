"""A run that a terminal, a scheduler or a person ends: a line, a checkpoint, nothing left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from m2flow.errors import CannotWrite, Stopped
from m2flow.observe.run_directory import read_metrics
from m2flow.training.checkpoint import resume_point, step_of
from m2flow.workloads.common.stopping import HEED_SECONDS, StepInterrupted, StepOverdue, Stopping
from tests.cli.test_resume import figures

M2flow = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("signals_are_heard")

STEPS = 400
"""More than a run gets to."""

SLOW = """
import os, time

def slowly(prompt, completion, completion_ids, row):
    open("scoring", "a").close()
    time.sleep(120)
"""

DAWDLES = """
import os, time

def slowly(prompt, completion, completion_ids, row):
    if os.path.exists("dawdle"):
        open("scoring", "a").close()
        deadline = time.monotonic() + 60
        while not os.path.exists("overdue") and time.monotonic() < deadline:
            time.sleep(0.01)
    return float(len(completion_ids) % 3)
"""

LEAVES = """
import os, subprocess, sys, time

pool = sys.argv[3]
folder = os.path.join(os.environ["TMPDIR"], pool)
os.mkdir(folder)
for name in (f"{pool}-0-1-0", f"{pool}0-0-1-0"):
    open(f"/dev/shm/{name}", "w").close()
subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
while not os.path.exists("go"):
    time.sleep(0.01)
os.rmdir(folder)
"""
"""A run that leaves a file in shared memory and a process; and a file of another pool."""

POOL = "m2flow-" + 12 * "[0-9a-f]"
"""Folders of pools; files in shared memory are named for them."""


class Started:
    """`m2flow train` in a process group and a temporary folder of its own.

    Args:
        recipe, words: what is trained.
        program: what Python runs.
        enter: words before the command, which have it run somewhere else.

    Attributes:
        pools: names of the pools that it has had, seen while it ran: they go with their folders.
    """

    def __init__(
        self,
        recipe: Path,
        *words: str,
        program: Sequence[str] = ("-m", "m2flow"),
        enter: Sequence[str] = (),
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.temporary = Path(tempfile.mkdtemp(prefix="m2s-"))  # short: Ray's sockets lie there
        environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        environment |= {"TMPDIR": str(self.temporary), "M2FLOW_MARK": self.mark}
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(Path.cwd() / "inductor")
        environment["PYTHONPATH"] = f"{Path.cwd()}:{environment.get('PYTHONPATH', '')}"
        command = [*enter, sys.executable, *program, "train", str(recipe), *words]
        self.process = subprocess.Popen(
            [*command, "--run-dir", "run"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self.pools: set[str] = set()
        self._watch = threading.Thread(target=self._see_pools, daemon=True)
        self._watch.start()

    def _see_pools(self) -> None:
        while self.process.poll() is None:
            self.pools.update(path.name for path in self.temporary.glob(POOL))
            time.sleep(0.05)

    def wait_for(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not what():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def ended(self) -> tuple[int, str]:
        """Exit code and standard error."""
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors

    def processes(self) -> dict[int, str]:
        """All processes that the run has started, and itself: number to command line."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self.mark.encode() in (process / "environ").read_bytes():
                    command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(process.name)] = command
        return found

    def left_behind(self) -> list[str]:
        """Processes that the run has started, its files and its shared memory."""
        found = [str(path) for path in self.temporary.iterdir()]
        own = tuple(f"{pool}-" for pool in self.pools)
        found += [str(path) for path in Path("/dev/shm").iterdir() if path.name.startswith(own)]
        return found + list(self.processes().values())

    def wait_until_quiet(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while left := self.left_behind():
            assert time.monotonic() < deadline, left
            time.sleep(0.1)

    def end(self) -> None:
        """Kill what is there of it, and remove its folder."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self._watch.join()
        shutil.rmtree(self.temporary, ignore_errors=True)


@pytest.fixture
def started(tiny: Path) -> Iterator[Callable[..., Started]]:
    runs: list[Started] = []

    def start(*words: str) -> Started:
        runs.append(Started(tiny, *words))
        return runs[-1]

    yield start
    for run in runs:
        run.end()


def steps_done() -> int:
    return max((row["step"] for row in read_metrics("run")), default=0)


def test_what_a_run_leaves_is_seen(tiny: Path) -> None:
    """Its folder, which the names of its files in shared memory begin with, is gone by then."""
    pool = f"m2flow-{uuid.uuid4().hex[:12]}"
    run = Started(tiny, pool, program=("-c", LEAVES))
    try:
        run.wait_for(lambda: pool in run.pools)
        Path("go").touch()
        assert run.ended() == (0, "")
        assert run.left_behind() == [f"/dev/shm/{pool}-0-1-0", "sleep 600 "]
    finally:
        run.end()
        for path in Path("/dev/shm").glob(f"{pool}*"):
            path.unlink()
    assert run.pools == {pool}
    assert not run.temporary.exists()


LANES = ["mode=collocated", "lanes=cpu:2", f"steps={STEPS}", "checkpoint.every=1000"]


def tell_its_group(run: Started, number: int) -> None:
    os.killpg(run.process.pid, number)


def tell_all_of_its_job(run: Started, number: int) -> None:
    for process in run.processes():
        with suppress(ProcessLookupError):
            os.kill(process, number)


@pytest.mark.parametrize(
    ("number", "tell"),
    [
        (signal.SIGTERM, lambda run, number: run.process.send_signal(number)),
        (signal.SIGTERM, tell_all_of_its_job),
        pytest.param(signal.SIGHUP, tell_its_group, marks=pytest.mark.slow),
    ],
    ids=["TERM", "TERM-job", "HUP"],
)
def test_a_signal_ends_a_run_on_lanes_after_the_step_at_hand(
    started: Callable[..., Started],
    tiny: Path,
    m2flow: M2flow,
    number: int,
    tell: Callable[[Started, int], None],
) -> None:
    """A person tells the launcher; a terminal tells all processes of its group, and a scheduler all
    of a job: Ray's, lanes, and what they have begun."""
    run = started(*LANES)
    run.wait_for(lambda: steps_done() >= 2)
    tell(run, number)
    code, errors = run.ended()
    assert code == 128 + number, errors
    first, *rest = errors.strip().splitlines()
    name, saved = signal.Signals(number).name, resume_point(Path("run/checkpoints"))
    assert first.startswith(f"{name}: ending after this step, or in 20 s at the latest")
    assert saved is not None
    step = step_of(saved)
    assert step == steps_done()
    end = f"ended after step {step}; saved is step {step}; go on with --run-dir run --resume"
    assert rest == [f"stopped by {name}: {end}"]
    run.wait_until_quiet(10)

    words = [f"steps={step + 1}", "mode=eager", "lanes=cpu:1", "--run-dir", "run", "--resume"]
    outcome = m2flow("train", tiny, *words, "checkpoint.every=1000")
    assert outcome.code == 0, outcome.err
    assert [row["step"] for row in figures(Path("run"))] == list(range(step + 2))


def test_a_second_signal_ends_at_once(started: Callable[..., Started], tiny: Path) -> None:
    Path("slow.py").write_text(SLOW)
    tiny.write_text(tiny.read_text() + "reward: slow:slowly\n")
    run = started("evaluation.problems=0", "warmup.steps=1")
    run.wait_for(Path("scoring").exists)
    run.process.send_signal(signal.SIGINT)
    assert run.process.stderr is not None
    assert "SIGINT: ending after this step" in run.process.stderr.readline()
    run.process.send_signal(signal.SIGINT)
    code, errors = run.ended()
    assert code == 130
    assert errors == (
        "stopped by SIGINT: ended after step 0; no checkpoint was saved; "
        "go on with --run-dir run --resume\n"
    )


def test_a_step_that_outlasts_the_grace_time_is_given_up(
    started: Callable[..., Started], tiny: Path
) -> None:
    Path("slow.py").write_text(SLOW)
    tiny.write_text(tiny.read_text() + "reward: slow:slowly\n")
    run = started("evaluation.problems=0", "warmup.steps=1", "grace_seconds=0.5")
    run.wait_for(Path("scoring").exists)
    run.process.terminate()
    code, errors = run.ended()
    assert code == 143
    assert "or in 0.5 s at the latest" in errors
    assert "stopped by SIGTERM: ended after step 0; no checkpoint was saved" in errors


@pytest.mark.parametrize("where", [["mode=eager"], ["mode=collocated", "lanes=cpu:2"]])
def test_a_step_that_is_given_up_before_it_is_learnt_from_leaves_a_checkpoint(
    started: Callable[..., Started], tiny: Path, m2flow: M2flow, where: list[str]
) -> None:
    """The steps before it are kept, and a resumed run goes on from there."""
    Path("dawdling.py").write_text(DAWDLES)
    tiny.write_text(tiny.read_text() + "reward: dawdling:slowly\n")
    words = ["evaluation.problems=0", "warmup.steps=1", "checkpoint.every=1000"]
    run = started(*words, *where, f"steps={STEPS}", "grace_seconds=0.2")
    run.wait_for(lambda: steps_done() >= 2)
    Path("dawdle").touch()
    run.wait_for(Path("scoring").exists)
    run.process.terminate()
    assert run.process.stderr is not None
    assert "or in 0.2 s at the latest" in run.process.stderr.readline()
    time.sleep(0.2 + HEED_SECONDS / 2)  # overdue by now, and still has the time to say so
    Path("overdue").touch()
    code, errors = run.ended()
    assert code == 143, errors
    saved = resume_point(Path("run/checkpoints"))
    assert saved is not None, errors
    step = step_of(saved)
    assert step == steps_done()
    assert f"ended after step {step}; saved is step {step}; go on" in errors
    run.wait_until_quiet(10)

    Path("dawdle").unlink()
    more = [*words, f"steps={step + 2}", "mode=eager", "lanes=cpu:1", "--run-dir", "run"]
    outcome = m2flow("train", tiny, *more, "--resume")
    assert outcome.code == 0, outcome.err
    assert [row["step"] for row in figures(Path("run"))] == list(range(1, step + 3))


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    for _ in range(3):
        time.sleep(0)  # a handler runs between two instructions


def test_before_the_first_step_a_signal_ends_at_once() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match="SIGTERM: nothing was begun"), Stopping(60.0):
        send(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def swallow(number: int) -> None:
    """As a package does whose import tries something and goes on without it."""
    with suppress(BaseException):
        send(number)


def test_what_fails_since_a_package_has_swallowed_the_signal_is_not_told() -> None:
    """A half-imported package ended the command with a traceback of somebody else's error."""
    with pytest.raises(Stopped, match="SIGTERM: nothing was begun") as ended, Stopping(60.0):
        raise ImportError(str(swallow(signal.SIGTERM)))
    assert isinstance(ended.value.__cause__, ImportError)
    with pytest.raises(CannotWrite), Stopping(60.0):
        raise CannotWrite(str(swallow(signal.SIGTERM)))


def test_an_error_of_a_step_that_a_signal_waits_for_is_told() -> None:
    def fail() -> None:
        assert stopping.step_begins()
        send(signal.SIGTERM)
        raise ImportError

    with pytest.raises(ImportError), Stopping(60.0) as stopping:
        fail()


def test_no_step_begins_after_a_signal() -> None:
    with Stopping(60.0) as stopping:
        assert stopping.step_begins()
        send(signal.SIGHUP)
        assert stopping.asked == signal.SIGHUP
        assert not stopping.step_begins()
        assert stopping.step_is_over() == signal.SIGHUP
        with pytest.raises(Stopped) as caught:
            send(signal.SIGTERM)
    assert caught.value.exit_code == 129, "the first one counts"


def test_a_step_that_ends_as_its_grace_time_does_is_not_given_up() -> None:
    """Nor is the checkpoint after it interrupted."""
    with Stopping(60.0) as stopping:
        assert stopping.step_begins()
        send(signal.SIGTERM)
        assert stopping.step_is_over() == signal.SIGTERM
        stopping._is_overdue()  # its timer had begun to run
        stopping.heed()
        assert stopping._timer is not None
        assert stopping._timer.finished.is_set(), "no other one was started"


def test_a_step_is_given_up_where_the_run_asks() -> None:
    with Stopping(60.0) as stopping:
        assert stopping.step_begins()
        stopping.heed()
        send(signal.SIGTERM)
        stopping.heed()
        stopping._is_overdue()
        with pytest.raises(StepOverdue):
            stopping.heed()
        stopping.heed()


def test_a_step_is_interrupted_where_the_run_does_not_ask() -> None:
    """But not what follows a step that ends just then; and a person's second signal is another."""
    with Stopping(60.0) as stopping:
        assert stopping.step_begins()
        send(signal.SIGTERM)
        with pytest.raises(StepInterrupted):
            stopping._interrupt()
        stopping._interrupt()
        stopping._interrupting = True
        send(signal.SIGTERM)

    with Stopping(60.0) as stopping:
        assert stopping.step_begins()
        send(signal.SIGTERM)
        with pytest.raises(Stopped) as caught:
            send(signal.SIGTERM)
    assert not isinstance(caught.value, StepOverdue)


def test_what_nohup_has_set_stays() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stopping(60.0) as stopping:
            send(signal.SIGHUP)
            assert stopping.asked is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_no_signal_follows_a_step_that_ends_as_its_grace_time_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The timer that was begun just then had nobody to cancel it, and ended the process later."""
    stopping = Stopping(60.0)
    stopping.step_begins()
    stopping.asked = signal.SIGTERM
    after, reached, go = stopping._after, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        reached.set()
        go.wait(60)
        after(*arguments)

    monkeypatch.setattr(stopping, "_after", slow)
    thread = threading.Thread(target=stopping._is_overdue)
    thread.start()
    assert reached.wait(60)
    threading.Timer(0.2, go.set).start()
    stopping.step_is_over()
    thread.join(60)
    timer = stopping._timer
    assert timer is not None
    cancelled = timer.finished.is_set()
    timer.cancel()
    assert cancelled
