"""Payloads between the exchanges of two processes, and who may reach them."""

from __future__ import annotations

import gc
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
import torch.distributed as dist

from m2flow.engine.plan import LaneSpec, Placement, Plan
from m2flow.errors import UserError
from m2flow.flow.batch import Batch
from m2flow.flow.worker import Worker
from m2flow.runtime.lane.exchange import Exchange, ItemsKey
from m2flow.runtime.lane.host import LaneHost
from m2flow.runtime.lane.loading import save
from m2flow.runtime.lane.orders import STATES, Save
from m2flow.runtime.lane.store import Store
from m2flow.runtime.transport.blocks import Blocks
from m2flow.runtime.transport.groups import LaneGroups
from m2flow.runtime.transport.listening import LOOPBACK
from m2flow.runtime.transport.peering import PeerLost
from tests.patience import SOON
from tests.training.lane_processes import LaneProcesses

if TYPE_CHECKING:  # it wants Ray
    from m2flow.runtime.driver.pool import LanePool


class SlowStore(Store):
    """Answers when so many have asked, and nobody before."""

    def __init__(self, askers: int) -> None:
        super().__init__()
        self._together = threading.Barrier(askers)

    def gather_alike(self, *wanted: object) -> list[Batch]:
        self._together.wait(SOON)
        return super().gather_alike(*wanted)  # type: ignore[arg-type]


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
    store = SlowStore(askers=5)
    batch = Batch({"x": torch.arange(4)})
    store.put("step", 1, 2, batch)
    lane.serve(store)
    fetches = [launcher.fetch_later(3, ItemsKey("step", 1, 2, (item,)), SOON) for item in range(4)]
    assert not any(one.done() for one in fetches), "nobody has answered yet"
    store._together.wait(SOON)  # all four have asked at once
    assert [int(one.result(SOON)["x"][0]) for one in fetches] == [0, 1, 2, 3]
    lane.close()
    with pytest.raises(PeerLost):
        launcher.fetch_later(3, ItemsKey("step", 1, 2, (0,)), SOON).result(SOON)


def test_items_of_other_columns_are_fetched_at_once(pair: tuple[Exchange, Exchange]) -> None:
    """Of a loop: rollouts that are over in one call and go on in another differ by columns."""
    launcher, lane = pair
    store = Store()
    store.put("step", 1, 2, Batch({"x": torch.tensor([0, 2])}, [0, 2]))
    store.put("step", 1, 2, Batch({"x": torch.tensor([1]), "told": torch.tensor([7])}, [1]))
    lane.serve(store)
    found = launcher.ask_alike(3, ItemsKey("step", 1, 2, (0, 1, 2)), SOON)
    assert {tuple(one.ids): sorted(one.columns) for one in found} == {
        (0, 2): ["x"],
        (1,): ["told", "x"],
    }


def test_a_way_that_not_all_payloads_can_take_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'link: no way for all payloads .*pigeon.*"stream"'):
        Exchange(None, -1, "here", None, tmp_path, b"key", "pigeon")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Saver(Worker):
    """Its state is one number, many times."""

    number = 0

    def save(self) -> dict[str, torch.Tensor]:
        return {"w": torch.full((4 * LARGE,), self.number)}


def test_a_state_that_is_held_is_not_written_over(tmp_path: Path) -> None:
    """It lies where the lane saved it; the lane has another place for the next one, and no third;
    what is held outlives the lane and its files."""
    folder = tmp_path / f"m2flow-test-{tmp_path.name}"
    lane, launcher = (Exchange(*who, "here", None, folder, b"key") for who in ((3, 0), (None, -1)))
    launcher.introduce({3: lane.address})
    saver = Saver()
    host = LaneHost(3, {}, {"saver": saver})
    lane.serve(host.store)

    def saved() -> torch.Tensor:
        saver.number += 1
        host.store.drop_step("", STATES)
        save(Save(0, "saver", 0), host, lane)
        fetched = launcher.fetch_later(3, ItemsKey("", STATES, 0, (0,)), SOON).result(SOON)
        there: torch.Tensor = fetched["state"][0]["w"]
        assert bool((there == saver.number).all())
        return there

    def files() -> int:
        return len(list(Path("/dev/shm").glob(f"{folder.name}-*")))

    held = saved()
    assert files() == 1, "it is not copied there"
    for _ in range(3):
        kept, held = held, saved()
        assert bool((kept == saver.number - 1).all())
        del kept
    assert files() == 2
    saved()  # given up
    saved()
    assert bool((held == saver.number - 2).all()), "the last one that was kept"
    assert files() == 2
    lane.close()
    assert files() == 0
    assert bool((held == saver.number - 2).all())
    launcher.close()


def test_a_lane_that_comes_back_leaves_no_connection_and_no_memory_of_before(
    tmp_path: Path,
) -> None:
    """Each loss of a lane had cost the launcher, and every other lane, two descriptors, and the
    memory that the lane had last answered in."""
    folder = tmp_path / f"m2flow-test-{tmp_path.name}"
    launcher = Exchange(None, -1, "here", None, folder, b"key")
    counts = []
    for number in range(6):
        lane = Exchange(3, 0, "here", None, folder, b"key")
        launcher.introduce({3: lane.address})
        wait_until(lambda: mapped_and_unlinked(folder.name) == 0)
        store = Store()
        store.put("step", 1, 2, Batch({"x": torch.full((1, LARGE), number)}))
        lane.serve(store)
        fetched = launcher.fetch_later(3, ItemsKey("step", 1, 2, (0,)), SOON).result(SOON)
        assert bool((fetched["x"] == number).all())
        del fetched
        lane.close()
        counts.append(open_files())
        assert mapped_and_unlinked(folder.name) > 0, "it came by shared memory"
    wait_until(lambda: open_files() <= counts[1])
    launcher.close()


def wait_until(holds: Callable[[], bool]) -> None:
    """A lane that is a part of this process lets go of its own when its threads have ended."""
    deadline = time.monotonic() + SOON
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    assert holds()


def mapped_and_unlinked(prefix: str) -> int:
    """Files in shared memory that this process still has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(f"/{prefix}-" in line and line.endswith("(deleted)") for line in lines)


def in_turn(groups: LaneGroups, folder: Path, rounds: int) -> int:
    """Sums of two lanes, each begun by one while the other still fetches from it."""
    groups.ensure([(0, 1)])
    lane = dist.get_rank()
    exchange = Exchange(lane, lane, "here", None, folder, b"key")
    store, found = Store(), 0
    store.put("step", 1, 2, Batch({"x": torch.full((1, LARGE), lane + 1)}, (0,)))
    exchange.serve(store)
    addresses: list[Any] = [None, None]
    dist.all_gather_object(addresses, exchange.address)
    exchange.introduce(dict(enumerate(addresses)))
    for number in range(rounds):
        if number % 2 == lane:
            time.sleep(0.02)  # the other one waits in the sum by now
            key = ItemsKey("step", 1, 2, (0,))
            found += int(exchange.fetch_later(1 - lane, key, SOON).result(SOON)["x"][0, -1])
        total = torch.tensor([number])
        groups.all_reduce((0, 1))([total])
        assert int(total) == 2 * number
    exchange.close()
    return found


LARGE = 1 << 18
ROUNDS = 20


def test_a_lane_within_a_collective_still_answers_its_peers(tmp_path: Path) -> None:
    """Where payloads travel in the order of collectives, one of two lanes waits for ever."""
    with LaneProcesses(2) as two:
        assert two(in_turn, tmp_path / f"m2flow-{tmp_path.name}", ROUNDS) == [ROUNDS, ROUNDS // 2]


def listening(process: psutil.Process) -> list[str]:
    """Addresses on which a process listens; none of one that has ended."""
    with suppress(psutil.NoSuchProcess):
        found = process.net_connections("tcp")
        ips = [one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN]
        return [ip.removeprefix("::ffff:") for ip in ips]  # IPv4 within IPv6
    return []


@pytest.fixture(scope="module")
def own_pool() -> Iterator[LanePool]:
    """Two lanes on a cluster of their own, as a run has them."""
    pytest.importorskip("ray")
    from m2flow.runtime.driver.pool import LanePool

    with LanePool([LaneSpec(0), LaneSpec(1)]) as pool:
        yield pool


def test_on_one_machine_all_sockets_are_unix_or_loopback(own_pool: LanePool) -> None:
    for address in own_pool.addresses.values():
        assert address.host == LOOPBACK
        assert address.meeting_port is None, "a store of process groups"
        assert len(listening(psutil.Process(address.process_id))) == 1, "Ray's"
        assert address.line.tcp is None
        assert address.peer.endpoint.tcp is None
    here = psutil.Process()
    found = {one.pid: listening(one) for one in (here, *here.children(recursive=True))}
    assert {address.process_id for address in own_pool.addresses.values()} <= found.keys()
    assert {ip for addresses in found.values() for ip in addresses} == {LOOPBACK}, found


def test_no_other_user_reads_what_a_pool_has_on_disk_or_in_shared_memory(
    own_pool: LanePool,
) -> None:
    """Stores of process groups have no other protection than their folder."""
    blocks = Blocks(f"{own_pool.folder.name}-9-", None)
    try:
        blocks.take(1 << 20)
        files = list(Path("/dev/shm").glob(f"{own_pool.folder.name}-*"))
        assert files
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    finally:
        blocks.close()
    folders = [own_pool.folder, own_pool._cluster._folder]
    assert [stat.S_IMODE(path.stat().st_mode) for path in folders if path] == [0o700] * 2


STRANGER = """
import sys
from ray._raylet import GcsClient
try:
    print(len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=60)), "machine")
except Exception as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize(
    ("known", "said"),
    [(None, "AuthenticationError"), ("0" * 64, "AuthenticationError"), ("ours", "1 machine")],
)
def test_ray_tells_nobody_anything_who_has_not_got_the_token(
    known: str | None, said: str, own_pool: LanePool
) -> None:
    import ray

    environment = {key: x for key, x in os.environ.items() if not key.startswith("RAY_AUTH")}
    if known is not None:
        token = os.environ["RAY_AUTH_TOKEN"] if known == "ours" else known
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    command = [sys.executable, "-c", STRANGER, ray.get_runtime_context().gcs_address]
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.strip() == said


def test_lanes_of_a_machine_read_a_state_in_one_place(pair: tuple[Exchange, Exchange]) -> None:
    """A run that went back made a copy for each of its lanes, and its launcher was killed."""
    from m2flow.runtime.driver.loading import LoadOrder  # it wants Ray

    launcher, lane = pair
    state = {"a": torch.arange(1 << 20), "b": torch.ones(3)}
    spots = {"learner": Placement(((0, 1, 2, 3),))}
    pool: Any = SimpleNamespace(
        exchange=launcher,
        is_here=lambda _: True,
        positions=tuple,
        new_number=lambda: 1,
        lanes=tuple(map(LaneSpec, range(4))),
    )
    order = LoadOrder(pool, {}, Plan("p", pool.lanes, spots), {"learner": Worker()}, 0)
    sent = [order.of(n, states={"learner": state}).placed["learner"].saved for n in range(4)]
    assert launcher._pool.bytes_resident < 2 * state["a"].nbytes
    for saved in sent:
        found = lane.unwrap(saved)["state"][0]
        assert all(found[name].equal(state[name]) for name in state)
    del order, found
    gc.collect()
    assert launcher._pool.blocks_in_use() == 0


def test_lanes_of_a_machine_read_what_a_relay_has_brought_in_one_place(tmp_path: Path) -> None:
    """Each of them was given a copy of its own, beside one that the relay kept: on a machine of
    eight GPUs as many models."""
    folder = tmp_path / f"m2flow-test-{tmp_path.name}"
    weights = {"a": torch.arange(1 << 20), "b": torch.ones(3)}
    source = Exchange(0, 0, "here", LOOPBACK, folder, b"key")
    there = [Exchange(lane, lane, "there", LOOPBACK, folder, b"key") for lane in range(1, 5)]
    relay, *others = there
    lanes = {lane: one.address for lane, one in enumerate([source, *there])}
    for one in there:
        one.introduce(lanes)
    assert source.weights_out is not None
    export = source.weights_out.lay_out("learner", 1, weights, oldest=1)
    found = [
        one.weights_in._version(replace(export, via=relay.lane), SOON) for one in (relay, *others)
    ]
    for manifest, flat in found:
        assert all(tensor.equal(weights[name]) for name, tensor in manifest.views(flat).items())
    assert relay._pool.bytes_resident < 1.5 * weights["a"].nbytes
    assert relay._pool.blocks_in_use() == 1
    for one in [*others, relay, source]:
        one.close()
