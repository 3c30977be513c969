"""Columns: rows in, rows out."""

from __future__ import annotations

from collections.abc import Callable

import torch

from m2flow.training.rollouts import TokenPairs, TokenRollouts


def test_rows_may_be_lists_or_tensors() -> None:
    lists = TokenPairs.from_rows([[1, 2], [3]], [[4], []])
    tensors = TokenPairs.from_rows(
        [torch.tensor([1, 2]), torch.tensor([3])], [torch.tensor([4]), torch.tensor([])]
    )
    for pairs in (lists, tensors):
        assert pairs.prompt_ids_P.tolist() == [1, 2, 3]
        assert pairs.completion_lengths_B.tolist() == [1, 0]
        assert pairs.completion_ids_T.dtype == torch.int64


def test_selected_rows_keep_their_columns(make_rollouts: Callable[..., TokenRollouts]) -> None:
    rollouts = make_rollouts()
    picked = rollouts.select(torch.tensor([5, 0, 5]))
    whole = rollouts.behaviour_logprobs_T.split(rollouts.pairs.completion_lengths_B.tolist())
    torch.testing.assert_close(
        picked.behaviour_logprobs_T, torch.cat([whole[5], whole[0], whole[5]])
    )
    assert picked.pairs.prompt_lengths_B.tolist() == (
        rollouts.pairs.prompt_lengths_B[[5, 0, 5]].tolist()
    )


def test_row_is_idle_where_no_advantage_is_left() -> None:
    rollouts = TokenRollouts.from_rows(
        [[1]] * 4, [[1, 2], [1], [], [1, 2]], [[-1.0, -1.0], [-1.0], [], [-1.0, -1.0]], [0, 1, 1, 2]
    )
    assert rollouts.idle_rows().tolist() == [True, False, True, False]
