"""Aggregation: against loops, and cut in pieces."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2flow.algorithms.aggregation import Aggregation, denominator, token_weights

MODES: tuple[Aggregation, ...] = (
    "token-mean",
    "sequence-mean-token-mean",
    "sequence-mean-token-sum",
)
Sequences = list[list[float]]  # losses
SEQUENCES = st.lists(st.lists(st.floats(-3, 3), max_size=5), min_size=1, max_size=6)


def loop_loss(sequences: Sequences, mode: Aggregation) -> float:
    counted = [losses for losses in sequences if losses]
    if not counted:
        return 0.0
    if mode == "token-mean":
        return sum(map(sum, counted)) / sum(map(len, counted))
    if mode == "sequence-mean-token-mean":
        return sum(sum(losses) / len(losses) for losses in counted) / len(counted)
    return sum(map(sum, counted)) / len(counted)


def weighted_sum(sequences: Sequences, mode: Aggregation) -> tuple[float, int]:
    losses = torch.tensor([loss for some in sequences for loss in some], dtype=torch.float64)
    lengths = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64)
    weights = token_weights(lengths, mode, dtype=torch.float64)
    return float((weights * losses).sum()), denominator(lengths, mode)


@pytest.mark.parametrize("mode", MODES)
@given(sequences=SEQUENCES, cut=st.integers(0, 6))
def test_pieces_add_up_to_the_loss_of_the_whole(
    mode: Aggregation, sequences: Sequences, cut: int
) -> None:
    pieces = [weighted_sum(piece, mode) for piece in (sequences[:cut], sequences[cut:])]
    total, divisor = (sum(part) for part in zip(*pieces, strict=True))
    assert total / max(divisor, 1) == pytest.approx(loop_loss(sequences, mode), abs=1e-12)


def test_an_empty_sequence_counts_for_nothing() -> None:
    lengths = torch.tensor([2, 0, 1])
    weights = token_weights(lengths, "sequence-mean-token-mean", dtype=torch.float32)
    assert weights.tolist() == [0.5, 0.5, 1.0]
    assert denominator(lengths, "sequence-mean-token-mean") == 2
    assert denominator(lengths, "token-mean") == 3
