"""AdamW on sums of gradients: accumulate, add up over replicas, divide once, clip, step.

Gradients accumulate in one flat buffer per dtype, so a replica sends one bucket and the norm is one
reduction. Of a model that is divided over a gang, all of it is done on this lane's pieces. Nothing
is normalised before `step`, for only then the global denominator is known. A gradient that is not
finite never reaches the weights. Knows nothing of losses, rollouts or models beyond their
parameters.

Parameters of 16 bits are for computing only. Their gradients are added up in float32, where a sum
does not stop growing at 256 times its terms, and the optimizer steps a float32 master copy, from
which the parameters are rounded: at a learning rate of 1e-6 most steps are smaller than the spacing
of bfloat16 numbers and would be lost. Micikevicius et al., "Mixed Precision Training",
arXiv 1710.03740, section 3.1. With stochastic rounding there is no copy: a step is rounded up or
down with the probability that makes the mean exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from m2flow.errors import RunFailed, UserError
from m2flow.runtime.weights.boxes import Box
from m2flow.runtime.weights.manifest import Shard
from m2flow.training.adamw import NOBODY_WAITS, AdamWStep
from m2flow.training.schedule import Schedule
from m2flow.training.sharded import WHOLE, Shards, whole
from m2flow.training.torchao_adamw import TorchaoAdamW

AllReduce = Callable[[list[Tensor]], None]
"""Sums each tensor of the list, in place, over the data-parallel replicas."""

MASTER = "master"
"""The quantity of a parameter's state that is its float32 master copy."""

NOT_TAKEN = "no step was taken"
"""How the message of `NotFinite` begins."""

NUM_STEPS = "num_steps"
_STEP = "step"  # of each parameter, in older files


class NotFinite(RunFailed):
    """A loss or gradient is NaN or infinite; no optimizer step was taken."""


@dataclass(frozen=True)
class AdamWConfig:
    """AdamW (arXiv 1711.05101), its schedule, and the bound on the gradient's norm (None: none).

    With `on_host`, moments and master copies of all parameters stay in host memory, and the CPU
    steps them (Ren et al., "ZeRO-Offload", arXiv 2101.06840): an accelerator then keeps 6 bytes of
    a 16-bit parameter in place of 18.

    The two others need torchao. With `moments_8bit` moments take 2 bytes of a parameter in place of
    8. With `stochastic_rounding` bfloat16 parameters are stepped themselves and have no master
    copies, which excludes `on_host`.
    """

    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: Schedule = field(default_factory=Schedule)
    max_grad_norm: float | None = 1.0
    on_host: bool = False
    moments_8bit: bool = False
    stochastic_rounding: bool = False


@dataclass(frozen=True)
class OptimizerStep:
    """One optimizer step: the norm before clipping, the learning rate, and the reduced sums.

    The learning rate is that of the parameters that begin last, 0 before they do.
    """

    grad_norm: float
    learning_rate: float
    sums: Tensor


@dataclass(frozen=True)
class _BufferKind:
    """What gradients have in common that lie in one flat buffer.

    Attributes:
        dtype, device: of the buffer.
        copies: lanes of the gang that have the same piece.
        is_term: whether each of them has a term of a sum only, before it is added up.
    """

    dtype: torch.dtype
    device: torch.device
    copies: int
    is_term: bool


class SumOptimizer:
    """Owns the gradients and the optimizer state of a model's trainable parameters.

    Args:
        named_parameters: as `model.named_parameters()` gives them; those that need no gradient
            are left alone.
        config: every figure of the optimizer.
        shards: how the model is divided.
        first_after: by parameter, so many steps of the run in which it stands still, and behind
            which its learning rate begins to rise; not with 8-bit moments or stochastic rounding.

    Raises:
        UserError: the configuration asks for torchao, which is not installed, or for stochastic
            rounding, and no parameter is bfloat16.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: AdamWConfig,
        shards: Shards = WHOLE,
        first_after: Mapping[Tensor, int] = NOBODY_WAITS,
    ) -> None:
        self._named = [(name, p) for name, p in named_parameters if p.requires_grad]
        assert self._named, "a model without trainable parameters"
        self._config = config
        self._shards = shards
        self._pieces = [shards.piece(p) for _, p in self._named]
        self._masters = [_master(piece, config) for piece in self._pieces]
        self._hooks: list[RemovableHandle] = []
        self._flats = self._flat_gradients()
        waits = {
            master: first_after[parameter]
            for (_, parameter), master in zip(self._named, self._masters, strict=True)
            if parameter in first_after
        }
        self._adamw = _adamw(self._masters, config, waits)
        self._last_after = max(waits.values(), default=0)
        self.num_steps = 0
        """Optimizer steps taken."""

    def zero(self) -> None:
        """Forget the gradients accumulated so far."""
        for flat in self._flats:
            flat.zero_()

    def zero_but(self, kept: Iterable[Tensor]) -> None:
        """Forget the gradients accumulated so far of all parameters but these."""
        ids = {id(parameter) for parameter in kept}
        for number, (_, parameter) in enumerate(self._named):
            if id(parameter) not in ids:
                self._gradients[number].zero_()

    def release(self) -> None:
        """Let go of the parameters, so that another optimizer may own them."""
        for hook in self._hooks:
            hook.remove()
        for _, parameter in self._named:
            parameter.grad = None

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
        for flat, kind in zip(self._flats, self._kinds, strict=True):
            if kind.is_term:
                self._shards.sum_terms([flat])
        squares = [
            torch.linalg.vector_norm(flat).double().square() / kind.copies
            for flat, kind in zip(self._flats, self._kinds, strict=True)
        ]
        squared_norm = squares[0] if len(squares) == 1 else torch.stack(squares).sum()
        self._shards.sum_over_gang([sums, squared_norm])
        norm = math.sqrt(float(squared_norm)) if squared_norm >= 0 else math.nan
        loss, divisor = float(sums[0]), float(sums[denominator])
        grad_norm = norm / divisor if divisor else 0.0
        rate_after = partial(self._rate_after, number=self.num_steps)
        finite = math.isfinite(norm) and math.isfinite(loss)
        if divisor and finite:
            scale = 1.0 / divisor
            bound = self._config.max_grad_norm
            if bound is not None:
                scale *= min(1.0, bound / (grad_norm + 1e-6))
            for flat in self._flats:
                flat.mul_(scale)
            for host, flat in zip(self._host_flats, self._flats, strict=False):
                host.copy_(flat)
            self.num_steps += 1
            self._adamw.step(rate_after, self.num_steps)
            self._round()
        found = "" if finite else self._what_is_not_finite(loss)
        self.zero()
        if not finite:
            raise NotFinite(found)
        return OptimizerStep(grad_norm, rate_after(self._last_after), sums)

    def _rate_after(self, waited: int, number: int) -> float:
        """The learning rate of a step, from 0, for parameters that wait for so many steps."""
        schedule = self._config.schedule
        own = replace(schedule, idle_steps=schedule.idle_steps + waited)
        return self._config.learning_rate * own.factor(number)

    def tensors(self) -> Iterator[Tensor]:
        """What is stepped, its gradients, and optimizer state, as they are now."""
        yield from self._pieces
        yield from (master for _, master in self._copied())
        yield from self._flats
        yield from self._host_flats
        yield from self._adamw.tensors()

    def bytes_to_come(self) -> int:
        """Bytes of the moments that the first step will make here; 0 once it has."""
        pairs = zip(self._masters, self._pieces, strict=True)
        here = [master for master, piece in pairs if master.device == piece.device]
        return sum(self._adamw.bytes_to_come(one) for one in here)

    def parts(self) -> dict[str, Shard]:
        """This lane's parts of the optimizer's state, to be written; they share its memory.

        Moments of 8 bits are given in float32, in host memory. Names are
        `<quantity>/<parameter>`, and `num_steps` for their number, a scalar. Master
        copies of 16-bit parameters are the quantity `master`.
        """
        found = {NUM_STEPS: _scalar(self.num_steps)}
        for name, value, parameter, _ in self._quantities():
            found[name] = self._shards.placed(value, parameter)
        return found

    def state_items(self) -> Iterator[tuple[str, Tensor]]:
        """The whole tensors of the optimizer's state, by name, on the CPU.

        Collective in the gang: they are gathered one by one.
        """
        yield NUM_STEPS, torch.tensor(self.num_steps)
        for name, value, parameter, piece in self._quantities():
            yield name, whole(self._shards.like(value.to(piece.device), parameter))

    def load(self, names: Iterable[str], fill: Callable[[dict[str, Shard]], None]) -> None:
        """Go on from state that was saved, of a model with the same parameters. Not collective.

        It does not matter how either model is or was divided, in which of them parameters have 16
        bits, or moments 8: without master copies they are made of the parameters as they are now,
        which the caller has loaded.

        Args:
            names: those that `parts` had.
            fill: copies what was saved into parts, which are memory of this optimizer.

        Raises:
            UserError: some of it is of no parameter that is trained here.
        """
        num_steps = _scalar(0)
        parts, by_name = {NUM_STEPS: num_steps}, {name: set[str]() for name, _ in self._named}
        for key in set(names) - {NUM_STEPS}:
            quantity, _, name = key.partition("/")
            if name not in by_name:
                raise UserError(
                    "is in the trainer's state, and no parameter that is trained now has it",
                    key=key,
                    hint="go on with the recipe and the version of m2flow that wrote it, or start "
                    "a new run",
                )
            by_name[name].add(quantity)
        moments: dict[str, dict[str, Tensor]] = {}
        for (name, parameter), _, master in self._all():
            saved = sorted(by_name[name] - {_STEP})
            blank = self._adamw.blank
            values = {q: master if q == MASTER else blank(master) for q in saved}
            for quantity, value in values.items():
                parts[f"{quantity}/{name}"] = self._shards.placed(value, parameter)
            moments[name] = {q: value for q, value in values.items() if q != MASTER}
        fill(parts)
        self.num_steps = int(num_steps.tensor)
        with torch.no_grad():
            for (name, _), piece, master in self._all():
                if MASTER not in by_name[name] and master is not piece:
                    master.copy_(piece)
                self._adamw.load(master, moments[name])
        self._round()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a copy of what `state_items` gave; otherwise as `load`."""

        @torch.no_grad()
        def fill(parts: dict[str, Shard]) -> None:
            for name, part in parts.items():
                assert tuple(state[name].shape) == part.global_shape, name
                part.tensor.copy_(part.box.of(state[name]))

        self.load(state, fill)

    def _quantities(self) -> Iterator[tuple[str, Tensor, nn.Parameter, Tensor]]:
        """Each tensor of the state here: its name and value, of which parameter, its piece."""
        for (name, parameter), piece, master in self._all():
            values = {MASTER: master} if _is_copy(master, piece) else {}
            for quantity, value in (values | dict(self._adamw.saved(master))).items():
                yield f"{quantity}/{name}", value, parameter, piece

    def _all(self) -> Iterator[tuple[tuple[str, nn.Parameter], Tensor, Tensor]]:
        """Each parameter with its name, this lane's piece of it, and what is stepped for that."""
        return zip(self._named, self._pieces, self._masters, strict=True)

    def _copied(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces that have a master copy, with it."""
        pairs = zip(self._pieces, self._masters, strict=True)
        return ((piece, master) for piece, master in pairs if _is_copy(master, piece))

    @torch.no_grad()
    def _round(self) -> None:
        """Set parameters to their master copies, where they have some."""
        for piece, master in self._copied():
            piece.copy_(master)

    def _flat_gradients(self) -> list[Tensor]:
        """Make the buffers in which gradients add up, and have them arrive there."""
        by_kind: dict[_BufferKind, list[int]] = {}
        for number, (name, parameter) in enumerate(self._named):
            master, shards = self._masters[number], self._shards
            copies, is_term = shards.copies(parameter), shards.is_term(name)
            dtype = _wide(master)
            kind = _BufferKind(dtype, self._pieces[number].device, copies, is_term)
            by_kind.setdefault(kind, []).append(number)
        self._kinds = list(by_kind)
        flats, self._gradients = [], dict[int, Tensor]()
        self._host_flats: list[Tensor] = []
        for kind, numbers in by_kind.items():
            sizes = [self._masters[number].numel() for number in numbers]
            flat = torch.zeros(sum(sizes), dtype=kind.dtype, device=kind.device)
            stepped = flat
            if self._config.on_host:
                stepped = torch.zeros_like(flat, device="cpu", pin_memory=flat.is_cuda)
                self._host_flats.append(stepped)
            views: Iterable[tuple[Tensor, Tensor]] = zip(
                torch.split(flat, sizes), torch.split(stepped, sizes), strict=True
            )
            for number, (view, stepped_view) in zip(numbers, views, strict=True):
                parameter, master = self._named[number][1], self._masters[number]
                gradient = self._gradients[number] = view.view(master.shape)
                master.grad = stepped_view.view(master.shape)
                if master is self._pieces[number]:
                    parameter.grad = self._shards.like(gradient, parameter)
                else:
                    parameter.grad = None
                    add = partial(_add_to, gradient, self._shards)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(add))
            flats.append(flat)
        return flats

    def _assert_views(self) -> None:
        starts = {flat.untyped_storage().data_ptr() for flat in self._flats}
        for number, ((name, parameter), piece, master) in enumerate(self._all()):
            given = parameter.grad
            if master is not piece:
                assert given is None, f"something made a gradient of {name} of its own"
                continue
            if given is self._gradients[number]:
                continue  # asked first, for storages take long to ask for
            assert given is not None, f"something took the gradient of {name}"
            gradient = self._shards.piece(given)
            assert not piece.numel() or gradient.untyped_storage().data_ptr() in starts, (
                f"something replaced the gradient of {name}"
            )

    def _what_is_not_finite(self, loss: float) -> str:
        bad = torch.tensor(
            [int(not torch.isfinite(self._gradients[n]).all()) for n in range(len(self._named))],
            device=self._flats[0].device,
        )
        self._shards.sum_over_gang([bad])
        names = [
            name for (name, _), is_bad in zip(self._named, bad.tolist(), strict=True) if is_bad
        ]
        listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        return (
            f"{NOT_TAKEN}: the summed loss is {loss} and the gradients of {len(names)} of "
            f"{len(self._named)} parameters are not finite" + (f" ({listed})" if names else "")
        )


def _scalar(number: int) -> Shard:
    return Shard(torch.tensor(number), Box.whole(()), ())


def _adamw(
    masters: list[Tensor], config: AdamWConfig, first_after: Mapping[Tensor, int]
) -> AdamWStep:
    if config.stochastic_rounding and all(one.dtype is not torch.bfloat16 for one in masters):
        raise UserError(
            "no trained weights are bfloat16, and no others are rounded",
            key="training.rounding",
            value="stochastic",
            hint="set model.dtype to bfloat16, or take it out",
        )
    betas, eps, weight_decay = config.betas, config.eps, config.weight_decay
    if not config.moments_8bit and not config.stochastic_rounding:
        return AdamWStep(
            masters, betas=betas, eps=eps, weight_decay=weight_decay, first_after=first_after
        )
    return TorchaoAdamW(
        masters,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        moments_8bit=config.moments_8bit,
        stochastic_rounding=config.stochastic_rounding,
    )


def _master(piece: Tensor, config: AdamWConfig) -> Tensor:
    """What the optimizer steps for a piece: a float32 copy of one of 16 bits, else the piece.

    On the host a copy of any. With stochastic rounding another tensor in a bfloat16 piece's memory,
    which may have a gradient of float32.
    """
    dtype = _wide(piece)
    if config.on_host:
        return piece.detach().to("cpu", dtype, copy=True)
    if config.stochastic_rounding and piece.dtype is torch.bfloat16:
        same = piece.detach()
        same.grad_dtype = None  # any
        return same
    return piece if piece.dtype == dtype else piece.detach().to(dtype)


def _wide(tensor: Tensor) -> torch.dtype:
    """The dtype of a tensor's gradients and master copy."""
    narrow = tensor.is_floating_point() and tensor.dtype.itemsize < torch.float32.itemsize
    return torch.float32 if narrow else tensor.dtype


def _is_copy(master: Tensor, piece: Tensor) -> bool:
    """Whether what is stepped has memory of its own."""
    return master is not piece and master.dtype is not torch.bfloat16


def _add_to(total: Tensor, shards: Shards, parameter: Tensor) -> None:
    """Add the gradient of a pass, which autograd has just made, and give its memory back."""
    assert parameter.grad is not None
    total.add_(shards.piece(parameter.grad))
    parameter.grad = None
