"""Sizes of small policies, for prices: FLOPs, parameters, and what a backward pass keeps.

They mirror `m2flow.models.policies.actor_critic` and `twin_critics`, layer by layer, and need no
torch. A product with a matrix counts two FLOPs for each of the matrix's numbers; biases,
activations and densities of heads count nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from m2flow.environments.spec import EnvironmentSpec
from m2flow.workloads.embodied.config import PolicySection

FLOAT_BYTES = 4
"""Small policies compute in float32."""

CONVOLUTIONS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Channels, kernel and stride (Mnih et al. 2015); below `LARGE_PICTURE` pixels the first one is
`SMALL_PICTURES_FIRST`."""

SMALL_PICTURES_FIRST = (32, 4, 2)
LARGE_PICTURE = 64


@dataclass(frozen=True)
class Layer:
    """A linear layer, applied at `places` of a picture, or once.

    Attributes:
        taken, given: numbers that each place takes and gives.
        places: where it is applied.
    """

    taken: int
    given: int
    places: int = 1

    @property
    def flops(self) -> float:
        """Of a forward pass."""
        return 2.0 * self.places * self.taken * self.given

    @property
    def parameters(self) -> int:
        """Weights and biases."""
        return (self.taken + 1) * self.given

    @property
    def outputs(self) -> int:
        """Numbers that all places give."""
        return self.places * self.given


@dataclass(frozen=True)
class Network:
    """Layers, one after another.

    Attributes:
        inputs: numbers that the first one is computed from.
    """

    inputs: int
    layers: tuple[Layer, ...]

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def forward(self) -> float:
        """FLOPs of a forward pass."""
        return sum(layer.flops for layer in self.layers)

    @property
    def trained(self) -> float:
        """FLOPs of forward and backward pass; nobody asks for the gradient of what was seen."""
        return 3 * self.forward - self.layers[0].flops

    @property
    def kept(self) -> int:
        """Numbers that are kept for a backward pass: the input, and what each layer gives."""
        return self.inputs + sum(layer.outputs for layer in self.layers)

    @property
    def widest(self) -> int:
        """Numbers that a forward pass holds at most: what a layer takes and gives."""
        held = (self.inputs, *(layer.outputs for layer in self.layers))
        return max(before + after for before, after in pairwise(held))


@dataclass(frozen=True)
class SmallPolicy:
    """An actor-critic.

    Attributes:
        actor: what acts; with the value, where the critic has no network of its own.
        critic: the network that says what observations are worth; None where the actor does.
        twins: each of SAC's two critics of states and actions; None for other algorithms.
        spread: trained numbers beside the layers: standard deviations that depend on nothing.
    """

    actor: Network
    critic: Network | None
    twins: Network | None = None
    spread: int = 0

    @property
    def parameters(self) -> int:
        """Of the policy; SAC's critics are the learner's."""
        critic = 0 if self.critic is None else self.critic.parameters
        return self.actor.parameters + critic + self.spread

    @property
    def judging(self) -> Network:
        """What says what observations are worth."""
        return self.critic or self.actor

    def learning(self, *, values: bool) -> float:
        """FLOPs of a turn in forward and backward pass; for SAC of a row of a batch.

        Args:
            values: whether the values are trained; else they are computed and that is all.
        """
        if (twins := self.twins) is not None:
            # The policy acts in the next state without gradients, and in this one with them. Both
            # targets judge the next state, both critics learn, and judge once more with fixed
            # weights, for the gradient of the action.
            critics = 2 * (twins.forward + twins.trained + 2 * twins.forward)
            return self.actor.forward + self.actor.trained + critics
        if self.critic is None:
            return self.actor.trained
        return self.actor.trained + (self.critic.trained if values else self.critic.forward)

    @property
    def kept(self) -> int:
        """Numbers that a turn keeps for the backward pass."""
        apart = (self.critic,) if self.twins is None else (self.twins, self.twins)
        return self.actor.kept + sum(one.kept for one in apart if one is not None)


def small_policy(policy: PolicySection, spec: EnvironmentSpec, algorithm: str) -> SmallPolicy:
    """The sizes of a policy of kind "mlp" or "cnn" for an environment.

    Args:
        policy: its section of the recipe.
        spec: of the environment.
        algorithm: "sac" has two critics besides.

    Raises:
        UserError: the environment does not show what the policy looks at.
    """
    discrete = spec.action.num_discrete
    actions = policy.chunk * spec.action.size
    squashed = policy.distribution == "squashed"
    head = policy.chunk * discrete if discrete else actions * (2 if squashed else 1)
    spread = 0 if discrete or squashed else actions
    if policy.kind == "cnn":
        seen = _convolutions(spec.picture_size(policy.cameras), len(policy.cameras))
        has_state = any(part.name == "state" for part in spec.observations)
        state = spec.state_size() if has_state else 0
        joined = Layer(seen[-1].outputs + state, policy.features)
        inputs = 3 * len(policy.cameras) * prod(spec.picture_size(policy.cameras)) + state
        layers = (*seen, joined, Layer(policy.features, head + 1))
        return SmallPolicy(Network(inputs, layers), None, None, spread)
    size = spec.state_size()
    return SmallPolicy(
        _perceptron(size, policy.hidden, head),
        _perceptron(size, policy.hidden, 1),
        _perceptron(size + actions, policy.hidden, 1) if algorithm == "sac" else None,
        spread,
    )


def _perceptron(inputs: int, hidden: Sequence[int], outputs: int) -> Network:
    widths = pairwise((inputs, *hidden, outputs))
    return Network(inputs, tuple(Layer(before, after) for before, after in widths))


def _convolutions(picture: tuple[int, int], cameras: int) -> list[Layer]:
    """The layers of a `PixelEncoder` before it joins them; a camera's channels stand beside the
    other ones'."""
    first = CONVOLUTIONS[0] if min(picture) >= LARGE_PICTURE else SMALL_PICTURES_FIRST
    channels, sides, found = 3 * cameras, picture, []
    for width, kernel, stride in (first, *CONVOLUTIONS[1:]):
        sides = ((sides[0] - kernel) // stride + 1, (sides[1] - kernel) // stride + 1)
        found.append(Layer(channels * kernel**2, width, prod(sides)))
        channels = width
    return found
