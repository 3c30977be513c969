"""Actor-critics of states without autograd: how they act, and their gradients, are written out.

Networks of a hundred units take less time than the bookkeeping about them. Here one layer is one
product of matrices, two or three on the way back, and nothing else; what is drawn for a few rows is
drawn by NumPy, whose calls are shorter. Results are those of `act` and `evaluate` up to rounding.
Knows two heads, Gaussian and categorical, on encoders that actor and critic do not share; whoever
asks for another gets None.

Legend: B batch, F features, K actions of a chunk, A action size, N discrete actions, R = B K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m2flow.algorithms.sampling import uniform, uniform_of_few
from m2flow.models.policies.distributions import (
    LOG_2PI,
    CategoricalHead,
    GaussianHead,
    normal_entropy,
)
from m2flow.models.policies.protocol import (
    Evaluation,
    Observations,
    PolicyOutput,
    Pullback,
    normal_of,
    seed_tensor,
)


class StateLayers(Protocol):
    """An encoder of states: linear layers, each with tanh behind it, on the normed state."""

    norm: nn.Module
    layers: nn.Sequential


NARROW = 16
"""Inputs of a layer below which its weights' gradient is computed transposed: half the time."""

_tanh_backward = torch.ops.aten.tanh_backward.default

HeadPullback = Callable[[Tensor, Tensor | None], Tensor]
"""Gradients of log-probabilities and entropies [B, K, D] to that of the features [B, F]."""


def act(
    actor: StateLayers,
    head: nn.Module,
    observations: Observations,
    seeds: Sequence[int],
    greedy: bool,
) -> PolicyOutput | None:
    """See `Policy.act`, of a critic apart; None for a head that is not known here.

    To be called where no gradient is asked for.

    Args:
        actor: on the CPU.
        head: on its features.
        observations, seeds, greedy: as `Policy.act` takes them.
    """
    if isinstance(head, CategoricalHead):
        draw: Callable[..., tuple[Any, Any, Any]] = _draw_categorical
    elif isinstance(head, GaussianHead):
        draw = _draw_gaussian
    else:
        return None
    found = draw(head, _forward(actor, observations)[-1], seeds, greedy)
    actions, tokens, logprobs = map(torch.from_numpy, found)
    return PolicyOutput(actions, tokens, logprobs, None)


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
    values_B = _linear(value, judged[-1]).squeeze(-1) * scale

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
    state = observations["state"]
    seen = [state if isinstance(encoder.norm, nn.Identity) else encoder.norm(state)]
    for layer in _linear_layers(encoder):
        seen.append(_tanh(_linear(layer, seen[-1])))
    return seen


def _linear_layers(encoder: StateLayers) -> list[nn.Linear]:
    return [layer for layer in encoder.layers._modules.values() if isinstance(layer, nn.Linear)]


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer itself, at half the time that its module takes for a few rows."""
    own = layer._parameters  # `layer.weight` asks for it by a call
    bias, weight = own["bias"], own["weight"]
    assert bias is not None and weight is not None
    return torch.addmm(bias, x, weight.t())


def _tanh(x: Tensor) -> Tensor:
    """In place; by NumPy where it can be, which takes a sixth of torch's time for it."""
    if x.device.type != "cpu":
        return x.tanh_()
    array = x.numpy()
    np.tanh(array, out=array)
    return x


def _backward(encoder: StateLayers, seen: list[Tensor], gradient_BF: Tensor) -> None:
    layers = _linear_layers(encoder)
    for number in range(len(layers) - 1, -1, -1):
        before, after = seen[number], seen[number + 1]
        gradient_BF = _tanh_backward(gradient_BF, after)
        gradient_BF = _linear_back(layers[number], before, gradient_BF, further=number > 0)


def _linear_back(
    layer: nn.Linear, given_BF: Tensor, gradient_BG: Tensor, *, further: bool = True
) -> Tensor:
    """Add the layer's gradients; that of what it was given, if it goes `further`."""
    own, gradient_GB = layer._parameters, gradient_BG.t()
    bias, weight = own["bias"], own["weight"]
    assert bias is not None and weight is not None
    if given_BF.shape[1] < NARROW:
        _gradient(weight).add_(torch.mm(given_BF.t(), gradient_BG).t())
    else:
        _gradient(weight).addmm_(gradient_GB, given_BF)
    ones_B = _ones(len(gradient_BG), gradient_BG.dtype, gradient_BG.device)
    _gradient(bias).addmv_(gradient_GB, ones_B)
    return torch.mm(gradient_BG, weight) if further else gradient_BG


def _gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        gradient = parameter.grad = torch.zeros_like(parameter)
    return gradient


@lru_cache(8)
def _ones(rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A one for each row: a product with them sums rows in half the time of a sum."""
    return torch.ones(rows, dtype=dtype, device=device)


FEW = 64
"""Draws that Python makes sooner than NumPy."""


def _drawn(seeds: Sequence[int], count: int) -> Any:
    """Uniform numbers of so many positions of each seed, an array float64 [B, count]."""
    if len(seeds) * count <= FEW:
        return np.array(uniform_of_few(seeds, count)).reshape(len(seeds), count)
    seed_B1 = seed_tensor(seeds, torch.device("cpu"))[:, None]
    return uniform(seed_B1, torch.arange(count)).numpy()


def _draw_gaussian(
    head: GaussianHead, features_BF: Tensor, seeds: Sequence[int], greedy: bool
) -> tuple[Any, Any, Any]:
    """Actions, tokens and log-probabilities, as arrays."""
    mean_BKA = _linear(head.mean, features_BF).view(-1, head.chunk, head.size).numpy()
    log_std_KA, low_A, high_A = (x.detach().numpy() for x in (head.log_std, head.low, head.high))
    tokens_BKA = mean_BKA
    if not greedy:
        noise = normal_of(torch.from_numpy(_drawn(seeds, head.chunk * head.size)))
        noise_BKA = noise.numpy().reshape(mean_BKA.shape).astype(np.float32)
        tokens_BKA = mean_BKA + np.exp(log_std_KA) * noise_BKA
    away_BKA = (tokens_BKA - mean_BKA) * np.exp(-log_std_KA)
    logprobs_BKA = -0.5 * (away_BKA * away_BKA) - (log_std_KA + np.float32(0.5 * LOG_2PI))
    return np.minimum(np.maximum(tokens_BKA, low_A), high_A), tokens_BKA, logprobs_BKA


def _draw_categorical(
    head: CategoricalHead, features_BF: Tensor, seeds: Sequence[int], greedy: bool
) -> tuple[Any, Any, Any]:
    """Actions, which are the tokens, these, and log-probabilities, as arrays."""
    away_RN = _linear(head.logits, features_BF).view(-1, head.count).numpy()
    away_RN -= np.maximum.reduce(away_RN, 1, keepdims=True)
    sum_RN = np.add.accumulate(np.exp(away_RN), 1, np.float64)
    total_R = sum_RN[:, -1]
    if greedy:
        tokens_R = away_RN.argmax(1)
    else:
        bound_R = _drawn(seeds, head.chunk).ravel() * total_R
        tokens_R = np.add.reduce(sum_RN <= bound_R[:, None], 1)
        np.minimum(tokens_R, head.count - 1, out=tokens_R)
    logprobs_R = away_RN[np.arange(len(tokens_R)), tokens_R] - np.log(total_R)
    tokens_BK1 = tokens_R.reshape(-1, head.chunk, 1)
    return tokens_BK1, tokens_BK1, logprobs_R.astype(np.float32).reshape(tokens_BK1.shape)


def _gaussian(
    head: GaussianHead, features_BF: Tensor, tokens_BKA: Tensor
) -> tuple[Tensor, Tensor, HeadPullback]:
    mean_BKA = _linear(head.mean, features_BF).view(-1, head.chunk, head.size)
    log_std = head.log_std
    narrow_KA = (-log_std).exp()
    away_BKA = (tokens_BKA - mean_BKA).mul_(narrow_KA)
    square_BKA = away_BKA * away_BKA

    def back(logprobs_BKA: Tensor, entropy_BKA: Tensor | None) -> Tensor:
        wider_BKA = (square_BKA - 1.0).mul_(logprobs_BKA)
        if entropy_BKA is not None:
            wider_BKA += entropy_BKA
        _gradient(log_std).add_(wider_BKA.sum(0))
        mean_BKA = (logprobs_BKA * away_BKA).mul_(narrow_KA)
        return _linear_back(head.mean, features_BF, mean_BKA.flatten(1))

    # `normal_logprob`, with what does not depend on the row computed once.
    logprobs_BKA = torch.sub(-(log_std + 0.5 * LOG_2PI), square_BKA, alpha=0.5)
    return logprobs_BKA, normal_entropy(log_std).expand_as(mean_BKA), back


def _categorical(
    head: CategoricalHead, features_BF: Tensor, tokens_BK1: Tensor
) -> tuple[Tensor, Tensor, HeadPullback]:
    logits_BKN = _linear(head.logits, features_BF).view(-1, head.chunk, head.count)
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
