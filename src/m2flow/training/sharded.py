"""A model in shards over the lanes of a gang (FSDP2), and what these lanes must do in step.

Each lane keeps a piece of every parameter, its gradient and its optimizer state. A pass gathers
parameters one block at a time, and its backward sums the block's gradients into the pieces, so a
lane never holds the gradient of the whole model, however many micro-batches are folded. Gangs that
are replicas of each other do not meet in a pass: they may run different numbers of calls, and sum
their gradients once, at the optimizer step.

Every pass is collective in the gang, so its lanes run equally many: one with fewer micro-batches
runs empty ones. `WHOLE` stands for a model that one lane has all of: there, nothing here costs.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from m2flow.errors import RunFailed, UserError
from m2flow.flow.worker import Gang
from m2flow.runtime.transport.groups import sum_over

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


class Shards:
    """The lanes among which a model is divided.

    Args:
        mesh: of shape (replicas, lanes of a gang), with the dimensions "replicate" and "shard";
            None for a whole model on one lane.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self._mesh = mesh
        self.size = 1 if mesh is None else mesh.size(1)
        """Lanes of the gang."""
        self.num_replicas = 1 if mesh is None else mesh.size(0)
        """Gangs."""

    @classmethod
    def of(cls, gang: Gang) -> Shards:
        """Those of a worker's gang; a gang of one lane holds a whole model."""
        return cls(gang.mesh()) if gang.size > 1 else WHOLE

    def shard(self, model: nn.Module) -> None:
        """Divide a model, in place; its parameters become DTensors on the "shard" dimension.

        The model may be on the CPU: pieces move to the mesh's device one block at a time. Gradients
        are summed, never averaged: they are divided by the true denominator at the optimizer step.

        Raises:
            UserError: this version of PyTorch cannot sum gradients.
        """
        if self._mesh is None:
            return
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
            raise UserError(
                "this version cannot shard a model as m2flow needs it",
                key="torch",
                value=torch.__version__,
                expected="2.9 or later for a worker on gangs of lanes",
            )
        # A critic's numbers are a view; nothing here writes into what a model gives.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
        mesh = self._mesh["shard"]
        units = [*_blocks(model), model]
        # Gradients of 16-bit parameters are summed over the lanes in float32, as over passes.
        narrow = any(parameter.dtype.itemsize < 4 for parameter in model.parameters())
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if narrow else None)
        for unit in units:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        for unit in units:
            assert isinstance(unit, FSDPModule)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # Gloo knows no mean

    def reshard(self, model: nn.Module) -> None:
        """Give up what a pass without a backward leaves gathered: it would be stale after a step.

        Blocks give up theirs by themselves; the model's own parameters (embedding, last norm, head)
        stay gathered for a backward to come.
        """
        if self._mesh is not None:
            sharded: Any = model
            sharded.reshard()

    # --- lanes in step ----------------------------------------------------------------------------

    @contextmanager
    def together(self) -> Iterator[None]:
        """What one lane of the gang raises within is raised on all, so that none waits in vain.

        Collective in the gang, on leaving. Nothing within may be collective.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # noqa: BLE001  (raised again, on all lanes)
            error = raised
        if self._mesh is not None and self._largest(int(error is not None)):
            told = self._errors(error)
            error = error or next(each for each in told if each is not None)
        if error is not None:
            raise error

    def padded(self, items: Sequence[T]) -> list[T | None]:
        """The items, and then as many times None as the lane of the gang with most has more.

        Collective in the gang.
        """
        return [*items, *[None] * (self._largest(len(items)) - len(items))]

    def sum_over_gang(self, tensors: Sequence[Tensor]) -> None:
        """Sum in place over the lanes of this gang. Collective."""
        if self._mesh is not None:
            sum_over(self._mesh.get_group("shard"), tensors)

    def sum_over_replicas(self, tensors: Sequence[Tensor]) -> None:
        """Sum in place over the lanes that hold the same pieces in the other gangs. Collective."""
        if self._mesh is not None and self.num_replicas > 1:
            sum_over(self._mesh.get_group("replicate"), tensors)

    def _largest(self, number: int) -> int:
        if self._mesh is None:
            return number
        import torch.distributed as dist

        numbers = torch.tensor([number])  # on the CPU: an accelerator would have to be waited for
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._mesh.get_group("shard"))
        return int(numbers)

    def _errors(self, error: Exception | None) -> list[Exception | None]:
        """What each lane of the gang has raised, in order. Collective in the gang."""
        import torch.distributed as dist

        assert self._mesh is not None
        told = error
        if error is not None and not isinstance(error, UserError):  # others may not be picklable
            told = RunFailed(f"{type(error).__name__} on another lane of the gang: {error}")
        errors: list[Exception | None] = [None] * self.size
        dist.all_gather_object(errors, told, group=self._mesh.get_group("shard"))
        return errors

    # --- pieces -----------------------------------------------------------------------------------

    def piece(self, tensor: Tensor) -> Tensor:
        """This lane's piece of a parameter or gradient; shares its memory, and may be empty."""
        if self._mesh is None:
            return tensor
        sharded: Any = tensor.detach()
        piece: Tensor = sharded.to_local()
        return piece

    def like(self, piece: Tensor, parameter: Tensor) -> Tensor:
        """A piece as part of a tensor that is laid out as a parameter is; shares its memory."""
        if self._mesh is None:
            return piece
        from torch.distributed.tensor import DTensor

        assert isinstance(parameter, DTensor)
        return DTensor.from_local(
            piece,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def cut(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """This lane's piece of a whole tensor that is laid out as a parameter is; a copy."""
        if self._mesh is None:
            return whole.to(parameter.device, copy=True)
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(parameter, DTensor) and whole.shape == parameter.shape
        mesh, placements = parameter.device_mesh, parameter.placements
        cut = distribute_tensor(whole.to(mesh.device_type), mesh, placements, src_data_rank=None)
        return cut.to_local().clone()


WHOLE = Shards(None)
"""A model that is not divided."""


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on the CPU; the tensor itself where it is whole and there already.

    Collective in the gang among which the tensor is divided.
    """
    gather = getattr(tensor, "full_tensor", None)  # of a DTensor
    return (tensor if gather is None else gather()).detach().cpu()


def whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the model's state dict, whole and on the CPU, gathered one at a time.

    Collective in the gang: every lane goes through all of it, and keeps what it needs. Names of one
    parameter (a head tied to the embedding) give the same tensor.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names_left = Counter(id(parameter) for parameter in parameters.values())
    tied: dict[int, Tensor] = {}
    for name, tensor in model.state_dict().items():
        key = id(parameters.get(name))
        if key not in tied:
            tied[key] = whole(tensor)
        yield name, tied[key]
        names_left[key] -= 1
        if names_left[key] <= 0:
            del tied[key]


@dataclass(frozen=True)
class WholeModel:
    """A divided model and its gathered weights, to be written by one lane."""

    model: Any
    weights: dict[str, Tensor]

    def save_pretrained(self, save_directory: str) -> None:
        """Write a folder in Hugging Face layout; not collective."""
        self.model.save_pretrained(save_directory, state_dict=self.weights)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: members of its outermost lists of modules."""
    blocks: list[nn.Module] = []
    for child in model.children():
        blocks += child if isinstance(child, nn.ModuleList) else _blocks(child)
    return blocks
