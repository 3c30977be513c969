"""AdamW on sums of gradients: accumulate, add up over replicas, divide once, clip, step.

Gradients accumulate in one flat buffer per dtype, of which every `parameter.grad` is a view, so a
replica sends one bucket and the norm is one reduction. Of a model that is divided over a gang, all
of it is done on this lane's pieces. Nothing is normalised before `step`, for only then the global
denominator is known. A gradient that is not finite never reaches the weights. Knows nothing of
losses, rollouts or models beyond their parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from m2flow.errors import RunFailed
from m2flow.training.schedule import Schedule
from m2flow.training.sharded import WHOLE, Shards, whole

AllReduce = Callable[[list[Tensor]], None]
"""Sums each tensor of the list, in place, over the data-parallel replicas."""


class NotFinite(RunFailed):
    """A loss or gradient is NaN or infinite; no optimizer step was taken."""


@dataclass(frozen=True)
class AdamWConfig:
    """AdamW (arXiv 1711.05101), its schedule, and the bound on the gradient's norm (None: none)."""

    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: Schedule = field(default_factory=Schedule)
    max_grad_norm: float | None = 1.0


@dataclass(frozen=True)
class OptimizerStep:
    """One optimizer step: the norm before clipping, the learning rate, and the reduced sums."""

    grad_norm: float
    learning_rate: float
    sums: Tensor


class SumOptimizer:
    """Owns the gradients and the optimizer state of a model's trainable parameters.

    Args:
        named_parameters: as `model.named_parameters()` gives them; those that need no gradient
            are left alone.
        config: every figure of the optimizer.
        shards: how the model is divided.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: AdamWConfig,
        shards: Shards = WHOLE,
    ) -> None:
        self._named = [(name, p) for name, p in named_parameters if p.requires_grad]
        assert self._named, "a model without trainable parameters"
        self._config = config
        self._shards = shards
        self._pieces = [shards.piece(p) for _, p in self._named]
        self._flats = self._flat_gradients()
        self._adamw = torch.optim.AdamW(
            self._pieces,
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.num_steps = 0
        """Optimizer steps taken."""

    def zero(self) -> None:
        """Forget the gradients accumulated so far."""
        for flat in self._flats:
            flat.zero_()

    def step(self, sums: Tensor, denominator: int, all_reduce: AllReduce | None) -> OptimizerStep:
        """Reduce, divide by the global denominator, clip, step, zero.

        Args:
            sums: float64 vector of this lane's sums: reduced along with the gradients. The
                element numbered `denominator` is what gradients are divided by; element 0 is the
                loss. Where the denominator is 0 nothing was learnt from, and no step is taken.
            denominator: an index into `sums`.
            all_reduce: sums over replicas of a whole model, which all call `step` together; None
                for one replica. Replicas of a divided model find each other by their mesh.

        Raises:
            NotFinite: on every lane alike. Gradients are zeroed, weights and state untouched.
        """
        self._assert_views()
        sums = sums.to(self._flats[0].device)
        over_replicas = all_reduce or self._shards.sum_over_replicas
        over_replicas([*self._flats, sums])
        squared_norm = torch.stack(
            [torch.linalg.vector_norm(flat).double().square() for flat in self._flats]
        ).sum()
        self._shards.sum_over_gang([sums, squared_norm])
        norm = squared_norm.sqrt()
        divisor = float(sums[denominator])
        grad_norm = float(norm) / divisor if divisor else 0.0
        learning_rate = self._config.learning_rate * self._config.schedule.factor(self.num_steps)
        finite = bool(torch.isfinite(norm)) and bool(torch.isfinite(sums[0]))
        if divisor and finite:
            scale = 1.0 / divisor
            bound = self._config.max_grad_norm
            if bound is not None:
                scale *= min(1.0, bound / (grad_norm + 1e-6))
            for flat in self._flats:
                flat.mul_(scale)
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._adamw.step()
            self.num_steps += 1
        found = "" if finite else self._what_is_not_finite(float(sums[0]))
        self.zero()
        if not finite:
            raise NotFinite(found)
        return OptimizerStep(grad_norm, learning_rate, sums)

    def tensors(self) -> Iterator[Tensor]:
        """What is stepped, its gradients, and optimizer state, as they are now."""
        yield from self._pieces
        yield from self._flats
        for quantities in self._adamw.state.values():
            yield from (value for value in quantities.values() if isinstance(value, Tensor))

    def bytes_to_come(self) -> int:
        """Bytes of the moments that the first step will make; 0 once it has."""
        return sum(2 * piece.nbytes for piece in self._pieces if piece not in self._adamw.state)

    def state_items(self) -> Iterator[tuple[str, Tensor]]:
        """Optimizer state as `<quantity>/<parameter>`, and `num_steps`; whole, on the CPU.

        Collective in the gang: each lane goes through all of it, gathered one by one.
        """
        yield "num_steps", torch.tensor(self.num_steps)
        for (name, parameter), piece in zip(self._named, self._pieces, strict=True):
            for quantity, value in self._adamw.state[piece].items():
                if quantity != "step":
                    value = self._shards.like(value, parameter)
                yield f"{quantity}/{name}", whole(value)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over a copy of what `state_items` gave, for a model with the same parameters.

        It does not matter how either model is or was divided. Not collective.
        """
        self.num_steps = int(state["num_steps"])
        by_name: dict[str, dict[str, Tensor]] = {name: {} for name, _ in self._named}
        for key, value in state.items():
            if key != "num_steps":
                quantity, name = key.split("/", 1)
                assert name in by_name, f"state of another model: it has no parameter {name}"
                by_name[name][quantity] = value.detach()
        for (name, parameter), piece in zip(self._named, self._pieces, strict=True):
            quantities = by_name[name]
            assert all(q == "step" or v.shape == parameter.shape for q, v in quantities.items())
            self._adamw.state[piece] = {
                quantity: value.to(parameter.device, copy=True)
                if quantity == "step"
                else self._shards.cut(value, parameter)
                for quantity, value in quantities.items()
            }

    def _flat_gradients(self) -> list[Tensor]:
        by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for number, piece in enumerate(self._pieces):
            by_kind.setdefault((piece.dtype, piece.device), []).append(number)
        flats = []
        for (dtype, device), numbers in by_kind.items():
            sizes = [self._pieces[number].numel() for number in numbers]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
            views: tuple[Tensor, ...] = torch.split(flat, sizes)
            for number, view in zip(numbers, views, strict=True):
                parameter, piece = self._named[number][1], self._pieces[number]
                piece.grad = view.view(piece.shape)
                parameter.grad = self._shards.like(piece.grad, parameter)
            flats.append(flat)
        return flats

    def _assert_views(self) -> None:
        starts = {flat.untyped_storage().data_ptr() for flat in self._flats}
        for (name, parameter), piece in zip(self._named, self._pieces, strict=True):
            assert parameter.grad is not None, f"something took the gradient of {name}"
            gradient = self._shards.piece(parameter.grad)
            assert not piece.numel() or gradient.untyped_storage().data_ptr() in starts, (
                f"something replaced the gradient of {name}"
            )

    def _what_is_not_finite(self, loss: float) -> str:
        bad = torch.tensor(
            [int(not torch.isfinite(p.grad).all()) for p in self._pieces if p.grad is not None],
            device=self._flats[0].device,
        )
        self._shards.sum_over_gang([bad])
        names = [
            name for (name, _), is_bad in zip(self._named, bad.tolist(), strict=True) if is_bad
        ]
        listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        return (
            f"no step was taken: the summed loss is {loss} and the gradients of {len(names)} of "
            f"{len(self._named)} parameters are not finite" + (f" ({listed})" if names else "")
        )
