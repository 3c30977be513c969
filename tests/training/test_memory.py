"""What bounds the memory of a pass: logits in chunks, and activations that are computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM, OPTConfig, OPTForCausalLM

from m2flow.algorithms.grpo import GRPOLoss
from m2flow.algorithms.ppo import CriticLoss
from m2flow.errors import UserError
from m2flow.models.critic import critic_of
from m2flow.runtime.transport.groups import LaneGroups
from m2flow.training import forward
from m2flow.training.attention import packed_attention_on
from m2flow.training.checkpointing import checkpoint_blocks
from m2flow.training.forward import token_logprobs
from m2flow.training.optimizer import AdamWConfig
from m2flow.training.packing import pack
from m2flow.training.policy import PolicyTrainer, PolicyTrainerConfig
from m2flow.training.sharded import WHOLE, Shards, whole_weights
from m2flow.training.values import ValueTargets, ValueTrainer
from tests.training.lane_processes import LaneProcesses
from tests.training.test_sharded import PAIR, gang_of
from tests.training.tiny_policy import VOCABULARY, make_model, make_rollouts

CONFIG = PolicyTrainerConfig(optimizer=AdamWConfig(learning_rate=1e-2), tokens_per_microbatch=60)
FULL = GRPOLoss(entropy_coefficient=0.01)


def figures_and_gradient(model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and a gradient of both, of one pack."""
    (microbatch,) = pack(make_rollouts(3).pairs, 1000)
    found = token_logprobs(model, microbatch, temperature=0.7, with_entropy=True)
    assert found.entropy_T is not None
    weight_T = torch.linspace(-1, 1, len(found.logprobs_T)).double()
    model.zero_grad()
    ((found.logprobs_T + 0.3 * found.entropy_T) * weight_T).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return found.logprobs_T.detach(), found.entropy_T.detach(), gradient


def capped_model() -> nn.Module:
    """A Gemma 2, whose logits are capped so low that it shows, in float64."""
    config = Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=4, max_position_embeddings=512,
        initializer_range=0.3, final_logit_softcapping=1.5, attn_logit_softcapping=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model: nn.Module = Gemma2ForCausalLM._from_config(config, attn_implementation="eager")
    return model.double().train()


@pytest.mark.parametrize("rows", [1, 2, 5, 20])
@pytest.mark.parametrize("make", [make_model, capped_model])
def test_logits_in_chunks_give_the_same(
    monkeypatch: pytest.MonkeyPatch, rows: int, make: Callable[[], nn.Module]
) -> None:
    model: Any = make()
    cap = getattr(model.config, "final_logit_softcapping", None)
    expected = figures_and_gradient(model)
    largest: list[int] = []
    head = model.get_output_embeddings()
    linear = nn.functional.linear

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight is head.weight:
            largest.append(x.shape[-2])
        return linear(x, weight, bias)

    monkeypatch.setattr(nn.functional, "linear", counted)
    monkeypatch.setattr(forward, "LOGITS_AT_A_TIME", rows * VOCABULARY)
    found = figures_and_gradient(model)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert max(largest) == rows
    assert len(largest) > 2
    assert "forward" not in vars(head), "the model is as it was"
    assert getattr(model.config, "final_logit_softcapping", None) == cap


def test_other_architectures_compute_all_logits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may scale what the head gives, or have no head of this name."""
    model: Any = make_model()
    monkeypatch.setattr(forward, "LOGITS_AT_A_TIME", VOCABULARY)
    monkeypatch.setattr(model.config, "model_type", "cohere")
    monkeypatch.setattr(forward._Head, "over", None)
    figures_and_gradient(model)


def trained(model: nn.Module, config: PolicyTrainerConfig, shards: Shards = WHOLE) -> list[Tensor]:
    """Weights after two steps."""
    trainer = PolicyTrainer(model, FULL, config, shards)
    rows = torch.arange(12)
    if shards.size > 1:
        rows = rows[:5] if dist.get_rank() == 0 else rows[5:]
    for seed in range(2):
        trainer.fold(make_rollouts(seed).select(rows))
        trainer.finish()
    return [weight for _, weight in whole_weights(trainer.model)]


def passes_of(model: Any, act: Callable[[], object]) -> int:
    """How often a block of the model is computed meanwhile."""
    count = 0

    def hook(*_: object) -> None:
        nonlocal count
        count += 1

    handle = model.model.layers[0].self_attn.register_forward_pre_hook(hook)
    act()
    handle.remove()
    return count


def test_activations_computed_again_give_the_same_weights() -> None:
    plain, again = make_model(), make_model()
    expected: list[Tensor] = []
    passes = passes_of(plain, lambda: expected.extend(trained(plain, CONFIG)))
    found: list[Tensor] = []
    config = replace(CONFIG, gradient_checkpointing=True)
    assert passes_of(again, lambda: found.extend(trained(again, config))) == 2 * passes
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_dropout_stays_off_where_activations_are_computed_again() -> None:
    """Also in OPT, whose blocks drop out themselves, and with probability 0.1 by default."""
    config = OPTConfig(
        vocab_size=VOCABULARY, hidden_size=16, ffn_dim=24, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=512, word_embed_proj_dim=16, init_std=0.3,
    )  # fmt: skip
    assert config.dropout == 0.1
    torch.manual_seed(0)
    model: Any = OPTForCausalLM(config).double().eval()
    expected = figures_and_gradient(model)
    checkpoint_blocks(model)
    with packed_attention_on(model):  # for what is computed again
        found = figures_and_gradient(model)
    assert not any(module.training for module in model.modules())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_critic_computes_its_activations_again() -> None:
    def learnt(gradient_checkpointing: bool) -> tuple[list[Tensor], int]:
        policy: Any = make_model()
        critic = critic_of(policy)
        config = replace(CONFIG, gradient_checkpointing=gradient_checkpointing)
        trainer = ValueTrainer(critic, CriticLoss(), config)
        pairs = make_rollouts(1).pairs
        count = int(pairs.completion_lengths_B.sum())
        targets = ValueTargets(pairs, torch.zeros(count).double(), torch.ones(count).double())

        def act() -> None:
            for _ in range(2):
                trainer.fold(targets)
                trainer.finish()

        passes = passes_of(critic, act)
        return [p.detach() for p in critic.parameters()], passes

    (plain, once), (again, twice) = learnt(False), learnt(True)
    assert twice == 2 * once
    for one, other in zip(again, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(UserError, match=r"training.gradient_checkpointing: .*got 'Linear'"):
        checkpoint_blocks(nn.Linear(2, 2))


@pytest.fixture(scope="module")
def lanes() -> Iterator[LaneProcesses]:
    with LaneProcesses(2) as lanes:
        yield lanes


def on_pair(groups: LaneGroups) -> list[Tensor]:
    gang = gang_of(groups, PAIR)
    assert gang is not None
    model, shards = make_model(), Shards.of(gang)
    shards.shard(model)
    before = forward.LOGITS_AT_A_TIME
    forward.LOGITS_AT_A_TIME = 3 * VOCABULARY
    try:
        config = replace(CONFIG, gradient_checkpointing=True, tokens_per_microbatch=20)
        return trained(model, config, shards)
    finally:
        forward.LOGITS_AT_A_TIME = before


def test_a_gang_does_both(lanes: LaneProcesses) -> None:
    """Unequal shares, so that a lane runs empty passes beside a chunked one."""
    expected = trained(make_model(), CONFIG)
    for weights in lanes(on_pair):
        for one, other in zip(weights, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
