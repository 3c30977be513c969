"""A model divided over the lanes of a gang, and what these lanes must do in step.

Whatever the layout (`m2flow.training.division`), each lane keeps a piece of every parameter, its
gradient and its optimizer state, and the piece may be all of it. Under FSDP2 a pass gathers
parameters one block at a time, and its backward sums the block's gradients into the pieces, so a
lane never holds the gradient of the whole model, however many micro-batches are folded. Gangs that
are replicas of each other do not meet in a pass: they may run different numbers of calls, and sum
their gradients once, at the optimizer step.

Every pass is collective in the gang, so its lanes run equally many: one with fewer micro-batches
runs others of which nothing is learned. `WHOLE` stands for a model that one lane has all of: there,
nothing here costs.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from m2flow.errors import RunFailed, UserError
from m2flow.flow.worker import Gang
from m2flow.models.folder import checked_folder
from m2flow.runtime.transport.groups import sum_over
from m2flow.runtime.weights.manifest import Shard, describe
from m2flow.training.context_parallel import ContextShard
from m2flow.training.division import Division
from m2flow.training.rollouts import Rows, joined

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
R = TypeVar("R", bound=Rows)


class Shards:
    """The lanes among which a model is divided, and how.

    Args:
        mesh: of shape (replicas, lanes of a gang), with the dimensions "replicate" and "shard";
            None for a whole model on one lane.
        division: what the lanes of a gang divide.
        grid: where they divide two things, the mesh of the gang, with the dimensions "column" (the
            lanes of which each has a shard of what is in a row) and "row".
    """

    def __init__(
        self,
        mesh: DeviceMesh | None,
        division: Division = Division(),  # noqa: B008  (frozen)
        grid: DeviceMesh | None = None,
    ) -> None:
        self._mesh, self._grid = mesh, grid
        self.division = division
        self.size = 1 if mesh is None else mesh.size(1)
        """Lanes of the gang."""
        self.num_replicas = 1 if mesh is None else mesh.size(0)
        """Gangs."""
        self.part: ContextShard | None = None
        """What is here of each micro-batch, where its tokens are divided."""
        if mesh is not None and division.cp > 1:
            self.part = ContextShard(
                mesh.get_local_rank("shard"), self.size, mesh.get_group("shard")
            )
        self._terms: set[str] = set()

    @classmethod
    def of(cls, gang: Gang) -> Shards:
        """The shards of a worker's gang; a gang of one lane holds a whole model."""
        if gang.size == 1:
            return WHOLE
        division = Division.of(gang.layout, gang.size)
        twofold = division.tp > 1 and division.fsdp > 1
        return cls(gang.mesh(), division, gang.grid() if twofold else None)

    def shard(self, model: nn.Module) -> None:
        """Divide a model, in place; parameters of which a lane has a piece become DTensors.

        The model may be on the CPU: what stays here moves to the mesh's device one block at a time.

        Raises:
            UserError: the model cannot be divided so, or not by this version of PyTorch.
        """
        if self._mesh is None:
            return
        if self.division.tp > 1:
            from m2flow.training.tensor_parallel import divide_layers

            row = self._mesh["shard"] if self._grid is None else self._grid["row"]
            self._terms = divide_layers(model, row)
        elif self.division.ep > 1:
            from m2flow.training.expert_parallel import divide_experts

            self._terms = divide_experts(model, self._mesh["shard"])
        elif self.division.cp > 1:
            self._terms = {name for name, _ in model.named_parameters()}
        if self.division.fsdp > 1:
            _shard_blocks(
                model, self._mesh["shard"] if self._grid is None else self._grid["column"]
            )
        else:
            _keep(model, self._mesh.device_type)

    def enter_by(self, model: nn.Module, method: str) -> None:
        """Have a method of a divided model gather what a call of the model itself would.

        The model's blocks gather theirs when they are called.
        """
        if self.division.fsdp > 1:
            from torch.distributed.fsdp import register_fsdp_forward_method

            register_fsdp_forward_method(model, method)

    def reshard(self, model: nn.Module) -> None:
        """Give up what a pass without a backward leaves gathered: it would be stale after a step.

        Blocks give up theirs by themselves; the model's own parameters (embedding, last norm, head)
        stay gathered for a backward to come.
        """
        if self.division.fsdp > 1:
            sharded: Any = model
            sharded.reshard()

    # --- lanes that share tokens ------------------------------------------------------------------

    @property
    def _sharing(self) -> Any:
        """The group of the lanes that work on the same tokens; None where each has its own."""
        if self._mesh is None or self.division.tp * self.division.cp == 1:
            return None
        return self._mesh.get_group("shard") if self._grid is None else self._grid.get_group("row")

    @property
    def counts(self) -> bool:
        """Whether figures count that were added up here: one of the lanes with equal ones says."""
        import torch.distributed as dist

        sharing = self._sharing
        return sharing is None or dist.get_rank(sharing) == 0

    def join(self, rows: R) -> tuple[R, slice]:
        """The rows of all lanes that share their tokens, in order.

        Collective among these lanes.

        Returns:
            The rows, and where this lane's completion tokens are among theirs.
        """
        sharing = self._sharing
        if sharing is None:
            return rows, slice(None)
        import torch.distributed as dist

        told: list[Any] = [None] * dist.get_world_size(sharing)
        dist.all_gather_object(told, rows, group=sharing)
        first = sum(theirs.num_tokens for theirs in told[: dist.get_rank(sharing)])
        return joined(told), slice(first, first + rows.num_tokens)

    def balance(self, rows: R) -> tuple[R, Callable[[Tensor], Tensor]]:
        """Deal the rows of lanes that work side by side out anew, so that each has as many tokens.

        Rows keep their order over the lanes, so those that share a prompt stay together.
        Collective among these lanes, and so is what is returned.

        Returns:
            The rows to work on here; and what gives, of figures of their completion tokens, those
            of the rows that were given here.
        """
        shares = self.division.shares
        if self._mesh is None or shares == 1:
            return rows, lambda figures_T: figures_T
        import torch.distributed as dist

        mesh, name = (self._mesh, "shard") if self._grid is None else (self._grid, "column")
        group, rank = mesh.get_group(name), mesh.get_local_rank(name)
        told: list[Any] = [None] * shares
        dist.all_gather_object(told, rows, group=group)
        everyone = joined(told)
        lane_B = dealt(everyone.row_lengths(), shares)
        mine = everyone.select((lane_B == rank).nonzero()[:, 0])
        first = sum(theirs.num_tokens for theirs in told[:rank])

        def given_back(figures_T: Tensor) -> Tensor:
            found: list[Any] = [None] * shares
            dist.all_gather_object(found, figures_T, group=group)
            return torch.cat(found)[first : first + rows.num_tokens]

        return mine, given_back

    def is_term(self, name: str) -> bool:
        """Whether this lane's gradient of a parameter is a term of a sum over lanes."""
        return name in self._terms

    def sum_terms(self, tensors: Sequence[Tensor]) -> None:
        """Sum in place over the lanes that have terms of one gradient. Collective."""
        if self._grid is not None:
            sum_over(self._grid.get_group("row"), tensors)
        else:
            self.sum_over_gang(tensors)

    def copies(self, parameter: Tensor) -> int:
        """How many lanes of the gang have the piece of a parameter that is here."""
        pieces = 1
        for placement, lanes in zip(*_laid_out(parameter), strict=True):
            pieces *= 1 if placement.is_replicate() else lanes
        return self.size // pieces

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

    def padded(self, items: Sequence[T]) -> Iterator[T | None]:
        """The items, and then as many times None as the lane of the gang with most has more.

        Collective in the gang. An item is asked for when it is its turn.
        """
        return chain(items, repeat(None, self._largest(len(items)) - len(items)))

    def one_of(self, item: T | None) -> T | None:
        """The item of this lane, or where it has none that of another; None where nobody has one.

        Collective in the gang.
        """
        if self._mesh is None or not self._largest(int(item is None)):
            return item
        import torch.distributed as dist

        told: list[T | None] = [None] * self.size
        dist.all_gather_object(told, item, group=self._mesh.get_group("shard"))
        return next((each for each in (item, *told) if each is not None), None)

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
        divided: Any = tensor.detach()
        piece: Tensor = divided.to_local() if _is_divided(tensor) else tensor
        return piece

    def like(self, piece: Tensor, parameter: Tensor) -> Tensor:
        """A piece as part of a tensor that is laid out as a parameter is; shares its memory."""
        if not _is_divided(parameter):
            return piece
        from torch.distributed.tensor import DTensor

        divided: Any = parameter
        return DTensor.from_local(
            piece,
            divided.device_mesh,
            divided.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def placed(self, piece: Tensor, parameter: Tensor) -> Shard:
        """A piece with where it is in the whole, laid out as a parameter is; shares its memory."""
        box = describe({"": parameter}).held[""].box
        return Shard(piece.detach(), box, tuple(parameter.shape))

    @property
    def group(self) -> Any:
        """The process group of the gang's lanes; None for one lane."""
        return None if self._mesh is None else self._mesh.get_group("shard")


WHOLE = Shards(None)
"""A model that is not divided."""


def dealt(lengths_B: Tensor, shares: int) -> Tensor:
    """Deal rows out in their order, so that each share has about as many tokens.

    Returns:
        The share of each row, from 0.
    """
    middle_B = lengths_B.cumsum(0) - lengths_B.double() / 2  # float32 counts to 2^24 alone
    share_B = middle_B * shares / max(int(lengths_B.sum()), 1)
    return share_B.long().clamp(max=shares - 1)  # an empty last row is at the very end


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on the CPU; the tensor itself where it is whole and there already.

    Collective in the gang among which the tensor is divided.
    """
    divided: Any = tensor
    if not _is_divided(tensor):
        return tensor.detach().cpu()
    if len(divided.placements) == 2:  # one gather after the other, as PyTorch would do with a word
        from torch.distributed.tensor import Replicate

        divided = divided.redistribute(placements=[Replicate(), divided.placements[1]])
    gathered: Tensor = divided.full_tensor().detach().cpu()
    return gathered


def whole_weights(
    model: nn.Module, named: Iterable[tuple[str, Tensor]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are `named`, by default all of the model's state dict, whole and on the CPU,
    gathered one at a time.

    Collective in the gang: every lane goes through all of it, and keeps what it needs. Names of one
    parameter (a head tied to the embedding) give the same tensor.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names_left = Counter(id(parameter) for parameter in parameters.values())
    tied: dict[int, Tensor] = {}
    for name, tensor in model.state_dict().items() if named is None else named:
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
        """Write a folder in Hugging Face layout; not collective.

        transformers writes in the first process of the world alone, which this lane need not be.

        Raises:
            UserError: the configuration or weights are not there afterwards.
        """
        self.model.should_save_on_this_rank = lambda is_main_process: is_main_process
        try:
            self.model.save_pretrained(save_directory, state_dict=self.weights)
        finally:
            del self.model.should_save_on_this_rank
        checked_folder(save_directory)


def _is_divided(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements")  # a DTensor, whose module is slow to import


def _laid_out(tensor: Tensor) -> tuple[Sequence[Any], Sequence[int]]:
    """How a tensor lies on each dimension of its mesh, and their sizes; none of a plain one."""
    divided: Any = tensor
    return (divided.placements, divided.device_mesh.shape) if _is_divided(tensor) else ((), ())


def _shard_blocks(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a model's blocks, and what is left of it, over a mesh of one dimension.

    Gradients are summed, never averaged: they are divided by the true denominator at the step.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    # A critic's numbers are a view; nothing here writes into what a model gives.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    blocks = _blocks(model)
    within = [part for block in blocks for part in _of_another_dtype(block)]
    units = [*within, *blocks, *_of_another_dtype(model, blocks), model]
    # Gradients of 16-bit parameters are summed over the lanes in float32, as over passes.
    narrow = any(parameter.dtype.itemsize < 4 for parameter in model.parameters())
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if narrow else None)
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    for unit in units:
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # Gloo knows no mean


def _keep(model: nn.Module, device: str) -> None:
    """Move what a lane has all of to its device; on the CPU, out of pages that others share."""
    for parameter in model.parameters():
        if not _is_divided(parameter):
            parameter.data = parameter.data.to(device, copy=True)
    for path, buffer in model.named_buffers():
        module, _, name = path.rpartition(".")
        model.get_submodule(module)._buffers[name] = buffer.to(device)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: members of its outermost lists of modules.

    So are those of a sequence of modules of one class, as timm has them.
    """
    blocks: list[nn.Module] = []
    for child in model.children():
        repeated = isinstance(child, nn.ModuleList) or (
            isinstance(child, nn.Sequential) and len({type(each) for each in child}) == 1
        )
        blocks += child.children() if repeated else _blocks(child)
    return blocks


def _of_another_dtype(
    unit: nn.Module, apart: Collection[nn.Module] = (), dtype: torch.dtype | None = None
) -> list[nn.Module]:
    """Modules of a unit with weights of another dtype than its first one's: a unit has one dtype.

    Args:
        unit: what is gathered at a time.
        apart: modules in it that are units of their own.
        dtype: of the unit, in place of its first weight's.

    Returns:
        The modules that hold such weights themselves, inner ones first.
    """
    found: list[nn.Module] = []
    dtype = dtype or next((parameter.dtype for parameter in unit.parameters()), None)
    for module in unit.children():
        if module in apart:
            continue
        dtypes = (parameter.dtype for parameter in module.parameters(recurse=False))
        other = next((own for own in dtypes if own != dtype), None)
        found += _of_another_dtype(module, apart, other or dtype)
        found += [] if other is None else [module]
    return found
