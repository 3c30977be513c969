"""Training in bfloat16: master weights, sums of gradients, and what a checkpoint of it holds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from m2flow.algorithms.grpo import GRPOLoss
from m2flow.models.causal_lm import TinySpec, build_tiny
from m2flow.training.optimizer import AdamWConfig, NotFinite, SumOptimizer
from m2flow.training.policy import PolicyTrainer, PolicyTrainerConfig
from m2flow.training.rollouts import TokenPairs, TokenRollouts
from m2flow.training.sharded import WHOLE, Shards, whole
from m2flow.training.supervised import train_supervised

SPEC = TinySpec(hidden_size=64, num_hidden_layers=2, intermediate_size=256)
"""A quarter of the widest matrices still has the 4,096 numbers that moments of 8 bits begin at."""
VOCABULARY = 32
CONFIG = PolicyTrainerConfig(AdamWConfig(learning_rate=1e-6, betas=(0.9, 0.99)))


def model_in(dtype: torch.dtype) -> nn.Module:
    """The same weights in either dtype: those that bfloat16 can say."""
    model = build_tiny(
        SPEC, vocab_size=VOCABULARY, eos_token_id=0, pad_token_id=1, seed=0, dtype=torch.bfloat16
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def rollouts_of(seed: int, rows: int = 8, length: int = 12) -> TokenRollouts:
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randint, VOCABULARY, generator=generator)
    prompts = [draw((4,)).tolist() for _ in range(rows)]
    completions = [draw((length,)).tolist() for _ in range(rows)]
    logprobs = [torch.full((length,), -3.4) for _ in range(rows)]
    advantages = torch.randn(rows, generator=generator)
    return TokenRollouts.from_rows(prompts, completions, logprobs, advantages)


def trainer_in(
    dtype: torch.dtype, config: PolicyTrainerConfig = CONFIG, shards: Shards = WHOLE
) -> PolicyTrainer:
    model = model_in(dtype)
    shards.shard(model)
    return PolicyTrainer(model, GRPOLoss(aggregation="token-mean"), config, shards)


def step(trainer: PolicyTrainer, seed: int) -> dict[str, float]:
    trainer.fold(rollouts_of(seed))
    return trainer.finish()


def stepped_weights(trainer: PolicyTrainer) -> Tensor:
    """What the optimizer steps: masters where there are some, else the weights."""
    state = dict(trainer.optimizer.state_items())
    named = trainer.model.named_parameters()
    return torch.cat([state.get(f"master/{name}", whole(p)).flatten() for name, p in named])


def test_two_hundred_small_steps_move_the_weights_as_in_float32() -> None:
    """At a learning rate of 1e-6, where bfloat16 alone would lose nearly every step."""
    trainers = [trainer_in(dtype) for dtype in (torch.float32, torch.bfloat16)]
    before = [stepped_weights(trainer) for trainer in trainers]
    assert torch.equal(*before)
    for seed in range(200):
        for trainer in trainers:
            step(trainer, seed)
    moves = [stepped_weights(one) - first for one, first in zip(trainers, before, strict=True)]
    cosine = torch.nn.functional.cosine_similarity(*moves, dim=0)
    assert float(cosine) >= 0.99
    assert float(moves[1].norm() / moves[0].norm()) == pytest.approx(1, abs=0.02)
    weights = torch.cat([p.detach().flatten() for p in trainers[1].model.parameters()])
    assert weights.dtype is torch.bfloat16
    assert torch.equal(weights, stepped_weights(trainers[1]).bfloat16()), "computed with, rounded"


def test_a_sum_of_many_gradients_goes_on_growing() -> None:
    """1,000 times the same: in bfloat16 the sum would stand still at 256 times a term."""
    layer = nn.Linear(4, 3, dtype=torch.bfloat16)
    optimizer = SumOptimizer(layer.named_parameters(), AdamWConfig())
    x = torch.ones(1, 4, dtype=torch.bfloat16)
    for _ in range(1000):
        layer(x).sum().backward()
    (flat,) = optimizer._flats
    assert flat.dtype is torch.float32
    assert torch.equal(flat, torch.full_like(flat, 1000.0))
    assert all(parameter.grad is None for parameter in layer.parameters()), "none is kept beside"


def test_training_goes_on_from_its_state_to_the_bit() -> None:
    straight, first = trainer_in(torch.bfloat16), trainer_in(torch.bfloat16)
    for seed in range(3):
        step(straight, seed)
        step(first, seed)
    state = {name: tensor.clone() for name, tensor in first.optimizer.state_items()}
    weights = {name: tensor.clone() for name, tensor in first.model.state_dict().items()}
    second = trainer_in(torch.bfloat16)
    second.model.load_state_dict(weights)
    second.optimizer.load_state_dict(state)
    for seed in range(3, 6):
        assert step(straight, seed) == step(second, seed)
    assert torch.equal(stepped_weights(straight), stepped_weights(second))


@pytest.mark.parametrize(
    "change", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_a_checkpoint_may_change_its_dtype(change: tuple[torch.dtype, torch.dtype]) -> None:
    """Weights lose no more than the folder does; moments and, from bfloat16, masters go on."""
    first, second = (trainer_in(dtype) for dtype in change)
    for seed in range(3):
        step(first, seed)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(dict(first.optimizer.state_items()))
    expected = stepped_weights(first)
    if change[1] is torch.bfloat16:
        expected = expected.bfloat16().float()
    assert torch.equal(stepped_weights(second), expected)
    assert step(second, 3)["steps"] == 1


def test_a_gradient_that_is_not_finite_is_named_and_moves_nothing() -> None:
    trainer = trainer_in(torch.bfloat16)
    before = stepped_weights(trainer)
    trainer.fold(rollouts_of(0))
    gradient = trainer.optimizer._masters[2].grad
    assert gradient is not None
    gradient[0] = float("inf")
    name = trainer.optimizer._named[2][0]
    with pytest.raises(NotFinite, match=f"gradients of 1 of .* are not finite \\({name}\\)"):
        trainer.finish()
    assert torch.equal(stepped_weights(trainer), before)
    assert step(trainer, 1)["steps"] == 1


def test_all_that_takes_memory_is_known() -> None:
    """18 bytes of a parameter: weight, and weight, gradient and two moments in float32."""
    trainer = trainer_in(torch.bfloat16)
    count = sum(parameter.numel() for parameter in trainer.model.parameters())

    def held() -> int:
        own = {tensor.untyped_storage().data_ptr(): tensor for tensor in trainer.tensors()}
        return sum(tensor.untyped_storage().nbytes() for tensor in own.values())

    before = held()
    assert trainer.optimizer.bytes_to_come() == 8 * count
    step(trainer, 0)
    assert trainer.optimizer.bytes_to_come() == 0
    assert held() - before == pytest.approx(8 * count, rel=0.01)
    assert held() == pytest.approx(18 * count, rel=0.01)


def test_parameters_are_let_go_for_another_optimizer() -> None:
    """A warm-up in bfloat16 moves the weights, and a trainer of its own follows it."""
    model: Any = model_in(torch.bfloat16)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    pairs = TokenPairs.from_rows([[1, 2, 3]] * 4, [[4, 5], [6, 7], [4, 5], [6, 7]])
    loss = train_supervised(model, pairs, steps=60, batch_size=4, seed=0)
    assert loss < 1.0
    assert not torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), before)
    trainer = PolicyTrainer(model, GRPOLoss(), replace(CONFIG, tokens_per_microbatch=10))
    assert step(trainer, 0)["steps"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_on_the_host_takes_the_same_steps(dtype: torch.dtype) -> None:
    """To the bit; and each goes on from the other's state."""
    config = replace(CONFIG, optimizer=replace(CONFIG.optimizer, learning_rate=1e-3))
    hosted = replace(config, optimizer=replace(config.optimizer, on_host=True))
    here, there = trainer_in(dtype, config), trainer_in(dtype, hosted)
    for seed in range(2):
        assert step(here, seed) == step(there, seed)
    of_here, of_there = dict(here.optimizer.state_items()), dict(there.optimizer.state_items())
    weights = [dict(one.model.state_dict()) for one in (here, there)]
    here, there = trainer_in(dtype, config), trainer_in(dtype, hosted)
    for one, its, state in ((here, weights[1], of_there), (there, weights[0], of_here)):
        one.model.load_state_dict(its)
        one.optimizer.load_state_dict(state)
        step(one, 2)
    expected = dict(there.model.named_parameters())
    assert not expected["model.norm.weight"].equal(weights[0]["model.norm.weight"])
    for name, parameter in here.model.named_parameters():
        assert parameter.equal(expected[name]), name


def test_what_is_not_finite_is_named_where_the_optimizer_is_on_the_host() -> None:
    trainer = trainer_in(torch.float32, CONFIG)
    hosted = replace(CONFIG, optimizer=replace(CONFIG.optimizer, on_host=True))
    trainer = PolicyTrainer(trainer.model, GRPOLoss(), hosted)
    trainer.fold(rollouts_of(0))
    trainer.optimizer._gradients[0][0] = torch.nan
    with pytest.raises(NotFinite, match="gradients of 1 of"):
        trainer.finish()
