"""What trainers that fold a mini-batch in pieces have in common, whatever their loss is.

Sums of figures are added up piece by piece, beside the gradients that the optimizer owns, and
reduced with them at the step: no figure is a mean of means. Knows neither losses nor rollouts.

Shapes: T completion tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from m2flow.algorithms.finite import check_finite
from m2flow.algorithms.loss import LossTerms
from m2flow.errors import UserError
from m2flow.models.device import sent
from m2flow.training.attention import packed_attention_on
from m2flow.training.checkpointing import checkpoint_blocks
from m2flow.training.optimizer import AdamWConfig, AllReduce, NotFinite, SumOptimizer
from m2flow.training.packing import Pack, Sharing, pack
from m2flow.training.rollouts import TokenPairs
from m2flow.training.sharded import Shards


class SummingTrainer:
    """A model with its optimizer, and sums of figures.

    Args:
        model: trained in place, with dropout off.
        config: the optimizer's.
        names: of the sums; "denominator" is what gradients are divided by, the first is the loss.
        shards: how the model is divided, which it has been already.
        gradient_checkpointing: whether activations are computed again in the backward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        config: AdamWConfig,
        names: tuple[str, ...],
        shards: Shards,
        gradient_checkpointing: bool = False,
    ) -> None:
        self.model = model.eval()
        if gradient_checkpointing:
            checkpoint_blocks(model)
        self.shards = shards
        self.optimizer = SumOptimizer(model.named_parameters(), config, shards)
        self._names = names
        self._sums: dict[str, float | Tensor] = dict.fromkeys(names, 0.0)
        self._spoilt = ""

    def tensors(self) -> Iterator[Tensor]:
        """All that takes memory between calls: weights, buffers, gradients, optimizer, sums."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        yield from self.optimizer.tensors()
        yield from (value for value in self._sums.values() if isinstance(value, Tensor))

    def add(self, **sums: float | Tensor) -> None:
        """Figures on an accelerator stay there until the step: nobody waits for them before."""
        for name, value in sums.items():
            self._sums[name] = self._sums[name] + value

    def check(self, columns: Mapping[str, Tensor | None]) -> None:
        """Have the step left out on all lanes, and say why, where a column [T] is not finite."""
        try:
            check_finite(columns)
        except UserError as error:
            self._spoilt = self._spoilt or str(error)
            self.add(loss=math.nan)

    def fold_packs(
        self,
        packs: Sequence[Pack],
        fold: Callable[[Pack], None],
        forward: Callable[[Pack], Tensor],
    ) -> None:
        """Accumulate the gradients of some packs; collective in the gang.

        Args:
            packs: of this lane; lanes may have unequally many.
            fold: adds the gradient of a pack.
            forward: the same pass without a loss, for a lane that has no pack left.
        """
        for microbatch in self.shards.padded(packs):
            if microbatch is not None:
                fold(microbatch)
            else:
                nothing_T = forward(one_token())
                self._backward(nothing_T, torch.zeros_like(nothing_T))

    def learn(self, terms: LossTerms, microbatch: Pack, **sums: float) -> None:
        """Accumulate the gradient of a pack's share of the loss, and its figures."""
        self._backward(terms.loss)
        loss, computed = terms.loss.detach().double(), microbatch.num_nodes
        self.add(loss=loss, tokens_computed=computed, **terms.sums, **sums)

    def _backward(self, result: Tensor, gradient: Tensor | None = None) -> None:
        with packed_attention_on(self.model):  # for what is computed again
            torch.autograd.backward(result, gradient)

    def discard(self) -> None:
        """Forget the gradients and figures folded in since the last step."""
        self._sums = dict.fromkeys(self._names, 0.0)
        self._spoilt = ""
        self.optimizer.zero()

    def step(self, all_reduce: AllReduce | None) -> tuple[dict[str, float], dict[str, float]]:
        """One optimizer step; the sums of all replicas, which begin anew here, and its figures.

        There are no figures where nothing was learnt from, so that no step was taken.

        Raises:
            NotFinite: the loss, a gradient or a column is NaN or infinite; no step was taken.
        """
        sums = torch.tensor([float(self._sums[name]) for name in self._names], dtype=torch.float64)
        if not self.shards.counts:
            sums.zero_()
        self._sums = dict.fromkeys(self._names, 0.0)
        spoilt, self._spoilt = self._spoilt, ""
        try:
            result = self.optimizer.step(sums, self._names.index("denominator"), all_reduce)
        except NotFinite as error:
            raise NotFinite(f"{error}; {spoilt}" if spoilt else str(error)) from None
        totals: dict[str, float] = dict(zip(self._names, result.sums.tolist(), strict=True))
        if not totals["denominator"]:
            return totals, {}
        return totals, {
            "loss": totals["loss"] / totals["denominator"],
            "grad_norm": result.grad_norm,
            "learning_rate": result.learning_rate,
        }


def figures_of(
    model: nn.Module,
    forward: Callable[[Pack], Tensor],
    pairs: TokenPairs,
    tokens_per_microbatch: int,
    sharing: Sharing,
    shards: Shards,
) -> Tensor:
    """[T] figures of all completion tokens, on the CPU, without gradient; 0 of those that the
    model did not draw.

    Collective in the gang of a divided model; each lane asks for pairs of its own, or for none.

    Args:
        model: whose figures they are.
        forward: those of the tokens of a pack.
        pairs, tokens_per_microbatch, sharing: as for `pack`.
        shards: how the model is divided.
    """
    pairs, own = shards.join(pairs)
    pairs, given_back = shards.balance(pairs)
    packs = pack(pairs, tokens_per_microbatch, sharing, shards.part)
    figures_T: Tensor | None = None
    with torch.no_grad():
        for microbatch in shards.padded(packs):
            found_T = forward(one_token() if microbatch is None else microbatch)
            if figures_T is None:
                figures_T = found_T.new_zeros(pairs.completion_ids_T.numel(), device="cpu")
            if microbatch is not None:
                figures_T[microbatch.token_index_T] = found_T.cpu()
    shards.reshard(model)
    return given_back(torch.empty(0) if figures_T is None else figures_T)[own]


def one_token() -> Pack:
    """The smallest pack, one token that predicts itself: for a lane that has nothing of its own."""
    return pack(TokenPairs.from_rows([[0]], [[0]]), 1)[0]


def column_of(values_T: Tensor, microbatch: Pack, device: torch.device) -> Tensor:
    """A column's values at the completion tokens of a pack, on a device."""
    return sent(values_T[microbatch.token_index_T], device)
