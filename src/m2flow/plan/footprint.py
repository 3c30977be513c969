"""Bytes on a lane by the shape of a model: weights, gradients, optimizer, activations, KV cache.

Mixed-precision Adam by default: 2 bytes of weight and of gradient, 12 of single-precision weight
and two moments for each parameter (Rajbhandari et al. 2020, section 3.1). What does not fit is
told with the smallest number of lanes on which it would.
"""

from __future__ import annotations

from dataclasses import dataclass

from m2flow.errors import UserError
from m2flow.plan.hardware import DEVICES, GB, Device
from m2flow.plan.models import ModelShape
from m2flow.plan.roofline import Layout, kv_bytes_per_lane

ACTIVATION_BYTES = 34
"""Of a layer, token and unit of width, without the attention scores, which fused kernels never
store (Korthikanti et al. 2022, equation 1). With recomputation 2 remain: the layer's input."""

LOGIT_BYTES = 6
"""Of a token and a row of the vocabulary: 16-bit logits and their single-precision copy."""

MOST_LANES = 65_536
"""Where the search for a fit ends."""


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """What a trained parameter takes; `optimizer` is spread over all lanes, always."""

    weight: float = 2.0
    gradient: float = 2.0
    optimizer: float = 12.0


ADAM = ParameterBytes()


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on each lane.

    Attributes:
        weights, gradients, optimizer: of the model's state.
        activations: of a micro-batch in work.
        kv_cache: of running requests.
    """

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    kv_cache: float = 0.0

    @property
    def state(self) -> float:
        """What stays between calls."""
        return self.weights + self.gradients + self.optimizer

    @property
    def working(self) -> float:
        """What a call takes beside it."""
        return self.activations + self.kv_cache

    @property
    def total(self) -> float:
        return self.state + self.working


def _parameters_per_lane(model: ModelShape, layout: Layout) -> float:
    experts = model.expert_parameters
    dense = model.parameters - experts
    return (dense + experts / layout.expert) / layout.lanes


def training_footprint(
    model: ModelShape,
    lanes: int,
    layout: Layout,
    tokens: int,
    sharded: bool = False,
    recomputes: bool = True,
    parameter: ParameterBytes = ADAM,
) -> Footprint:
    """Of training on so many lanes.

    Args:
        layout: of a replica; data-parallel replicas fill the lanes.
        tokens: of a micro-batch, at least those of the longest answer.
        sharded: whether weights and gradients are spread over all lanes (FSDP) too.
        recomputes: whether only each layer's input is kept.
    """
    held = model.parameters / lanes if sharded else _parameters_per_lane(model, layout)
    wide = tokens * model.hidden / layout.tensor
    layers = model.layers / layout.pipeline
    kept = layers * wide * (2 if recomputes else ACTIVATION_BYTES)
    working = ACTIVATION_BYTES * wide if recomputes else 0.0
    if sharded:  # a gathered layer and its gradient
        working += 2 * parameter.weight * model.parameters / model.layers / layout.lanes
    logits = LOGIT_BYTES * tokens * model.vocabulary / layout.tensor
    return Footprint(
        weights=parameter.weight * held,
        gradients=parameter.gradient * held,
        optimizer=parameter.optimizer * model.parameters / lanes,
        activations=kept + working + logits,
    )


def generation_footprint(model: ModelShape, layout: Layout, kv_tokens: float) -> Footprint:
    """Of generating with so many tokens in the cache of a replica."""
    return Footprint(
        weights=model.weight_bytes / layout.lanes,
        kv_cache=kv_tokens * kv_bytes_per_lane(model, layout),
    )


def kv_tokens_that_fit(model: ModelShape, device: Device, layout: Layout) -> int:
    """Tokens that the cache of a replica may hold beside the weights; 0 where none fit."""
    room = device.usable_bytes - model.weight_bytes / layout.lanes
    return max(0, int(room / kv_bytes_per_lane(model, layout)))


def running_limit(model: ModelShape, device: Device, layout: Layout, tokens: float) -> int:
    """Requests of so many tokens in the mean that a replica may run at once; 0 where none fit."""
    return int(kv_tokens_that_fit(model, device, layout) / tokens)


def layouts(model: ModelShape, lanes: int, device: Device) -> list[Layout]:
    """Ways to cut a replica that fill the lanes evenly: tensor within a machine, then pipeline."""
    found = []
    for tensor in (2**n for n in range(8)):
        if tensor > min(lanes, device.lanes_per_node) or model.heads % tensor or lanes % tensor:
            continue
        for pipeline in (2**n for n in range(6)):
            if tensor * pipeline <= lanes and lanes % (tensor * pipeline) == 0:
                replicas = lanes // (tensor * pipeline)
                expert = 1
                while model.is_moe and expert * 2 <= min(replicas, model.experts, 8):
                    if replicas % (expert * 2):
                        break
                    expert *= 2
                if pipeline <= model.layers:
                    found.append(Layout(tensor, pipeline, expert))
    return found


def training_layouts(
    model: ModelShape, lanes: int, device: Device, tokens: int, sharded: bool = False
) -> list[Layout]:
    """The layouts on which training fits, those with fewer lanes a replica first."""
    found = [
        layout
        for layout in layouts(model, lanes, device)
        if training_footprint(model, lanes, layout, tokens, sharded).total <= device.usable_bytes
    ]
    return sorted(found, key=lambda layout: (layout.lanes, layout.pipeline))


def check_training_fits(
    model: ModelShape, lanes: int, device: Device, tokens: int, sharded: bool = False
) -> list[Layout]:
    """The layouts on which training fits on so many lanes.

    Raises:
        UserError: on none; says the smallest number of lanes that would do, if any would.
    """
    found = training_layouts(model, lanes, device, tokens, sharded)
    if found:
        return found
    enough, least = 1, None
    while least is None and enough <= MOST_LANES:
        if training_layouts(model, enough, device, tokens, sharded):
            least = enough
        enough *= 2
    raise UserError(
        f"training {model.name} fits on no {lanes} lane{'s' * (lanes > 1)} of {device.name}",
        key="cluster",
        value=f"{lanes}x{device.name}",
        expected=f"at least {least} lanes" if least else "lanes with more memory",
        hint=None if least else f"micro-batches of {tokens} tokens are too large for it",
    )


def replica_sizes(most: int) -> list[int]:
    """Lanes that a copy of a model may have, at most so many: powers of two."""
    return [2**n for n in range(most.bit_length())]


def check_generation_fits(
    model: ModelShape, lanes: int, device: Device, tokens: float
) -> list[Layout]:
    """The layouts of a generating replica, at most so many lanes, that hold a request's tokens.

    Raises:
        UserError: none; says the smallest number of lanes that would do, if any would on a machine
            like these or on a usual one.
    """

    def fitting(most: int) -> list[Layout]:
        return [
            Layout(size)
            for size in replica_sizes(most)
            if model.heads % size == 0 and running_limit(model, device, Layout(size), tokens)
        ]

    found = fitting(min(lanes, device.lanes_per_node))
    if found:
        return found
    usual = DEVICES.get(device.name, device).lanes_per_node
    more = fitting(max(usual, device.lanes_per_node))
    raise UserError(
        f"generating with {model.name} fits on no {lanes} lane{'s' * (lanes > 1)} of {device.name}",
        key="cluster",
        value=f"{lanes}x{device.name}",
        expected=f"at least {more[0].lanes} lanes of a machine"
        if more
        else "lanes with more memory",
        hint=None
        if more
        else f"weights alone are {model.weight_bytes / GB:.0f} GB and a replica stays on a machine",
    )
