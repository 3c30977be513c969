"""Small actor-critics: what `act` draws, `evaluate` judges the same; draws belong to the item."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from m2flow.algorithms.sampling import derive_seed, sample_tokens
from m2flow.errors import UserError
from m2flow.models.policies import direct
from m2flow.models.policies.actor_critic import (
    ActorCritic,
    RunningNorm,
    cnn_actor_critic,
    mlp_actor_critic,
)
from m2flow.models.policies.distributions import SquashedGaussianHead
from m2flow.models.policies.protocol import at_level, standard_normal

LOW, HIGH = [-1.0, -2.0], [1.0, 4.0]
SEEDS = [7, 8, 9, 2**62]


def observations(batch: int = 4, size: int = 32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "state": torch.randn(batch, 5, generator=generator),
        "image": torch.randint(0, 256, (batch, size, size, 3), generator=generator).byte(),
        "wrist_image": torch.randint(0, 256, (batch, size, size, 3), generator=generator).byte(),
    }


def policy(encoder: str, kind: str, chunk: int = 3) -> ActorCritic:
    torch.manual_seed(1)
    spaces = {"count": 6} if kind == "categorical" else {"low": LOW, "high": HIGH}
    if encoder == "mlp":
        return mlp_actor_critic(5, actions=kind, chunk=chunk, **spaces)
    cameras = ("image", "wrist_image")
    return cnn_actor_critic(
        (32, 32), actions=kind, chunk=chunk, cameras=cameras, state_size=5, features=32, **spaces
    )


ALL = [(e, k) for e in ("mlp", "cnn") for k in ("gaussian", "squashed", "categorical")]


@pytest.mark.parametrize(("encoder", "kind"), ALL)
@pytest.mark.parametrize("greedy", [False, True])
def test_evaluate_gives_what_act_gave(encoder: str, kind: str, greedy: bool) -> None:
    model, seen = policy(encoder, kind), observations()
    output = model.act(seen, seeds=SEEDS, greedy=greedy)
    again = model.evaluate(seen, output.tokens)
    torch.testing.assert_close(again.logprobs, output.logprobs)
    torch.testing.assert_close(again.values, model.values(seen))
    if encoder == "cnn":
        torch.testing.assert_close(again.values, output.values)
    else:
        assert output.values is None, "a critic of its own judges whole rollouts at once"
    width = 1 if kind == "categorical" else 2
    assert output.actions.shape == output.logprobs.shape == again.entropy.shape == (4, 3, width)
    assert again.values is not None
    assert again.values.shape == (4,)


@pytest.mark.parametrize(("encoder", "kind"), ALL)
def test_a_draw_does_not_depend_on_the_batch(encoder: str, kind: str) -> None:
    model, seen = policy(encoder, kind), observations()
    together = model.act(seen, seeds=SEEDS)
    alone = model.act({name: value[2:3] for name, value in seen.items()}, seeds=SEEDS[2:3])
    torch.testing.assert_close(together.tokens[2:3], alone.tokens)
    other = model.act(seen, seeds=[s + 1 for s in SEEDS])
    assert not torch.equal(other.tokens, together.tokens)


@pytest.mark.parametrize("kind", ["gaussian", "squashed"])
def test_logprobs_are_those_of_torch(kind: str) -> None:
    model, seen = policy("mlp", kind), observations()
    output = model.act(seen, seeds=SEEDS)
    features = model.actor(seen)
    mean = model.head.mean(features).view(4, 3, 2)
    if kind == "gaussian":
        normal = torch.distributions.Normal(mean, model.head.log_std.exp())
        expected, entropy = normal.log_prob(output.tokens), normal.entropy()
        torch.testing.assert_close(model.evaluate(seen, output.tokens).entropy, entropy)
    else:
        base = torch.distributions.Normal(mean, model.head.log_std(features).view(4, 3, 2).exp())
        tanh = torch.distributions.TransformedDistribution(
            base, [torch.distributions.TanhTransform(cache_size=1)]
        )
        expected = tanh.log_prob(output.tokens.tanh())
    torch.testing.assert_close(output.logprobs, expected, rtol=1e-3, atol=1e-4)


def test_categorical_logprobs_and_entropy_are_those_of_torch() -> None:
    model, seen = policy("mlp", "categorical"), observations()
    output = model.act(seen, seeds=SEEDS)
    logits = model.head.logits(model.actor(seen)).view(4, 3, 6)
    oracle = torch.distributions.Categorical(logits=logits)
    judged = model.evaluate(seen, output.tokens)
    torch.testing.assert_close(judged.logprobs[..., 0], oracle.log_prob(output.tokens[..., 0]))
    torch.testing.assert_close(judged.entropy[..., 0], oracle.entropy())


def test_actions_keep_the_bounds() -> None:
    for kind in ("gaussian", "squashed"):
        model = policy("mlp", kind)
        with torch.no_grad():
            model.head.mean.bias.fill_(9.0)
        actions = model.act(observations(), seeds=SEEDS).actions
        assert (actions <= torch.tensor(HIGH) + 1e-6).all()
        assert (actions[..., 1] > 3.9).all()


def test_a_saturated_squash_keeps_wide_bounds_exactly() -> None:
    """Rounding had put the action 2.4e-4 above the upper bound."""
    low, high = torch.tensor([-273.15, -0.3]), torch.tensor([4000.3, 0.1])
    head = SquashedGaussianHead(3, low, high)
    ends = head.actions(torch.tensor([[[20.0, 20.0]], [[-20.0, -20.0]]]))
    assert (ends <= high).all()
    assert (ends >= low).all()


def test_a_figure_without_width_can_be_cloned() -> None:
    """It was divided by: the loss was no number, of all figures."""
    head = SquashedGaussianHead(3, torch.tensor([0.5, -1.0]), torch.tensor([0.5, 1.0]))
    shown = torch.tensor([[[0.5, 0.0]]])
    tokens = head.tokens_of(shown)
    assert tokens.isfinite().all()
    torch.testing.assert_close(head.actions(tokens), shown)


def test_entropy_of_a_squashed_gaussian_by_sampling() -> None:
    torch.manual_seed(0)
    head = SquashedGaussianHead(3, torch.tensor([-1.0]), torch.tensor([1.0]))
    with torch.no_grad():
        head.mean.bias.fill_(0.7)
    features = torch.zeros(200_000, 3)
    tokens = head.draw(features, torch.arange(200_000), greedy=False)
    logprobs, entropy = head.judge(features, tokens)
    assert abs(entropy[0, 0, 0].item() + logprobs.mean().item()) < 0.01


def test_gradients_reach_the_parameters_through_a_drawn_action() -> None:
    model = policy("mlp", "squashed")
    model.act(observations(), seeds=SEEDS).actions.sum().backward()
    assert model.head.log_std.weight.grad is not None
    assert model.head.log_std.weight.grad.abs().sum() > 0


def test_initialisation_is_orthogonal() -> None:
    model = policy("mlp", "gaussian")
    first = model.actor.layers[0].weight
    torch.testing.assert_close(first.T @ first, 2.0 * torch.eye(5), rtol=1e-4, atol=1e-5)
    head = model.head.mean.weight
    torch.testing.assert_close(head @ head.T, 1e-4 * torch.eye(6), rtol=1e-3, atol=1e-8)
    assert math.isclose(model.value.weight.norm().item(), 1.0, rel_tol=1e-4)


def test_running_norm_is_the_moments_of_all_states() -> None:
    norm, states = RunningNorm(3), torch.randn(100, 3) * 4 + 2
    assert torch.equal(norm(states), states)
    for part in states.split([1, 30, 69]):
        norm.take_in(norm.moments(part))
    norm.take_in(norm.moments(None))
    expected = (states - states.mean(0)) / states.std(0, correction=0)
    torch.testing.assert_close(norm(states), expected, rtol=1e-4, atol=1e-4)


def test_moments_of_parts_add_up() -> None:
    """Lanes see a part of the states each, and sum what they know of them."""
    states = torch.randn(40, 3) * 2 - 1
    whole, divided = RunningNorm(3), RunningNorm(3)
    for norm in (whole, divided):
        norm.take_in(norm.moments(torch.ones(5, 3)))
    whole.take_in(whole.moments(states))
    divided.take_in(divided.moments(states[:7]) + divided.moments(states[7:]))
    torch.testing.assert_close(whole.mean, divided.mean)
    torch.testing.assert_close(whole.square, divided.square)


def test_actor_critic_and_returns_have_statistics() -> None:
    model, seen = policy("mlp", "gaussian"), observations()
    before = model.evaluate(seen, torch.zeros(4, 3, 2)).values
    kinds = [statistics.of for statistics in model.running_statistics()]
    assert sorted(kinds) == ["return", "state", "state"]
    returns = model.returns
    returns.take_in(returns.moments(torch.tensor([3.0, -3.0])))
    assert float(returns.scale) == 3.0
    torch.testing.assert_close(model.evaluate(seen, torch.zeros(4, 3, 2)).values, before)


def test_values_do_not_grow_with_the_scale_of_returns() -> None:
    """A head that was trained on returns of 100 said 100 times 100 once their scale was known."""
    model, seen = policy("mlp", "gaussian"), observations()
    with torch.no_grad():
        model.value.bias.fill_(100.0)
    for _ in range(3):
        values = model.evaluate(seen, torch.zeros(4, 3, 2)).values
        assert values is not None
        model.returns.take_in(model.returns.moments(values.detach()))
    torch.testing.assert_close(values, torch.full((4,), 100.0), rtol=0.05, atol=0.0)


def test_jitter_around_a_constant_is_not_blown_up() -> None:
    """A solver's noise of 1e-7 filled a Meta-World state with features of deviation 1."""
    norm = RunningNorm(2)
    states = torch.randn(100, 2) * torch.tensor([1.0, 1e-7])
    norm.take_in(norm.moments(states))
    assert float(norm(states)[:, 1].abs().max()) < 0.01
    torch.testing.assert_close(norm(states)[:, 0].std(correction=0), torch.tensor(1.0))


def test_standard_normal_numbers_are_normal_and_go_on() -> None:
    seeds = torch.arange(2000)
    drawn = standard_normal(seeds, 50)
    assert abs(drawn.mean()) < 0.02
    assert abs(drawn.std() - 1) < 0.02
    assert torch.equal(drawn[:, 20:], standard_normal(seeds, 30, first=20))


def test_levels_sum_tokens_to_actions_and_chunks() -> None:
    values = torch.arange(24.0).view(2, 3, 4)
    assert at_level(values, "token") is values
    assert torch.equal(at_level(values, "action"), values.sum(-1))
    assert torch.equal(at_level(values, "chunk"), values.sum((1, 2)))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"actions": "beta", "low": LOW, "high": HIGH}, "gaussian, squashed or categorical"),
        ({"actions": "gaussian"}, "no bounds"),
        ({"actions": "gaussian", "low": [0.0], "high": HIGH}, "1 and 2"),
        ({"actions": "categorical", "low": LOW, "high": HIGH}, "not discrete"),
        ({"actions": "squashed", "low": [-math.inf], "high": [1.0]}, "finite bounds"),
        ({"actions": "squashed", "low": [-3e38], "high": [3e38]}, "finite bounds"),
        ({"actions": "squashed", "low": [-1e300], "high": [1.0]}, "finite bounds"),
    ],
)
def test_what_does_not_fit_is_said(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        mlp_actor_critic(5, **arguments)


def test_pictures_that_are_too_small_are_refused() -> None:
    with pytest.raises(UserError, match=r"too small \(got '32x20'\); expected at least 24 pixels"):
        cnn_actor_critic((32, 20), actions="categorical", count=2)


def test_pictures_need_not_be_square() -> None:
    model = cnn_actor_critic((40, 60), actions="categorical", count=2, cameras=("left", "right"))
    seen = {name: torch.zeros(3, 40, 60, 3, dtype=torch.uint8) for name in ("left", "right")}
    assert model.act(seen, seeds=[0, 1, 2]).actions.shape == (3, 1, 1)


def test_reinforce_learns_from_pixels() -> None:
    """A picture with a bright left or right half; the action must name the half."""
    torch.manual_seed(0)
    model = cnn_actor_critic((32, 32), actions="categorical", count=2, features=32)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    side = torch.arange(64) % 2
    image = torch.zeros(64, 32, 32, 3, dtype=torch.uint8)
    image[side == 0, :, :16] = 200
    image[side == 1, :, 16:] = 200
    for step in range(30):
        output = model.act({"image": image}, seeds=[step * 64 + i for i in range(64)])
        reward = (output.actions[:, 0, 0] == side).float()
        logprobs = at_level(model.evaluate({"image": image}, output.tokens).logprobs, "chunk")
        loss = -(logprobs * (reward - 0.5)).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    greedy = model.act({"image": image}, seeds=range(64), greedy=True).actions[:, 0, 0]
    assert (greedy == side).all()


def test_choices_are_those_that_sample_tokens_draws() -> None:
    model, seen = policy("mlp", "categorical", chunk=3), observations(200)
    torch.nn.init.normal_(model.head.logits.weight)
    seeds = [derive_seed(7, n) for n in range(200)]
    output = model.act(seen, seeds=seeds)
    logits_BKN = model.head.logits(model.actor(seen)).view(200, 3, 6)
    for k in range(3):
        at_B = torch.full((200,), k)
        tokens_B, _ = sample_tokens(logits_BKN[:, k].detach(), torch.tensor(seeds), at_B, 1.0)
        assert torch.equal(output.tokens[:, k, 0], tokens_B)
    assert len(output.tokens.unique()) == 6


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_what_is_drawn_without_autograd_is_what_is_drawn_with_it(kind: str, greedy: bool) -> None:
    model, seen = policy("mlp", kind), observations(200)
    for parameter in model.head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    seeds = [derive_seed(7, n) for n in range(200)]
    slow = model.act(seen, seeds=seeds, greedy=greedy)
    with torch.inference_mode():
        fast = model.act(seen, seeds=seeds, greedy=greedy)
        direct_one = direct.act(model.actor, model.head, seen, seeds, greedy)  # type: ignore[arg-type]
    assert slow.logprobs.requires_grad
    assert direct_one is not None
    for found in (fast, direct_one):
        torch.testing.assert_close(found.actions, slow.actions.detach())
        torch.testing.assert_close(found.tokens, slow.tokens.detach())
        torch.testing.assert_close(found.logprobs, slow.logprobs.detach())
        assert found.values is None
    judged = model.evaluate(seen, fast.tokens.clone())
    torch.testing.assert_close(fast.logprobs.clone(), judged.logprobs.detach())


@pytest.mark.parametrize(("encoder", "kind"), ALL)
@pytest.mark.parametrize("entropy", [False, True])
def test_gradients_that_are_written_out_are_autograds(
    encoder: str, kind: str, entropy: bool
) -> None:
    """Of every head and encoder, whichever of the two computes them; they add to what is there."""
    one, two, seen = policy(encoder, kind), policy(encoder, kind), observations()
    for model in (one, two):
        model.returns.square.fill_(9.0)
        model.returns.count.fill_(1.0)
    tokens = one.act(seen, seeds=SEEDS).tokens.detach()
    judged, pull = one.judge(seen, tokens)
    wanted = two.evaluate(seen, tokens)
    assert wanted.values is not None
    assert judged.values is not None
    torch.testing.assert_close(judged.logprobs, wanted.logprobs)
    torch.testing.assert_close(judged.entropy, wanted.entropy)
    torch.testing.assert_close(judged.values, wanted.values)
    assert not judged.logprobs.requires_grad
    assert not judged.values.requires_grad
    generator = torch.Generator().manual_seed(4)
    parts = (judged.logprobs, judged.entropy, judged.values)
    slopes = [torch.randn(part.shape, generator=generator) for part in parts]
    pull(slopes[0], slopes[1] if entropy else None, slopes[2])
    sums = [(wanted.logprobs * slopes[0]).sum(), (wanted.values * slopes[2]).sum()]
    if entropy:
        sums.append((wanted.entropy * slopes[1]).sum())
    torch.stack(sums).sum().backward()
    _, pull = one.judge(seen, tokens)
    pull(slopes[0])
    (two.evaluate(seen, tokens).logprobs * slopes[0]).sum().backward()
    for (name, found), expected in zip(one.named_parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-5, msg=name)
    written_out = encoder == "mlp" and kind != "squashed"
    assert (pull.__module__ == direct.__name__) == written_out  # type: ignore[attr-defined]
