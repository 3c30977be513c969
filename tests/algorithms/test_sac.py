"""Soft actor-critic's targets and losses, against one row at a time in plain Python."""

from __future__ import annotations

import math

import torch
from torch import nn

from m2flow.algorithms.sac import actor_loss, critic_loss, polyak, soft_targets, temperature_loss

ROWS = [
    # reward, discount, the two critics, log-probability
    (1.0, 0.99, (2.0, 3.0), -0.5),
    (-2.0, 0.0, (7.0, -9.0), 4.0),  # terminated
    (0.5, 0.9, (-1.0, -4.0), 1.5),
]
TEMPERATURE = 0.3


def columns() -> tuple[torch.Tensor, ...]:
    rewards, discounts, critics, logprobs = zip(*ROWS, strict=True)
    plain = [torch.tensor(column, dtype=torch.float64) for column in (rewards, discounts, logprobs)]
    return plain[0], plain[1], torch.tensor(critics, dtype=torch.float64).T, plain[2]


def test_targets() -> None:
    rewards, discounts, critics, logprobs = columns()
    found = soft_targets(rewards, discounts, critics, logprobs, torch.tensor(TEMPERATURE))
    wanted = [r + g * (min(q) - TEMPERATURE * p) for r, g, q, p in ROWS]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64))
    assert found[1] == -2.0, "nothing follows a termination"


def test_losses() -> None:
    _, _, critics, logprobs = columns()
    targets = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)
    wanted = [
        sum((one - target) ** 2 for one in q) / 2
        for (_, _, q, _), target in zip(ROWS, targets.tolist(), strict=True)
    ]
    assert critic_loss(critics, targets).tolist() == wanted
    found = actor_loss(critics, logprobs, torch.tensor(TEMPERATURE, dtype=torch.float64))
    wanted = [TEMPERATURE * p - min(q) for _, _, q, p in ROWS]
    assert found.tolist() == wanted


def test_the_temperature_rises_where_the_entropy_is_too_low() -> None:
    logprobs = torch.tensor([2.0, 4.0])  # an entropy of -3
    for target, sign in ((-1.0, 1), (-5.0, -1)):
        log_temperature = nn.Parameter(torch.tensor(math.log(TEMPERATURE)))
        temperature_loss(log_temperature, logprobs, target).mean().backward()
        assert log_temperature.grad is not None
        assert -log_temperature.grad.sign() == sign


def test_targets_follow_by_a_share() -> None:
    target, source = nn.Linear(1, 2), nn.Linear(1, 2)
    with torch.no_grad():
        target.bias.fill_(1.0)
        source.bias.fill_(3.0)
    polyak(target, source, 0.25)
    assert target.bias.tolist() == [1.5, 1.5]
    assert source.bias.tolist() == [3.0, 3.0]
