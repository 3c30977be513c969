"""Lanes that start while the launcher does something else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from m2flow.engine.plan import LaneSpec
from m2flow.errors import UserError
from m2flow.runtime.driver.ahead import LanesAhead
from tests.runtime.local_cluster import local_cluster


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with local_cluster(1):
        yield


def test_lanes_are_there_when_they_are_asked_for_and_end_with_it() -> None:
    with LanesAhead([LaneSpec(0, cores=(0,))], ["m2flow.plan", "json"]) as ahead:
        pool = ahead.pool()
        assert pool is ahead.pool()
        assert list(pool.addresses) == [0]
        assert pool._folder.exists()
    assert not pool._folder.exists()


def test_what_is_wrong_with_them_is_said_then() -> None:
    ahead = LanesAhead([LaneSpec(0, cores=(0, 1, 2))])
    with ahead, pytest.raises(UserError, match="the lanes need 3 CPUs"):
        ahead.pool()


def test_lanes_that_are_never_asked_for_end_as_well() -> None:
    with pytest.raises(KeyError), LanesAhead([LaneSpec(0, cores=(0,))]) as ahead:
        raise KeyError
    assert not ahead.pool()._folder.exists()
