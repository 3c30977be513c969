"""Which machines lanes are on, once some have gone and others have joined."""

from __future__ import annotations

import pytest

from m2flow.engine.plan import LaneSpec
from m2flow.runtime.driver import placing

LANES = (LaneSpec(0), LaneSpec(1, node=1), LaneSpec(2, node=1), LaneSpec(3, node=3))


@pytest.mark.parametrize(
    ("there", "found"),
    [
        ("abcd", "abcd"),
        ("acd", "accd"),  # nobody is on c
        ("ad", "abcd"),
        ("ade", "aecd"),
        ("ae", "aecd"),  # one has joined for two that have gone
        ("aef", "aecf"),
    ],
)
def test_a_machine_on_which_no_lane_is_takes_the_place_of_one_that_is_gone(
    there: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "machines_there", lambda: set(there))
    assert "".join(placing.nodes_left(LANES, "abcd")) == found
