"""Supervised training: against a plain loop, and that it learns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from m2flow.training import supervised
from m2flow.training.optimizer import AdamWConfig, NotFinite
from m2flow.training.rollouts import TokenPairs
from m2flow.training.schedule import Schedule
from m2flow.training.supervised import _batches, train_supervised

MakeModel = Callable[..., nn.Module]
PAIRS = TokenPairs.from_rows(
    [[a, 6] for a in range(6)], [[a] * (1 + a % 3) + [6] for a in range(6)]
)


def test_agrees_with_a_plain_loop(
    make_model: MakeModel,
    plain_logprobs: Callable[[nn.Module, TokenPairs], Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervised, "TOKENS_PER_MICROBATCH", 7)
    model, plain = make_model(), make_model()
    train_supervised(
        model,
        PAIRS,
        steps=4,
        batch_size=4,
        seed=5,
        optimizer=AdamWConfig(
            learning_rate=1e-2,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            schedule=Schedule("linear", 2, 4, 0.1),
            max_grad_norm=0.5,
        ),
    )

    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    factors = [0.5, 1.0, 1.0, 0.55]
    for factor, batch in zip(factors, _batches(len(PAIRS), 4, 5), strict=False):
        adamw.param_groups[0]["lr"] = 1e-2 * factor
        loss = -plain_logprobs(plain, PAIRS.select(batch)).mean()
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        adamw.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def test_learns_and_reports(make_model: MakeModel) -> None:
    reports: dict[int, float] = {}
    last = train_supervised(
        make_model(torch.float32),
        PAIRS,
        steps=60,
        batch_size=6,
        on_progress=reports.__setitem__,
    )
    assert list(reports) == [25, 50, 60]
    assert reports[25] > 0.3
    assert last < 0.3
    assert last == reports[60]


def test_same_seed_same_weights(make_model: MakeModel) -> None:
    states = []
    for _ in range(2):
        model = make_model(torch.float32)
        train_supervised(model, PAIRS, steps=5, batch_size=4, seed=3)
        states.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert torch.equal(*states)


def test_batches_use_every_row_equally() -> None:
    batches = _batches(5, 3, seed=0)
    drawn = torch.cat([next(batches) for _ in range(5)])
    assert drawn.bincount().tolist() == [3] * 5
    assert sorted(drawn[:5].tolist()) == list(range(5))


def test_a_warm_up_of_what_is_no_number_ends(make_model: MakeModel) -> None:
    model = make_model(torch.float32)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(NotFinite, match="no step was taken"):
        train_supervised(model, PAIRS, steps=2, batch_size=4)


def test_nothing_to_learn_from_is_refused(make_model: MakeModel) -> None:
    with pytest.raises(AssertionError, match="nothing to learn from"):
        train_supervised(make_model(), TokenPairs.from_rows([[1]], [[]]), steps=1)
