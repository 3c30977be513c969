"""Prices of policies and simulators: against the published seconds that they come from."""

from __future__ import annotations

import pytest

from m2flow.plan.profile.hardware import DEVICES
from m2flow.workloads.embodied.prices import LIBERO, MANISKILL, OPENVLA, OPENVLA_OFT, training

H100 = DEVICES["H100"]


def test_policies_and_simulators() -> None:
    assert 7.4e9 < OPENVLA.parameters < 7.6e9
    assert OPENVLA_OFT.actions_per_chunk == 8
    assert OPENVLA.forward_flops(2) == pytest.approx(2 * OPENVLA.forward_flops(1))
    # Parallel on the accelerator, a process each on cores: what decides how to spread them.
    assert MANISKILL.seconds(40) < 1.1 * MANISKILL.seconds(10)
    assert LIBERO.seconds(32) > 7 * LIBERO.seconds(4)
    assert LIBERO.seconds(32) == pytest.approx(4.66, rel=0.02)  # measured; never 0.13


@pytest.mark.parametrize(("envs", "seconds"), [(10, 0.40), (20, 0.60), (30, 0.85), (40, 1.15)])
def test_acting_is_what_was_measured(envs: int, seconds: float) -> None:
    """What the tests of RLinf's public repository have for OpenVLA in ManiSkill."""
    assert OPENVLA.act(envs).on(H100) == pytest.approx(seconds, rel=0.1)
    assert OPENVLA_OFT.act(envs).on(H100) < seconds  # one pass, not seven


def test_training_is_declared_in_shards() -> None:
    stage, worker = training(OPENVLA, 80, 8)
    assert [one.layout.name for one in stage.layouts] == ["one", "fsdp2", "fsdp4", "fsdp8"]
    one, *_, eight = (work.call(16).on(H100) for work in stage.layouts)
    assert eight == pytest.approx(one / 8)
    assert worker.states[-1][1] == 2 * OPENVLA.parameters
