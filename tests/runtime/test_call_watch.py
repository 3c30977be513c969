"""A call in the launcher's own process that stalls ends the run, and says where it was."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import suppress

import cloudpickle
import pytest

import m2flow
from m2flow import Batch, Flow, Place, Stream, Worker, loop, stage
from m2flow.engine.plan import LaneSpec, Placement, Plan
from m2flow.errors import RunFailed, Stalled
from m2flow.runtime.driver.call_watch import CallWatch, _Overdue

FOR_EVER = 3600


class Sleeper(Worker):
    """Sleeps for ever in one of its methods, and would not hear of a mere `Exception`."""

    def __init__(self, where: str) -> None:
        self.where = where

    def sleep_in(self, where: str) -> None:
        while where == self.where:
            with suppress(Exception):
                time.sleep(FOR_EVER)

    @stage
    def rest(self, batch: Batch) -> Batch:
        self.sleep_in("rest")
        return batch

    @stage(accumulates=True)
    def train(self, batch: Batch) -> Batch:
        return batch

    @train.finish
    def train_finish(self) -> None:
        self.sleep_in("finish")

    def ask(self) -> None:
        self.sleep_in("ask")


class Sleeping(Flow):
    sleeper: Sleeper

    def step(self, items: Stream) -> Stream:
        return self.sleeper.train(self.sleeper.rest(items))


@pytest.mark.parametrize(
    ("where", "called"),
    [
        ("rest", r"sleeper\.rest \(step 0, call 1\)"),
        ("finish", r"sleeper\.train\.finish \(step 0, mini-batch 0\)"),
        ("ask", r"sleeper\.ask"),
    ],
)
def test_an_eager_run_whose_stage_sleeps_for_ever_ends(where: str, called: str) -> None:
    """It never came back: the deadline is judged between calls, and there was no other call."""
    spots = {"sleeper": Placement(((0,),))}
    plan = Plan("eager", (LaneSpec(0),), spots, deadline_seconds=1.0)
    flow = Sleeping(sleeper=Sleeper(where))
    late = f"^{called} has not finished within its deadline of 1 s$"
    run = m2flow.launch(flow, items_per_step=2, plan=plan)
    with run, pytest.raises(RunFailed, match=late) as caught:
        run.worker_call("sleeper", "ask") if where == "ask" else run.step(Batch({"x": [1, 2]}))
    assert isinstance(caught.value.__cause__, Stalled)
    (stacks,) = caught.value.__cause__.__notes__
    assert "in sleep_in" in stacks
    assert stacks.count("hread 0x") > 1, "those of all threads"


class Slow(Worker):
    """Takes longer than a deadline for all that it does, and has nothing ready before its end."""

    PAUSES, SECONDS = 7, 0.5

    @stage(streaming=True)
    def draw(self, batch: Batch) -> Generator[Batch, Batch | None, None]:
        for _ in range(self.PAUSES):
            time.sleep(self.SECONDS)
            assert (yield batch.select([])) is None
        yield batch

    @stage
    def turn(self, batch: Batch) -> Batch:
        time.sleep(self.SECONDS)
        return batch


class Drawing(Flow):
    slow: Slow

    def step(self, items: Stream) -> Stream:
        return self.slow.draw(items)


class Turning(Flow):
    slow: Slow

    def step(self, items: Stream) -> Stream:
        return loop(self.slow.turn, max_turns=self.slow.PAUSES)(items)


@pytest.mark.parametrize("flow", [Drawing, Turning])
def test_an_eager_call_that_makes_progress_is_not_late(flow: type[Flow]) -> None:
    """It ended at its deadline: only finished items counted as a sign of life."""
    plan = Plan("eager", (LaneSpec(0),), {"slow": Placement(((0,),))}, deadline_seconds=2.0)
    with m2flow.launch(flow(slow=Slow()), items_per_step=2, plan=plan) as run:
        assert run.step(Batch({"x": [1, 2]})).output["x"] == [1, 2]


class Around(Flow):
    sleeper: Sleeper
    slow: Slow

    def step(self, items: Stream) -> Stream:
        return loop(self.slow.turn, self.sleeper.rest, max_turns=2)(items)


def test_a_loop_that_is_late_is_named_by_all_its_stages() -> None:
    """Its first stage was, whichever of them had not come back."""
    spots = {name: Placement(((0,),)) for name in ("sleeper", "slow")}
    plan = Plan("eager", (LaneSpec(0),), spots, deadline_seconds=1.0)
    run = m2flow.launch(Around(sleeper=Sleeper("rest"), slow=Slow()), items_per_step=2, plan=plan)
    late = r"^loop\(slow\.turn, sleeper\.rest\) \(step 0, call \d+\) has not finished within"
    with run, pytest.raises(RunFailed, match=late):
        run.step(Batch({"x": [1, 2]}))


def test_what_a_call_has_given_puts_its_deadline_off() -> None:
    watch = CallWatch(FOR_EVER)
    with watch.over("a call"):
        assert watch._call is not None
        watch._call.left = 0.5
        watch.heard()
        assert watch._call.left >= FOR_EVER
    assert watch._call is None
    watch.close()


def test_a_call_that_is_late_twice_is_interrupted_twice() -> None:
    """One that had caught the first interruption and gone on could not be interrupted again: past
    its deadline and 30 s the process was ended."""
    watch = CallWatch(FOR_EVER)
    watch.close()  # nobody else looks at it
    with watch.over("a call"):
        call = watch._call
        assert call is not None
        for _ in range(2):
            call.left = 0.0
            with pytest.raises(_Overdue):
                watch._interrupt()
            watch._interrupt()  # it was interrupted already
            watch.heard()


def test_a_worker_that_says_it_goes_on_puts_its_deadline_off() -> None:
    """And does nothing by it where no call is watched, or on a thread that is not the call's."""
    place, watch = Place(), CallWatch(FOR_EVER)
    place.goes_on()
    with watch.over("a call"):
        assert watch._call is not None
        watch._call.left = 0.5
        beside = threading.Thread(target=place.goes_on)
        beside.start()
        beside.join()
        assert watch._call.left == 0.5
        place.goes_on()
        assert watch._call.left >= FOR_EVER
    place.goes_on()
    watch.close()


def test_a_worker_of_an_eager_run_can_be_sent_to_lanes() -> None:
    """What puts its deadline off is found where the worker stands, and does not travel."""
    spots = {"sleeper": Placement(((0,),))}
    flow, plan = Sleeping(sleeper=Sleeper("")), Plan("eager", (LaneSpec(0),), spots)
    with m2flow.launch(flow, items_per_step=2, plan=plan) as run:
        run.step(Batch({"x": [1, 2]}))
        sent = pickle.loads(cloudpickle.dumps(flow.sleeper))
    assert sent.place == flow.sleeper.place
    sent.place.goes_on()


def test_nobody_is_hurried_who_debugs() -> None:
    watch, names = CallWatch(0.2), {"__name__": "bdb", "sleep": time.sleep}
    exec("def prompt():\n    sleep(1.5)", names)
    with watch.over("a call"):
        names["prompt"]()  # type: ignore[operator]
    watch.close()


PROGRAM = """
import signal, threading, time
from m2flow.runtime.driver import call_watch

call_watch.GRACE_SECONDS = 0.0

def stuck():
    signal.pthread_sigmask(signal.SIG_BLOCK, [call_watch.SIGNAL])
    with call_watch.CallWatch(0.2).over("a call"):
        time.sleep(3600)

"""


@pytest.mark.parametrize(
    "call", ["stuck()", "threading.Thread(target=stuck).start()"], ids=["native", "thread"]
)
def test_a_call_that_cannot_be_interrupted_ends_the_process(call: str) -> None:
    """A call that never comes back to Python, which a blocked signal stands for; and a thread."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM + call],
        check=False,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1
    first, *stacks = ran.stderr.splitlines()
    late = "a call has not finished within its deadline of 0.2 s, cannot be interrupted"
    assert first == f"the run failed: {late}"
    assert any("in stuck" in line for line in stacks)
