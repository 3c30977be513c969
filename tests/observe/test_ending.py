"""What the doctor says of a run's directory, for every way in which a run can end."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2flow.errors import UserError
from m2flow.observe.ending import REMEDIES, ending_of, this_process
from m2flow.observe.run_directory import RunDirectory
from m2flow.workloads.common.resume import MAY_CHANGE


def run_at(folder: Path, **facts: object) -> RunDirectory:
    run = RunDirectory.create(folder / "run", "r")
    run.write_config({"workload": "reasoning"})
    run.write_run(recipe="r", steps=9, started=1.0, finished=None, **facts)
    run.append_metrics(4, {"reward/mean": 0.5})
    return run


def gone() -> dict[str, object]:
    """A process that was there."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return {**this_process(), "id": process.pid}


def test_each_way_to_end(tmp_path: Path) -> None:
    ways = {
        "finished": {"finished": 5.0},
        "running": {"process": this_process()},
        "stopped": {"ended": 5.0, "why": "SIGTERM: ended after step 4"},
        "failed": {"ended": 5.0, "why": "lane 1 was lost: it held learner"},
        "killed": {"process": gone()},
        "unknown": {"process": {**this_process(), "host": "elsewhere"}},
    }
    for state, facts in ways.items():
        run = run_at(tmp_path / state)
        run.write_run(**facts)
        ending = ending_of(run.path)
        assert ending.state == state
        assert any(line.startswith("steps: 4 of 9") for line in ending.lines)
        goes_on = f"to go on: m2flow train {run.config} --run-dir {run.path} --resume"
        assert (goes_on in ending.lines) == (state not in ("finished", "running"))


def test_what_is_to_be_pasted_is_quoted(tmp_path: Path) -> None:
    run = run_at(tmp_path / "my runs")
    (told,) = (line for line in ending_of(run.path).lines if line.startswith("to go on: "))
    *_, config, _, path, _ = shlex.split(told)
    assert (config, path) == (str(run.config), str(run.path))


def test_another_process_of_the_same_number_is_not_the_run(tmp_path: Path) -> None:
    run = run_at(tmp_path, process={**this_process(), "began": 1.0})
    assert ending_of(run.path).state == "killed"


def test_what_helps_and_how_it_came(tmp_path: Path) -> None:
    run = run_at(tmp_path, ended=5.0, why="lane 1 was lost: it held learner")
    run.failure.write_text("Traceback\nRunFailed: lane 1 was lost\n")
    run.write_skipped(3, [{"reward": 1.0}])
    (run.checkpoints / ".step_000004.partial").mkdir(parents=True)
    lines = ending_of(run.path).lines
    assert any("dmesg" in line for line in lines)
    assert lines[-1] == "  RunFailed: lane 1 was lost"
    assert any(
        line.endswith("rollouts of 1 steps, the last in step_000003.jsonl") for line in lines
    )
    assert "checkpoint: none was saved; --resume begins again" in lines
    assert any(".step_000004.partial" in line for line in lines)


ENDS = {
    "could not be written: /x: No space left on device": "make room",
    "reward.math gave nothing within 60 s; so for all 8 samples of step 3. The first: prompt": (
        "see why the reward fails"
    ),
    "no; so for 5 of 8 samples of step 3, and half or more of 4 steps in a row "
    "(max_skipped_updates: 3). The first: prompt": "see why the reward fails",
    "half or more of the episodes were given up in 4 steps in a row (max_skipped_updates: 3)": (
        "see why the simulators fail"
    ),
    "the summed loss is nan; 4 times in a row (max_skipped_updates: 3)": "see skipped/; raise max_",
    "learner.train ran out of memory on lane 1, which held learner 3 GB: CUDA": "lower training.",
    "no progress with loading for 600 s: lane 1 (learner)": "raise load_deadline_seconds",
    "lanes [1, 3] have not started within 120 s": "raise load_deadline_seconds",
    "lane 1 was lost: it held learner": "see whether the system killed it",
    "generate has not finished within its deadline of 12 s": "see who waits for whom below",
}
"""What runs have said at their end, and what their users are told to look at."""


@pytest.mark.parametrize("why", ENDS)
def test_one_thing_is_to_be_looked_at_first(why: str, tmp_path: Path) -> None:
    lines = ending_of(run_at(tmp_path, ended=5.0, why=why).path).lines
    (first,) = (line.removeprefix("first: ") for line in lines if line.startswith("first: "))
    assert first.startswith(ENDS[why])


def test_keys_that_are_to_be_changed_may_be_changed() -> None:
    needs_new_run = {"optimizer.learning_rate"}
    words = " ".join(hint for _, hint in REMEDIES)
    named = set(re.findall(r"[a-z]+(?:[._][a-z]+)+", words)) - needs_new_run
    assert named
    assert named <= MAY_CHANGE


def test_what_holds_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neither run\.json nor metrics"):
        ending_of(tmp_path)
    with pytest.raises(UserError, match="no such run directory"):
        ending_of(tmp_path / "none")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
)
FACTS = ("finished", "ended", "why", "process", "steps", "recipe", "id", "began", "host")


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.sampled_from(FACTS), JSON),
    st.dictionaries(st.sampled_from(FACTS), JSON),
    st.binary(max_size=60),
)
def test_whatever_the_files_hold_there_is_an_account(
    tmp_path: Path, facts: dict[str, object], process: dict[str, object], rows: bytes
) -> None:
    (tmp_path / "run.json").write_text(json.dumps({**facts, "process": process, "recipe": "r"}))
    (tmp_path / "metrics.jsonl").write_bytes(rows + b'\n{"step": 1, "time": "now"}\n')
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    (tmp_path / "checkpoints" / "latest").unlink(missing_ok=True)
    (tmp_path / "checkpoints" / "latest").symlink_to("step_x")
    ending = ending_of(tmp_path)
    assert ending.lines
    assert all(isinstance(line, str) for line in ending.lines)
