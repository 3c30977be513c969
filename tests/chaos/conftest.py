"""Lanes for a flow of workers that die, and what it gives undisturbed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    pytest.importorskip("ray")
    from m2flow.runtime.driver.pool import LanePool
    from tests.chaos.dying_workers import LANES

    with LanePool(LANES) as lanes:
        yield lanes


@pytest.fixture(scope="module")
def undisturbed() -> list[Any]:
    from tests.chaos.dying_workers import APART, Death, seen, start

    with start(APART, Death(), None) as run:
        return seen(run).figures
