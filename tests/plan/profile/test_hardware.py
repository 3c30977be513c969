"""Device figures: their units make sense, and wrong names get an answer."""

from __future__ import annotations

import pytest

from m2flow.errors import UserError
from m2flow.plan.profile import hardware
from m2flow.plan.profile.hardware import DEVICES, GB, TERA, device_called, device_named


@pytest.mark.parametrize("device", DEVICES.values(), ids=str)
def test_figures_are_in_bytes_flops_and_seconds(device: hardware.Device) -> None:
    cpu = device.kind == "cpu"
    assert (0.01 if cpu else 100) * TERA <= device.flops_per_second <= 5000 * TERA
    assert (1 if cpu else 24) * GB <= device.memory_bytes <= 300 * GB
    assert (1 if cpu else 800) * GB <= device.memory_bytes_per_second <= 10_000 * GB
    assert device.network_bytes_per_second <= device.peer_bytes_per_second
    assert device.usable_bytes < device.memory_bytes


def test_all_devices_that_plans_are_asked_for() -> None:
    named = {"A100-40GB", "A100-80GB", "H100", "H200", "H800", "H20", "B200", "L40S", "RTX-4090"}
    assert set(DEVICES) == named | {"CPU"}


def test_fractions_are_fractions() -> None:
    names = [name for name in vars(hardware) if name.endswith("FRACTION")]
    assert len(names) >= 3
    assert all(0 < getattr(hardware, name) <= 1 for name in names)


def test_a_collective_past_one_machine_goes_over_the_network() -> None:
    h100 = DEVICES["H100"]
    near, adapter = h100.collective_bytes_per_second(8), h100.network_bytes_per_second
    assert near == h100.peer_bytes_per_second * hardware.NVLINK_FRACTION
    far = {apart: h100.collective_bytes_per_second(16, apart) for apart in (1, 4, 8, 16)}
    one = adapter * hardware.NETWORK_FRACTION
    assert far == {1: 8 * one, 4: 2 * one, 8: one, 16: one}, "eight, two or one of a ring's lanes"
    l40s = DEVICES["L40S"]
    assert l40s.collective_bytes_per_second(16) <= l40s.collective_bytes_per_second(8)


def test_names_in_any_letters() -> None:
    assert device_named(" h100 ") is DEVICES["H100"]
    assert device_named("A100-80G") is DEVICES["A100-80GB"]
    assert device_named("rtx4090") is DEVICES["RTX-4090"]


@pytest.mark.parametrize(
    ("name", "hint"), [("A100", "A100-40GB or A100-80GB"), ("H10", "H100"), ("L40", "L40S")]
)
def test_a_wrong_name_gets_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(UserError, match=hint):
        device_named(name)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 3060", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA A100 80GB PCIe", None),
        ("", None),
    ],
)
def test_names_as_drivers_have_them(name: str, device: str | None) -> None:
    found = device_called(name)
    assert (found and found.name) == device
