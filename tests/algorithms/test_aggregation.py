"""Aggregation: against loops, and cut in pieces."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.algorithms.aggregation import Aggregation, denominator, token_weights

MODES: tuple[Aggregation, ...] = (
    "token-mean",
    "sequence-mean-token-mean",
    "sequence-mean-token-sum",
)
Sequences = list[list[float]]  # losses
LOSS = st.floats(-3, 3, width=32) | st.floats(-1e9, 1e9, width=32)  # a ratio of exp(20) among them
SEQUENCES = st.lists(st.lists(LOSS, max_size=5), min_size=1, max_size=6)
DTYPES = st.sampled_from([torch.float32, torch.float64])


def loop_loss(sequences: Sequences, mode: Aggregation) -> float:
    counted = [losses for losses in sequences if losses]
    if not counted:
        return 0.0
    if mode == "token-mean":
        return sum(map(sum, counted)) / sum(map(len, counted))
    if mode == "sequence-mean-token-mean":
        return sum(sum(losses) / len(losses) for losses in counted) / len(counted)
    return sum(map(sum, counted)) / len(counted)


def weighted_sum(sequences: Sequences, mode: Aggregation, dtype: torch.dtype) -> tuple[float, int]:
    losses = torch.tensor([loss for some in sequences for loss in some], dtype=dtype)
    lengths = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64)
    weights = token_weights(lengths, mode, dtype=dtype)
    return float((weights * losses).sum()), denominator(lengths, mode)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=1000)
@given(sequences=SEQUENCES, cut=st.integers(0, 6), dtype=DTYPES)
def test_pieces_add_up_to_the_loss_of_the_whole(
    mode: Aggregation, sequences: Sequences, cut: int, dtype: torch.dtype
) -> None:
    pieces = [weighted_sum(piece, mode, dtype) for piece in (sequences[:cut], sequences[cut:])]
    total, divisor = (sum(part) for part in zip(*pieces, strict=True))
    size = sum(abs(loss) for some in sequences for loss in some)
    within = (1e-12 if dtype is torch.float64 else 1e-6) * max(1.0, size)
    assert total / max(divisor, 1) == pytest.approx(loop_loss(sequences, mode), abs=within)


def test_an_empty_sequence_counts_for_nothing() -> None:
    lengths = torch.tensor([2, 0, 1])
    weights = token_weights(lengths, "sequence-mean-token-mean", dtype=torch.float32)
    assert weights.tolist() == [0.5, 0.5, 1.0]
    assert denominator(lengths, "sequence-mean-token-mean") == 2
    assert denominator(lengths, "token-mean") == 3
