"""Clusters by their text: `16x8xH100` is 16 machines with 8 H100 each, whether or not they exist.

Parts are joined by `+`: `2x8xH100+1x16xL40S`, or `1x8xA100-80GB+1x32xCPU` for lanes of cores beside
lanes of accelerators. Lanes are numbered in the order of the text.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

from m2flow.engine.plan import LaneSpec
from m2flow.errors import UserError
from m2flow.plan.profile.hardware import Device, device_named

MOST_LANES = 16_384
"""A choice for more would take minutes."""

EXAMPLES = "16x8xH100, 1x8xA100-80GB, 2x8xH100+1x16xL40S or 1x32xCPU"


@dataclass(frozen=True, slots=True)
class Machines:
    """Machines that are alike.

    Attributes:
        nodes: how many.
        device: which; its `lanes_per_node` is how many there are in each.
    """

    nodes: int
    device: Device

    @property
    def num_lanes(self) -> int:
        return self.nodes * self.device.lanes_per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.device.lanes_per_node}x{self.device.name}"


@dataclass(frozen=True, slots=True)
class Cluster:
    """All machines of a run."""

    machines: tuple[Machines, ...]

    @property
    def num_lanes(self) -> int:
        return sum(part.num_lanes for part in self.machines)

    @property
    def kinds(self) -> dict[str, Device]:
        """Kinds of lanes: `gpu` or `cpu` where all of that kind are alike, else the device's name.

        Of machines with the same device and different counts of it, the first one's figures count.
        """
        every = {part.device.name: part.device for part in reversed(self.machines)}
        alike = Counter(device.kind for device in every.values())
        return {
            device.kind if alike[device.kind] == 1 else name.lower(): device
            for name, device in reversed(every.items())
        }

    def lanes_of(self, kind: str) -> int:
        """How many lanes of a kind there are."""
        name = self.kinds[kind].name
        return sum(part.num_lanes for part in self.machines if part.device.name == name)

    def __str__(self) -> str:
        return "+".join(map(str, self.machines))


def parse_cluster(text: str, key: str = "cluster") -> Cluster:
    """The cluster that a text means.

    Args:
        text: parts `MxNxDEVICE` (M machines with N of the device each) or `NxDEVICE` (one
            machine), joined by `+`; devices are those of `m2flow.plan.profile.hardware`.
        key: whose value it is, for errors.

    Raises:
        UserError: a part does not parse, counts nothing, or names a device without figures; or
            there are more than MOST_LANES.
    """
    cluster = Cluster(tuple(_machines(part, text, key) for part in text.split("+")))
    if cluster.num_lanes > MOST_LANES:
        raise UserError("has too many lanes", key=key, value=text, expected=f"{MOST_LANES} at most")
    return cluster


def _machines(part: str, text: str, key: str) -> Machines:
    match = re.fullmatch(r"(?:([0-9]+)[xX*])?([0-9]+)[xX*]([A-Za-z][A-Za-z0-9_-]*)", part.strip())
    if match is None:
        turned = re.fullmatch(r"([A-Za-z][A-Za-z0-9_-]*?)[xX*:]([0-9]+)", part.strip())
        raise UserError(
            f"the part {part.strip()!r} is not machines x devices x name",
            key=key,
            value=text,
            expected=EXAMPLES,
            hint=f"did you mean '1x{turned[2]}x{turned[1]}'?" if turned else None,
        )
    nodes, lanes = int(match[1] or 1), int(match[2])
    if nodes < 1 or lanes < 1:
        raise UserError(
            f"the part {part.strip()!r} has no lane", key=key, value=text, expected=EXAMPLES
        )
    device = device_named(match[3], key)
    return Machines(nodes, replace(device, lanes_per_node=lanes))


def lane_specs(cluster: Cluster) -> tuple[LaneSpec, ...]:
    """The lanes of a cluster, with the memory that states and calls may take on each."""
    lanes: list[LaneSpec] = []
    kind_of = {one.name: kind for kind, one in cluster.kinds.items()}
    machines = [part for part in cluster.machines for _ in range(part.nodes)]
    for node, part in enumerate(machines):
        kind, room = kind_of[part.device.name], part.device.usable_bytes
        for number in range(part.device.lanes_per_node):
            gpu = number if part.device.kind == "gpu" else None
            cores = () if gpu is not None else (number,)
            lanes.append(LaneSpec(len(lanes), kind, cores, gpu, node=node, memory_bytes=room))
    return tuple(lanes)
