"""Policy training: against a plain loop, cut in any pieces, over replicas, and that it learns."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from m2flow.algorithms.advantages import group_advantages
from m2flow.algorithms.grpo import GRPOLoss
from m2flow.errors import UserError
from m2flow.flow import Place
from m2flow.runtime.lane.state import MovableState
from m2flow.training.optimizer import AdamWConfig, NotFinite
from m2flow.training.packing import Sharing
from m2flow.training.policy import PolicyTrainer, PolicyTrainerConfig, logprobs_of
from m2flow.training.rollouts import TokenPairs, TokenRollouts

MakeModel = Callable[..., nn.Module]
MakeRollouts = Callable[..., TokenRollouts]
ADAMW = AdamWConfig(learning_rate=1e-2, betas=(0.9, 0.99), weight_decay=0.1, max_grad_norm=0.3)
CONFIG = PolicyTrainerConfig(optimizer=ADAMW, tokens_per_microbatch=30)
FULL = GRPOLoss(kl_coefficient=0.05, entropy_coefficient=0.01)


def weights(trainer: PolicyTrainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def gradient(trainer: PolicyTrainer) -> Tensor:
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])


def with_reference(rollouts: TokenRollouts) -> TokenRollouts:
    return replace(rollouts, reference_logprobs_T=rollouts.behaviour_logprobs_T - 0.3)


def test_two_steps_agree_with_a_plain_loop(
    make_model: MakeModel,
    make_rollouts: MakeRollouts,
    plain_logprobs: Callable[[nn.Module, TokenPairs], Tensor],
) -> None:
    rollouts, plain = make_rollouts(), make_model()
    trainer = PolicyTrainer(
        make_model(), GRPOLoss(clip_high=0.28, aggregation="token-mean"), CONFIG
    )
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    for _ in range(2):
        trainer.fold(rollouts)
        figures = trainer.finish()
        ratio = (plain_logprobs(plain, rollouts.pairs) - rollouts.behaviour_logprobs_T).exp()
        clipped = ratio.clamp(0.8, 1.28)
        advantages = rollouts.advantages_T
        loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        adamw.step()
        assert figures["loss"] == pytest.approx(float(loss.detach()), abs=1e-12)
        assert figures["grad_norm"] == pytest.approx(float(norm), abs=1e-12)
    expected = torch.cat([p.detach().flatten() for p in plain.parameters()])
    torch.testing.assert_close(weights(trainer), expected, rtol=0, atol=1e-10)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_chunking_packing_and_sharing_gives_the_same_weights(
    make_model: MakeModel, make_rollouts: MakeRollouts, data: st.DataObject
) -> None:
    rollouts = with_reference(make_rollouts(groups=2))
    aggregation = data.draw(
        st.sampled_from(["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum"])
    )
    algorithm = replace(FULL, aggregation=aggregation)
    whole = PolicyTrainer(make_model(), algorithm, CONFIG)
    whole.fold(rollouts)
    expected = whole.finish()

    sharing: Sharing = data.draw(st.sampled_from(["none", "prompt", "prefix"]))
    budget = data.draw(st.integers(1, 60))
    config = replace(CONFIG, sharing=sharing, tokens_per_microbatch=budget)
    pieces = PolicyTrainer(make_model(), algorithm, config)
    order = torch.tensor(data.draw(st.permutations(range(len(rollouts)))))
    for rows in order.split(data.draw(st.integers(1, len(rollouts)))):
        pieces.fold(rollouts.select(rows))
    found = pieces.finish()
    torch.testing.assert_close(weights(pieces), weights(whole), rtol=0, atol=1e-10)
    for name in set(expected) - {"tokens_computed"}:
        assert found[name] == pytest.approx(expected[name], abs=1e-10), name


def test_dropping_samples_without_advantage_changes_no_gradient(
    make_model: MakeModel, make_rollouts: MakeRollouts
) -> None:
    rollouts = make_rollouts()
    gradients, figures = [], []
    for drop in (False, True):
        config = replace(CONFIG, drop_zero_advantage=drop)
        trainer = PolicyTrainer(make_model(), GRPOLoss(), config)
        trainer.fold(rollouts)
        gradients.append(gradient(trainer))
        figures.append(trainer.finish())
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)
    kept, dropped = figures
    assert dropped["samples_dropped"] == 4
    assert dropped["tokens_computed"] < kept["tokens_computed"]
    for name in ("loss", "grad_norm", "tokens", "samples", "behaviour_entropy"):
        assert dropped[name] == pytest.approx(kept[name], abs=1e-12)


def test_samples_without_advantage_are_kept_where_they_have_a_kl_term(
    make_model: MakeModel, make_rollouts: MakeRollouts
) -> None:
    trainer = PolicyTrainer(make_model(), FULL, CONFIG)
    trainer.fold(with_reference(make_rollouts()))
    figures = trainer.finish()
    assert figures["samples_dropped"] == 0
    assert figures["kl"] > 0
    assert figures["entropy"] > 0


class Replicas:
    """An all-reduce among threads."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count)
        self.given: list[list[Tensor]] = []

    def __call__(self, tensors: list[Tensor]) -> None:
        self.given.append([tensor.clone() for tensor in tensors])
        self.barrier.wait(60)
        for position, tensor in enumerate(tensors):
            tensor.copy_(sum(given[position] for given in self.given))
        self.barrier.wait(60)


def finish_together(trainers: list[PolicyTrainer]) -> list[Any]:
    replicas, results = Replicas(len(trainers)), [None] * len(trainers)

    def run(i: int) -> None:
        try:
            results[i] = trainers[i].finish(replicas)  # type: ignore[call-overload]
        except NotFinite as error:
            results[i] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(trainers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_replicas_with_unequal_shares_make_the_step_of_one(
    make_model: MakeModel, make_rollouts: MakeRollouts
) -> None:
    """One replica has 3 samples, one 9, one none at all: a mean of means would differ."""
    rollouts = make_rollouts()
    alone = PolicyTrainer(make_model(), GRPOLoss(), CONFIG)
    alone.fold(rollouts)
    expected = alone.finish()
    trainers = [PolicyTrainer(make_model(), GRPOLoss(), CONFIG) for _ in range(3)]
    trainers[0].fold(rollouts.select(torch.tensor([4, 0, 11])))
    trainers[1].fold(rollouts.select(torch.tensor([1, 2, 3, 5, 6, 7, 8, 9, 10])))
    results = finish_together(trainers)
    for trainer, figures in zip(trainers, results, strict=True):
        torch.testing.assert_close(weights(trainer), weights(alone), rtol=0, atol=1e-10)
        assert figures == results[0]
    for name in set(expected) - {"tokens_computed"}:
        assert results[0][name] == pytest.approx(expected[name], abs=1e-10), name


@pytest.mark.parametrize("replicas", [1, 2])
def test_nan_loss_stops_every_replica_before_the_step(
    make_model: MakeModel, make_rollouts: MakeRollouts, replicas: int
) -> None:
    trainers = [PolicyTrainer(make_model(), GRPOLoss(), CONFIG) for _ in range(replicas)]
    before = weights(trainers[0])
    model: Any = trainers[0].model
    norm_weight = model.model.norm.weight.detach()
    norm_weight[0] = float("nan")
    for trainer in trainers:
        trainer.fold(make_rollouts())
    norm_weight[0] = 1.0
    if replicas == 1:
        with pytest.raises(NotFinite, match=r"no step was taken: the summed loss is nan.*model\."):
            trainers[0].finish()
    else:
        assert all(isinstance(result, NotFinite) for result in finish_together(trainers))
    for trainer in trainers:
        assert torch.equal(weights(trainer), before)
        assert trainer.optimizer.num_steps == 0
        assert not gradient(trainer).any()


def test_goes_on_after_a_step_that_was_not_taken(
    make_model: MakeModel, make_rollouts: MakeRollouts
) -> None:
    spoilt, fresh = (PolicyTrainer(make_model(), GRPOLoss(), CONFIG) for _ in range(2))
    spoilt.fold(make_rollouts())
    parameter = next(spoilt.model.parameters())
    assert parameter.grad is not None
    parameter.grad[0, 0] = float("inf")
    with pytest.raises(NotFinite, match="1 of"):
        spoilt.finish()
    for trainer in (spoilt, fresh):
        trainer.fold(make_rollouts())
        trainer.finish()
    assert torch.equal(weights(spoilt), weights(fresh))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("column", ["behaviour_logprobs_T", "advantages_T"])
def test_columns_that_are_no_numbers_leave_the_step_of_all_replicas_out(
    make_model: MakeModel, make_rollouts: MakeRollouts, column: str, value: float
) -> None:
    """Where the loss alone would not tell: a ratio to an infinite probability is 0."""
    rollouts = make_rollouts()
    values = getattr(rollouts, column).clone()
    values[3] = value
    trainers = [PolicyTrainer(make_model(), GRPOLoss(), CONFIG) for _ in range(2)]
    before = weights(trainers[0])
    trainers[0].fold(replace(rollouts, **{column: values}))
    trainers[1].fold(rollouts)
    first, second = finish_together(trainers)
    assert f"; {column.removesuffix('_T')}: 1 of " in str(first)
    assert "values are not finite, the first at 3" in str(first)
    assert str(second).startswith("no step was taken: the summed loss is nan")
    assert torch.equal(weights(trainers[0]), before)
    trainers[0].fold(rollouts)
    trainers[0].finish()
    assert trainers[0].optimizer.num_steps == 1


def test_kl_without_reference_is_refused(
    make_model: MakeModel, make_rollouts: MakeRollouts
) -> None:
    with pytest.raises(UserError, match="kl_coefficient=0"):
        PolicyTrainer(make_model(), FULL, CONFIG).fold(make_rollouts())


def test_minibatch_in_which_no_token_counts_takes_no_step(
    make_model: MakeModel, make_rollouts: MakeRollouts
) -> None:
    trainer = PolicyTrainer(make_model(), GRPOLoss(), CONFIG)
    before = weights(trainer)
    trainer.fold(TokenRollouts.from_rows([[1], [2]], [[], []], [[], []], [1.0, 2.0]))
    figures = trainer.finish()
    assert figures["steps"] == 0
    assert torch.equal(weights(trainer), before)
    assert figures.keys() == {
        "steps", "samples", "samples_dropped", "tokens", "tokens_trained", "tokens_computed"
    }, "0 is no loss, gradient or learning rate of a step that was not taken"  # fmt: skip
    trainer.fold(make_rollouts())
    assert figures.keys() < trainer.finish().keys()


def test_logprobs_are_those_of_a_plain_forward_pass(
    make_model: MakeModel,
    make_rollouts: MakeRollouts,
    plain_logprobs: Callable[[nn.Module, TokenPairs], Tensor],
) -> None:
    trainer, rollouts = PolicyTrainer(make_model(), GRPOLoss(), CONFIG), make_rollouts()
    found = trainer.logprobs(rollouts)
    assert not found.requires_grad
    torch.testing.assert_close(found, plain_logprobs(trainer.model, rollouts.pairs).detach())
    assert logprobs_of(trainer.model, TokenPairs.from_rows([], []), 10).numel() == 0


def test_on_policy_the_ratio_is_one_and_nothing_is_clipped(
    make_model: MakeModel, make_rollouts: MakeRollouts
) -> None:
    trainer, rollouts = PolicyTrainer(make_model(), GRPOLoss(), CONFIG), make_rollouts()
    own_T = trainer.logprobs(rollouts)
    trainer.fold(replace(rollouts, behaviour_logprobs_T=own_T, old_logprobs_T=own_T))
    figures = trainer.finish()
    assert figures["ratio"] == pytest.approx(1)
    assert figures["clip_fraction"] == 0
    assert figures["behaviour_kl"] == pytest.approx(0, abs=1e-12)


def test_the_gap_is_that_to_the_policy_that_drew(
    make_model: MakeModel, make_rollouts: MakeRollouts
) -> None:
    """Also where the ratio is taken against log-probabilities that were computed again."""
    trainer, rollouts = PolicyTrainer(make_model(), GRPOLoss(), CONFIG), make_rollouts()
    own_T = trainer.logprobs(rollouts)
    every_T = torch.ones(own_T.numel(), dtype=torch.bool)
    apart = {"behaviour_logprobs_T": own_T - 0.25, "old_logprobs_T": own_T, "fresh_T": every_T}
    trainer.fold(replace(rollouts, **apart))
    figures = trainer.finish()
    assert figures["ratio"] == pytest.approx(1)
    assert figures["logprob_gap"] == pytest.approx(0.25)
    assert figures["behaviour_kl"] == pytest.approx(math.exp(0.25) - 1 - 0.25)
    assert trainer.largest_gap == pytest.approx(0.25)
    assert trainer.engine_figures["engine_gap"] == pytest.approx(0.25)
    assert trainer.engine_figures["engine_kl"] == pytest.approx(figures["behaviour_kl"])
    apart_T = torch.linspace(-0.4, 0.3, own_T.numel(), dtype=own_T.dtype)
    trained_T = torch.repeat_interleave(~rollouts.idle_rows(), rollouts.pairs.completion_lengths_B)
    for fresh_T in (every_T, apart_T > 0):
        again_T = trainer.logprobs(rollouts)
        trainer.fold(replace(rollouts, behaviour_logprobs_T=again_T + apart_T, fresh_T=fresh_T))
        trainer.finish()
        sizes_T = apart_T[trained_T & fresh_T].abs()
        largest = float(sizes_T.max())
        assert trainer.largest_gap == pytest.approx(largest), "of any piece, and of this step alone"
        assert trainer.engine_figures["engine_gap"] == pytest.approx(float(sizes_T.mean()))
    trainer.fold(rollouts)
    trainer.finish()
    assert not trainer.engine_figures, "no token is known to be fresh"


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_share_of_the_tokens_that_the_gap_masks_is_told(
    make_model: MakeModel, make_rollouts: MakeRollouts, level: Any
) -> None:
    """A step in which every token was masked had a gradient of 0, and no figure said why."""
    algorithm, rollouts = GRPOLoss(gap_rule="mask", gap_level=level, gap_cap=2.0), make_rollouts()
    trainer = PolicyTrainer(make_model(), algorithm, CONFIG)
    own_T, lengths_B = trainer.logprobs(rollouts), rollouts.pairs.completion_lengths_B
    apart_T = torch.linspace(-1.0, 1.0, own_T.numel(), dtype=own_T.dtype)
    trained_T = torch.repeat_interleave(~rollouts.idle_rows(), lengths_B)
    sums_T = torch.cat([row.sum().expand(row.numel()) for row in apart_T.split(lengths_B.tolist())])
    gaps_T = sums_T if level == "sequence" else apart_T
    trainer.fold(replace(rollouts, behaviour_logprobs_T=own_T - apart_T, old_logprobs_T=own_T))
    share = float((gaps_T.abs() > math.log(2))[trained_T].double().mean())
    assert 0 < share < 1
    assert trainer.finish()["gap_masked"] == pytest.approx(share)
    again_T = trainer.logprobs(rollouts)
    trainer.fold(replace(rollouts, behaviour_logprobs_T=again_T - 3.0, old_logprobs_T=again_T))
    figures = trainer.finish()
    assert (figures["gap_masked"], figures["grad_norm"]) == (1.0, 0.0)
    trainer.fold(rollouts)
    assert trainer.finish()["gap_masked"] == 0.0, "nothing is weighed"
    assert "gap_masked" not in GRPOLoss().figures


def test_resumed_trainer_goes_on_as_if_it_had_not_stopped(
    make_model: MakeModel, make_rollouts: MakeRollouts
) -> None:
    through = PolicyTrainer(make_model(), GRPOLoss(), CONFIG)
    through.fold(make_rollouts(0))
    through.finish()
    resumed = PolicyTrainer(make_model(), GRPOLoss(), CONFIG)
    resumed.model.load_state_dict(through.model.state_dict())
    resumed.optimizer.load_state_dict(dict(through.optimizer.state_items()))
    for trainer in (through, resumed):
        trainer.fold(make_rollouts(1))
        trainer.finish()
    assert torch.equal(weights(through), weights(resumed))
    assert resumed.optimizer.num_steps == 2


def test_learns_which_token_is_rewarded(make_model: MakeModel) -> None:
    """Sampled from the policy itself, rewarded for answering the prompt's own token."""
    trainer = PolicyTrainer(
        make_model(torch.float32),
        GRPOLoss(),
        replace(CONFIG, optimizer=AdamWConfig(learning_rate=1e-2, betas=(0.9, 0.99))),
    )
    generator = torch.Generator().manual_seed(0)
    prompts = [[token, 6] for token in range(4) for _ in range(16)]
    means = []
    for _ in range(30):
        with torch.no_grad():
            model: Any = trainer.model
            logprobs = model(input_ids=torch.tensor(prompts)).logits[:, -1].log_softmax(-1)
        tokens = torch.multinomial(logprobs.exp(), 1, generator=generator)
        rewards = torch.tensor(
            [float(token == prompt[0]) for token, prompt in zip(tokens, prompts, strict=True)]
        )
        means.append(float(rewards.mean()))
        trainer.fold(
            TokenRollouts.from_rows(
                prompts,
                list(tokens),
                list(logprobs.gather(1, tokens)),
                group_advantages(rewards, 16),
            )
        )
        trainer.finish()
    assert sum(means[:3]) / 3 < 0.4
    assert sum(means[-3:]) / 3 > 0.9


def test_state_may_leave_memory_between_any_two_calls(
    make_model: MakeModel, make_rollouts: MakeRollouts
) -> None:
    """Also in the middle of a mini-batch, when gradients are half accumulated."""

    def train(switching: bool) -> tuple[Tensor, dict[str, Tensor]]:
        trainer = PolicyTrainer(make_model(), GRPOLoss(), CONFIG)
        state = MovableState(trainer.tensors, Place())
        for step in range(3):
            for seed in range(2):
                trainer.fold(make_rollouts(10 * step + seed))
                if switching:
                    state.offload()
                    assert not weights_and_gradients_have_memory(trainer)
                    state.onload()
            trainer.finish()
        return weights(trainer), dict(trainer.optimizer.state_items())

    found, expected = train(True), train(False)
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1][name], tensor) for name, tensor in expected[1].items())


def weights_and_gradients_have_memory(trainer: PolicyTrainer) -> bool:
    tensors = [t for p in trainer.model.parameters() for t in (p, p.grad) if t is not None]
    return any(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_stale_rollouts_are_weighted_by_the_policy_that_drew_them(
    make_model: MakeModel, make_rollouts: MakeRollouts
) -> None:
    """Recomputed log-probabilities once replaced the behaviour policy's, whatever those were."""
    rollouts = make_rollouts()
    trainers = [PolicyTrainer(make_model(), GRPOLoss(), CONFIG) for _ in range(3)]
    old_T = trainers[0].logprobs(rollouts)
    drawn = {"same": old_T, "half as likely": old_T - math.log(2), "behaviour": None}
    losses = {}
    for trainer, (name, behaviour_T) in zip(trainers, drawn.items(), strict=True):
        stale = replace(rollouts, old_logprobs_T=old_T)
        if behaviour_T is not None:
            stale = replace(stale, behaviour_logprobs_T=behaviour_T)
        trainer.fold(stale)
        losses[name] = trainer.finish()["loss"]
    assert losses["half as likely"] == pytest.approx(2 * losses["same"])
    assert losses["behaviour"] != pytest.approx(losses["same"])
