"""Messages of a control line come out as they went in, and cheaply."""

from __future__ import annotations

import pickletools
from typing import Any

import pytest

from m2flow.engine.messages import CallFailed, CallFinished, ItemsProduced, Part, RunCall
from m2flow.engine.spans import Span
from m2flow.errors import UserError
from m2flow.runtime.lane.orders import Close, Execute, Reports, from_bytes, to_bytes
from m2flow.runtime.lane.reports import Report

SPAN = Span(5, "learner.train", "call", 1.0, 2.0, {"step": 3, "items": 2})
MESSAGES = [
    Close(),
    Execute("step", RunCall(77, 3, 3, (5,), (((Part(0, (1, 2), 4),),),))),
    Reports([Report(ItemsProduced(77, 5, (1, 2), 10)), Report(None, (SPAN,), {"a": 1.0})]),
    Reports([Report(CallFinished(77, 5), (SPAN,))]),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: type(one).__name__)
def test_messages_come_out_as_they_went_in(message: Any) -> None:
    assert from_bytes(to_bytes(message)) == message


def test_an_error_comes_along_with_its_call() -> None:
    report = Report(CallFailed(1, 2, UserError("is wrong", key="a")))
    (back,) = from_bytes(to_bytes(Reports([report]))).reports
    assert isinstance(back.event, CallFailed)
    assert str(back.event.error) == str(UserError("is wrong", key="a"))


def test_frequent_messages_are_made_by_calling_their_class() -> None:
    """Restoring the state of a data class with slots looks its fields up for each object."""
    for message in MESSAGES[1:]:
        calls = [code.name for code, *_ in pickletools.genops(to_bytes(message))]
        assert "BUILD" not in calls
