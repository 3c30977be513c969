"""A machine that goes without a word, and comes back: the run goes on without it, then with it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.runtime.cluster_of_two import two_nodes

pytestmark = pytest.mark.slow

SECONDS = 200

SCRIPT = """
import time
import m2flow
from m2flow.runtime.driver import supervision
from tests.chaos.dying_workers import ITEMS, Death, Judge, Learner, Sampler, Training, prompts

supervision.LOOK_SECONDS = 1.0

def start(**where):
    workers = {"sampler": Sampler(Death()), "judge": Judge(Death()), "learner": Learner(Death())}
    return m2flow.launch(Training(**workers), items_per_step=ITEMS, **where)

def batches(run):
    step, more, deadline = 0, 5, time.monotonic() + 120
    while more and time.monotonic() < deadline:
        more -= bool(run.returns)
        yield prompts(step)
        step += 1

with start(mode="{mode}", lanes="2xcpu:1", elastic=True) as run:
    found, said = [], 0
    for result in run.steps(batches(run)):
        found.append((result.step, result.version, result.metrics, result.output["z"].tolist()))
        if result.step == 2:
            print("said: under way", flush=True)
        for one in (*run.losses, *run.returns)[said:]:
            said += 1
            print("said:", one, flush=True)
    assert len(run.plan.lanes) == 2
    assert run.plan.mode == "{mode}"
with start(mode="eager") as run:
    results = run.steps(prompts(step) for step in range(len(found)))
    wanted = [(r.step, r.version, r.metrics, r.output["z"].tolist()) for r in results]
print("said: the same" if found == wanted else (found, wanted))
"""
"""Prints a line when the machine may go, one when it has gone, one when it is back, and the end."""


def next_line(run: subprocess.Popen[str]) -> str:
    """What the script says next, with what Ray prints before; all there is at its end."""
    assert run.stdout is not None
    lines = [""]
    while not lines[-1].startswith("said: "):
        if not (line := run.stdout.readline()):
            break
        lines.append(line)
    return "".join(lines)


@pytest.mark.parametrize(
    ("mode", "silent"), [("collocated", False), ("disaggregated", False), ("disaggregated", True)]
)
def test_a_run_goes_on_without_a_machine_and_takes_it_in_again(mode: str, silent: bool) -> None:
    """Of one that loses its power no word comes, not even that its connections are closed."""
    folder = Path(tempfile.mkdtemp(prefix="m2n-"))  # short: Ray's sockets lie there
    try:
        with two_nodes(folder, delay_ms=1) as cluster:
            if not cluster.apart:
                pytest.skip(cluster.how)
            script = SCRIPT.replace("{mode}", mode)
            run = cluster.start([sys.executable, "-c", script], SECONDS)
            lines = [next_line(run)]
            if "under way" in lines[0]:
                if silent:
                    cluster.cut()
                cluster.kill_other()
                lines.append(next_line(run))
                if silent:
                    cluster.mend()
                cluster.start_other()
            rest, errors = run.communicate(timeout=SECONDS + 30)
            said = "".join(lines) + rest
        assert run.returncode == 0, f"{said}\n{errors}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _, lost, back, end = (x for x in said.splitlines() if x.startswith("said: "))
    assert lost.startswith("said: lane 1 was lost (")
    assert "; its machine is gone: on without it after " in lost
    assert "collocated on 1 lane" in lost
    assert back.startswith("said: lane 1 is back after ")
    assert f"on with it, {mode} on 2 lanes" in back
    assert end == "said: the same"
