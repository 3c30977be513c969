"""Payloads between the exchanges of two processes, and who may reach them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from m2flow.engine.plan import LaneSpec
from m2flow.flow.batch import Batch
from m2flow.runtime.lane.exchange import Exchange, ItemsKey
from m2flow.runtime.lane.store import Store
from m2flow.runtime.transport.listening import LOOPBACK
from m2flow.runtime.transport.peering import PeerLost

SOON = 10.0


class SlowStore(Store):
    """Takes its time."""

    def gather(self, *wanted: object) -> Batch:
        time.sleep(0.5)
        return super().gather(*wanted)  # type: ignore[arg-type]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Exchange, Exchange]]:
    """A launcher's exchange, and that of lane 3."""
    folder = tmp_path / f"m2flow-test-{tmp_path.name}"
    lane = Exchange(3, 0, "here", None, folder, b"key")
    launcher = Exchange(None, -1, "here", None, folder, b"key")
    launcher.introduce({3: lane.address})
    yield launcher, lane
    launcher.close()
    lane.close()


def test_a_fetch_need_not_be_waited_for(pair: tuple[Exchange, Exchange]) -> None:
    """The driver's loop had stood still until the items of a step were there."""
    launcher, lane = pair
    store = SlowStore()
    batch = Batch({"x": torch.arange(4)})
    store.put("step", 1, 2, batch)
    lane.serve(store)
    started = time.monotonic()
    fetches = [launcher.fetch_later(3, ItemsKey("step", 1, 2, (item,)), SOON) for item in range(4)]
    assert time.monotonic() - started < 0.25
    assert [int(one.result(SOON)["x"][0]) for one in fetches] == [0, 1, 2, 3]
    assert time.monotonic() - started < 4 * 0.5, "all at once"
    lane.close()
    with pytest.raises(PeerLost):
        launcher.fetch_later(3, ItemsKey("step", 1, 2, (0,)), SOON).result(SOON)


def test_a_lane_that_comes_back_leaves_no_connection_of_before(tmp_path: Path) -> None:
    """Each loss of a lane had cost the launcher, and every other lane, a descriptor."""
    folder = tmp_path / f"m2flow-test-{tmp_path.name}"
    launcher = Exchange(None, -1, "here", None, folder, b"key")
    counts = []
    for _ in range(6):
        lane = Exchange(3, 0, "here", None, folder, b"key")
        launcher.introduce({3: lane.address})
        store = Store()
        store.put("step", 1, 2, Batch({"x": torch.arange(1)}))
        lane.serve(store)
        fetched = launcher.fetch_later(3, ItemsKey("step", 1, 2, (0,)), SOON).result(SOON)
        assert fetched["x"].tolist() == [0]
        lane.close()
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    launcher.close()
    assert counts[-1] <= counts[1], counts


def test_on_one_machine_all_sockets_are_unix_or_loopback() -> None:
    pytest.importorskip("ray")
    from m2flow.runtime.driver.pool import LanePool

    with LanePool([LaneSpec(0), LaneSpec(1)]) as pool:
        for address in pool.addresses.values():
            assert address.host == LOOPBACK
            assert address.meeting_port is None, "a store of process groups"
            connections = psutil.Process(address.process_id).net_connections("tcp")
            assert len([x for x in connections if x.status == "LISTEN"]) == 1, "Ray's"
            assert address.line.tcp is None
            assert address.peer.endpoint.tcp is None
