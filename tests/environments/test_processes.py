"""Environments in processes: the same episodes as in one, and failures that stay where they are.

The processes are real, and so are kills and hangs.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from m2flow.environments import child
from m2flow.environments.deadlines import Deadlines
from m2flow.environments.memory import anonymous_memory
from m2flow.environments.process import SimulatorProcess, Source
from m2flow.environments.processes import ProcessEnvironments
from m2flow.environments.serial import SerialEnvironments
from m2flow.errors import RunFailed, UserError

PATIENT = Deadlines(start=60, reset=30, step=30, render=30)
HURRIED = Deadlines(start=60, reset=30, step=0.5, render=30)


def hosted(task="Walk", num_envs=4, num_processes=2, deadlines=PATIENT, **settings):
    """Toy environments in processes."""
    kwargs = {key: settings.pop(key) for key in ("copy",) if key in settings}
    source = Source(f"toy_environments:{task}", settings)
    return ProcessEnvironments(source, num_envs, num_processes, deadlines=deadlines, **kwargs)


def actions(rows, chunk=2, seed=0):
    return torch.rand(rows, chunk, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def same(left, right):
    assert left.keys() == right.keys()
    assert torch.equal(left["state"], right["state"])
    assert torch.equal(left["image"], right["image"])
    assert left["instruction"] == right["instruction"]


def test_processes_end_by_themselves():
    """One that waits for its own lock at its end is aborted a second later."""
    there = hosted()
    processes = [one._process for one in there._processes]
    there.reset(None, range(4))
    there.close()
    assert [one.returncode for one in processes] == [0, 0]


@pytest.mark.parametrize(("num_envs", "num_processes"), [(1, 1), (5, 2)])
def test_processes_give_the_same_episodes_as_one(walk, num_envs, num_processes):
    serial = SerialEnvironments(lambda: walk(limit=7), num_envs)
    there = hosted(num_envs=num_envs, num_processes=num_processes, limit=7)
    try:
        assert there.spec == serial.spec
        seeds = list(range(num_envs))
        same(there.reset(None, seeds), serial.reset(None, seeds))
        for turn in range(6):
            chunk = actions(num_envs, 3, turn)
            left, right = there.step(chunk), serial.step(chunk)
            same(left.observation, right.observation)
            for name in ("reward", "terminated", "truncated", "success", "steps", "failed"):
                assert torch.equal(getattr(left, name), getattr(right, name)), name
            over = left.done.nonzero()[:, 0].tolist()
            if over:
                same(there.reset(over, over), serial.reset(over, over))
        assert torch.equal(there.render([0]), serial.render([0]))
        assert not there.failures
    finally:
        there.close()
        there.close()


def test_steps_of_different_environments_go_on_beside_each_other(walk):
    """Begun before the first is ended; both are in both processes, with other work between."""
    serial = SerialEnvironments(lambda: walk(limit=7), 4)
    there = hosted(limit=7)
    groups = [0, 2], [1, 3]
    try:
        same(there.reset(None, range(4)), serial.reset(None, range(4)))
        for turn in range(6):
            chunks = [actions(2, 3, turn), actions(2, 3, 10 + turn)]
            ends = [there.begin_step(chunk, ids) for chunk, ids in zip(chunks, groups, strict=True)]
            for ids, chunk, end in zip(groups, chunks, ends, strict=True):
                left, right = end(), serial.step(chunk, ids)
                same(left.observation, right.observation)
                for name in ("reward", "terminated", "truncated", "success", "steps", "failed"):
                    assert torch.equal(getattr(left, name), getattr(right, name)), name
                over = [ids[row] for row in left.done.nonzero()[:, 0].tolist()]
                if over:  # of the first group, while the second one steps
                    same(there.reset(over, over), serial.reset(over, over))
    finally:
        there.close()


def test_a_step_that_nobody_ends_is_in_nobodys_way(walk):
    serial, there = SerialEnvironments(walk, 4), hosted()
    try:
        for vector in (there, serial):
            vector.reset(None, range(4))
        there.begin_step(actions(2), [0, 1])
        serial.step(actions(2), [0, 1])
        left, right = (vector.step(actions(4, seed=1)) for vector in (there, serial))
        same(left.observation, right.observation)
        there.begin_step(actions(4))
    finally:
        there.close()


def test_episodes_move_between_processes_and_one(walk):
    there, here = hosted(), SerialEnvironments(walk, 4)
    try:
        there.reset([1, 2], [1, 2])
        there.step(actions(2), [1, 2])
        here.restore(there.state())
        left, right = (v.step(actions(2, 3, 1), [1, 2]) for v in (there, here))
        same(left.observation, right.observation)
        there.restore(here.state())
        left, right = (v.step(actions(2, 3, 2), [2, 1]) for v in (there, here))
        same(left.observation, right.observation)
    finally:
        there.close()


def test_views_of_the_shared_memory_are_not_copied():
    with_views, with_copies = hosted(copy=False), hosted(num_envs=2, num_processes=1)
    try:
        seen = with_views.reset(None, [0, 1, 2, 3])
        before = seen["state"].clone()
        again = with_views.step(actions(4)).observation
        assert seen["image"].data_ptr() == again["image"].data_ptr()
        assert not torch.equal(seen["state"], before), "the view shows what is there now"
        kept = with_copies.reset(None, [0, 1])
        before = kept["state"].clone()
        with_copies.step(actions(2))
        assert torch.equal(kept["state"], before)
    finally:
        with_views.close()
        with_copies.close()


def faulty(tmp_path: Path, deadlines=PATIENT, **settings):
    vector = hosted("Faulty", deadlines=deadlines, folder=str(tmp_path), **settings)
    vector.reset(None, [0, 1, 2, 3])
    return vector


@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_process_costs_its_episodes_and_no_other(tmp_path, ended_by):
    vector = faulty(tmp_path)
    try:
        before = vector.pids
        os.kill(before[0], ended_by)
        outcome = vector.step(actions(4))
        assert outcome.failed.tolist() == [True, True, False, False]
        assert vector.failures == Counter(killed=2)
        assert vector.pids[0] != before[0], "started again"
        assert vector.pids[1] == before[1], "untouched"
        others = vector.step(actions(2, 2, 1), [2, 3])
        assert not others.failed.any()
        vector.reset([0, 1], [4, 5])
        assert not vector.step(actions(4)).failed.any()
        assert vector.failures == Counter(killed=2)
    finally:
        vector.close()


@pytest.mark.parametrize("first", [0, 1])
def test_a_process_that_is_killed_costs_all_steps_that_were_begun_there(tmp_path, first):
    vector, groups = faulty(tmp_path), ([0, 2], [1, 3])
    try:
        os.kill(vector.pids[0], signal.SIGSTOP)
        ends = [vector.begin_step(actions(2), ids) for ids in groups]
        os.kill(vector.pids[0], signal.SIGKILL)
        for end in (ends[first], ends[1 - first]):
            assert end().failed.tolist() == [True, False]
        assert vector.failures == Counter(killed=2)
        vector.reset([0, 1], [4, 5])
        assert not vector.step(actions(4)).failed.any()
    finally:
        vector.close()


def test_a_simulator_that_ends_its_process_in_mid_episode(tmp_path, caplog):
    vector = faulty(tmp_path)
    try:
        vector.step(actions(4))
        (tmp_path / "kill").touch()
        outcome = vector.step(actions(4))
        assert "discarded: its process has ended by signal 9" in caplog.text
        assert int(outcome.failed.sum()) == 2
        assert not outcome.reward[outcome.failed].any()
        assert not outcome.observation["state"][outcome.failed].any()
        assert vector.failures == Counter(killed=2)
        again = vector.step(actions(4))
        assert torch.equal(again.failed, outcome.failed), "no episode until it is reset"
        assert vector.failures == Counter(killed=2), "counted once"
    finally:
        vector.close()


def test_a_process_that_hangs_is_killed_at_its_deadline(tmp_path):
    vector = faulty(tmp_path, HURRIED)
    try:
        (tmp_path / "hang").touch()
        outcome = vector.step(actions(4))
        assert int(outcome.failed.sum()) == 2
        assert vector.failures == Counter(hung=2)
        ids = [row for row in range(4) if outcome.failed[row]]
        vector.reset(ids, [7, 8])
        assert not vector.step(actions(4)).failed.any()
    finally:
        vector.close()


def test_a_reset_that_hangs_is_waited_for_once(monkeypatch):
    """It was tried three times, which took longer than a call may take."""
    vector = hosted("Stuck", 2, 2, Deadlines(start=60, reset=0.5, step=30, render=30))
    starts = []
    start = SimulatorProcess.start
    monkeypatch.setattr(SimulatorProcess, "start", lambda one: (starts.append(1), start(one))[1])
    try:
        vector.reset(None, [7, 8])
        assert vector.failures == Counter(hung=1)
        assert len(starts) == 1
        assert vector.step(actions(2)).failed.tolist() == [True, False]
        vector.reset([0], [9])
        assert not vector.step(actions(2)).failed.any()
        assert vector.failures == Counter(hung=1)
    finally:
        vector.close()


def test_what_processes_are_sent_needs_no_version_of_numpy(monkeypatch):
    """NumPy 2 names modules in pickled arrays that an older one does not have."""
    sent = []
    send = SimulatorProcess.send

    def spy(process, command, seconds=60.0):
        sent.append((command[0], pickle.dumps(command)))
        send(process, command, seconds)

    monkeypatch.setattr(SimulatorProcess, "send", spy)
    vector = hosted(num_envs=2, num_processes=1)
    try:
        vector.reset(None, [0, 1])
        vector.step(actions(2))
        vector.restore(vector.state())
        vector.step(actions(2))
    finally:
        vector.close()
    assert {"step", "restore"} <= {name for name, _ in sent}
    assert [name for name, told in sent if b"numpy" in told] == []


def test_a_simulators_own_state_is_pickled_where_the_simulator_is(walk):
    there = hosted(num_envs=2, num_processes=1, restores="saved")
    here = SerialEnvironments(lambda: walk(restores="saved"), 2)
    try:
        there.reset(None, [0, 1])
        there.step(actions(2))
        state = there.state()
        assert all(isinstance(one.saved, bytes) and one.saved for one in pickle.loads(state))
        here.restore(state)
        there.restore(here.state())
        left, right = (vector.step(actions(2, 2, 1)) for vector in (there, here))
        same(left.observation, right.observation)
    finally:
        there.close()


def test_a_process_that_wakes_up_does_not_keep_the_host_from_waking_the_others():
    there = hosted(num_envs=3, num_processes=3)
    policies = [os.sched_getscheduler(pid) for pid in there.pids]
    there.close()
    assert policies == [os.SCHED_BATCH] * 3


class Commands:
    """A connection on which commands come at their time; who reads one earlier sleeps until then.

    Args:
        now: the time, in a list of one.
    """

    def __init__(self, now):
        self.now, self.due, self.number = now, None, -1
        self.theirs, self.ours = Pipe()
        self.fileno, self.close = self.theirs.fileno, self.ours.close

    def comes_in(self, seconds):
        self.due, self.number = self.now[0] + seconds, self.number + 1

    def pass_time(self, seconds):
        self.now[0] += seconds
        if self.due is not None and self.now[0] >= self.due:
            self.ours.send(("command", self.number))
            self.due = None

    def recv(self):
        if self.due is not None:
            self.pass_time(self.due - self.now[0])
        return self.theirs.recv()


@pytest.mark.parametrize(
    ("processes", "first_took", "awake"),
    [(2, 0.5, True), (2, 2.0, False), (3, 0.5, False)],
    ids=["the-last-one-came-soon", "the-last-one-came-late", "more-processes-than-cores"],
)
def test_a_process_awaits_the_next_command_awake_where_they_follow_each_other(
    monkeypatch, processes, first_took, awake
):
    """Two cores; time passes while a process sleeps or gives way."""
    now, gave_way = [0.0], []
    connection = Commands(now)
    asked = child._Child(connection)
    monkeypatch.setattr(child, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(child, "SOON", 1.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})

    def give_way():
        gave_way.append(now[0])
        connection.pass_time(0.25)

    monkeypatch.setattr(os, "sched_yield", give_way)
    asked.obey("make", ["toy_environments:Walk", {}, 1])
    spec = replace(asked.slots.spec, num_envs=processes)
    asked.obey("attach", [anonymous_memory(), spec, processes, 0, 0])
    for number, took in enumerate((first_took, 0.75, 3.0)):
        connection.comes_in(took)
        assert asked.next_command() == ("command", number)
    connection.close()
    second = [first_took + part for part in (0.0, 0.25, 0.5)]
    third = [first_took + 0.75 + part for part in (0.0, 0.25, 0.5, 0.75)]  # and then it sleeps
    assert gave_way == (second if awake else []) + (third if processes == 2 else [])


def test_a_simulator_has_one_thread_whatever_its_lane_has(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    vector = hosted("Threads", 1, 1)
    try:
        vector.reset(None, [0])
        assert vector.step(actions(1)).reward.tolist() == [[1.0, 1.0]]
    finally:
        vector.close()


def test_many_slow_steps_are_no_hang(tmp_path):
    """The deadline counts from the last sign of life, not from the command."""
    vector = hosted("Slow", num_envs=2, num_processes=1, deadlines=HURRIED, seconds=0.15)
    try:
        vector.reset(None, [0, 1])
        assert not vector.step(actions(2, 4)).failed.any()
    finally:
        vector.close()


@pytest.mark.parametrize(("name", "cause"), [("nan", "nan"), ("raise", "error")])
def test_a_bad_step_costs_one_episode_and_no_process(tmp_path, name, cause):
    vector = faulty(tmp_path)
    try:
        before = vector.pids
        (tmp_path / name).touch()
        outcome = vector.step(actions(4))
        assert int(outcome.failed.sum()) == 1
        assert vector.failures == Counter({cause: 1})
        assert vector.pids == before
        (index,) = (row for row in range(4) if outcome.failed[row])
        vector.reset([index], [9])
        assert not vector.step(actions(4)).failed.any()
    finally:
        vector.close()


def test_a_reset_that_fails_three_times(tmp_path):
    vector = faulty(tmp_path)
    try:
        before = vector.pids
        (tmp_path / "noreset").write_text("3")
        vector.reset([0], [5])
        assert vector.failures == Counter(reset=1)
        outcome = vector.step(actions(4))
        assert outcome.failed.tolist() == [True, False, False, False]
        vector.reset([0], [5])
        assert vector.pids == before, "an episode runs beside it"
        assert not vector.step(actions(4)).failed.any()
        vector.reset([0, 1], [6, 7])
        assert vector.pids[0] != before[0], "started again when none ran there"
        assert vector.pids[1] == before[1]
        assert not vector.step(actions(4)).failed.any()
        assert vector.failures == Counter(reset=1)
    finally:
        vector.close()


def test_a_reset_goes_on_after_every_failure(tmp_path):
    vector = faulty(tmp_path, HURRIED)
    try:
        for name in ("kill", "hang", "nan", "raise"):
            (tmp_path / name).touch()
            failed = vector.step(actions(4)).failed
            assert failed.any()
            over = failed.nonzero()[:, 0].tolist()
            vector.reset(over, over)
            assert not vector.step(actions(4)).failed.any()
        assert vector.failures == Counter(killed=2, hung=2, nan=1, error=1)
    finally:
        vector.close()


def test_what_the_user_got_wrong_is_said_as_such():
    with pytest.raises(UserError, match="did you mean 'limit'"):
        hosted(limmit=3)
    with pytest.raises(UserError, match="each process needs an environment"):
        hosted(num_envs=1, num_processes=2)


def test_a_process_that_does_not_start_names_its_cause():
    with pytest.raises(RunFailed, match="no such display"):
        hosted("Unmakeable", num_envs=1, num_processes=1)


def test_no_process_outlives_its_host():
    vector = hosted(num_envs=2)
    pids = vector.pids
    vector.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


HOST = """
import time
from m2flow.environments.process import Source
from m2flow.environments.processes import ProcessEnvironments
print(*ProcessEnvironments(Source("toy_environments:Walk"), 2, 2).pids, flush=True)
time.sleep(600)
"""


def test_no_process_outlives_a_host_that_is_killed():
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    words, environment = [sys.executable, "-c", HOST], {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment) as host:
        pids = [int(word) for word in host.stdout.readline().split()]
        host.kill()
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while any(runs(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_answer_is_not_kept_where_its_process_is_lost_before_the_step_is_ended():
    """It saw zeros, and what its limit had ended was learned from."""
    hurried = Deadlines(start=60, reset=0.5, step=30, render=30)
    there = hosted("Stuck", deadlines=hurried, limit=1)
    try:
        there.reset(None, range(4))
        end = there.begin_step(actions(2), [0, 2])
        there.reset([1], [7])  # hangs, and takes its neighbour along
        outcome = end()
        assert outcome.failed.tolist() == [True, False]
        assert outcome.truncated.tolist() == [False, True]
    finally:
        there.close()
