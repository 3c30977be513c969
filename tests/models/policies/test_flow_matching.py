"""A flow-matching policy: the path's density, the plain equation as transformers solves it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from m2flow.errors import UserError
from m2flow.models.policies.flow_matching import (
    FlowMatchingPolicy,
    FlowOptions,
    load_pi0,
    tiny_pi0,
)
from m2flow.models.policies.protocol import at_level, standard_normal

TEXTS = ["push the cube", "lift the big red cube up"]
SEEDS = [5, 6, 7]
CAMERAS = ("image", "wrist_image")


def observations(batch: int = 3) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    return {
        "image": torch.randint(0, 256, (batch, 32, 32, 3), generator=generator).byte(),
        "wrist_image": torch.randint(0, 256, (batch, 48, 64, 3), generator=generator).byte(),
        "state": torch.randn(batch, 5, generator=generator),
        "instruction": [TEXTS[i % 2] for i in range(batch)],
    }


def policy(noise: Any = "sde", **more: Any) -> FlowMatchingPolicy:
    options = FlowOptions(action_size=3, cameras=CAMERAS, noise=noise, critic=True, **more)
    return tiny_pi0(TEXTS, options, state_size=5)


@pytest.mark.parametrize("noise", ["sde", "network"])
def test_evaluate_gives_what_act_gave_whatever_the_batch(noise: str) -> None:
    model, seen = policy(noise), observations()
    output = model.act(seen, seeds=SEEDS)
    judged = model.evaluate(seen, output.tokens)
    assert output.actions.shape == (3, 4, 3)
    assert output.tokens.shape == (3, 4, 5 * (3 + 2))
    assert output.logprobs.shape == judged.entropy.shape == (3, 4, 15)
    torch.testing.assert_close(judged.logprobs, output.logprobs, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(judged.values, output.values)
    for i in range(3):
        alone = model.act({k: v[i : i + 1] for k, v in seen.items()}, seeds=[SEEDS[i]])
        torch.testing.assert_close(alone.tokens[0], output.tokens[i], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_greedy_acting_solves_the_equation_as_transformers_does() -> None:
    model, seen = policy(), observations()
    ours = model.act(seen, seeds=SEEDS, greedy=True).actions
    noise = standard_normal(torch.tensor(SEEDS), 20).view(3, 4, 5).float()
    ids, mask = model._prompts(seen["instruction"], torch.device("cpu"))
    from m2flow.models.policies.flow_matching import _picture

    pixels = torch.stack([_picture(seen, c, model.model, ids.device) for c in CAMERAS], dim=1)
    theirs = model.model.sample_actions(
        state=seen["state"],
        input_ids=ids,
        pixel_values=pixels,
        noise=noise,
        attention_mask=mask,
        pixel_attention_mask=torch.ones(3, 2, dtype=torch.bool),
    )
    torch.testing.assert_close(ours, theirs[..., :3], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_each_step_of_the_path_is_the_gaussian_of_the_stochastic_equation() -> None:
    model, seen = policy(noise_level=0.7), observations()
    output = model.act(seen, seeds=SEEDS)
    path = output.tokens.split(5, dim=-1)
    logprobs = output.logprobs.split(3, dim=-1)
    standard = torch.distributions.Normal(0.0, 1.0)
    torch.testing.assert_close(logprobs[0], standard.log_prob(path[0][..., :3]))
    scene = model._scene(seen)
    for step in range(4):
        t, d = 1 - step / 4, 1 / 4
        v, _ = model._velocity(scene, path[step], t)
        s = 0.7 * (t / (1 - min(t, 0.75))) ** 0.5
        mean = path[step] - d * v - d * s * s / (2 * t) * (path[step] + (1 - t) * v)
        oracle = torch.distributions.Normal(mean, s * d**0.5)
        torch.testing.assert_close(
            logprobs[step + 1], oracle.log_prob(path[step + 1])[..., :3], rtol=1e-3, atol=1e-4
        )


def test_the_stochastic_equation_keeps_the_marginals() -> None:
    """Exact velocity of Gaussian data: after many steps its mean and deviation come out."""
    data_mean, data_std = 0.8, 0.3
    options = FlowOptions(action_size=1, steps=200, noise_level=0.7)
    model = tiny_pi0(TEXTS, options, state_size=5)

    def exact(scene: Any, x: Tensor, t: float) -> tuple[Tensor, Tensor]:
        # x_t = t noise + (1 - t) data; v = E[noise - data | x_t], a regression of Gaussians.
        variance = t * t + (1 - t) ** 2 * data_std**2
        slope = (t - (1 - t) * data_std**2) / variance
        return -data_mean + slope * (x - (1 - t) * data_mean), x

    model._velocity = exact
    noise = standard_normal(torch.arange(4000), 201).float()
    x = noise[:, :1]
    for step in range(200):
        mean, log_std = model._transition(None, x, step)
        x = mean + log_std.exp() * noise[:, step + 1 : step + 2]
    assert abs(x.mean() - data_mean) < 0.03
    assert abs(x.std() - data_std) < 0.04


def test_cloning_matches_the_flow_from_noise_to_the_scaled_actions() -> None:
    """Against the definition, at the noise and times that the seed gives."""
    scales = {"action_mean": (0.5, -1.0, 2.0), "action_std": (2.0, 0.5, 4.0)}
    model, seen = policy(**scales), observations()
    shown = torch.randn(3, 4, 3)
    loss = model.cloning_loss(seen, shown, seed=9)
    assert torch.equal(loss, model.cloning_loss(seen, shown, seed=9))
    assert not torch.equal(loss, model.cloning_loss(seen, shown, seed=10))
    loss.backward()
    assert model.model.action_out_proj.weight.grad is not None

    torch.manual_seed(9)
    time = torch.distributions.Beta(torch.tensor(1.5), torch.tensor(1.0)).sample((3,))
    time = 0.001 + 0.999 * time
    noise = torch.randn(3, 4, 5)
    wanted = (shown - torch.tensor(scales["action_mean"])) / torch.tensor(scales["action_std"])
    wanted = torch.cat([wanted, torch.zeros(3, 4, 2)], dim=-1)
    errors = []
    with torch.no_grad():
        for row in range(3):
            alone = {name: part[row : row + 1] for name, part in seen.items()}
            t = float(time[row])
            point = t * noise[row : row + 1] + (1 - t) * wanted[row : row + 1]
            velocity, _ = model._velocity(model._scene(alone), point, t)
            errors.append((velocity - (noise - wanted)[row]).square().mean())
    torch.testing.assert_close(loss.detach(), torch.stack(errors).mean(), rtol=1e-4, atol=1e-5)


def test_the_noise_network_keeps_its_bounds_and_learns() -> None:
    model, seen = policy("network", std_range=(0.1, 0.2)), observations()
    output = model.act(seen, seeds=SEEDS)
    _, log_std = model._transition(model._scene(seen), output.tokens[..., :5], 0)
    assert (log_std.exp() > 0.1).all()
    assert (log_std.exp() < 0.2).all()
    at_level(model.evaluate(seen, output.tokens).logprobs, "chunk").sum().backward()
    assert model.noise_network is not None
    assert all(p.grad is not None and p.grad.any() for p in model.noise_network.parameters())
    reached = [p.grad is not None and bool(p.grad.any()) for p in model.model.parameters()]
    assert sum(reached) > 0.85 * len(reached)


@pytest.mark.parametrize("noise", ["sde", "network"])
def test_a_checkpoint_in_bfloat16_acts_and_is_judged(noise: Any, tmp_path: Path) -> None:
    """The noise network is float32, and had been given the hidden state as it was."""
    model, seen = policy(), observations()
    model.model.save_pretrained(tmp_path)
    model.tokenizer.save(str(tmp_path / "tokenizer.json"))
    options = FlowOptions(action_size=3, cameras=CAMERAS, noise=noise, critic=True)
    half = load_pi0(tmp_path, options, torch.bfloat16)
    output = half.act(seen, seeds=SEEDS)
    assert output.tokens.dtype == output.logprobs.dtype == torch.float32
    judged = half.evaluate(seen, output.tokens)
    torch.testing.assert_close(judged.logprobs, output.logprobs, rtol=0.1, atol=0.1)
    judged.logprobs.sum().backward()
    if half.noise_network is not None:
        assert all(p.grad is not None and p.grad.any() for p in half.noise_network.parameters())


def test_a_bfloat16_checkpoint_has_states_and_actions_scaled_as_transformers_scales_them() -> None:
    """In float32: rounded to bfloat16 first, a figure near the mean lost all but its sign."""
    mean, std = (0.7, -1.3, 2.1, 0.4, 5.0), (0.01, 0.02, 0.005, 0.03, 0.01)
    scales = {"state_mean": mean, "state_std": std, "action_mean": mean[:3], "action_std": std[:3]}
    model = policy(**scales)
    model.model.to(torch.bfloat16)
    from transformers import PI0Processor  # after torchvision, which making the policy imports

    theirs: Any = SimpleNamespace(
        **{name.replace("action", "actions"): list(figures) for name, figures in scales.items()}
    )
    generator = torch.Generator().manual_seed(3)
    state = torch.tensor(mean) + torch.tensor(std) * torch.randn(3, 5, generator=generator)
    actions = torch.tensor(mean[:3]) + 0.01 * torch.randn(3, 4, 3, generator=generator)
    wanted = PI0Processor.normalize(theirs, state, "state").to(torch.bfloat16)
    assert model._scene(observations() | {"state": state}).state.equal(wanted)
    given: dict[str, Tensor] = {}
    model.model.register_forward_pre_hook(lambda _, __, some: given.update(some), with_kwargs=True)
    model.cloning_loss(observations() | {"state": state}, actions, seed=9)
    wanted = PI0Processor.normalize(theirs, actions, "actions").to(torch.bfloat16)
    assert given["actions"][..., :3].equal(wanted)


@torch.no_grad()
@pytest.mark.parametrize("noise", ["sde", "network"])
def test_the_path_of_a_bfloat16_checkpoint_is_float32(noise: Any) -> None:
    """Rounded to bfloat16, a point was off by more than a small deviation, and log-probabilities
    by units. The oracle is the path in float64, from the same velocities."""
    model, seen = policy(noise, noise_level=0.05, std_range=(0.005, 0.01)), observations()
    model.model.to(torch.bfloat16)
    velocity_of, transition_of = model._velocity, model._transition
    velocities: list[Tensor] = []
    log_stds: list[Tensor] = []

    def velocity(scene: Any, x: Tensor, time: float) -> tuple[Tensor, Tensor]:
        found, hidden = velocity_of(scene, x, time)
        velocities.append(found)
        return found, hidden

    def transition(scene: Any, x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        mean, log_std = transition_of(scene, x, step)
        log_stds.append(log_std)
        return mean, log_std

    model._velocity, model._transition = velocity, transition
    output = model.act(seen, seeds=SEEDS)
    drawn = standard_normal(torch.tensor(SEEDS), 5 * 4 * 5).view(3, 5, 4, 5)
    path = output.tokens.double().split(5, dim=-1)
    point, d = drawn[:, 0], 1 / 4

    def moments(x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        t, v = 1 - step * d, velocities[step].double()
        if noise == "network":
            return x - d * v, log_stds[step].double().exp()
        s = 0.05 * (t / (1 - min(t, 1 - d))) ** 0.5
        mean = x - d * v - d * s * s / (2 * t) * (x + (1 - t) * v)
        return mean, torch.tensor(s * d**0.5).double()

    for step in range(4):
        mean, std = moments(point, step)
        point = mean + std * drawn[:, step + 1]
        torch.testing.assert_close(path[step + 1], point, rtol=1e-6, atol=1e-6)
    acted = output.logprobs.double().split(3, dim=-1)
    velocities.clear()
    log_stds.clear()
    judged = model.evaluate(seen, output.tokens).logprobs.double().split(3, dim=-1)
    for step in range(4):
        mean, std = moments(path[step], step)
        oracle = torch.distributions.Normal(mean, std).log_prob(path[step + 1])[..., :3]
        torch.testing.assert_close(acted[step + 1], oracle, rtol=1e-4, atol=2e-3)
        torch.testing.assert_close(judged[step + 1], oracle, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("noise", ["sde", "network"])
def test_gradients_of_what_is_judged_reach_the_parameters(noise: str) -> None:
    """The entropy of noise that is fixed depends on nothing, and stops nothing."""
    one, two, seen = policy(noise), policy(noise), observations()
    tokens = one.act(seen, seeds=SEEDS).tokens
    judged, pull = one.judge(seen, tokens)
    assert judged.values is not None
    slopes = [torch.full_like(part, 0.1) for part in (judged.logprobs, judged.entropy)]
    pull(*slopes, torch.ones_like(judged.values))
    wanted = two.evaluate(seen, tokens)
    assert wanted.values is not None
    (0.1 * (wanted.logprobs + wanted.entropy).sum() + wanted.values.sum()).backward()
    for (name, found), expected in zip(one.named_parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_nothing_is_trained_that_has_no_gradient() -> None:
    """The expert's table of embeddings had float32 gradients and moments, and is never used."""
    model, seen = policy(), observations()
    judged = model.evaluate(seen, model.act(seen, seeds=SEEDS).tokens)
    assert judged.values is not None
    (judged.logprobs.sum() + judged.values.sum()).backward()
    idle = [
        name for name, one in model.named_parameters() if one.requires_grad and one.grad is None
    ]
    assert not idle


def test_reinforcing_a_path_raises_its_probability() -> None:
    model, seen = policy(), observations()
    output = model.act(seen, seeds=SEEDS)
    before = at_level(output.logprobs, "chunk")
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(20):
        loss = -at_level(model.evaluate(seen, output.tokens).logprobs, "chunk").mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    after = at_level(model.evaluate(seen, output.tokens).logprobs, "chunk")
    assert (after > before + 1).all()


def test_instruction_and_scales_matter() -> None:
    model, seen = policy(), observations(1)
    actions = model.act(seen, seeds=[1], greedy=True).actions
    other = model.act({**seen, "instruction": [TEXTS[1]]}, seeds=[1], greedy=True).actions
    assert not torch.allclose(actions, other)
    scaled = policy(action_mean=(1.0, 2.0, 3.0), action_std=(2.0, 2.0, 2.0))
    expected = actions * 2 + torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(scaled.act(seen, seeds=[1], greedy=True).actions, expected)


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    model, seen = policy(), observations()
    model.model.save_pretrained(tmp_path)
    model.tokenizer.save(str(tmp_path / "tokenizer.json"))
    again = load_pi0(tmp_path, FlowOptions(action_size=3, cameras=CAMERAS), torch.float32)
    one, two = (p.act(seen, seeds=SEEDS).actions for p in (model, again))
    torch.testing.assert_close(one, two)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "openvla"}))
    with pytest.raises(UserError, match="another family"):
        load_pi0(tmp_path, FlowOptions(action_size=3), torch.float32)


def test_weights_in_a_pickle_are_not_read(tmp_path: Path) -> None:
    model = policy()
    model.model.save_pretrained(tmp_path)
    model.tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"convert pytorch_model\.bin to safetensors"):
        load_pi0(tmp_path, FlowOptions(action_size=3, cameras=CAMERAS), torch.float32)


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(UserError, match="sde or network"):
        policy("ode")
    with pytest.raises(UserError, match="not positive"):
        policy(noise_level=0.0)
    seen = observations()
    with pytest.raises(UserError, match="at most 5"):
        policy().act({**seen, "state": torch.zeros(3, 6)}, seeds=SEEDS)
    del seen["wrist_image"]
    with pytest.raises(UserError, match="wrist_image"):
        policy().act(seen, seeds=SEEDS)


def test_a_part_of_the_decided_actions_is_carried_out_and_counted() -> None:
    """Two of four actions: the same path, the same probabilities of those two, no others."""
    seen = observations()
    whole, part = policy(), policy(chunk=2)
    ours, theirs = part.act(seen, seeds=SEEDS), whole.act(seen, seeds=SEEDS)
    torch.testing.assert_close(ours.actions, theirs.actions[:, :2])
    assert ours.tokens.shape == (3, 2, 2 * 5 * (3 + 2))
    torch.testing.assert_close(ours.logprobs, theirs.logprobs[:, :2])
    judged = part.evaluate(seen, ours.tokens)
    torch.testing.assert_close(judged.logprobs, ours.logprobs, rtol=1e-4, atol=1e-4)
    assert judged.entropy.shape == ours.logprobs.shape
    with pytest.raises(UserError, match="a divisor of 4"):
        policy(chunk=3)


def test_actions_stay_within_the_environments_bounds() -> None:
    model = policy(low=(-0.1,) * 3, high=(0.2,) * 3)
    actions = model.act(observations(), seeds=SEEDS).actions
    assert float(actions.min()) == pytest.approx(-0.1)
    assert float(actions.max()) == pytest.approx(0.2)


def test_scales_are_read_as_openpi_writes_them(tmp_path: Path) -> None:
    from m2flow.models.policies.flow_matching import _with_scales

    options = FlowOptions(action_size=3)
    assert _with_scales(tmp_path, options, 8) == options
    figures = {"mean": [0.5] * 8, "std": [2.0] * 8}
    content = {"norm_stats": {"actions": figures, "state": figures}}
    (tmp_path / "norm_stats.json").write_text(json.dumps(content))
    found = _with_scales(tmp_path, options, 8)
    assert (found.action_mean, found.action_std) == ((0.5,) * 3, (2.0,) * 3)
    assert len(found.state_std or ()) == 8
    with pytest.raises(UserError, match=r"another size than those.*3 figures, or 32 with padding"):
        _with_scales(tmp_path, options, 32)
    del content["norm_stats"]["state"]
    (tmp_path / "norm_stats.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"has no state\.mean"):
        _with_scales(tmp_path, options, 8)


def test_lora_trains_adapters_and_the_projections_of_actions_and_states() -> None:
    pytest.importorskip("peft", reason='needs the extra "vla"')
    from m2flow.models.policies.vla.lora import add_lora

    model, seen = policy(), observations()
    before = model.act(seen, seeds=SEEDS)
    add_lora(model, rank=2)
    torch.testing.assert_close(model.evaluate(seen, before.tokens).logprobs, before.logprobs)
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimiser = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.01)
    for _ in range(2):  # of a pair of matrices the second is moved first: it begins at zero
        optimiser.zero_grad()
        judged = model.evaluate(seen, before.tokens)
        assert judged.values is not None
        (judged.logprobs.mean() + judged.values.sum()).backward()
        optimiser.step()
    moved = {name for name, p in model.named_parameters() if not p.equal(old[name])}
    projections = {
        f"model.{name}.{part}"
        for name in (
            "action_out_proj", "embed_action_time.state_proj", "embed_action_time.action_in_proj",
            "embed_action_time.action_time_mlp_in", "embed_action_time.action_time_mlp_out",
        )
        for part in ("weight", "bias")
    }  # fmt: skip
    adapters = {name for name in moved if ".lora_" in name}
    assert moved - adapters - projections == {
        name for name in old if name.startswith("value_head.")
    }
    assert projections <= moved
    for part in (
        "model.model.vlm.language_model",
        "model.model.vlm.vision_tower",
        "model.model.dit",
    ):
        assert any(name.startswith(part) for name in adapters), part
    assert all(2 in old[name].shape for name in adapters), "of rank 2"
