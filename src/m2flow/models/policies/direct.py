"""Actor-critics of states judged without autograd: their gradients are written out.

Networks of a hundred units take less time than autograd's bookkeeping about them. Here one layer is
two or three products of matrices, forward and back, and nothing else. Results are `evaluate`'s up
to rounding. Knows two heads, Gaussian and categorical, on encoders that actor and critic do not
share; whoever asks for another gets None and uses autograd.

Legend: B batch, F features, K actions of a chunk, A action size, N discrete actions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m2flow.models.policies.distributions import (
    CategoricalHead,
    GaussianHead,
    normal_entropy,
    normal_logprob,
)
from m2flow.models.policies.protocol import Evaluation, Observations, Pullback


class StateLayers(Protocol):
    """An encoder of states: linear layers, each with tanh behind it, on the normed state."""

    norm: nn.Module
    layers: nn.Sequential


HeadPullback = Callable[[Tensor, Tensor | None], Tensor]
"""Gradients of log-probabilities and entropies [B, K, D] to that of the features [B, F]."""


@torch.no_grad()
def judge(
    actor: StateLayers,
    critic: StateLayers,
    head: nn.Module,
    value: nn.Linear,
    scale: float,
    observations: Observations,
    tokens: Tensor,
) -> tuple[Evaluation, Pullback] | None:
    """See `Policy.judge`; None for a head that is not known here.

    Args:
        actor, critic: networks apart.
        head: on the actor's features.
        value: on the critic's; what it says times `scale` is the value.
        scale: of returns.
        observations, tokens: what is judged.
    """
    seen = _forward(actor, observations)
    if isinstance(head, GaussianHead):
        logprobs, entropy, head_back = _gaussian(head, seen[-1], tokens)
    elif isinstance(head, CategoricalHead):
        logprobs, entropy, head_back = _categorical(head, seen[-1], tokens)
    else:
        return None
    judged = _forward(critic, observations)
    values_B = value(judged[-1]).squeeze(-1) * scale

    @torch.no_grad()
    def pull(
        logprobs_BKD: Tensor, entropy_BKD: Tensor | None = None, values_B: Tensor | None = None
    ) -> None:
        _backward(actor, seen, head_back(logprobs_BKD, entropy_BKD))
        if values_B is not None:
            share_B1 = (values_B * scale).unsqueeze(-1)
            _backward(critic, judged, _linear_back(value, judged[-1], share_B1))

    return Evaluation(logprobs, entropy, values_B), pull


def _forward(encoder: StateLayers, observations: Observations) -> list[Tensor]:
    """The encoder's input, and what each of its layers gives, [B, width] each."""
    seen = [encoder.norm(observations["state"])]
    for layer in encoder.layers:
        if isinstance(layer, nn.Linear):
            seen.append(_tanh(F.linear(seen[-1], layer.weight, layer.bias)))
    return seen


def _tanh(x: Tensor) -> Tensor:
    """In place; by NumPy where it can be, which takes a sixth of torch's time for it."""
    if x.device.type != "cpu":
        return x.tanh_()
    array = x.numpy()
    np.tanh(array, out=array)
    return x


def _backward(encoder: StateLayers, seen: list[Tensor], gradient_BF: Tensor) -> None:
    layers = [layer for layer in encoder.layers if isinstance(layer, nn.Linear)]
    for number in range(len(layers) - 1, -1, -1):
        before, after = seen[number], seen[number + 1]
        gradient_BF = torch.ops.aten.tanh_backward(gradient_BF, after)
        gradient_BF = _linear_back(layers[number], before, gradient_BF, further=number > 0)


def _linear_back(
    layer: nn.Linear, given_BF: Tensor, gradient_BG: Tensor, *, further: bool = True
) -> Tensor:
    """Add the layer's gradients; that of what it was given, if it goes `further`."""
    _gradient(layer.weight).addmm_(gradient_BG.t(), given_BF)
    _gradient(layer.bias).add_(gradient_BG.sum(0))
    return gradient_BG @ layer.weight if further else gradient_BG


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _gaussian(
    head: GaussianHead, features_BF: Tensor, tokens_BKA: Tensor
) -> tuple[Tensor, Tensor, HeadPullback]:
    mean_BKA = head.mean(features_BF).view(-1, head.chunk, head.size)
    log_std_BKA = head.log_std.expand_as(mean_BKA)
    narrow_KA = (-head.log_std).exp()
    away_BKA = (tokens_BKA - mean_BKA) * narrow_KA

    def back(logprobs_BKA: Tensor, entropy_BKA: Tensor | None) -> Tensor:
        wider_BKA = logprobs_BKA * (away_BKA.square() - 1.0)
        if entropy_BKA is not None:
            wider_BKA = wider_BKA + entropy_BKA
        _gradient(head.log_std).add_(wider_BKA.sum(0))
        mean_BF = (logprobs_BKA * away_BKA * narrow_KA).flatten(1)
        return _linear_back(head.mean, features_BF, mean_BF)

    logprobs_BKA = normal_logprob(tokens_BKA, mean_BKA, log_std_BKA)
    return logprobs_BKA, normal_entropy(log_std_BKA), back


def _categorical(
    head: CategoricalHead, features_BF: Tensor, tokens_BK1: Tensor
) -> tuple[Tensor, Tensor, HeadPullback]:
    logits_BKN = head.logits(features_BF).view(-1, head.chunk, head.count)
    logprobs_BKN = F.log_softmax(logits_BKN, dim=-1)
    prob_BKN = logprobs_BKN.exp()
    entropy_BK1 = -(prob_BKN * logprobs_BKN).sum(dim=-1, keepdim=True)

    def back(chosen_BK1: Tensor, given_BK1: Tensor | None) -> Tensor:
        gradient_BKN = prob_BKN * -chosen_BK1
        gradient_BKN.scatter_add_(-1, tokens_BK1, chosen_BK1)
        if given_BK1 is not None:
            gradient_BKN -= given_BK1 * prob_BKN * (logprobs_BKN + entropy_BK1)
        return _linear_back(head.logits, features_BF, gradient_BKN.flatten(1))

    return logprobs_BKN.gather(-1, tokens_BK1), entropy_BK1, back
