"""Lanes for all runs of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from m2flow.plan import parse_lanes
from m2flow.runtime.driver.pool import LanePool


@pytest.fixture(scope="module")
def two_lanes() -> Iterator[LanePool]:
    """They have imported what the workers need when the second run begins."""
    with LanePool(parse_lanes("cpu:2")) as lanes:
        yield lanes
