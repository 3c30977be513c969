"""A decoder in parts over the lanes of a gang, and what these lanes must do in step.

After Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3: a lane has some of the key-value
heads with their queries and their part of the cache, and some of the MLP's channels, or some of its
experts. What it makes of them is its term of a sum over the lanes, twice a layer. Embedding, norms,
router and head are on every lane. `WHOLE` stands for a decoder that one lane has all of: there,
nothing here costs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from m2flow.errors import UserError
from m2flow.flow.worker import Gang
from m2flow.generation.architecture import Architecture


@dataclass(frozen=True)
class TensorParallel:
    """The lanes over which a decoder is divided.

    Attributes:
        rank: which part is here.
        size: how many there are.
        group: the process group of the lanes; None for a whole decoder.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    @classmethod
    def of(cls, gang: Gang) -> TensorParallel:
        """That of a worker's gang; a gang of one lane holds a whole decoder."""
        if gang.size == 1:
            return WHOLE
        return cls(gang.rank, gang.size, gang.mesh().get_group("shard"))

    def part(self, whole: Architecture) -> Architecture:
        """The decoder's sizes as they are on this lane.

        Raises:
            UserError: the key-value heads do not divide evenly over the lanes.
        """
        if whole.kv_heads % self.size:
            fitting = [str(n) for n in range(1, whole.kv_heads + 1) if whole.kv_heads % n == 0]
            raise UserError(
                f"cannot be divided evenly over the {self.size} lanes of a gang",
                key="num_key_value_heads",
                value=whole.kv_heads,
                hint=f"let the generator stand on gangs of {' or '.join(fitting)}",
            )
        return replace(
            whole,
            heads=whole.heads // self.size,
            kv_heads=whole.kv_heads // self.size,
            intermediate_size=whole.intermediate_size
            if whole.experts
            else len(self.channels(whole)),
            own_experts=self._share(whole.experts),
        )

    def channels(self, whole: Architecture) -> range:
        """The MLP's channels that are here; lanes may have unequally many."""
        return self._share(whole.intermediate_size)

    def _share(self, size: int) -> range:
        return range(size * self.rank // self.size, size * (self.rank + 1) // self.size)

    def sum(self, term: Tensor) -> Tensor:
        """Add up the lanes' terms, in place; the same bits on all of them. Collective."""
        if self.size > 1:
            torch.distributed.all_reduce(term, group=self.group)
        return term

    def least(self, number: int) -> int:
        """The least of the numbers that the lanes call it with. Collective."""
        if self.size == 1:
            return number
        numbers = torch.tensor([number])  # on the CPU: an accelerator would have to be awaited
        torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MIN, group=self.group)
        return int(numbers)

    def agree(self, token_B: Tensor, logprob_B: Tensor) -> tuple[Tensor, Tensor]:
        """What one lane has drawn, on all of them: no rounding can part the lanes. Collective.

        Args:
            token_B: int64.
            logprob_B: float32 or float64.
        """
        if self.size == 1:
            return token_B, logprob_B
        both_2B = torch.stack([token_B, logprob_B.double().view(torch.int64)])
        torch.distributed.broadcast(both_2B, group=self.group, group_src=0)
        return both_2B[0], both_2B[1].view(torch.float64).to(logprob_B.dtype)


WHOLE = TensorParallel()
"""A decoder that is not divided."""
