"""What a worker says of a `finish` is heard with the result of its step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from m2flow.engine.messages import CallFinished, RunFinish
from m2flow.flow import Batch
from m2flow.runtime.driver.runner import Runner, _Open
from m2flow.runtime.lane.reports import Report


def test_a_note_is_that_of_the_step_that_it_speaks_of() -> None:
    """Two steps are in flight, and the later one has finished while nobody listened."""
    runner: Any = Runner.__new__(Runner)
    call = SimpleNamespace(step=1, command=RunFinish(7, 0, 1, 0, (0,)))
    runner.engine = SimpleNamespace(calls={7: call}, handle=lambda *_: [])
    finished = CallFinished(7, 0)
    reports = [Report(finished, (), {"loss": 1.0}, note="of step 1"), Report(finished, note="too")]
    runner.carrier = SimpleNamespace(wait=lambda seconds: reports)
    runner._open = {step: _Open(Batch({}), 0.0) for step in (0, 1)}
    runner._spans, runner._notes, runner._astray = [], [], False
    runner._sources = {}
    runner._clock, runner._attended = lambda: 0.0, 0.0
    runner.advance()
    assert [runner._open[step].notes for step in (0, 1)] == [[], ["of step 1", "too"]]
