"""AdamW by torchao: moments of 8 bits, and bfloat16 parameters that are rounded at random.

Moments have 8 bits in blocks of 256 with a scale each (Dettmers et al., "8-bit Optimizers via
Block-wise Quantization", arXiv 2110.02861), those of tensors under 4,096 numbers 32. They are saved
in float32, so state goes on under any layout and in any optimizer; to be rounded once more when it
is read costs what a step costs. Rounding draws its bits from the step's number and the parameter's
alone: replicas stay equal, and a run that is repeated too.

On a CPU torchao's step runs as it is written, since to compile it takes some seconds for each shape
of parameters.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from m2flow.algorithms.sampling import derive_seed
from m2flow.errors import UserError
from m2flow.training.adamw import MOMENTS, AdamWStep

_COUNT = "step"


def check_installed(key: str) -> None:
    """Refuse a setting that needs torchao where this interpreter does not find it.

    Raises:
        UserError: names the command that installs it.
    """
    if importlib.util.find_spec("torchao") is None:
        raise UserError(
            "torchao is not installed",
            key=key,
            hint="pip install 'm2flow[torchao]', or take it out",
        )


class TorchaoAdamW(AdamWStep):
    """An `AdamWStep` by torchao, whose moments are there from the beginning.

    Args:
        parameters: what is stepped.
        betas, eps, weight_decay: as in the paper.
        moments_8bit: whether moments have 8 bits; else float32.
        stochastic_rounding: whether bfloat16 parameters are rounded at random.

    Raises:
        UserError: torchao is not installed.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        moments_8bit: bool,
        stochastic_rounding: bool,
    ) -> None:
        check_installed("training.moments" if moments_8bit else "training.rounding")
        from torchao.optim import AdamW8bit, _AdamW

        super().__init__(parameters, betas=betas, eps=eps, weight_decay=weight_decay)
        self._draws = stochastic_rounding
        self._optimizers: dict[Tensor, Any] = {}
        for parameter in parameters:
            optimizer = (AdamW8bit if moments_8bit else _AdamW)(
                [parameter],
                lr=0.0,
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
                bf16_stochastic_round=stochastic_rounding,
            )
            self._optimizers[parameter] = optimizer
            self._begin(parameter)

    def step(self, rate_after: Callable[[int], float], number: int) -> None:
        """As of an `AdamWStep`; no parameter waits."""
        learning_rate = rate_after(0)
        for index, (parameter, optimizer) in enumerate(self._optimizers.items()):
            optimizer.param_groups[0]["lr"].fill_(learning_rate)
            optimizer.state[parameter][_COUNT].fill_(number - 1)  # which it adds 1 to
            # Mixed, since a CPU's generator heeds the low 32 bits of its seed alone.
            self._take(parameter, seed=derive_seed(number, index))

    def tensors(self) -> Iterator[Tensor]:
        """What the moments are made of."""
        for moments in self.state.values():
            for moment in moments.values():
                yield from _inner(moment)

    def bytes_to_come(self, parameter: Tensor) -> int:
        """0: the moments are there."""
        assert parameter in self.state
        return 0

    def saved(self, parameter: Tensor) -> Mapping[str, Tensor]:
        """A parameter's moments by name, in float32; those of 8 bits copied to host memory."""
        return {name: _plain(moment) for name, moment in self.state[parameter].items()}

    def blank(self, parameter: Tensor) -> Tensor:
        """Host memory that a moment can be read into, to be given to `load`."""
        return torch.empty(parameter.shape, dtype=torch.float32)

    def load(self, parameter: Tensor, moments: dict[str, Tensor]) -> None:
        """Take over a copy of a parameter's moments; without any they begin anew."""
        for name, moment in self.state[parameter].items():
            value = moments.get(name)
            moment.copy_(torch.zeros_like(self.blank(parameter)) if value is None else value)

    def _begin(self, parameter: Tensor) -> None:
        """Have torchao make its moments, by a step that moves nothing; short ones in float32."""
        gradient = parameter.grad
        parameter.grad = torch.zeros_like(parameter)
        self._take(parameter, seed=0)
        parameter.grad = gradient
        made = self._optimizers[parameter].state[parameter]
        for name in MOMENTS:
            if type(made[name]) is Tensor:
                made[name] = torch.zeros_like(made[name], dtype=torch.float32)
        self.state[parameter] = {name: made[name] for name in MOMENTS}

    def _take(self, parameter: Tensor, seed: int) -> None:
        """Take a parameter's step, compiled where that is worth its time."""
        stance = "default" if parameter.is_cuda else "force_eager"
        devices = [parameter.device] if parameter.is_cuda else []
        with (
            torch.random.fork_rng(devices, enabled=self._draws),
            torch.compiler.set_stance(stance),
        ):
            if self._draws:
                torch.manual_seed(seed)
            self._optimizers[parameter].step()


def _inner(moment: Any) -> Iterator[Tensor]:
    """The plain tensors that a moment is made of."""
    if type(moment) is Tensor:
        yield moment
    else:
        names, _ = moment.__tensor_flatten__()
        yield from (getattr(moment, name) for name in names)


def _plain(moment: Any) -> Tensor:
    if type(moment) is Tensor:
        return moment
    values: Tensor = moment.dequantize()
    return values.cpu()
