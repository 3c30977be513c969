"""Entropy against its definition, forbidden tokens included."""

from __future__ import annotations

import math

import torch

from m2flow.algorithms.entropy import categorical_entropy


def test_agrees_with_the_definition() -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = [-sum(p * math.log(p) for p in row) for row in logits.softmax(-1).tolist()]
    found = categorical_entropy(logits)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_forbidden_tokens_count_for_nothing_and_leak_no_nan() -> None:
    logits = torch.tensor([[0.0, 0.0, float("-inf")]], requires_grad=True)
    entropy = categorical_entropy(logits)
    entropy.sum().backward()
    torch.testing.assert_close(entropy, torch.tensor([math.log(2)]))
    assert torch.isfinite(logits.grad).all()
