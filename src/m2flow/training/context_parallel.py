"""The tokens of a pack divided over lanes that each have the whole model.

A lane computes the layers on its own nodes alone; for attention the keys and values of all lanes
are gathered (Llama Team, "The Llama 3 Herd of Models", arXiv 2407.21783, section 3.3.2), and the
figures of the completion tokens are put together at the end. Lane r of C takes the pieces r and
2 C - 1 - r of 2 C equal ones, since later nodes have more ancestors. The gradient on a lane is its
term of a sum over the lanes.

Shapes: N nodes of a pack, n = N / C of them here, T completion tokens, S of them predicted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ContextShard:
    """Which part of each pack is here, and the process group of all parts' lanes."""

    rank: int
    size: int
    group: Any = None

    @property
    def pieces(self) -> int:
        """What the number of nodes of a pack must be a multiple of."""
        return 2 * self.size

    def windows(self, num_nodes: int, rank: int | None = None) -> list[tuple[int, int]]:
        """The ranges of nodes [first, end) that are here, or on another lane."""
        rank = self.rank if rank is None else rank
        width = num_nodes // self.pieces
        return [(n * width, (n + 1) * width) for n in (rank, self.pieces - 1 - rank)]

    def nodes(self, num_nodes: int, rank: int | None = None) -> Tensor:
        """The nodes that are here, or on another lane, one by one: int64 [n]."""
        return torch.cat([torch.arange(*window) for window in self.windows(num_nodes, rank)])

    def gathered_places(self, num_nodes: int) -> Tensor:
        """[N] where `gather` puts each node."""
        order_N = torch.cat([self.nodes(num_nodes, rank) for rank in range(self.size)])
        return torch.empty_like(order_N).index_copy(0, order_N, torch.arange(num_nodes))

    def gather(self, rows_nF: Tensor) -> Tensor:
        """[N, F] the rows of all lanes, one lane after another. Collective, its backward too."""
        gathered_NF: Tensor = _Gather.apply(rows_nF, self)
        return gathered_NF

    def put_together(self, figures_SK: Tensor, own_S: Tensor, num_tokens: int) -> Tensor:
        """[T, K] the figures of all tokens on every lane, which all go on alike. Collective.

        Args:
            figures_SK: of the tokens that are predicted here.
            own_S: which ones of the T these are.
            num_tokens: T.
        """
        figures_TK: Tensor = _PutTogether.apply(figures_SK, own_S, num_tokens, self.group)
        return figures_TK


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_nF: Tensor, part: ContextShard) -> Tensor:
        ctx.part = part
        gathered_NF = rows_nF.new_empty(part.size * rows_nF.shape[0], rows_nF.shape[1])
        dist.all_gather_into_tensor(gathered_NF, rows_nF.contiguous(), group=part.group)
        return gathered_NF

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient_NF,) = gradients
        gradient_nF = gradient_NF.new_empty(
            gradient_NF.shape[0] // ctx.part.size, gradient_NF.shape[1]
        )
        dist.reduce_scatter_tensor(gradient_nF, gradient_NF.contiguous(), group=ctx.part.group)
        return gradient_nF, None


class _PutTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, figures_SK: Tensor, own_S: Tensor, num_tokens: int, group: Any) -> Tensor:
        ctx.save_for_backward(own_S)
        figures_TK = figures_SK.new_zeros(num_tokens, figures_SK.shape[1])
        figures_TK[own_S] = figures_SK
        dist.all_reduce(figures_TK, group=group)
        return figures_TK

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Every lane computes the same loss of the same figures, so nothing is to be summed."""
        (own_S,) = ctx.saved_tensors
        return gradients[0][own_S], None, None, None
