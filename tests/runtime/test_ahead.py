"""Lanes that start while the launcher does something else."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

import pytest

from m2flow.engine.plan import LaneSpec
from m2flow.errors import UserError
from m2flow.runtime.driver import ahead as ahead_module
from m2flow.runtime.driver.ahead import LanesAhead
from tests.runtime.local_cluster import local_cluster

POOL = "m2flow.runtime.driver.pool"


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


@pytest.mark.parametrize("says", [LanesAhead.may_import, LanesAhead.pool])
def test_nothing_is_imported_while_the_launcher_imports(
    says: Callable[[LanesAhead], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads that import what imports each other are given modules that are not done."""
    started, imported = threading.Event(), threading.Event()
    begun = ahead_module.cluster_of

    def started_now(lanes: Sequence[LaneSpec], modules: Sequence[str]) -> Any:
        found = begun(lanes, modules)
        started.set()
        return found

    class Finder:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == POOL:
                imported.set()

    monkeypatch.setattr(ahead_module, "cluster_of", started_now)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    monkeypatch.delitem(sys.modules, POOL)
    with LanesAhead([LaneSpec(0, cores=(0,))]) as ahead:
        assert started.wait(60)
        assert not imported.wait(0.2)
        says(ahead)
        assert imported.wait(60)


def test_what_is_wrong_with_them_is_said_then() -> None:
    ahead = LanesAhead([LaneSpec(0, cores=(0, 1, 2))])
    with ahead, pytest.raises(UserError, match="the lanes need 3 CPUs"):
        ahead.pool()


def test_lanes_that_are_never_asked_for_end_as_well() -> None:
    def fail() -> None:
        ahead.may_import()
        assert ahead._pool.exception(60) is None
        raise KeyError

    with pytest.raises(KeyError), LanesAhead([LaneSpec(0, cores=(0,))]) as ahead:
        fail()
    assert not ahead.pool()._folder.exists()


def test_lanes_that_nobody_wants_any_more_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal during the launcher's imports had the lanes' begin, on top of what it had cut off:
    the command crashed, or ended when the lanes had come up.
    """
    closed: list[str] = []

    class Part:
        def __init__(self, name: str) -> None:
            self.close = partial(closed.append, name)

    parts = Part("cluster"), Part("template")
    monkeypatch.setattr(ahead_module, "cluster_of", lambda *_: parts)
    monkeypatch.setitem(sys.modules, POOL, None)  # which cannot be imported
    with pytest.raises(KeyError), LanesAhead([LaneSpec(0, cores=(0,))]) as ahead:
        raise KeyError
    assert sorted(closed) == ["cluster", "template"]
    with pytest.raises(CancelledError):
        ahead.pool()
