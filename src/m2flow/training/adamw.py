"""AdamW's moments and its step, by the kernel that torch has for it.

`torch.optim.AdamW` looks at each parameter in Python and counts steps for each of them in a tensor
of its own: of a small policy that takes four times as long as the kernel. Here all parameters have
one count, which the caller keeps; one that stands still at first has fewer by a fixed number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
NOBODY_WAITS: Mapping[Tensor, int] = MappingProxyType({})


class AdamWStep:
    """AdamW (arXiv 1711.05101) on parameters and their `grad`, in place.

    Attributes:
        state: the moments of each parameter, named as in `MOMENTS`; empty before the first step.

    Args:
        parameters: what is stepped.
        betas, eps, weight_decay: as in the paper.
        first_after: number of the step after which a parameter takes its first; 0 where not named.
            Moments and decay begin with that step.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        first_after: Mapping[Tensor, int] = NOBODY_WAITS,
    ) -> None:
        self._betas, self._eps, self._weight_decay = betas, eps, weight_decay
        self._groups: dict[tuple[torch.device, torch.dtype, int], list[Tensor]] = {}
        for parameter in parameters:
            key = parameter.device, parameter.dtype, first_after.get(parameter, 0)
            self._groups.setdefault(key, []).append(parameter)
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self, rate_after: Callable[[int], float], number: int) -> None:
        """Take a step.

        Args:
            rate_after: the learning rate of parameters by their `first_after`.
            number: of the step, from 1.
        """
        for (device, _, after), group in self._groups.items():
            stepped = [(one, one.grad) for one in group if one.grad is not None]
            if not stepped or number <= after:
                continue
            parameters = [parameter for parameter, _ in stepped]
            moments = [self._moments(parameter) for parameter in parameters]
            count = torch.full((), float(number - after), dtype=torch.float32, device=device)
            torch._fused_adamw_(
                parameters,
                [gradient for _, gradient in stepped],
                [one[MOMENTS[0]] for one in moments],
                [one[MOMENTS[1]] for one in moments],
                [],
                [count] * len(stepped),
                lr=rate_after(after),
                beta1=self._betas[0],
                beta2=self._betas[1],
                weight_decay=self._weight_decay,
                eps=self._eps,
                amsgrad=False,
                maximize=False,
            )

    def tensors(self) -> Iterator[Tensor]:
        """What the moments are made of."""
        for moments in self.state.values():
            yield from moments.values()

    def bytes_to_come(self, parameter: Tensor) -> int:
        """Bytes of a parameter's moments that its first step will make; 0 once it has."""
        return 0 if parameter in self.state else 2 * parameter.nbytes

    def saved(self, parameter: Tensor) -> Mapping[str, Tensor]:
        """A parameter's moments by name, none before its first step; they share its memory."""
        return self.state.get(parameter, {})

    def blank(self, parameter: Tensor) -> Tensor:
        """Memory that a moment can be read into, to be given to `load`."""
        return torch.empty_like(parameter)

    def load(self, parameter: Tensor, moments: dict[str, Tensor]) -> None:
        """Take over a parameter's moments; without any they begin anew."""
        self.state.pop(parameter, None)
        if moments:
            self.state[parameter] = moments

    def _moments(self, parameter: Tensor) -> dict[str, Tensor]:
        if parameter not in self.state:
            self.state[parameter] = {name: torch.zeros_like(parameter) for name in MOMENTS}
        return self.state[parameter]
