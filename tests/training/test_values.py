"""A critic on packed answers against one answer at a time, and its training in any pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from m2flow.algorithms.ppo import CriticLoss
from m2flow.models.causal_lm import TinySpec, build_tiny
from m2flow.models.critic import critic_of, load_critic
from m2flow.training.optimizer import AdamWConfig, NotFinite
from m2flow.training.packing import pack
from m2flow.training.policy import PolicyTrainerConfig
from m2flow.training.rollouts import TokenPairs
from m2flow.training.values import ValueTargets, ValueTrainer, token_values

PROMPTS = [[1, 2, 3], [1, 2, 3], [4], [1, 2, 3], [4]]
ANSWERS = [[5, 6, 9], [5, 7, 9], [8, 9], [], [8, 3, 2, 9]]
PAIRS = TokenPairs.from_rows(PROMPTS, ANSWERS)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def critic(dtype: torch.dtype = torch.float64) -> Any:
    spec = TinySpec(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24
    )
    model: Any = critic_of(
        build_tiny(spec, vocab_size=11, eos_token_id=9, pad_token_id=10, seed=1, dtype=dtype)
    )
    with torch.no_grad():
        model.score.weight.copy_(torch.linspace(-1, 1, 16)[None])
        model.score.bias.fill_(0.3)
    return model


def trainer(model: Any = None, algorithm: CriticLoss | None = None, **config: Any) -> ValueTrainer:
    return ValueTrainer(
        critic() if model is None else model,
        algorithm or CriticLoss(),
        PolicyTrainerConfig(optimizer=AdamWConfig(1e-2), **config),
    )


def targets(returns_T: Tensor | None = None) -> ValueTargets:
    num_tokens = PAIRS.completion_ids_T.numel()
    generator = torch.Generator().manual_seed(0)
    old_T, drawn_T = torch.randn(2, num_tokens, generator=generator, dtype=torch.float64)
    return ValueTargets(PAIRS, old_T, drawn_T if returns_T is None else returns_T)


def part(whole: ValueTargets, rows: list[int]) -> ValueTargets:
    ends = whole.pairs.completion_lengths_B.cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    index = [token for row in rows for token in range(starts[row], ends[row])]
    return ValueTargets(
        whole.pairs.select(torch.tensor(rows, dtype=torch.int64)),
        whole.old_values_T[index],
        whole.returns_T[index],
    )


def slow_values(model: Any) -> Tensor:
    """Each answer by itself, by the model's own attention: the figure before each token."""
    rows = []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        out = model(input_ids=torch.tensor([prompt + answer])).logits[0, :, 0]
        rows.append(out[len(prompt) - 1 : len(prompt) - 1 + len(answer)])
    return torch.cat(rows)


@pytest.mark.parametrize("sharing", ["none", "prompt", "prefix"])
@pytest.mark.parametrize("budget", [1, 6, 1000])
def test_packed_values_are_those_of_single_answers(sharing: Any, budget: int) -> None:
    model = critic()
    found = trainer(model, tokens_per_microbatch=budget, sharing=sharing).values(PAIRS)
    torch.testing.assert_close(found, slow_values(model).detach(), rtol=1e-9, atol=1e-9)
    assert found.dtype is torch.float64


def test_gradients_are_those_of_single_answers() -> None:
    model, wanted = critic(), targets()
    (microbatch,) = pack(PAIRS, 1000)
    values_T = token_values(model, microbatch)
    whole_T = torch.empty_like(values_T).index_put((microbatch.token_index_T,), values_T)
    other = critic()
    for net, found_T in ((model, whole_T), (other, slow_values(other))):
        loss = (found_T - wanted.returns_T).square().sum()
        loss.backward()
        assert net.score.weight.grad.abs().max() > 0
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    "pieces", [[[0, 1, 2, 3, 4]], [[3], [0, 4], [], [2, 1]], [[4, 2], [0, 1, 3]]]
)
def test_pieces_change_nothing(pieces: list[list[int]]) -> None:
    wanted, reference = targets(), trainer()
    reference.fold(wanted)
    expected = reference.finish()
    found = trainer(tokens_per_microbatch=5)
    for rows in pieces:
        found.fold(part(wanted, rows))
    figures = found.finish()
    del expected["tokens_computed"], figures["tokens_computed"]
    assert figures == pytest.approx(expected, rel=1e-9)
    for mine, theirs in zip(found.model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_figures() -> None:
    wanted, model = targets(), critic()
    some = trainer(model, CriticLoss(value_clip=None))
    values_T = slow_values(model).detach()
    wanted = replace(wanted, old_values_T=values_T)
    some.fold(wanted)
    figures = some.finish()
    assert figures["loss"] == pytest.approx(
        float((values_T - wanted.returns_T).square().mean() / 2)
    )
    assert figures["value"] == pytest.approx(float(values_T.mean()))
    assert figures["return"] == pytest.approx(float(wanted.returns_T.mean()))
    left = (wanted.returns_T - values_T).var(correction=0) / wanted.returns_T.var(correction=0)
    assert figures["explained_variance"] == pytest.approx(float(1 - left))
    assert figures["clip_fraction"] == 0


def test_a_minibatch_in_which_no_token_counts_has_no_figure_of_a_step() -> None:
    """A loss of 0, and a critic that explains nothing, had counted among those of real steps."""
    some = trainer()
    before = [parameter.detach().clone() for parameter in some.model.parameters()]
    some.fold(part(targets(), [3]))
    assert some.finish() == {"tokens_computed": 0.0, "steps": 0.0}
    assert all(map(torch.equal, before, some.model.parameters()))
    some.fold(targets())
    assert some.finish()["steps"] == 1


def test_a_critic_learns_what_it_is_told() -> None:
    some = trainer(algorithm=CriticLoss(value_clip=None))
    wanted = targets(torch.arange(12, dtype=torch.float64) / 12)
    losses = []
    for _ in range(150):
        some.fold(wanted)
        losses.append(some.finish()["loss"])
    assert losses[-1] < 0.01 * losses[0]


@pytest.mark.parametrize("name", ["values", "returns"])
def test_what_is_not_finite_leaves_the_step_out_and_is_named(name: str) -> None:
    wanted = targets()
    bad_T = wanted.returns_T.clone()
    bad_T[4] = float("nan")
    field = {"values": "old_values_T", "returns": "returns_T"}[name]
    some = trainer()
    some.fold(replace(wanted, **{field: bad_T}))
    with pytest.raises(NotFinite, match=f"{name}: 1 of 12 values are not finite, .* 4"):
        some.finish()


def test_a_loss_that_overflows_takes_no_step() -> None:
    some = trainer(critic(torch.float32))
    before = [parameter.detach().clone() for parameter in some.model.parameters()]
    some.fold(targets(torch.full((12,), 1e300, dtype=torch.float64)))
    with pytest.raises(NotFinite):
        some.finish()
    for parameter, value in zip(some.model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


def test_goes_on_from_its_state(tmp_path: Path) -> None:
    some, wanted = trainer(), targets()
    some.fold(wanted)
    some.finish()
    some.model.save_pretrained(tmp_path)
    again = trainer(load_critic(tmp_path, torch.float64))
    again.optimizer.load_state_dict(dict(some.optimizer.state_items()))
    for each in (some, again):
        each.fold(wanted)
        each.finish()
    for mine, theirs in zip(some.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
