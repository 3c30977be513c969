"""Bytes on a lane by the shape of a model, and what is said where nothing fits."""

from __future__ import annotations

import pytest

from m2flow.errors import UserError
from m2flow.plan.footprint import (
    check_generation_fits,
    check_training_fits,
    generation_footprint,
    kv_tokens_that_fit,
    training_footprint,
)
from m2flow.plan.hardware import DEVICES
from m2flow.plan.models import KNOWN_MODELS
from m2flow.plan.roofline import Layout

H100, L40S = DEVICES["H100"], DEVICES["L40S"]
QWEN, MOE = KNOWN_MODELS["Qwen2.5-7B"], KNOWN_MODELS["Qwen3-30B-A3B"]


def test_state_is_sixteen_bytes_for_each_parameter() -> None:
    assert training_footprint(QWEN, 1, Layout(), 4096).state == 16 * QWEN.parameters
    sharded = training_footprint(QWEN, 8, Layout(), 4096, sharded=True)
    assert sharded.state == 2 * QWEN.parameters
    assert training_footprint(QWEN, 8, Layout(8), 4096).state == sharded.state
    assert training_footprint(QWEN, 8, Layout(), 4096).state > sharded.state
    kept = training_footprint(QWEN, 8, Layout(8), 4096, recomputes=False)
    assert kept.activations > 3 * training_footprint(QWEN, 8, Layout(8), 4096).activations


def test_experts_spread_over_the_ranks() -> None:
    whole = training_footprint(MOE, 8, Layout(), 1024)
    spread = training_footprint(MOE, 8, Layout(expert=8), 1024)
    assert spread.weights == pytest.approx(
        2 * (MOE.parameters - MOE.expert_parameters * 7 / 8), rel=1e-9
    )
    assert spread.weights < whole.weights
    assert spread.optimizer == whole.optimizer


def test_the_cache_fills_what_the_weights_leave() -> None:
    tokens = kv_tokens_that_fit(QWEN, H100, Layout(2))
    held = generation_footprint(QWEN, Layout(2), tokens).total
    assert H100.usable_bytes * 0.999 < held <= H100.usable_bytes


def test_heads_of_the_cache_stay_whole() -> None:
    """Four key-value heads: on eight lanes each has a copy of one."""
    assert MOE.kv_heads == 4
    for lanes in (1, 2, 4):
        assert MOE.kv_bytes_on_lane(lanes) * lanes == MOE.kv_bytes_per_token
    assert MOE.kv_bytes_on_lane(8) == MOE.kv_bytes_on_lane(4)
    four, eight = (kv_tokens_that_fit(MOE, H100, Layout(lanes)) for lanes in (4, 8))
    room = (H100.usable_bytes - MOE.weight_bytes / 8) / (MOE.kv_bytes_per_token / 4)
    assert four < eight == int(room)


def test_what_fits_on_no_lane_count_says_the_smallest_that_would_do() -> None:
    with pytest.raises(UserError, match="at least 2 lanes") as caught:
        check_training_fits(QWEN, 1, H100, 4096)
    assert caught.value.value == "1xH100"
    assert check_training_fits(QWEN, 2, H100, 4096)
    big = KNOWN_MODELS["Qwen2.5-32B"]
    with pytest.raises(UserError, match="at least 2 lanes"):
        check_generation_fits(big, 1, L40S, 4096)
    assert check_generation_fits(big, 2, L40S, 4096)[0] == Layout(2)
    with pytest.raises(UserError, match="lanes with more memory"):
        check_training_fits(QWEN, 8, DEVICES["CPU"], 1_000_000_000)
