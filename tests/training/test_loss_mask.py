"""Tokens that the model did not draw are read and never learned: against a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from m2flow.algorithms.grpo import GRPOLoss
from m2flow.training.optimizer import AdamWConfig
from m2flow.training.packing import Sharing, pack
from m2flow.training.policy import PolicyTrainer, PolicyTrainerConfig
from m2flow.training.rollouts import TokenPairs, TokenRollouts
from m2flow.training.supervised import train_supervised

MakeModel = Callable[..., nn.Module]
MakeRollouts = Callable[..., TokenRollouts]
PlainLogprobs = Callable[[nn.Module, TokenPairs], Tensor]
CONFIG = PolicyTrainerConfig(AdamWConfig(max_grad_norm=None), tokens_per_microbatch=30)


def masked(rollouts: TokenRollouts) -> tuple[TokenRollouts, Tensor]:
    """The rollouts with every third token somebody else's, and one row that is all of it."""
    mask_T = torch.arange(rollouts.advantages_T.numel()) % 3 != 0
    mask_T[: int(rollouts.pairs.completion_lengths_B[0])] = False
    behaviour_T = rollouts.behaviour_logprobs_T * mask_T
    pairs = replace(rollouts.pairs, loss_mask_T=mask_T)
    return replace(rollouts, pairs=pairs, behaviour_logprobs_T=behaviour_T), mask_T


@pytest.mark.parametrize("sharing", ["none", "prompt", "prefix"])
@given(st.data())
def test_only_drawn_tokens_are_predicted(sharing: Sharing, data: st.DataObject) -> None:
    rows = data.draw(
        st.lists(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=8), max_size=6)
    )
    completions = [[token for token, _ in row] for row in rows]
    masks = [[drawn for _, drawn in row] for row in rows]
    pairs = TokenPairs.from_rows([[1, 2]] * len(rows), completions, masks)
    packs = pack(pairs, 12, sharing)
    indices = sorted(index for one in packs for index in one.token_index_T.tolist())
    assert pairs.loss_mask_T is not None
    assert indices == pairs.loss_mask_T.nonzero()[:, 0].tolist()
    for one in packs:
        assert one.lengths_R.tolist() == [sum(masks[row]) for row in one.rows_R.tolist()]
        assert one.target_ids_T.equal(pairs.completion_ids_T[one.token_index_T])


@pytest.mark.parametrize(
    "aggregation", ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum"]
)
def test_gradient_is_that_of_a_plain_loop_over_drawn_tokens(
    aggregation: str,
    make_model: MakeModel,
    make_rollouts: MakeRollouts,
    plain_logprobs: PlainLogprobs,
) -> None:
    rollouts, mask_T = masked(make_rollouts())
    trainer = PolicyTrainer(make_model(), GRPOLoss(aggregation=aggregation), CONFIG)  # type: ignore[arg-type]
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.fold(rollouts)
    figures = trainer.finish()
    plain = make_model()
    ratio_T = (plain_logprobs(plain, rollouts.pairs) - rollouts.behaviour_logprobs_T).exp()
    advantages_T = rollouts.advantages_T
    loss_T = -torch.minimum(ratio_T * advantages_T, ratio_T.clamp(0.8, 1.2) * advantages_T)
    rows = (loss_T * mask_T).split(rollouts.pairs.completion_lengths_B.tolist())
    counts = [int(row.sum()) for row in mask_T.split(rollouts.pairs.completion_lengths_B.tolist())]
    if aggregation == "token-mean":
        loss = sum(row.sum() for row in rows) / sum(counts)
    else:
        mean = aggregation == "sequence-mean-token-mean"
        sums = [row.sum() / (max(1, n) if mean else 1) for row, n in zip(rows, counts, strict=True)]
        loss = torch.stack(sums).sum() / sum(count > 0 for count in counts)
    assert figures["loss"] == pytest.approx(float(loss.detach()), abs=1e-9)
    assert figures["tokens"] == sum(counts)
    after = list(trainer.model.parameters())
    assert any(not torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_what_others_wrote_changes_no_gradient_but_as_context(
    make_model: MakeModel, make_rollouts: MakeRollouts
) -> None:
    """Log-probabilities and advantages of such tokens are not even looked at."""
    rollouts, mask_T = masked(make_rollouts())
    noise = replace(
        rollouts,
        behaviour_logprobs_T=rollouts.behaviour_logprobs_T - 7.0 * ~mask_T,
        advantages_T=rollouts.advantages_T + 5.0 * ~mask_T,
    )
    losses = []
    for some in (rollouts, noise):
        trainer = PolicyTrainer(make_model(), GRPOLoss(), CONFIG)
        trainer.fold(some)
        losses.append((trainer.finish()["loss"], trainer.logprobs(some)))
    assert losses[0][0] == losses[1][0]
    # Up to rounding, which on some machines depends on where the trainer's memory lies.
    torch.testing.assert_close(losses[0][1], losses[1][1], rtol=0.0, atol=1e-6)
    assert not losses[0][1][~mask_T].any()


def test_supervised_training_counts_drawn_tokens(make_model: MakeModel) -> None:
    """The loss at the first step is the mean over them."""
    pairs = TokenPairs.from_rows([[1, 2]], [[3, 4, 5, 6]], [[True, False, False, True]])
    model = make_model()
    logits = model(input_ids=torch.tensor([[1, 2, 3, 4, 5, 6]])).logits[0].log_softmax(-1)
    wanted = -(logits[1, 3] + logits[4, 6]) / 2
    assert train_supervised(model, pairs, steps=1, batch_size=1) == pytest.approx(
        float(wanted.detach())
    )
