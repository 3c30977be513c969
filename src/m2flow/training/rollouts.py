"""The columns a trainer learns from: token ids as they were generated, never text.

Everything is flat: rows lie one after another, with their lengths beside them, so nothing is
padded and nothing is lost. Knows neither models nor algorithms.

Shapes: B rows; P prompt tokens and T completion tokens of all rows together.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from m2flow.errors import UserError

TokenRow = Sequence[int] | Tensor
FloatRow = Sequence[float] | Tensor


class Rows(Protocol):
    """Token pairs, or a record that has them beside columns of their completion tokens."""

    @property
    def num_tokens(self) -> int:
        """Completion tokens of all rows."""

    def row_lengths(self) -> Tensor:
        """[B] tokens of each row."""

    def select(self, rows_R: Tensor) -> Self:
        """The given rows (int64 [R]), in that order."""


@dataclass(frozen=True)
class TokenPairs:
    """Prompts and completions as int64 token ids, flat: [P] with lengths [B], [T] with lengths [B].

    A prompt has at least one token, for something must predict the first token of its completion.
    A completion may be empty.

    Attributes:
        loss_mask_T: bool [T], the tokens that the model drew; others, such as a tool's answer, are
            read and never learned. None where the model drew all of them.
    """

    prompt_ids_P: Tensor
    prompt_lengths_B: Tensor
    completion_ids_T: Tensor
    completion_lengths_B: Tensor
    loss_mask_T: Tensor | None = None

    def __post_init__(self) -> None:
        mask_T = self.loss_mask_T
        assert mask_T is None or mask_T.shape == self.completion_ids_T.shape
        assert self.prompt_lengths_B.shape == self.completion_lengths_B.shape
        assert self.prompt_ids_P.numel() == int(self.prompt_lengths_B.sum())
        assert self.completion_ids_T.numel() == int(self.completion_lengths_B.sum())
        if len(self) and int(self.prompt_lengths_B.min()) < 1:
            raise UserError(
                "has no token, so nothing predicts the first token of its completion",
                key=f"prompt {int(self.prompt_lengths_B.argmin())}",
                expected="at least one token",
                hint="begin prompts with a start token",
            )

    @classmethod
    def from_rows(
        cls,
        prompts: Sequence[TokenRow],
        completions: Sequence[TokenRow],
        loss_masks: Sequence[TokenRow] | None = None,
    ) -> TokenPairs:
        """One row of ids per prompt and per completion; lists or one-dimensional tensors."""
        assert len(prompts) == len(completions)
        prompt_ids_P, prompt_lengths_B = flatten(prompts, torch.int64)
        completion_ids_T, completion_lengths_B = flatten(completions, torch.int64)
        mask_T = None if loss_masks is None else flatten(loss_masks, torch.bool)[0]
        return cls(prompt_ids_P, prompt_lengths_B, completion_ids_T, completion_lengths_B, mask_T)

    def __len__(self) -> int:
        return self.prompt_lengths_B.numel()

    @property
    def learned_lengths_B(self) -> Tensor:
        """[B] int64, the completion tokens of each row that the model drew."""
        if self.loss_mask_T is None:
            return self.completion_lengths_B
        row_T = torch.repeat_interleave(torch.arange(len(self)), self.completion_lengths_B)
        return torch.zeros_like(self.completion_lengths_B).index_add(
            0, row_T, self.loss_mask_T.long()
        )

    @property
    def num_tokens(self) -> int:
        """Completion tokens of all rows."""
        return self.completion_ids_T.numel()

    def row_lengths(self) -> Tensor:
        """[B] tokens of each row."""
        return self.prompt_lengths_B + self.completion_lengths_B

    def select(self, rows_R: Tensor) -> TokenPairs:
        """The given rows (int64 [R]), in that order."""
        tokens_S = flat_index(self.completion_lengths_B, rows_R)
        return TokenPairs(
            self.prompt_ids_P[flat_index(self.prompt_lengths_B, rows_R)],
            self.prompt_lengths_B[rows_R],
            self.completion_ids_T[tokens_S],
            self.completion_lengths_B[rows_R],
            None if self.loss_mask_T is None else self.loss_mask_T[tokens_S],
        )


@dataclass(frozen=True)
class TokenRollouts:
    """Token pairs with what policy-gradient training needs of each completion token.

    Attributes:
        pairs: prompts and completions.
        behaviour_logprobs_T: under the weights that sampled the token, at the sampling
            temperature; end tokens included.
        advantages_T: constant over a sequence for group-relative algorithms.
        old_logprobs_T: what the ratio is taken against; None for the behaviour ones.
        reference_logprobs_T: under the reference model, or None.
        fresh_T: bool [T], the tokens that the weights drew which learn from them; None for none.
    """

    pairs: TokenPairs
    behaviour_logprobs_T: Tensor
    advantages_T: Tensor
    old_logprobs_T: Tensor | None = None
    reference_logprobs_T: Tensor | None = None
    fresh_T: Tensor | None = None

    def __post_init__(self) -> None:
        num_tokens = self.pairs.completion_ids_T.numel()
        for column_T in self._columns().values():
            assert column_T is None or column_T.shape == (num_tokens,)

    @classmethod
    def from_rows(
        cls,
        prompts: Sequence[TokenRow],
        completions: Sequence[TokenRow],
        behaviour_logprobs: Sequence[FloatRow],
        advantages_B: FloatRow,
    ) -> TokenRollouts:
        """One row a sample; the advantage of a sequence is that of each of its tokens."""
        pairs = TokenPairs.from_rows(prompts, completions)
        logprobs_T, lengths_B = flatten(behaviour_logprobs, torch.float32)
        assert torch.equal(lengths_B, pairs.completion_lengths_B), "one log-probability a token"
        if not isinstance(advantages_B, Tensor):
            advantages_B = torch.tensor(advantages_B, dtype=logprobs_T.dtype)
        advantages_T = torch.repeat_interleave(advantages_B, pairs.completion_lengths_B)
        return cls(pairs, logprobs_T, advantages_T)

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def num_tokens(self) -> int:
        """Completion tokens of all rows."""
        return self.pairs.num_tokens

    def row_lengths(self) -> Tensor:
        """[B] tokens of each row."""
        return self.pairs.row_lengths()

    def select(self, rows_R: Tensor) -> TokenRollouts:
        """The given rows (int64 [R]), in that order."""
        tokens_S = flat_index(self.pairs.completion_lengths_B, rows_R)
        columns: dict[str, Any] = {
            name: None if column_T is None else column_T[tokens_S]
            for name, column_T in self._columns().items()
        }
        return replace(self, pairs=self.pairs.select(rows_R), **columns)

    def idle_rows(self) -> Tensor:
        """[B] bool: rows of which every advantage of a token that the model drew is zero."""
        live_T = self.advantages_T != 0
        if self.pairs.loss_mask_T is not None:
            live_T &= self.pairs.loss_mask_T
        lengths_B = self.pairs.completion_lengths_B
        row_T = torch.repeat_interleave(torch.arange(len(self)), lengths_B)
        return torch.zeros(len(self), dtype=torch.int64).index_add(0, row_T, live_T.long()) == 0

    def _columns(self) -> dict[str, Tensor | None]:
        return {
            "behaviour_logprobs_T": self.behaviour_logprobs_T,
            "advantages_T": self.advantages_T,
            "old_logprobs_T": self.old_logprobs_T,
            "reference_logprobs_T": self.reference_logprobs_T,
            "fresh_T": self.fresh_T,
        }


R = TypeVar("R", bound=Rows)


def joined(parts: Sequence[R]) -> R:
    """The rows of all parts as one."""
    first: Any = parts[0]
    values: dict[str, Any] = {}
    for name, value in vars(first).items():
        found: list[Any] = [getattr(part, name) for part in parts]
        if value is not None:
            values[name] = torch.cat(found) if isinstance(value, Tensor) else joined(found)
    together: R = replace(first, **values)
    return together


def flatten(
    rows: Sequence[TokenRow] | Sequence[FloatRow], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Rows laid one after another, and their lengths [B]; floating tensors keep their own dtype."""
    lengths_B = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    if rows and all(isinstance(row, Tensor) for row in rows):
        flat_T = torch.cat([row for row in rows if isinstance(row, Tensor)])
        return (flat_T if dtype.is_floating_point else flat_T.to(dtype)), lengths_B
    values = [row.tolist() if isinstance(row, Tensor) else row for row in rows]
    return torch.tensor(list(itertools.chain.from_iterable(values)), dtype=dtype), lengths_B


def flat_index(lengths_B: Tensor, rows_R: Tensor) -> Tensor:
    """int64 places of the elements of the given rows in a flat column, row after row."""
    starts_B = lengths_B.cumsum(0) - lengths_B
    lengths_R = lengths_B[rows_R]
    offsets_R = starts_B[rows_R] - (lengths_R.cumsum(0) - lengths_R)
    return torch.repeat_interleave(offsets_R, lengths_R) + torch.arange(int(lengths_R.sum()))
