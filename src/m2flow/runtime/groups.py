"""Process groups between lanes: made once at start, one for each set of lanes that a worker has."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class LaneGroups:
    """This lane's membership in the process groups of all workers.

    Args:
        lane_index: position of this lane among all lanes.
        num_lanes: how many lanes there are.
        address: `host:port` where the first lane keeps the store.
        lane_sets: the sets of lane positions that need a group; the same on every lane, in the
            same order, because making a group is collective.
        same_node: all lanes are on one machine.
        timeout_seconds: the longest a collective may take.
    """

    def __init__(
        self,
        lane_index: int,
        num_lanes: int,
        address: str,
        lane_sets: Iterable[tuple[int, ...]],
        *,
        same_node: bool,
        timeout_seconds: float,
    ) -> None:
        import torch
        import torch.distributed as dist

        if same_node:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            init_method=f"tcp://{address}",
            rank=lane_index,
            world_size=num_lanes,
            timeout=datetime.timedelta(seconds=timeout_seconds),
        )
        self._groups = {lanes: dist.new_group(list(lanes)) for lanes in lane_sets}

    def all_reduce(self, lanes: tuple[int, ...]) -> Callable[[Sequence[Any]], None]:
        """A function that sums lists of tensors in place over these lanes, one bucket a dtype."""
        import torch
        import torch.distributed as dist

        group = self._groups[lanes]

        def sum_over_lanes(tensors: Sequence[Any]) -> None:
            by_type: dict[tuple[Any, Any], list[Any]] = {}
            for tensor in tensors:
                by_type.setdefault((tensor.dtype, tensor.device), []).append(tensor)
            for some in by_type.values():
                bucket = torch.cat([tensor.reshape(-1) for tensor in some])
                dist.all_reduce(bucket, group=group)
                sizes = [tensor.numel() for tensor in some]
                for tensor, summed in zip(some, bucket.split(sizes), strict=True):
                    tensor.copy_(summed.view_as(tensor))

        return sum_over_lanes

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()
