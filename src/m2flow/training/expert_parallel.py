"""A mixture's experts divided over lanes, which have tokens of their own and all else of the model.

Every token goes to the lanes of its experts and what they make of it comes back, by one exchange
each (Lepikhin et al., "GShard", arXiv 2006.16668, section 3.2; nothing is dropped). So a lane's
experts have the gradient of all lanes' tokens, while that of all else is a term of a sum over the
lanes.

Shapes: T tokens here, K experts of each, P = T K pairs, R pairs that came from all lanes, H width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from m2flow.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MATRICES = ("gate_up_proj", "down_proj")
"""The parameters of a transformers module of experts, which they are the first dimension of."""

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Hidden states [T, H], experts [T, K] and weights [T, K] of tokens -> [T, H]."""


def divide_experts(model: nn.Module, mesh: DeviceMesh) -> set[str]:
    """Divide a model's experts over a mesh of one dimension, in place; they become DTensors.

    Returns:
        Names of the parameters of which a lane's gradient is a term of a sum over the lanes.

    Raises:
        UserError: the model has no experts, or not as many as can be divided.
    """
    from torch.distributed.tensor import DTensor, Shard

    divided = set()
    for path, module in model.named_modules():
        some: Any = module
        if not all(getattr(getattr(some, name, None), "ndim", 0) == 3 for name in MATRICES):
            continue
        experts, lanes = len(some.gate_up_proj), mesh.size()
        if experts % lanes:
            raise UserError(f"{experts} experts cannot be divided by {lanes}", key="num_experts")
        share = experts // lanes
        first = mesh.get_local_rank() * share
        for name in MATRICES:
            matrix = getattr(some, name)
            own = matrix.data[first : first + share].to(mesh.device_type, copy=True)
            placed = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
            setattr(some, name, nn.Parameter(placed, requires_grad=matrix.requires_grad))
            divided.add(f"{path}.{name}")
        some.num_experts = share
        some.forward = _exchanging(some, some.forward, share, mesh.get_group())
    if not divided:
        raise UserError("a model without experts has none to divide", key="layouts")
    return {name for name, _ in model.named_parameters()} - divided


def _exchanging(module: nn.Module, experts: Experts, share: int, group: Any) -> Experts:
    """Experts of all lanes, made of this lane's."""
    lanes = dist.get_world_size(group)

    def forward(hidden_TH: Tensor, chosen_TK: Tensor, weight_TK: Tensor) -> Tensor:
        chosen_P = chosen_TK.flatten()
        order_P = chosen_P.argsort(stable=True)
        sent_LE = chosen_P.bincount(minlength=lanes * share).view(lanes, share)
        came_LE = torch.empty_like(sent_LE)
        dist.all_to_all_single(came_LE, sent_LE, group=group)
        sent, came = torch.stack([sent_LE.sum(1), came_LE.sum(1)]).tolist()
        sent_PH = hidden_TH[order_P // chosen_TK.shape[1]]
        came_RH: Tensor = _AllToAll.apply(sent_PH, sent, came, group)
        expert_R = torch.arange(share, device=chosen_P.device).repeat(lanes)
        expert_R = expert_R.repeat_interleave(came_LE.flatten(), output_size=sum(came))
        made_RH = came_RH
        if len(came_RH):  # else the way back alone: its backward is collective, too
            with _local(module):
                ones_R1 = came_RH.new_ones(len(came_RH), 1)
                made_RH = experts(came_RH, expert_R[:, None], ones_R1)
        back_PH: Tensor = _AllToAll.apply(made_RH, came, sent, group)
        made_TKH = back_PH[order_P.argsort()].view(*chosen_TK.shape, -1)
        return (made_TKH * weight_TK[..., None]).sum(1).to(hidden_TH.dtype)

    return forward


@contextmanager
def _local(module: nn.Module) -> Iterator[None]:
    """Within, the module's parameters are this lane's pieces, plain."""
    divided: dict[str, Any] = {name: module._parameters[name] for name in MATRICES}
    try:
        for name, parameter in divided.items():
            module._parameters[name] = parameter.to_local()
        yield
    finally:
        module._parameters.update(divided)


class _AllToAll(torch.autograd.Function):
    """Rows to other lanes: `sent` many to each in turn, `came` many of each in turn."""

    @staticmethod
    def forward(ctx: Any, rows_PH: Tensor, sent: list[int], came: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = (sent, came), group
        return _exchanged(rows_PH, sent, came, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        sent, came = ctx.sizes
        return _exchanged(gradients[0], came, sent, ctx.group), None, None, None


def _exchanged(rows: Tensor, sent: list[int], came: list[int], group: Any) -> Tensor:
    found = rows.new_empty(sum(came), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), came, sent, group=group)
    return found
