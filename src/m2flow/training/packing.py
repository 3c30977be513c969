"""Packing of ragged sequences into padding-free micro-batches, in which common prefixes enter once.

A pack is a set of token trees. Each row (a prompt and its completion) is a path from a root; what
a row has in common with the row before it is not repeated, so a prompt shared by a group is
computed once, and so is a prefix common to several completions. Every node sees exactly its
ancestors: the log-probabilities and gradients are those of separate rows.

The last completion token predicts nothing and never enters. Tokens that the model did not draw
(`loss_mask_T`) are read, and nothing predicts them. Packing is deterministic, and no row with
anything to learn is dropped: one longer than the budget gets a pack of its own. Device and model
are unknown here.

Shapes: N nodes of a pack, R rows, T completion tokens of these rows, M nodes that predict some.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from m2flow.models.device import sent
from m2flow.training.attention import PackLayout
from m2flow.training.context_parallel import ContextShard
from m2flow.training.rollouts import TokenPairs, flat_index

Sharing = Literal["none", "prompt", "prefix"]


@dataclass(frozen=True)
class Pack:
    """One micro-batch; all index tensors are int64. Of completion tokens those that the model drew
    are meant.

    Attributes:
        rows_R: which rows of the packed pairs it holds, in pack order.
        input_ids_N, position_ids_N: the nodes' tokens and depths.
        layout: which nodes each node attends to.
        predicting_M: the nodes whose output predicts a completion token.
        prediction_T: for each completion token, its row in `predicting_M`; of a pack that is
            divided over lanes, for those of `own_T` alone.
        target_ids_T: the completion tokens, row after row.
        token_index_T: their places in the flat completion column of the packed pairs.
        lengths_R: completion tokens of each row.
        own_T: None, or where the pack is divided over lanes, which of the tokens are predicted
            here; nodes are numbered as they are here.
    """

    rows_R: Tensor
    input_ids_N: Tensor
    position_ids_N: Tensor
    layout: PackLayout
    predicting_M: Tensor
    prediction_T: Tensor
    target_ids_T: Tensor
    token_index_T: Tensor
    lengths_R: Tensor
    own_T: Tensor | None = None

    @property
    def num_nodes(self) -> int:
        """Tokens that the model computes, on all lanes that the pack is divided over."""
        part = self.layout.part
        return self.input_ids_N.numel() * (1 if part is None else part.size)

    @property
    def predicted_ids(self) -> Tensor:
        """The completion tokens that `prediction_T` is about."""
        return self.target_ids_T if self.own_T is None else self.target_ids_T[self.own_T]

    def to(self, device: torch.device) -> Pack:
        """The pack with its tensors on a device; itself where they are there already."""
        if self.input_ids_N.device == device:
            return self
        moved: dict[str, Any] = {
            name: sent(value, device) if isinstance(value, Tensor) else value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor | PackLayout)
        }
        return replace(self, **moved)


class Packs(Sequence[Pack]):
    """Packs, each of which is built when it is asked for: while a device is at the one before."""

    def __init__(
        self, pairs: TokenPairs, cuts: Sequence[list[_PairRow]], part: ContextShard | None
    ) -> None:
        self._pairs, self._cuts, self._part = pairs, cuts, part

    def __len__(self) -> int:
        return len(self._cuts)

    @overload
    def __getitem__(self, index: int) -> Pack: ...

    @overload
    def __getitem__(self, index: slice) -> Packs: ...

    def __getitem__(self, index: int | slice) -> Pack | Packs:
        if isinstance(index, slice):
            return Packs(self._pairs, self._cuts[index], self._part)
        return _build(self._pairs, self._cuts[index], self._part)


@dataclass(frozen=True)
class _PairRow:
    index: int
    prompt_length: int
    inputs: list[int]  # prompt and all of the completion but its last token
    shared: int  # leading tokens in common with the row before


def pack(
    pairs: TokenPairs,
    tokens_per_microbatch: int,
    sharing: Sharing = "prefix",
    part: ContextShard | None = None,
) -> Packs:
    """Cut rows into packs of at most `tokens_per_microbatch` computed tokens.

    Rows without a completion token that the model drew have nothing to learn and enter no pack.

    Args:
        pairs: the rows, on the CPU.
        tokens_per_microbatch: budget of nodes; a row that alone exceeds it gets its own pack.
        sharing: `none` lays rows side by side; `prompt` computes a prompt once for consecutive
            rows that have it in common; `prefix` orders rows by their tokens and computes every
            prefix, in prompts and completions, once a pack.
        part: where packs are divided over lanes, what is here of each; the budget is each lane's.
    """
    assert tokens_per_microbatch >= 1, tokens_per_microbatch
    budget = tokens_per_microbatch * (1 if part is None else part.size)
    return Packs(pairs, list(_cut(_rows(pairs, sharing), budget)), part)


def _rows(pairs: TokenPairs, sharing: Sharing) -> list[_PairRow]:
    """Rows in pack order, each with what it shares with the one before."""
    prompt_lengths = pairs.prompt_lengths_B.tolist()
    completion_lengths = pairs.completion_lengths_B.tolist()
    prompts = [ids.tolist() for ids in pairs.prompt_ids_P.split(prompt_lengths)]
    completions = [ids.tolist() for ids in pairs.completion_ids_T.split(completion_lengths)]
    inputs = [p + c[:-1] for p, c in zip(prompts, completions, strict=True)]
    order = [row for row, length in enumerate(pairs.learned_lengths_B.tolist()) if length]
    if sharing == "prefix":
        order.sort(key=inputs.__getitem__)
    rows: list[_PairRow] = []
    for row in order:
        shared = 0
        if rows and sharing == "prefix":
            shared = _common_prefix(rows[-1].inputs, inputs[row])
        elif rows and sharing == "prompt" and prompts[rows[-1].index] == prompts[row]:
            shared = prompt_lengths[row]
        rows.append(_PairRow(row, prompt_lengths[row], inputs[row], shared))
    return rows


def _cut(rows: list[_PairRow], budget: int) -> Iterator[list[_PairRow]]:
    """Greedy, in order; the first row of each pack has nothing to share with."""
    current: list[_PairRow] = []
    num_nodes = 0
    for row in rows:
        if current and num_nodes + len(row.inputs) - row.shared > budget:
            yield current
            current, num_nodes = [], 0
        if not current:
            row = replace(row, shared=0)
        current.append(row)
        num_nodes += len(row.inputs) - row.shared
    if current:
        yield current


def _build(pairs: TokenPairs, rows: list[_PairRow], part: ContextShard | None) -> Pack:
    rows_R = torch.tensor([row.index for row in rows])
    token_index_T = flat_index(pairs.completion_lengths_B, rows_R)
    input_ids: list[int] = []
    positions: list[int] = []
    path: list[int] = []  # the nodes of the row at hand, root first
    paths: list[int] = []  # those of all rows, one after another
    predictors: list[int] = []
    for row in rows:
        first, length = len(input_ids), len(row.inputs)
        input_ids += row.inputs[row.shared :]
        positions += range(row.shared, length)
        path = path[: row.shared] + list(range(first, len(input_ids)))
        paths += path
        predictors += path[row.prompt_length - 1 :]
    lengths, shared = [len(row.inputs) for row in rows], [row.shared for row in rows]
    if part is not None and (missing := -len(input_ids) % part.pieces):
        # One more row, of which nothing is wanted: every lane gets equally many nodes.
        paths += range(len(input_ids), len(input_ids) + missing)
        lengths, shared = [*lengths, missing], [*shared, 0]
        input_ids, positions = [*input_ids, *[0] * missing], [*positions, *range(missing)]
    input_ids_N, position_ids_N = torch.tensor(input_ids), torch.tensor(positions)
    predictor_T, own_T = torch.tensor(predictors), None
    if pairs.loss_mask_T is not None:
        learned_T = pairs.loss_mask_T[token_index_T]
        predictor_T, token_index_T = predictor_T[learned_T], token_index_T[learned_T]
    if part is not None:
        here = part.nodes(len(input_ids))
        number_N = torch.full_like(input_ids_N, -1).index_copy(0, here, torch.arange(len(here)))
        own_T = (number_N[predictor_T] >= 0).nonzero()[:, 0]
        predictor_T = number_N[predictor_T[own_T]]
        input_ids_N, position_ids_N = input_ids_N[here], position_ids_N[here]
    predicting_M, prediction_T = torch.unique(predictor_T, return_inverse=True)
    return Pack(
        rows_R=rows_R,
        input_ids_N=input_ids_N,
        position_ids_N=position_ids_N,
        layout=PackLayout.build(
            torch.tensor(paths), torch.tensor(lengths), torch.tensor(shared), part
        ),
        predicting_M=predicting_M,
        prediction_T=prediction_T,
        target_ids_T=pairs.completion_ids_T[token_index_T],
        token_index_T=token_index_T,
        lengths_R=pairs.learned_lengths_B[rows_R],
        own_T=own_T,
    )


def _common_prefix(a: list[int], b: list[int]) -> int:
    if a == b[: len(a)]:
        return len(a)
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
