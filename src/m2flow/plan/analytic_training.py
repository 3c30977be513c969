"""What training and passes over answers take on lanes that are not here, and how they are cut.

For each number of lanes the fastest layout that fits is taken, so that a layout of the profile is
told by its lanes alone. A pass of a worker that trains goes through its shards as they lie.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from m2flow.errors import UserError
from m2flow.plan.analytic_work import Act, Forward, Generate, Train, TrainPolicy, Work
from m2flow.plan.footprint import (
    ACTIVATION_BYTES,
    ADAM,
    check_generation_fits,
    check_training_fits,
    replica_sizes,
    running_limit,
    training_footprint,
    training_layouts,
)
from m2flow.plan.hardware import Device
from m2flow.plan.models import WEIGHT_BYTES
from m2flow.plan.profile import Piecewise, StageCost
from m2flow.plan.roofline import (
    Layout,
    Rates,
    action_training_seconds,
    all_reduce_seconds,
    log_probability_seconds,
    training_seconds,
)
from m2flow.plan.sampled import curve, flat, rising

ADAM_BYTES = ADAM.weight + ADAM.gradient + ADAM.optimizer
"""Of a trained parameter."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stage may run.

    Attributes:
        device: of all its lanes.
        lanes: how many there are of this kind.
        most: items that a call is priced for, at most.
        rates: attained shares of the peaks.
    """

    device: Device
    lanes: int
    most: int
    rates: Rates


def training_layout(work: Train, lanes: int, device: Device, rates: Rates) -> Layout | None:
    """The fastest layout of training on so many lanes, of those that fit; None if none does."""
    answers = work.answers
    fitting = training_layouts(work.model, lanes, device, answers.longest, work.sharded)

    def seconds(layout: Layout) -> float:
        return training_seconds(
            work.model, 64 * answers.tokens, answers.context, lanes, device, layout, rates,
            64, answers.deviation, sharded=work.sharded,
        )  # fmt: skip

    return min(fitting, key=seconds, default=None)


def forward_layout(work: Forward, lanes: int, device: Device) -> Layout | None:
    """The fewest lanes a copy that hold the longest answer and fill the lanes evenly."""
    for size in replica_sizes(min(lanes, device.lanes_per_node)):
        layout = Layout(size)
        even = lanes % size == 0 and work.model.heads % size == 0
        if even and running_limit(work.model, device, layout, work.answers.longest):
            return layout
    return None


def trained_on(work: Train, place: Place) -> list[StageCost]:
    """A call is forward and backward passes, `finish` an update.

    Raises:
        UserError: no number of these lanes holds it; says the smallest that would.
    """
    found = []
    for count in rising(place.lanes):
        layout = training_layout(work, count, place.device, place.rates)
        if layout is not None:
            found.append(_trained_by(work, count, layout, place))
    if not found:
        longest = work.answers.longest
        check_training_fits(work.model, place.lanes, place.device, longest, work.sharded)
    return found


def _trained_by(work: Train, count: int, layout: Layout, place: Place) -> StageCost:
    model, answers, device = work.model, work.answers, place.device

    def seconds(n: int) -> float:
        return training_seconds(
            model, n * answers.tokens, answers.context, count, device, layout, place.rates,
            n, answers.deviation, updates=0, sharded=work.sharded,
        )  # fmt: skip

    def finish(replicas: int) -> float:
        return training_seconds(
            model, 0, 0, count * replicas, device, layout, place.rates, updates=1,
            sharded=work.sharded,
        )  # fmt: skip

    taken = training_footprint(model, count, layout, answers.longest, work.sharded)
    return StageCost(
        count,
        curve(seconds, rising(place.most)),
        finish=curve(finish, rising(max(1, place.lanes // count))),
        working=flat(taken.working),
    )


def passed_on(work: Forward, trainer: Train | None, place: Place) -> list[StageCost]:
    """One pass over answers, through the shards of a trainer or through copies of the model.

    Raises:
        UserError: no number of these lanes holds it; says the smallest that would.
    """
    model, answers, device = work.model, work.answers, place.device
    if trainer is None:
        check_generation_fits(model, place.lanes, device, answers.longest)
    found = []
    for count in rising(place.lanes):
        if trainer is None:
            layout = forward_layout(work, count, device)
        else:
            layout = training_layout(trainer, count, device, place.rates)
        if layout is None:
            continue
        taken = ACTIVATION_BYTES * answers.longest * model.hidden / layout.tensor
        found.append(StageCost(count, _passes(work, count, layout, place), working=flat(taken)))
    if not found and trainer is not None:
        check_training_fits(model, place.lanes, device, answers.longest, trainer.sharded)
    return found


def _passes(work: Forward, count: int, layout: Layout, place: Place) -> Piecewise:
    answers = work.answers

    def seconds(n: int) -> float:
        return log_probability_seconds(
            work.model, n * answers.tokens, answers.context, count, place.device, layout,
            place.rates, n, answers.deviation,
        )  # fmt: skip

    return curve(seconds, rising(place.most))


def policy_trained_on(work: TrainPolicy, place: Place) -> list[StageCost]:
    """Training of a sharded action model.

    Raises:
        UserError: no number of these lanes holds it; says the smallest that would.
    """
    device, policy = place.device, work.policy
    least = math.ceil(ADAM_BYTES * policy.parameters / device.usable_bytes)
    if place.lanes < least:
        raise UserError(
            f"training {policy.name} fits on no {place.lanes} lanes of {device.name}",
            key="cluster",
            value=f"{place.lanes}x{device.name}",
            expected=f"at least {least} lanes",
        )
    fitting = [count for count in rising(place.lanes) if count >= least]
    return [_policy_trained_by(work, count, place) for count in fitting]


def _policy_trained_by(work: TrainPolicy, count: int, place: Place) -> StageCost:
    def seconds(n: int) -> float:
        return action_training_seconds(
            work.policy, n * work.chunks, count, place.device, place.rates, updates=0
        )

    def finish(replicas: int) -> float:
        size = work.policy.parameters * WEIGHT_BYTES
        return 1.5 * all_reduce_seconds(size, count * replicas, place.device)

    replicas = rising(max(1, place.lanes // count))
    return StageCost(count, curve(seconds, rising(place.most)), finish=curve(finish, replicas))


def state_bytes(work: Work, lanes: int, device: Device, rates: Rates) -> float:
    """What a worker keeps on each of so many lanes for this work; 0 where that cannot be."""
    match work:
        case Generate():
            return work.model.weight_bytes / lanes
        case Forward():
            copy = forward_layout(work, lanes, device)
            return work.model.weight_bytes / copy.lanes if copy else 0.0
        case Train():
            cut = training_layout(work, lanes, device, rates)
            if cut is None:
                return 0.0
            longest = work.answers.longest
            return training_footprint(work.model, lanes, cut, longest, work.sharded).state
        case Act():
            return float(work.policy.parameters * WEIGHT_BYTES)
        case TrainPolicy():
            return ADAM_BYTES * work.policy.parameters / lanes
    return 0.0
