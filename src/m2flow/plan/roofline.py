"""Seconds by roofline: the larger of arithmetic and memory traffic, and the wires besides.

Every function takes the shape of a model, a device and a `Layout`, and returns seconds of all lanes
together at work; nothing is measured and nothing is remembered. What a phase attains of a peak are
the fractions of `Rates`. Sequences differ in length, so data-parallel ranks wait for the fullest
one: `fullest` says for how long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

from m2flow.plan.embodied_models import ActionModel
from m2flow.plan.hardware import (
    DECODE_BANDWIDTH_FRACTION,
    DECODE_STEP_SECONDS,
    FORWARD_FRACTION,
    GROUPED_BANDWIDTH_FRACTION,
    GROUPED_FRACTION,
    PCIE_FRACTION,
    SMALL_COLLECTIVE_SECONDS,
    TRAINING_FRACTION,
    Device,
)
from m2flow.plan.models import WEIGHT_BYTES, ModelShape

FORWARD_AND_BACKWARD = 3.0
"""A backward pass is twice the work of a forward pass (Kaplan et al. 2020, section 2.1)."""

RECOMPUTED_FORWARD = 1.0
"""Forward passes besides, where all activations are computed again (Chen et al. 2016)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a replica of a model is cut over lanes.

    Attributes:
        tensor: lanes that share each layer.
        pipeline: lanes, or groups of them, that share the layers out.
        expert: lanes over which the experts are spread; among the data-parallel ranks.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def lanes(self) -> int:
        """Of a replica."""
        return self.tensor * self.pipeline

    def __str__(self) -> str:
        return f"TP{self.tensor} PP{self.pipeline} EP{self.expert}"


@dataclass(frozen=True, slots=True)
class Rates:
    """Attained shares of the peaks; see `m2flow.plan.hardware` for where they come from."""

    training: float = TRAINING_FRACTION
    forward: float = FORWARD_FRACTION
    decode_bandwidth: float = DECODE_BANDWIDTH_FRACTION
    decode_step_seconds: float = DECODE_STEP_SECONDS
    grouped: float = GROUPED_FRACTION
    grouped_bandwidth: float = GROUPED_BANDWIDTH_FRACTION

    def arithmetic(self, model: ModelShape, fraction: float) -> float:
        """A fraction of peak FLOP/s for this model: grouped products of small experts get less."""
        return fraction * (1 - model.expert_share * (1 - self.grouped))

    def bandwidth(self, model: ModelShape) -> float:
        """The fraction of memory bandwidth that decoding this model gets."""
        return self.decode_bandwidth * (1 - model.expert_share * (1 - self.grouped_bandwidth))


def fullest(ranks: int, sequences: float, deviation: float) -> float:
    """The fullest rank's load over the mean one's, sequences dealt out without looking.

    The largest of `ranks` sums of `sequences` independent lengths, by Blom's normal score of the
    largest.

    Args:
        ranks: data-parallel ranks that wait for one another.
        sequences: of each rank.
        deviation: standard deviation of a length over the mean.
    """
    if ranks <= 1 or sequences <= 0:
        return 1.0
    score = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return 1 + deviation * score / math.sqrt(max(sequences, 1.0))


# Wires --------------------------------------------------------------------------------------------


def all_reduce_seconds(num_bytes: float, lanes: int, device: Device) -> float:
    """Of a ring: each lane sends and receives `2 (n - 1) / n` of the bytes."""
    if lanes <= 1:
        return 0.0
    return 2 * (lanes - 1) / lanes * num_bytes / device.collective_bytes_per_second(lanes)


def all_to_all_seconds(num_bytes: float, lanes: int, device: Device) -> float:
    """Each lane keeps an n-th of its bytes and sends the rest away."""
    if lanes <= 1:
        return 0.0
    return (lanes - 1) / lanes * num_bytes / device.collective_bytes_per_second(lanes)


def host_copy_seconds(num_bytes: float, device: Device) -> float:
    """Of offloading or onloading so many bytes of one lane."""
    return num_bytes / (device.host_bytes_per_second * PCIE_FRACTION)


def publish_seconds(
    weight_bytes: float, sender: Device, receiver: Device, to: Layout, same_lanes: bool
) -> float:
    """From a trainer's shards to every generating replica; all lanes receive at once.

    Each lane takes its share of one replica: over the network, or on the same lanes from the peers
    that hold the other shards.
    """
    per_lane = weight_bytes / to.lanes
    if same_lanes:
        return per_lane / sender.collective_bytes_per_second(to.lanes)
    rates = [device.network_bytes_per_second * PCIE_FRACTION for device in (sender, receiver)]
    return per_lane / min(rates)


# Phases -------------------------------------------------------------------------------------------


def prefill_seconds(
    model: ModelShape, tokens: float, context: float, device: Device, layout: Layout, rates: Rates
) -> float:
    """Of one replica, on so many prompt tokens that attend to `context` tokens in the mean."""
    flops = model.forward_flops(tokens, context)
    attained = device.flops_per_second * rates.arithmetic(model, rates.forward) * layout.lanes
    reading = model.weight_bytes_read(tokens) / layout.lanes
    reading /= device.memory_bytes_per_second * rates.bandwidth(model)
    return max(flops / attained, reading) + _shared_layers(model, tokens, device, layout)


def decode_step_seconds(
    model: ModelShape,
    running: float,
    kv_tokens: float,
    device: Device,
    layout: Layout,
    rates: Rates,
) -> float:
    """Of one replica, for one more token of each running request.

    Args:
        running: requests that decode together.
        kv_tokens: in the cache, of all of them.
    """
    traffic = model.weight_bytes_read(running) / layout.lanes
    traffic += kv_bytes_per_lane(model, layout) * kv_tokens
    memory = traffic / (device.memory_bytes_per_second * rates.bandwidth(model))
    context = kv_tokens / running if running else 0.0
    arithmetic = model.forward_flops(running, context) / layout.lanes
    arithmetic /= device.flops_per_second * rates.arithmetic(model, rates.forward)
    wires = _shared_layers(model, running, device, layout)
    return rates.decode_step_seconds + max(memory, arithmetic) + wires


def kv_bytes_per_lane(model: ModelShape, layout: Layout) -> float:
    """Of keys and values of one token on each lane of a replica."""
    return model.kv_bytes_on_lane(layout.tensor) / layout.pipeline


def _shared_layers(model: ModelShape, tokens: float, device: Device, layout: Layout) -> float:
    """What the wires of layers that lanes share take in one forward pass of a replica.

    Heads and feed-forward channels are dealt out, so that a layer ends in two sums over the lanes
    (Shoeybi et al. 2019, arXiv 1909.08053, section 3).
    """
    if layout.tensor == 1:
        return 0.0
    message = tokens * model.hidden * WEIGHT_BYTES
    one = SMALL_COLLECTIVE_SECONDS + all_reduce_seconds(message, layout.tensor, device)
    return 2 * model.layers * one


def _at_work(lanes: int, layout: Layout, sequences: float) -> int:
    """Data-parallel replicas that have a sequence to work on."""
    replicas = max(1, lanes // layout.lanes)
    return replicas if sequences >= replicas else max(1, int(sequences))


def _layer_wires(
    model: ModelShape, tokens: float, device: Device, layout: Layout, passes: float
) -> float:
    """Collectives inside the layers for a rank's tokens, in so many forward passes' worth."""
    message = tokens * model.hidden * WEIGHT_BYTES
    layers = model.layers / layout.pipeline
    tensor = 2 * layers * all_reduce_seconds(message, layout.tensor, device)
    expert = 0.0
    if model.is_moe and layout.expert > 1:
        span = layout.expert * layout.tensor  # the ranks of a group do not lie side by side
        rate = device.collective_bytes_per_second(span)
        sent = message * model.experts_per_token / layout.tensor
        away = (layout.expert - 1) / layout.expert
        expert = 2 * model.moe_layers / layout.pipeline * away * sent / rate
    return passes * (tensor + expert)


def log_probability_seconds(
    model: ModelShape,
    tokens: float,
    context: float,
    lanes: int,
    device: Device,
    layout: Layout,
    rates: Rates,
    sequences: float = math.inf,
    deviation: float = 0.0,
) -> float:
    """A forward pass over whole answers on all lanes (also values of a critic, a reference).

    Args:
        tokens: of all answers, prompts included.
        context: tokens that each of them attends to, in the mean.
        sequences: how many answers the tokens are; `deviation` of their lengths.
    """
    replicas = _at_work(lanes, layout, sequences)
    slowest = fullest(replicas, sequences / replicas, deviation)
    attained = device.flops_per_second * rates.arithmetic(model, rates.forward)
    arithmetic = model.forward_flops(tokens, context) / (replicas * layout.lanes * attained)
    bubble = 1 + (layout.pipeline - 1) / max(1.0, sequences / replicas)
    wires = _layer_wires(model, tokens / replicas, device, layout, passes=1)
    return slowest * (bubble * arithmetic + wires)


def training_seconds(
    model: ModelShape,
    tokens: float,
    context: float,
    lanes: int,
    device: Device,
    layout: Layout,
    rates: Rates,
    sequences: float = math.inf,
    deviation: float = 0.0,
    updates: int = 1,
    sharded: bool = False,
    recomputes: bool = True,
) -> float:
    """Forward, backward and updates on all lanes.

    Args:
        tokens: of all answers of the step, prompts included.
        context: tokens that each of them attends to, in the mean.
        sequences: how many answers the tokens are; `deviation` of their lengths.
        updates: of the optimizer, between which the answers are dealt out evenly; 0 for the
            passes alone.
        sharded: whether the ranks shard the weights and gather them in each pass (FSDP).
        recomputes: whether activations are computed again in the backward pass.
    """
    held = max(1, lanes // layout.lanes)
    replicas = _at_work(lanes, layout, sequences)
    passes = FORWARD_AND_BACKWARD + (RECOMPUTED_FORWARD if recomputes else 0.0)
    per_update = sequences / replicas / max(1, updates)
    slowest = fullest(replicas, per_update, deviation)
    attained = device.flops_per_second * rates.arithmetic(model, rates.training)
    flops = passes * model.forward_flops(tokens, context)
    bubble = 1 + (layout.pipeline - 1) / max(1.0, per_update)
    arithmetic = bubble * flops / (replicas * layout.lanes * attained)
    # A layer's backward pass has as many collectives as a forward pass, not twice as many.
    wires = _layer_wires(model, tokens / replicas, device, layout, passes=passes - 1)
    shard = model.weight_bytes / layout.lanes
    # Gradients are scattered and new weights gathered (bytes of an all-reduce), once an update;
    # sharded ranks gather in both passes.
    gathered = 1.5 if sharded else 1.0
    updating = updates * gathered * all_reduce_seconds(shard, held, device)
    state = 16 * model.parameters / (held * layout.lanes)
    updating += updates * 2 * state / device.memory_bytes_per_second
    return slowest * (arithmetic + wires) + updating


def action_seconds(policy: ActionModel, observations: float, device: Device, rates: Rates) -> float:
    """Of one lane: a chunk of actions for each of so many observations."""
    launching = rates.decode_step_seconds if policy.pass_seconds is None else policy.pass_seconds
    attained = device.flops_per_second * rates.forward
    seconds = observations * policy.prepare_seconds + launching
    seconds += max(
        policy.forward_flops(observations) / attained,
        policy.parameters
        * WEIGHT_BYTES
        / (device.memory_bytes_per_second * rates.decode_bandwidth),
    )
    if not policy.parallel:
        kv_tokens = observations * policy.tokens_per_chunk
        quick = replace(rates, decode_step_seconds=launching)
        seconds += (policy.action_tokens - 1) * decode_step_seconds(
            policy.language, observations, kv_tokens, device, Layout(), quick
        )
    return seconds


def action_training_seconds(
    policy: ActionModel, chunks: float, lanes: int, device: Device, rates: Rates, updates: int = 1
) -> float:
    """Forward, backward (activations computed again) and updates of a sharded policy."""
    passes = FORWARD_AND_BACKWARD + RECOMPUTED_FORWARD
    flops = passes * policy.forward_flops(chunks)
    arithmetic = flops / (lanes * device.flops_per_second * rates.training)
    updating = 1.5 * all_reduce_seconds(policy.parameters * WEIGHT_BYTES, lanes, device)
    return arithmetic + updates * updating
