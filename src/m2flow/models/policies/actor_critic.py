"""Small actor-critics: an encoder of states or pixels, an action head and a value head.

From a state, actor and critic have networks of their own; from pixels they share the convolutions,
which are most of the cost. Initialisation is orthogonal.

Legend: B batch, S state size, F features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from m2flow.errors import UserError
from m2flow.models.policies import direct
from m2flow.models.policies.distributions import (
    ActionHead,
    CategoricalHead,
    GaussianHead,
    SquashedGaussianHead,
    orthogonal,
)
from m2flow.models.policies.protocol import (
    Evaluation,
    Observations,
    Policy,
    PolicyOutput,
    Pullback,
    RunningStatistics,
    seed_tensor,
)

SMALLEST_PICTURE = 24
"""Pixels of a side: what the convolutions leave of fewer is nothing."""

SMALLEST_VARIANCE = 1e-8
"""Of a state's coordinate: a solver's jitter around a constant is not to be seen as information."""


class RunningNorm(RunningStatistics):
    """Subtract the mean and divide by the standard deviation of all states seen so far."""

    of = "state"
    mean: Tensor
    square: Tensor
    count: Tensor

    def __init__(self, size: int, limit: float = 10.0) -> None:
        super().__init__()
        self.limit = limit
        self._seen: tuple[Any, bool, Tensor] = None, True, torch.ones(size)
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("square", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def moments(self, values: Tensor | None) -> Tensor:
        """Float64 [2 S + 1]: count, sums and sums of squares around the mean so far."""
        if values is None:
            return self.mean.new_zeros(2 * self.mean.numel() + 1)
        away_BS = values.to(self.mean) - self.mean
        count = away_BS.new_tensor([len(away_BS)])
        return torch.cat([count, away_BS.sum(0), away_BS.square().sum(0)])

    @torch.no_grad()
    def take_in(self, moments: Tensor) -> None:
        """Chan et al. 1983, the parallel variance formula."""
        added, sums_S, squares_S = moments.split([1, self.mean.numel(), self.mean.numel()])
        if not added:
            return
        total = self.count + added[0]
        self.square += squares_S - sums_S.square() / total
        self.mean += sums_S / total
        self.count.copy_(total)

    def forward(self, state_BS: Tensor) -> Tensor:
        key = self.square.data_ptr(), self.square._version, self.count._version
        if key != self._seen[0]:  # it is asked for every turn, and changes once a step
            std_S = (self.square / self.count + SMALLEST_VARIANCE).sqrt()
            self._seen = key, bool(self.count < 2), std_S
        _, unknown, std_S = self._seen
        if unknown:
            return state_BS
        normed = (state_BS - self.mean) / std_S
        return normed.clamp(-self.limit, self.limit).to(state_BS.dtype)


class ReturnScale(RunningStatistics):
    """The root mean square of all returns seen so far: what a value head's output is a share of.

    When it changes, the head is rescaled with it, so that values stay what they were (Pop-Art, van
    Hasselt et al. 2016, arXiv 1602.07714). Without that values that are too large by the change
    make returns that are too large, and so on.

    Args:
        head: the last layer of the value network; its parameters belong to whoever owns it.
    """

    of = "return"
    square: Tensor
    count: Tensor

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self._head = (head,)  # in a tuple, for it is no part of this module
        self._seen: tuple[Any, float] = None, 1.0
        self.register_buffer("square", torch.zeros((), dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def moments(self, values: Tensor | None) -> Tensor:
        """Float64 [2]: count and sum of squares."""
        if values is None:
            return self.count.new_zeros(2)
        wide = values.to(self.count)
        return torch.stack([wide.new_tensor(wide.numel()), wide.square().sum()])

    @torch.no_grad()
    def take_in(self, moments: Tensor) -> None:
        before = self.scale
        self.count += moments[0]
        self.square += moments[1]
        for parameter in self._head[0].parameters():
            parameter.mul_(before / self.scale)

    def forward(self, value_B: Tensor) -> Tensor:
        """Values as returns, from shares."""
        return value_B * self.scale

    @property
    def scale(self) -> float:
        """1 before there was a return."""
        key = self.square.data_ptr(), self.square._version, self.count._version
        if key != self._seen[0]:  # it is asked for every turn, and changes once a step
            mean = float(self.square) / max(1.0, float(self.count))
            self._seen = key, math.sqrt(mean) if mean > 0 else 1.0
        return self._seen[1]


class Encoder(nn.Module):
    """Observations to `features` numbers each."""

    features: int


class ActorCritic(Policy):
    """An action head and a value head on features of the observation."""

    def __init__(self, actor: Encoder, critic: Encoder | None, head: ActionHead) -> None:
        """Take the parts apart.

        Args:
            actor: observations to features [B, F].
            critic: a second network of that kind for the value, or None to share the actor's.
            head: features to actions.
        """
        super().__init__()
        self.actor, self.critic, self.head = actor, critic, head
        self.value = orthogonal(nn.Linear((critic or actor).features, 1), 1.0)
        self.returns = ReturnScale(self.value)

    def act(
        self, observations: Observations, *, seeds: Sequence[int], greedy: bool = False
    ) -> PolicyOutput:
        """See `Policy.act`; differentiable through the drawn actions, as SAC needs it."""
        if isinstance(self.actor, StateEncoder) and isinstance(self.critic, StateEncoder):
            on_cpu = observations["state"].device.type == "cpu"
            if on_cpu and not torch.is_grad_enabled():
                found = direct.act(self.actor, self.head, observations, seeds, greedy)
                if found is not None:
                    return found
        features_BF = self.actor(observations)
        seed_B = seed_tensor(seeds, features_BF.device)
        tokens, logprobs = self.head.draw_judged(features_BF, seed_B, greedy)
        values_B = self._values(features_BF) if self.critic is None else None
        return PolicyOutput(self.head.actions(tokens), tokens, logprobs, values_B)

    def evaluate(self, observations: Observations, tokens: Tensor) -> Evaluation:
        features_BF = self.actor(observations)
        logprobs, entropy = self.head.judge(features_BF, tokens)
        if self.critic is not None:
            features_BF = self.critic(observations)
        return Evaluation(logprobs, entropy, self._values(features_BF))

    def judge(self, observations: Observations, tokens: Tensor) -> tuple[Evaluation, Pullback]:
        actor, critic, found = self.actor, self.critic, None
        if isinstance(actor, StateEncoder) and isinstance(critic, StateEncoder):
            scale = self.returns.scale
            found = direct.judge(actor, critic, self.head, self.value, scale, observations, tokens)
        return found or super().judge(observations, tokens)

    def values(self, observations: Observations) -> Tensor:
        return self._values((self.critic or self.actor)(observations))

    def tokens_of(self, actions_BKA: Tensor) -> Tensor:
        return self.head.tokens_of(actions_BKA)

    def running_statistics(self) -> list[RunningStatistics]:
        return [module for module in self.modules() if isinstance(module, RunningStatistics)]

    def _values(self, features_BF: Tensor) -> Tensor:
        return self.returns(self.value(features_BF).squeeze(-1))


class StateEncoder(Encoder):
    """An MLP over `state`."""

    def __init__(self, state_size: int, hidden: Sequence[int], normalise: bool) -> None:
        super().__init__()
        self.norm: nn.Module = RunningNorm(state_size) if normalise else nn.Identity()
        layers: list[nn.Module] = []
        for width in hidden:
            layers += [orthogonal(nn.Linear(state_size, width), math.sqrt(2)), nn.Tanh()]
            state_size = width
        self.layers = nn.Sequential(*layers)
        self.features = state_size

    def forward(self, observations: Observations) -> Tensor:
        return self.layers(self.norm(observations["state"]))


class PixelEncoder(Encoder):
    """Convolutions over the cameras, with the state beside their features where there is one.

    Kernels and strides of Mnih et al. (2015) for 64 pixels and more, one stride less below; a
    second camera has its channels beside the first one's.
    """

    def __init__(
        self, picture: tuple[int, int], cameras: Sequence[str], state_size: int, features: int
    ) -> None:
        super().__init__()
        self.cameras, self.features = tuple(cameras), features
        first = (8, 4) if min(picture) >= 64 else (4, 2)
        layers: list[nn.Module] = []
        channels = 3 * len(self.cameras)
        for width, (kernel, stride) in zip((32, 64, 64), (first, (4, 2), (3, 1)), strict=True):
            convolution = nn.Conv2d(channels, width, kernel, stride)
            layers += [orthogonal(convolution, math.sqrt(2)), nn.ReLU()]
            channels = width
        self.convolutions = nn.Sequential(*layers, nn.Flatten())
        with torch.no_grad():
            empty = torch.zeros(1, 3 * len(self.cameras), *picture)
            flat = self.convolutions(empty).shape[1]
        self.norm = RunningNorm(state_size) if state_size else None
        joined = nn.Linear(flat + state_size, features)
        self.join = nn.Sequential(orthogonal(joined, math.sqrt(2)), nn.ReLU())

    def forward(self, observations: Observations) -> Tensor:
        images = torch.cat([observations[camera] for camera in self.cameras], dim=-1)
        pixels = images.permute(0, 3, 1, 2).float() / 255.0
        flat = self.convolutions(pixels)
        if self.norm is not None:
            flat = torch.cat([flat, self.norm(observations["state"])], dim=-1)
        return self.join(flat)


def action_head(
    kind: str,
    features: int,
    *,
    low: Sequence[float] | None = None,
    high: Sequence[float] | None = None,
    count: int | None = None,
    chunk: int = 1,
) -> ActionHead:
    """Build the head of that kind: "gaussian", "squashed" (both need bounds) or "categorical"."""
    if kind == "categorical":
        if count is None:
            raise UserError("actions are not discrete", key="policy.actions", value=kind)
        return CategoricalHead(features, count, chunk)
    if low is None or high is None:
        raise UserError("actions have no bounds", key="policy.actions", value=kind)
    if len(low) != len(high):
        raise UserError(
            "bounds differ in size", key="policy.actions", value=f"{len(low)} and {len(high)}"
        )
    low_A, high_A = torch.tensor(low), torch.tensor(high)
    if kind == "gaussian":
        return GaussianHead(features, low_A, high_A, chunk)
    if kind == "squashed":
        if not bool(torch.isfinite(high_A - low_A).all()):
            raise UserError(
                "a squashed Gaussian needs finite bounds",
                key="policy.actions",
                hint="use a Gaussian",
            )
        return SquashedGaussianHead(features, low_A, high_A, chunk)
    raise UserError(
        "unknown distribution of actions",
        key="policy.actions",
        value=kind,
        expected="gaussian, squashed or categorical",
    )


def mlp_actor_critic(
    state_size: int,
    *,
    actions: str,
    low: Sequence[float] | None = None,
    high: Sequence[float] | None = None,
    count: int | None = None,
    chunk: int = 1,
    hidden: Sequence[int] = (128, 128),
    normalise: bool = True,
) -> ActorCritic:
    """Build a policy over states, its critic apart. `actions`, bounds: see `action_head`."""
    actor, critic = (StateEncoder(state_size, hidden, normalise) for _ in range(2))
    head = action_head(actions, actor.features, low=low, high=high, count=count, chunk=chunk)
    return ActorCritic(actor, critic, head)


def cnn_actor_critic(
    picture: tuple[int, int],
    *,
    actions: str,
    low: Sequence[float] | None = None,
    high: Sequence[float] | None = None,
    count: int | None = None,
    chunk: int = 1,
    cameras: Sequence[str] = ("image",),
    state_size: int = 0,
    features: int = 256,
) -> ActorCritic:
    """Build a policy over pictures, whose critic shares the convolutions.

    Args:
        picture: height and width of each camera's.
        actions, low, high, count, chunk: see `action_head`.
        cameras: names of the observed pictures.
        state_size: figures of the state that is seen beside them; 0 for none.
        features: width of what the heads are given.
    """
    if min(picture) < SMALLEST_PICTURE:
        raise UserError(
            "its pictures are too small",
            key="policy.cameras",
            value=f"{picture[0]}x{picture[1]}",
            expected=f"at least {SMALLEST_PICTURE} pixels of height and width",
        )
    encoder = PixelEncoder(picture, cameras, state_size, features)
    head = action_head(actions, features, low=low, high=high, count=count, chunk=chunk)
    return ActorCritic(encoder, None, head)
