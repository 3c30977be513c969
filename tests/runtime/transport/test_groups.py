"""Process groups between lanes: made on demand, without waiting for others, and kept."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from m2flow.errors import RunFailed, UserError
from m2flow.runtime.transport import groups as module
from m2flow.runtime.transport.groups import (
    PRIVATE_NETWORK,
    STORE,
    LaneGroups,
    check_private,
    choose_interface,
    interface_of,
    lane_sets_of,
)
from tests.training.lane_processes import LaneProcesses


@pytest.fixture(scope="module")
def lanes() -> Iterator[LaneProcesses]:
    with LaneProcesses(3) as lanes:
        yield lanes


def summed(groups: LaneGroups, lane_set: tuple[int, ...]) -> tuple[list[float], int] | None:
    if dist.get_rank() not in lane_set:
        return None
    mine = 10.0 ** dist.get_rank()
    strided = torch.full((4, 2), mine)[:, 0]
    tensors = [torch.tensor([mine]), strided, torch.tensor(mine, dtype=torch.float64)]
    groups.all_reduce(lane_set)(tensors)
    assert strided.tolist() == [tensors[0].item()] * 4
    return [tensors[0].item(), tensors[2].item()], int(groups.group(lane_set).size())


def ensured_and_summed(
    groups: LaneGroups, lane_sets: list[tuple[int, ...]]
) -> list[tuple[list[float], int] | None]:
    groups.ensure(lane_sets)
    return [summed(groups, lane_set) for lane_set in lane_sets]


def test_groups_sum_over_their_lanes(lanes: LaneProcesses) -> None:
    found = lanes(ensured_and_summed, [(0, 1, 2), (0, 2), (2, 1)])
    everyone, first_last, last_two = ([111.0] * 2, 3), ([101.0] * 2, 2), ([110.0] * 2, 2)
    assert found == [
        [everyone, first_last, None],
        [everyone, None, last_two],
        [everyone, first_last, last_two],
    ]


def least(groups: LaneGroups) -> list[int]:
    groups.ensure([(0, 1, 2)])
    least_of = groups.least((2, 0, 1))
    own = dist.get_rank()
    return [least_of(number) for number in (own + 5, 3 - own, 7)]


def test_lanes_agree_on_the_least(lanes: LaneProcesses) -> None:
    assert lanes(least) == [[5, 1, 7]] * 3


def kept(groups: LaneGroups) -> list[bool]:
    groups.ensure([(0, 1, 2)])
    before = dict(groups._groups)
    groups.ensure([(2, 1, 0), (0, 1)])
    return [
        all(groups._groups[members] is group for members, group in before.items()),
        groups._groups.keys() - before.keys() <= {(0, 1)},
    ]


def test_another_plan_makes_only_what_is_new(lanes: LaneProcesses) -> None:
    assert lanes(kept) == [[True, True]] * 3


def wait_for_files(*paths: Path) -> None:
    """Wait until other lanes have said so much; longer than a group waits for its members."""
    deadline = time.monotonic() + 50
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def made_without_the_third(groups: LaneGroups, folder: Path) -> list[float] | None:
    """The third lane asks for the group when the two others have made it and summed over it."""
    lane = dist.get_rank()
    if lane == 2:
        wait_for_files(folder / "0", folder / "1")
    groups._groups.pop((0, 1), None)
    groups.ensure([(0, 1)])
    if lane == 2:
        return None
    found, _ = summed(groups, (0, 1)) or ([], 0)
    (folder / str(lane)).touch()
    return found


def test_nobody_waits_for_a_lane_that_is_no_member(lanes: LaneProcesses, tmp_path: Path) -> None:
    assert lanes(made_without_the_third, tmp_path) == [[11.0] * 2, [11.0] * 2, None]


def mesh_of_two(groups: LaneGroups) -> list[object]:
    groups.ensure(lane_sets_of([(2, 1)]))
    if dist.get_rank() == 0:
        return []
    make = groups.mesh([(2, 1)])
    mesh = make()
    same = make() is mesh and groups.mesh([(1, 2)])() is mesh
    shard = mesh["shard"]
    tensor = torch.tensor([dist.get_rank()])
    dist.all_reduce(tensor, group=mesh.get_group("shard"))
    return [same, mesh.mesh.tolist(), mesh.mesh_dim_names, shard.get_local_rank(), tensor.item()]


def test_a_mesh_stands_on_any_lanes_in_ascending_order(lanes: LaneProcesses) -> None:
    first, *others = lanes(mesh_of_two)
    assert first == []
    names = ("replicate", "shard")
    assert others == [[True, [[1, 2]], names, rank, 3] for rank in (0, 1)]


def test_the_groups_that_gangs_need() -> None:
    assert lane_sets_of([(3,)]) == []
    assert lane_sets_of([(3,), (1,)]) == [(1, 3)]
    assert lane_sets_of([(3,), (1,)], sums=False) == []
    assert lane_sets_of([(1, 0)], sums=False) == lane_sets_of([(1, 0)])
    assert lane_sets_of([(1, 0)]) == [(0, 1), (0,), (1,)]
    pairs = lane_sets_of([(2, 3), (1, 0)])
    assert pairs == [(0, 1, 2, 3), (2, 3), (0, 1), (0, 2), (1, 3)]


def test_a_later_deadline_holds_for_groups_that_are_there(tmp_path: Path) -> None:
    """The error names the deadline that was in force: not the 30 s that the group was made with."""
    with LaneProcesses(2) as two:
        error, _ = two(waits_for_two, tmp_path)
    assert "Timed out waiting 1000ms" in error


def waits_for_two(groups: LaneGroups, folder: Path) -> str:
    """The first lane's error; the second waits until that has been raised."""
    groups.ensure([(0, 1)])
    groups.init(Path("ignored"), timeout_seconds=1)
    given_up = folder / "given up"
    if dist.get_rank():
        wait_for_files(given_up)
        return ""
    with pytest.raises(RuntimeError) as caught:
        groups.all_reduce((0, 1))([torch.zeros(1)])
    given_up.touch()
    return str(caught.value)


def in_worlds(groups: LaneGroups, folder: Path) -> list[object]:
    """What the first and the last lane find alone, and all three once the second has joined."""
    lane, found = dist.get_rank(), list[object]()
    if lane == 1:
        groups.close()  # as a new process, which has joined no world
    for number, world, keeper in ((1, (0, 2), 2), (2, (0, 1, 2), 1)):
        if lane not in world:
            continue
        store = folder / f"{STORE}{number}"
        groups.init(store, timeout_seconds=30, world=world, keeper=keeper)
        groups.ensure(lane_sets_of([world]))
        total = torch.tensor([10**lane])
        groups.all_reduce(world)([total])
        mesh = groups.mesh([world])()
        found.append([int(total), dist.get_rank(), mesh["shard"].size(), mesh.mesh.tolist()])
    return found


def test_a_world_may_lack_lanes_and_take_one_in(tmp_path: Path) -> None:
    with LaneProcesses(3) as three:
        first, new, last = three(in_worlds, tmp_path)
    assert first == [[101, 0, 2, [[0, 1]]], [111, 0, 3, [[0, 1, 2]]]]
    assert last == [[101, 1, 2, [[0, 1]]], [111, 2, 3, [[0, 1, 2]]]]
    assert new == [[111, 1, 3, [[0, 1, 2]]]]


def test_the_store_of_an_earlier_world_is_removed(tmp_path: Path) -> None:
    with LaneProcesses(3) as three:
        three(in_worlds, tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [f"{STORE}2"]


def what_strangers_hear(groups: LaneGroups) -> tuple[list[str], list[bytes]]:
    """The hosts on which this lane listens; what listeners answer to a query of PyTorch's store."""
    groups.ensure([(0, 1)])
    groups.all_reduce((0, 1))([torch.ones(1)])
    listening = [x.laddr for x in psutil.Process().net_connections("tcp") if x.status == "LISTEN"]
    answers = []
    for host, port in listening:
        with socket.create_connection((host, port)) as stranger:
            stranger.settimeout(0.3)
            stranger.sendall(VALIDATE + PING)
            with suppress(TimeoutError, ConnectionError):
                answers.append(stranger.recv(100))
    return [host for host, _ in listening], [answer for answer in answers if answer]


VALIDATE = bytes([0]) + (0x3C85F7CE).to_bytes(4, "little")
PING = bytes([13]) + (7).to_bytes(4, "little")
"""What PyTorch's store answers to anybody: a greeting, then a number that it sends back."""


def test_no_stranger_reaches_a_store_on_one_machine() -> None:
    with LaneProcesses(2) as two:
        for hosts, answers in two(what_strangers_hear):
            assert set(hosts) <= {"127.0.0.1"}  # Gloo's
            assert answers == []


def test_pytorch_s_own_store_answers_anybody() -> None:
    """The probe of the test above is one."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    with socket.create_connection(("127.0.0.1", store.port)) as stranger:
        stranger.settimeout(60)
        stranger.sendall(VALIDATE + PING)
        assert stranger.recv(100) == PING[1:]


@pytest.mark.parametrize(
    ("address", "named", "refusal"),
    [
        ("10.77.0.1", "", None),
        ("fe80::1%eth0", "", None),
        ("8.8.4.4", "", "8.8.4.4 is an address of a public network"),
        ("8.8.4.4", "8.8.0.0/16", None),
        ("10.77.0.1", "8.8.0.0/16", "10.77.0.1 is an address of another network"),
        ("10.77.0.1", "ours", "M2FLOW_PRIVATE_NETWORK: no network"),
    ],
)
def test_process_groups_between_machines_want_a_private_network(
    address: str, named: str, refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PRIVATE_NETWORK, named)
    if refusal is None:
        check_private(address)
        return
    with pytest.raises(UserError, match=refusal):
        check_private(address)


def test_the_interface_that_has_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    addresses = Path("/proc/net/if_inet6")
    if addresses.exists() and f"{1:032x} " in addresses.read_text():
        assert interface_of("::1") == "lo"
    with pytest.raises(RunFailed, match=r"192\.0\.2\.7; name one in GLOO_SOCKET_IFNAME"):
        interface_of("192.0.2.7")


def test_loopback_serves_one_node_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "interface_of", {"10.77.0.1": "eth7"}.__getitem__)
    for node_address, gloo, nccl in ((None, "lo", "=lo"), ("10.77.0.1", "eth7", "=eth7")):
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
        choose_interface(node_address)
        assert os.environ["GLOO_SOCKET_IFNAME"] == gloo
        assert os.environ["NCCL_SOCKET_IFNAME"] == nccl
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    choose_interface("10.77.0.1")
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("ib0", "=ib0")


def test_a_lane_that_needs_no_collective_joins_nothing() -> None:
    LaneGroups(0, 2).close()
    with pytest.raises(AssertionError, match="has not joined"):
        LaneGroups(0, 2).ensure([(0, 1)])
