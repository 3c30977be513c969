"""Devices and the wires between them: what data sheets promise, and the share that is attained.

Peak figures are the vendors' own, for dense bfloat16, for single precision without tensor cores
(torch's default for float32), and for one direction of a wire. The shares of a
wire's peak that programs attain have their sources; shares of arithmetic and of memory bandwidth
belong to the work (`m2flow.plan.profile.work`). This module knows no model and no plan.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from m2flow.errors import UserError, suggestion

GB = 1_000_000_000
TERA = 1e12

SMALL_COLLECTIVE_SECONDS = 10e-6
"""An all-reduce of a few kilobytes inside a node. An assumption near what nccl-tests print for
8 B to 64 KB on NVLink (8 to 15 us)."""

NVLINK_FRACTION = 0.8
"""nccl-tests print about 360 GB/s bus bandwidth of 450 for large all-reduces on 8 H100."""

NETWORK_FRACTION = 0.8
"""nccl-tests over several nodes print about 40 GB/s of 50 for each NDR adapter."""

PCIE_FRACTION = 0.8
"""Copies from and to pinned memory reach about 50 of 63 GB/s on PCIe 5.0 x16."""

DISPATCH_SECONDS = 1e-3
"""Of a call beside the lane's own work: a command to a process and its answer. An assumption, of
the order of a call of a Ray actor."""

MESSAGE_SECONDS = {"node": 100e-6, "cluster": 300e-6}
"""Of a message between two processes. Assumptions, of the order of a socket's."""

USABLE_MEMORY = 0.9
"""Of a device's memory that states and calls may take; the rest is the context, workspaces and
fragmentation. The default of vLLM's `gpu_memory_utilization`."""


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator, or a core.

    Attributes:
        name: as cluster strings have it.
        kind: `gpu` or `cpu`, as lanes have it.
        flops_per_second: peak, dense bfloat16 (single precision on a core).
        single_flops_per_second: peak in single precision.
        memory_bytes: its own memory; of a core, its share of the machine's.
        memory_bytes_per_second: peak bandwidth of that memory.
        peer_bytes_per_second: to another device of the machine, one direction.
        host_bytes_per_second: to the machine's memory, one direction.
        network_bytes_per_second: to another machine, one direction, this device's share.
        lanes_per_node: of a usual machine.
    """

    name: str
    kind: str
    flops_per_second: float
    single_flops_per_second: float
    memory_bytes: int
    memory_bytes_per_second: float
    peer_bytes_per_second: float
    host_bytes_per_second: float
    network_bytes_per_second: float
    lanes_per_node: int = 8

    @property
    def usable_bytes(self) -> int:
        """What states and calls may take."""
        return int(self.memory_bytes * USABLE_MEMORY)

    def host_copy_seconds(self, num_bytes: float) -> float:
        """Seconds of a copy between the device and pinned memory of its machine."""
        return num_bytes / (self.host_bytes_per_second * PCIE_FRACTION)

    def collective_bytes_per_second(self, lanes: int, apart: int = 1) -> float:
        """Attained for each lane in a collective: over the network past one machine.

        A ring leaves a machine once, by the adapters of all of its members there.

        Args:
            lanes: from the first member of the ring to the last one.
            apart: from one member to the next; as much as `lanes` where every member sends to
                every other one, each by its own adapter.
        """
        near = self.peer_bytes_per_second * NVLINK_FRACTION
        if lanes <= self.lanes_per_node:
            return near
        adapters = max(1, self.lanes_per_node // apart)
        return min(near, adapters * self.network_bytes_per_second * NETWORK_FRACTION)


PCIE_4, PCIE_5 = 31.5 * GB, 63.0 * GB
"""x16, one direction. PCI-SIG: 16 and 32 GT/s, 128b/130b coding."""

NVLINK_3, NVLINK_4, NVLINK_5 = 300.0 * GB, 450.0 * GB, 900.0 * GB
"""Of all links of an A100, H100 and B200, one direction (NVIDIA's data sheets give both)."""

NVLINK_H800 = 200.0 * GB
"""The H800's links, of which the data sheet has 400 GB/s both ways."""

HDR, NDR, ETHERNET_100 = 25.0 * GB, 50.0 * GB, 12.5 * GB
"""InfiniBand at 200 and 400 Gb/s, Ethernet at 100 Gb/s. DGX A100 has an HDR adapter for each
accelerator, DGX H100, H200 and B200 an NDR one (NVIDIA's DGX data sheets)."""

DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        # NVIDIA A100 Tensor Core GPU data sheet (SXM): 312 and 19.5 TFLOPS, 1,555 / 2,039 GB/s,
        # NVLink 600 GB/s both ways, PCIe 4.0.
        Device(
            "A100-40GB", "gpu", 312 * TERA, 19.5 * TERA, 40 * GB, 1555.0 * GB, NVLINK_3, PCIE_4, HDR
        ),
        Device(
            "A100-80GB", "gpu", 312 * TERA, 19.5 * TERA, 80 * GB, 2039.0 * GB, NVLINK_3, PCIE_4, HDR
        ),
        # NVIDIA H100 Tensor Core GPU data sheet (SXM): 1,979 TFLOPS with sparsity and 67, 3.35
        # TB/s, NVLink 900 GB/s both ways, PCIe 5.0.
        Device("H100", "gpu", 989.5 * TERA, 67 * TERA, 80 * GB, 3350.0 * GB, NVLINK_4, PCIE_5, NDR),
        # NVIDIA H200 data sheet (SXM): as the H100, 141 GB at 4.8 TB/s.
        Device(
            "H200", "gpu", 989.5 * TERA, 67 * TERA, 141 * GB, 4800.0 * GB, NVLINK_4, PCIE_5, NDR
        ),
        # Lenovo ThinkSystem H800 product guide: as the H100, NVLink 400 GB/s both ways.
        Device(
            "H800", "gpu", 989.5 * TERA, 67 * TERA, 80 * GB, 3350.0 * GB, NVLINK_H800, PCIE_5, NDR
        ),
        # NVIDIA H20 figures as vendors of servers print them: 148 and 44 TFLOPS, 96 GB at 4.0 TB/s,
        # NVLink 900 GB/s both ways.
        Device("H20", "gpu", 148 * TERA, 44 * TERA, 96 * GB, 4000.0 * GB, NVLINK_4, PCIE_5, NDR),
        # NVIDIA DGX B200 data sheet, an eighth of it: 1,440 GB at 64 TB/s, NVLink 14.4 TB/s both
        # ways; HGX B200: 36 PFLOPS with sparsity for eight, 75 TFLOPS for each.
        Device("B200", "gpu", 2250 * TERA, 75 * TERA, 180 * GB, 8000.0 * GB, NVLINK_5, PCIE_5, NDR),
        # NVIDIA L40S data sheet: 362 and 91.6 TFLOPS, 48 GB at 864 GB/s, PCIe 4.0, no NVLink.
        # Servers of it usually have Ethernet.
        Device(
            "L40S", "gpu", 362 * TERA, 91.6 * TERA, 48 * GB, 864.0 * GB, PCIE_4, PCIE_4,
            ETHERNET_100,
        ),
        # NVIDIA Ada GPU architecture white paper, table 2: 165.2 TFLOPS in bfloat16 with
        # float32 sums, 82.6 in float32, 24 GB at 1,008 GB/s, PCIe 4.0.
        Device(
            "RTX-4090", "gpu", 165.2 * TERA, 82.6 * TERA, 24 * GB, 1008.0 * GB, PCIE_4, PCIE_4,
            ETHERNET_100,
        ),
        # One core of an Intel Xeon Platinum 8480+ (Intel ARK: 56 cores, 2.0 GHz base, 8 channels of
        # DDR5-4800): 2 fused multiply-adds x 16 floats a cycle; a 56th of 307 GB/s; 8 GB a core.
        Device(
            "CPU", "cpu", 0.128 * TERA, 0.128 * TERA, 8 * GB, 5.5 * GB, 5.5 * GB, 5.5 * GB,
            12.5 * GB / 56, 56,
        ),
    )
}  # fmt: skip
"""Every device that a cluster string may name."""

ALIASES = {
    "A100-40G": "A100-40GB", "A100-80G": "A100-80GB", "H100-80GB": "H100", "RTX4090": "RTX-4090",
}  # fmt: skip
"""Other ways in which people write the same."""

_BY_LETTERS = {name.lower(): device for name, device in DEVICES.items()}
_BY_LETTERS |= {alias.lower(): DEVICES[name] for alias, name in ALIASES.items()}


def device_named(name: str, key: str = "cluster") -> Device:
    """The device of that name, in small or large letters.

    Raises:
        UserError: there is none; names the nearest.
    """
    device = _BY_LETTERS.get(name.strip().lower())
    if device is None:
        hint = suggestion(name.strip().upper(), DEVICES)
        if name.strip().lower() == "a100":
            hint = "say A100-40GB or A100-80GB"
        raise UserError(
            "no figures for such a device",
            key=key,
            value=name,
            expected=f"one of {', '.join(DEVICES)}",
            hint=hint,
        )
    return device


OTHERS = {"MIG", "LAPTOP", "PCIE", "NVL"}
"""Words in a driver's names of a part of a device, or of another one of its name: the figures above
are of SXM modules, and cards compute and read less (H100 PCIe: 756 TFLOPS and 2,000 GB/s of 989.5
and 3,350 by NVIDIA's data sheet)."""


def device_called(name: str) -> Device | None:
    """The device that a driver names so, such as "NVIDIA A100-SXM4-80GB"; None without figures."""
    words = re.split(r"[\s-]+", name.upper())
    if OTHERS & set(words):
        return None
    for device in DEVICES.values():
        if device.kind == "gpu" and set(device.name.upper().split("-")) <= set(words):
            return device
    return None
