"""Process groups between lanes: a world made once, a group for each set of lanes, made on demand.

They live as long as the lane's process, or until a lane joins the world. A group is named by its
lanes and kept, so another plan makes only what it has not seen. Lanes are positions among all
lanes; the ranks of the world count those that have joined it. CPU tensors travel by Gloo, those of
a GPU by NCCL. Knows neither plans nor workers.

Lanes find each other by a store. On one machine it is a file in a folder that no other user can
enter; between machines one lane keeps it, on a port that asks for no secret.

PyTorch numbers groups as they are made, so every lane of the world asks for every group in one
order, also for those it is not in. Only the members of a new group wait for each other.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from m2flow.errors import RunFailed, UserError

Lanes = tuple[int, ...]

Grid = tuple[int, int]

Address = tuple[str, int]
"""Host and port."""

PRIVATE_NETWORK = "M2FLOW_PRIVATE_NETWORK"
"""The variable that names the network between machines, such as 128.30.0.0/16."""

STORE = "world-"
"""How the name of a store's file begins; a number follows that grows with each world."""


def lane_sets_of(
    replicas: Sequence[Lanes], grid: Grid | None = None, *, sums: bool = True
) -> list[Lanes]:
    """The groups that a worker with these gangs needs: see `LaneGroups.ensure`.

    None for a single lane, nor for single lanes that do not sum over all of them. Else all of its
    lanes together; and where gangs have several lanes, each gang, and each set of lanes that hold
    the same pieces in all gangs; and where each gang is a grid of (rows, lanes of a row), its rows
    and columns.
    """
    rows, columns = _rows(replicas), _columns(replicas)
    everyone = tuple(sorted(lane for row in rows for lane in row))
    if len(everyone) == 1 or not (sums or len(rows[0]) > 1):
        return []
    gangs = [*rows, *columns] if len(rows[0]) > 1 else []
    for lanes in rows if grid is not None else ():
        gangs += [*_grid_rows(lanes, grid), *zip(*_grid_rows(lanes, grid), strict=True)]
    return [everyone, *(lanes for lanes in gangs if lanes != everyone)]


def _rows(replicas: Sequence[Lanes]) -> tuple[Lanes, ...]:
    assert len({len(lanes) for lanes in replicas}) == 1, f"gangs of unequal size: {replicas}"
    return tuple(tuple(sorted(lanes)) for lanes in replicas)


def _columns(replicas: Sequence[Lanes]) -> tuple[Lanes, ...]:
    return tuple(tuple(sorted(lanes)) for lanes in zip(*_rows(replicas), strict=True))


def _grid_rows(gang: Lanes, grid: Grid | None) -> list[Lanes]:
    assert grid is not None and len(gang) == grid[0] * grid[1], (gang, grid)
    return [gang[first : first + grid[1]] for first in range(0, len(gang), grid[1])]


class LaneGroups:
    """This lane's membership in the world of all lanes and in groups of some.

    Cheap until `init`, and a lane that no collective ever needs never calls it.

    Args:
        lane_index: position of this lane among all lanes.
        num_lanes: how many lanes there are.
        listener: between machines a socket that listens on the port which the other lanes are told,
            should this lane keep the store; it belongs to the store from then on.
    """

    def __init__(
        self, lane_index: int, num_lanes: int, listener: socket.socket | None = None
    ) -> None:
        self._lane, self._num_lanes, self._listener = lane_index, num_lanes, listener
        self._world: Lanes = ()
        self._number = 0
        self._timeout: datetime.timedelta | None = None
        self._groups: dict[Lanes, Any] = {}
        self._meshes: dict[tuple[tuple[Lanes, ...], str, tuple[str, str]], Any] = {}

    def init(
        self,
        store: Path | Address,
        *,
        timeout_seconds: float,
        node_address: str | None = None,
        world: Lanes | None = None,
        keeper: int = 0,
        number: int = 0,
    ) -> None:
        """Join the world: a collective of its lanes the first time, and whenever its lanes change.

        Later calls only set the longest that a collective may take from then on; where the lanes
        meet does not matter any more. Another world takes the place of the one before: its groups
        are gone, and no worker may hold one of them.

        Args:
            store: a new file, where all lanes are on one machine: its name is `STORE` with a
                number, its folder open to their user alone. Else where one lane keeps the store.
            timeout_seconds: the longest that a collective may take.
            node_address: this lane's own address; needed where lanes are on several machines.
            world: the lanes that join; None for all.
            keeper: the lane that keeps the store, or sees to its files; between machines it has not
                kept one before.
            number: of the world: it is another one where the same lanes have new processes.

        Raises:
            RunFailed: no interface has `node_address`.
        """
        import torch
        import torch.distributed as dist

        timeout = datetime.timedelta(seconds=timeout_seconds)
        world = tuple(range(self._num_lanes)) if world is None else tuple(sorted(world))
        if (world, number) != (self._world, self._number):
            self.close()
        if self._timeout is None:
            assert isinstance(store, Path) or node_address is not None
            choose_interface(None if isinstance(store, Path) else node_address)
            self._world, self._number = world, number
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                store=self._store(store, timeout, kept_here=self._lane == keeper),
                rank=world.index(self._lane),
                world_size=len(world),
                timeout=timeout,
            )
            if isinstance(store, Path) and self._lane == keeper:  # nobody is in another world now
                remove_stores(store)
        elif timeout != self._timeout:
            own = [group for lanes, group in self._groups.items() if self._lane in lanes]
            for group in (None, *own):
                dist.distributed_c10d._set_pg_timeout(timeout, group)
        self._timeout = timeout

    def _store(self, place: Path | Address, timeout: datetime.timedelta, *, kept_here: bool) -> Any:
        """The file, or the store that one lane keeps on the port that it has held since it started.

        A store in a file has listeners and connections nowhere.
        """
        from torch._C._distributed_c10d import FileStore, TCPStore

        if isinstance(place, Path):
            store = FileStore(str(place), len(self._world))
            store.set_timeout(timeout)
            return store
        host, port = place
        held: dict[str, Any] = {}
        if kept_here and self._listener is not None:
            held["master_listen_fd"] = self._listener.detach()
            self._listener = None
        size = len(self._world)
        return TCPStore(host, port, size, is_master=kept_here, timeout=timeout, **held)

    def ensure(self, lane_sets: Iterable[Lanes]) -> None:
        """Make the groups that do not exist yet.

        All lanes of the world pass the same sets in the same order. The members of a new group wait
        for each other there; a lane that is in none of them goes on at once.
        """
        import torch.distributed as dist

        assert self._timeout is not None, "the lane has not joined the world"
        for lanes in lane_sets:
            members = tuple(sorted(lanes))
            assert len(set(members)) == len(members), f"a lane occurs twice in {lanes}"
            if members not in self._groups:
                self._groups[members] = dist.new_group(self._ranks(members), timeout=self._timeout)

    def _ranks(self, lanes: Lanes) -> list[int]:
        return [self._world.index(lane) for lane in lanes]

    def all_reduce(self, lanes: Lanes) -> Callable[[Sequence[Any]], None]:
        """A function that sums lists of tensors in place over these lanes, one bucket a dtype."""
        return lambda tensors: sum_over(self.group(lanes), tensors)

    def least(self, lanes: Lanes) -> Callable[[int], int]:
        """A function that gives the least of the numbers that these lanes call it with."""

        def least_of_lanes(number: int) -> int:
            import torch
            import torch.distributed as dist

            numbers = torch.tensor([number])  # on the CPU: an accelerator would have to be awaited
            dist.all_reduce(numbers, op=dist.ReduceOp.MIN, group=self.group(lanes))
            return int(numbers)

        return least_of_lanes

    def mesh(self, replicas: Sequence[Lanes], device: str = "cpu") -> Callable[[], Any]:
        """Return a function that makes the mesh of a worker's gangs, for `Gang.mesh`.

        The mesh has the dimensions "replicate" and "shard"; row r holds the lanes of replica r in
        ascending order, whatever the order in which the plan lists them. Its groups are there
        already (`lane_sets_of`, `ensure`), so nobody waits. Asked again, it is the same mesh.

        Args:
            replicas: the lanes of each gang; gangs of equal size.
            device: "cpu", or "cuda" with or without a number.
        """
        return partial(self._mesh, _rows(replicas), device, ("replicate", "shard"))

    def grid(self, replicas: Sequence[Lanes], grid: Grid, device: str = "cpu") -> Callable[[], Any]:
        """Return a function that makes the mesh of this lane's gang, for `Gang.grid`."""
        (gang,) = (row for row in _rows(replicas) if self._lane in row)
        return partial(self._mesh, tuple(_grid_rows(gang, grid)), device, ("column", "row"))

    def _mesh(self, rows: tuple[Lanes, ...], device: str, names: tuple[str, str]) -> Any:
        """The mesh with these rows of lanes: the same whenever it is asked for."""
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        kind = device.split(":", maxsplit=1)[0]
        if (rows, kind, names) not in self._meshes:
            (row,) = (row for row in rows if self._lane in row)
            (column,) = (column for column in zip(*rows, strict=True) if self._lane in column)
            self._meshes[rows, kind, names] = DeviceMesh.from_group(
                [self.group(column), self.group(row)],
                kind,
                mesh=torch.tensor([self._ranks(lanes) for lanes in rows], dtype=torch.int),
                mesh_dim_names=names,
            )
        return self._meshes[rows, kind, names]

    def group(self, lanes: Lanes) -> Any:
        """The process group of these lanes, which `ensure` has made."""
        members = tuple(sorted(lanes))
        assert members in self._groups, f"no group was made for the lanes {lanes}"
        return self._groups[members]

    def close(self) -> None:
        """Leave all groups and the world."""
        if self._timeout is None:
            return
        import torch.distributed as dist

        self._groups.clear()
        self._meshes.clear()
        self._timeout, self._world = None, ()
        dist.destroy_process_group()


class NoGroups(LaneGroups):
    """Process groups are of processes; lanes that share one have none, and say so when asked."""

    def init(self, *_: Any, **__: Any) -> None:
        """Meet nobody."""

    def ensure(self, *_: Any, **__: Any) -> None:
        """Make no group."""

    def group(self, lanes: Lanes) -> Any:
        raise UserError("lanes that share a process have no collectives", key="lanes_per_process")


def remove_stores(current: Path) -> None:
    """Remove the files of worlds before the current one."""
    number = int(current.name.removeprefix(STORE))
    for file in current.parent.glob(f"{STORE}*"):
        if int(file.name.removeprefix(STORE)) < number:
            file.unlink(missing_ok=True)


def check_private(address: str) -> None:
    """Refuse an address at which strangers might come to process groups, which ask for no secret.

    Raises:
        UserError: it is not of the network that `PRIVATE_NETWORK` names; where it names none, it is
            an address of the public Internet.
    """
    named = os.environ.get(PRIVATE_NETWORK)
    try:
        network = ipaddress.ip_network(named) if named else None
    except ValueError:
        raise UserError(
            "no network", key=PRIVATE_NETWORK, value=named, expected="such as 10.77.0.0/16"
        ) from None
    ours = _without_zone(address)
    if not (ours in network if network else not ours.is_global):
        raise UserError(
            f"process groups between machines ask for no secret, and {address} is an address of "
            f"{'another' if network else 'a public'} network",
            key="lanes",
            hint="give `ray start` the --node-ip-address of a private network, or name in "
            f"{PRIVATE_NETWORK} the network that strangers cannot reach",
        )


def sum_over(group: Any, tensors: Sequence[Any]) -> None:
    """Sum tensors in place over a process group, one bucket for each dtype and device.

    All buckets are on their way together: small ones cost the time of a message each.
    """
    import torch
    import torch.distributed as dist

    by_type: dict[tuple[Any, Any], list[Any]] = {}
    for tensor in tensors:
        by_type.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    buckets = [
        some[0]
        if len(some) == 1 and some[0].is_contiguous()
        else torch.cat([tensor.reshape(-1) for tensor in some])
        for some in by_type.values()
    ]
    for work in [dist.all_reduce(bucket, group=group, async_op=True) for bucket in buckets]:
        work.wait()
    for some, bucket in zip(by_type.values(), buckets, strict=True):
        if bucket is some[0]:
            continue
        sizes = [tensor.numel() for tensor in some]
        for tensor, summed in zip(some, bucket.split(sizes), strict=True):
            tensor.copy_(summed.view_as(tensor))


def choose_interface(node_address: str | None) -> None:
    """Tell Gloo and NCCL which network interface to use: loopback, if all lanes are on one node.

    What the user has set in `GLOO_SOCKET_IFNAME` or `NCCL_SOCKET_IFNAME` stays. Left alone, Gloo
    would look the host name up, which often is a loopback address that other nodes cannot reach,
    and NCCL would listen on the first interface that is none.

    Args:
        node_address: the node's own address; None where no lane is on another node.
    """
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        here = "lo" if node_address is None else interface_of(node_address)
        os.environ["GLOO_SOCKET_IFNAME"] = here
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "=" + os.environ["GLOO_SOCKET_IFNAME"])


def interface_of(address: str) -> str:
    """The name of the network interface that has an IPv4 or IPv6 address of this host.

    Raises:
        RunFailed: none has it.
    """
    wanted = _without_zone(address)
    for name, known in psutil.net_if_addrs().items():
        ours = (one.address for one in known if one.family in (socket.AF_INET, socket.AF_INET6))
        if wanted in map(_without_zone, ours):
            return name
    raise RunFailed(
        f"no network interface of this node has its address {address}; name one in "
        "GLOO_SOCKET_IFNAME that the other nodes can reach"
    )


def _without_zone(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address.partition("%")[0])
