"""Distributions over the actions of small policies: Gaussian, squashed Gaussian, categorical.

A head maps features to a distribution; it draws tokens, judges them and turns them into actions
as the environment takes them. Drawing is reparameterised where the distribution allows it, so that
gradients reach the parameters through a drawn action (SAC needs that).

Legend: B batch, K actions of a chunk, A action size, F features, N discrete actions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m2flow.algorithms.sampling import uniform
from m2flow.models.policies.protocol import standard_normal

L = TypeVar("L", nn.Linear, nn.Conv2d)

LOG_2PI = math.log(2.0 * math.pi)
# Haarnoja et al., "Soft Actor-Critic Algorithms and Applications" (2018), appendix: the range in
# which a state-dependent log standard deviation is kept.
_LOG_STD_RANGE = (-20.0, 2.0)
_QUADRATURE_NODES = 32


class ActionHead(nn.Module, ABC):
    """Features to a distribution over chunks of actions."""

    @abstractmethod
    def draw(self, features_BF: Tensor, seed_B: Tensor, greedy: bool) -> Tensor:
        """Return tokens [B, K, D]; the mode of the distribution if `greedy`."""

    def draw_judged(
        self, features_BF: Tensor, seed_B: Tensor, greedy: bool
    ) -> tuple[Tensor, Tensor]:
        """Return what `draw` does, and the log-probability of each token."""
        tokens = self.draw(features_BF, seed_B, greedy)
        return tokens, self.judge(features_BF, tokens)[0]

    @abstractmethod
    def judge(self, features_BF: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of each token, float32 [B, K, D]."""

    @abstractmethod
    def actions(self, tokens: Tensor) -> Tensor:
        """Return tokens as the environment takes them, [B, K, A]."""

    @abstractmethod
    def tokens_of(self, actions_BKA: Tensor) -> Tensor:
        """Return the tokens of an environment's actions, for behaviour cloning."""


class GaussianHead(ActionHead):
    """Independent Gaussians whose standard deviation does not depend on the observation.

    Tokens are the unbounded draws; the environment gets them clamped to its bounds, which the
    log-probability does not see (as in PPO's usual implementations).
    """

    low: Tensor
    high: Tensor

    def __init__(
        self, features: int, low_A: Tensor, high_A: Tensor, chunk: int = 1, log_std: float = 0.0
    ) -> None:
        super().__init__()
        self.chunk, self.size = chunk, low_A.numel()
        self.mean = orthogonal(nn.Linear(features, chunk * self.size), 0.01)
        self.log_std = nn.Parameter(torch.full((chunk, self.size), log_std))
        self.register_buffer("low", low_A.float().clone())
        self.register_buffer("high", high_A.float().clone())

    def draw(self, features_BF: Tensor, seed_B: Tensor, greedy: bool) -> Tensor:
        mean_BKA = self._mean(features_BF)
        if greedy:
            return mean_BKA
        noise = standard_normal(seed_B, self.chunk * self.size).view_as(mean_BKA)
        return mean_BKA + self.log_std.exp() * noise.to(mean_BKA.dtype)

    def judge(self, features_BF: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        mean_BKA = self._mean(features_BF)
        log_std_BKA = self.log_std.expand_as(mean_BKA)
        return normal_logprob(tokens, mean_BKA, log_std_BKA), normal_entropy(log_std_BKA)

    def actions(self, tokens: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(tokens, self.low), self.high)

    def tokens_of(self, actions_BKA: Tensor) -> Tensor:
        return actions_BKA

    def _mean(self, features_BF: Tensor) -> Tensor:
        return self.mean(features_BF).view(-1, self.chunk, self.size)


class SquashedGaussianHead(ActionHead):
    """A Gaussian squashed by tanh to the bounds, its standard deviation from the observation.

    Tokens are the draws before tanh: tanh cannot be inverted exactly near the bounds. The
    log-probability is that of the action in [-1, 1] (Haarnoja et al. 2018, appendix C); the
    entropy is the Gaussian's plus the expected log-Jacobian by Gauss-Hermite quadrature.
    """

    low: Tensor
    high: Tensor

    def __init__(self, features: int, low_A: Tensor, high_A: Tensor, chunk: int = 1) -> None:
        super().__init__()
        self.chunk, self.size = chunk, low_A.numel()
        self.mean = orthogonal(nn.Linear(features, chunk * self.size), 0.01)
        self.log_std = orthogonal(nn.Linear(features, chunk * self.size), 0.01)
        self.register_buffer("low", low_A.float().clone())
        self.register_buffer("high", high_A.float().clone())
        nodes, weights = np.polynomial.hermite_e.hermegauss(_QUADRATURE_NODES)
        self._nodes = torch.tensor(nodes, dtype=torch.float32)
        self._weights = torch.tensor(weights / weights.sum(), dtype=torch.float32)

    def draw(self, features_BF: Tensor, seed_B: Tensor, greedy: bool) -> Tensor:
        mean_BKA, log_std_BKA = self._gaussian(features_BF)
        if greedy:
            return mean_BKA
        noise = standard_normal(seed_B, self.chunk * self.size).view_as(mean_BKA)
        return mean_BKA + log_std_BKA.exp() * noise.to(mean_BKA.dtype)

    def judge(self, features_BF: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        mean_BKA, log_std_BKA = self._gaussian(features_BF)
        logprob = normal_logprob(tokens, mean_BKA, log_std_BKA) - log_tanh_slope(tokens)
        nodes = self._nodes.to(mean_BKA.device)
        points = mean_BKA.unsqueeze(-1) + log_std_BKA.exp().unsqueeze(-1) * nodes
        squeezed = log_tanh_slope(points) @ self._weights.to(mean_BKA.device)
        return logprob, normal_entropy(log_std_BKA) + squeezed

    def actions(self, tokens: Tensor) -> Tensor:
        actions = self.low + 0.5 * (tokens.tanh() + 1.0) * (self.high - self.low)
        return torch.minimum(torch.maximum(actions, self.low), self.high)  # rounding

    def tokens_of(self, actions_BKA: Tensor) -> Tensor:
        width_A = (self.high - self.low).clamp(min=torch.finfo(torch.float32).tiny)
        share = 2.0 * (actions_BKA - self.low) / width_A - 1.0
        return share.clamp(-0.999, 0.999).atanh()

    def _gaussian(self, features_BF: Tensor) -> tuple[Tensor, Tensor]:
        shape = (-1, self.chunk, self.size)
        log_std = self.log_std(features_BF).view(shape).clamp(*_LOG_STD_RANGE)
        return self.mean(features_BF).view(shape), log_std


class CategoricalHead(ActionHead):
    """One of N discrete actions; tokens and actions are its number, int64 [B, K, 1]."""

    def __init__(self, features: int, count: int, chunk: int = 1) -> None:
        super().__init__()
        self.chunk, self.count = chunk, count
        self.logits = orthogonal(nn.Linear(features, chunk * count), 0.01)

    def draw(self, features_BF: Tensor, seed_B: Tensor, greedy: bool) -> Tensor:
        return self.draw_judged(features_BF, seed_B, greedy)[0]

    def draw_judged(
        self, features_BF: Tensor, seed_B: Tensor, greedy: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs_BKN = F.log_softmax(self._logits(features_BF).float(), dim=-1)
        if greedy:
            tokens = logprobs_BKN.argmax(dim=-1, keepdim=True)
        else:  # `sample_tokens` for few choices and all actions of the chunk at once
            cdf_BKN = logprobs_BKN.exp().cumsum(dim=-1, dtype=torch.float64)
            drawn_BK = uniform(seed_B[:, None], torch.arange(self.chunk, device=seed_B.device))
            below_BKN = cdf_BKN <= drawn_BK[..., None] * cdf_BKN[..., -1:]
            tokens = below_BKN.sum(dim=-1, keepdim=True).clamp_(max=self.count - 1)
        return tokens, logprobs_BKN.gather(-1, tokens)

    def judge(self, features_BF: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return categorical(self._logits(features_BF).unsqueeze(2), tokens)

    def actions(self, tokens: Tensor) -> Tensor:
        return tokens

    def tokens_of(self, actions_BKA: Tensor) -> Tensor:
        return actions_BKA.to(torch.int64)

    def _logits(self, features_BF: Tensor) -> Tensor:
        return self.logits(features_BF).view(-1, self.chunk, self.count)


def categorical(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy, in the shape of `tokens`, of logits [..., N]."""
    logprobs = F.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return chosen, -(logprobs.exp() * logprobs).sum(dim=-1)


def normal_logprob(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density of each coordinate of a Gaussian with independent coordinates."""
    return -0.5 * (((x - mean) * (-log_std).exp()) ** 2 + LOG_2PI) - log_std


def normal_entropy(log_std: Tensor) -> Tensor:
    """Entropy of each coordinate of a Gaussian with independent coordinates, in nats."""
    return log_std + 0.5 * (1.0 + LOG_2PI)


def log_tanh_slope(x: Tensor) -> Tensor:
    """log(1 - tanh(x)^2), exact where tanh rounds to one."""
    return 2.0 * (math.log(2.0) - x - F.softplus(-2.0 * x))


def orthogonal(layer: L, gain: float) -> L:
    """Initialise a layer as PPO's usual implementations do: orthogonal weights, no bias.

    Andrychowicz et al., "What Matters In On-Policy Reinforcement Learning?" (2020): the last
    layer of the policy gets a hundredth of the scale.
    """
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
