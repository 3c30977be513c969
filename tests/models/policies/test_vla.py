"""OpenVLA and OpenVLA-OFT against an independent slow implementation, and their contract."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

if find_spec("timm") is None or find_spec("peft") is None:
    pytest.skip("needs the extra vla", allow_module_level=True)

from m2flow.errors import UserError
from m2flow.models.policies.protocol import at_level
from m2flow.models.policies.vla import checkpoint, parallel
from m2flow.models.policies.vla.actions import ActionBins, ActionScale, scale_proprioception
from m2flow.models.policies.vla.checkpoint import (
    build_empty,
    load_config,
    load_openvla,
    load_openvla_oft,
    published_weights,
    save_policy,
)
from m2flow.models.policies.vla.config import VLAConfig
from m2flow.models.policies.vla.heads import L1Head, ProprioProjector
from m2flow.models.policies.vla.images import preprocess
from m2flow.models.policies.vla.lora import add_lora
from m2flow.models.policies.vla.openvla import causal
from m2flow.models.policies.vla.policy import VLAOptions
from m2flow.models.policies.vla.prompts import prompt
from m2flow.models.policies.vla.tiny import tiny_openvla, unit_statistics
from tests.models.policies import slow_vla

FIXTURES = Path(__file__).parent / "fixtures"
INSTRUCTIONS = ["push the red cube", "Pick up the blue bowl, then place it on the plate"]
STATISTICS = {
    "action": {
        "q01": [-0.5, -1.0, 0.0, -2.0, -0.1, -0.2, 0.0],
        "q99": [0.5, 2.0, 1.0, 2.0, 0.3, 0.2, 1.0],
        "mask": [True] * 6 + [False],
    },
    "proprio": {"q01": [-1.0] * 8, "q99": [3.0] * 8},
}
SEEDS = [11, 12, 13]
OFT = VLAOptions(chunk=8, cameras=("image", "wrist_image"), critic=True)
ONE = VLAOptions(critic=True)


def observations(batch: int = 3) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    # Of the size that the model takes: resizing has tests of its own, which allow for rounding.
    pictures = torch.randint(0, 256, (2, batch, 32, 32, 3), generator=generator).byte()
    return {
        "image": pictures[0],
        "wrist_image": pictures[1],
        "state": torch.randn(batch, 8, generator=generator),
        "instruction": [INSTRUCTIONS[i % 2] for i in range(batch)],
    }


def tiny(kind: str) -> Any:
    if kind == "openvla":
        return tiny_openvla(INSTRUCTIONS, STATISTICS, ONE)
    return tiny_openvla(INSTRUCTIONS, STATISTICS, OFT, parallel=True, l1=kind == "l1")


def slow_prefix(policy: Any, seen: dict[str, Any], i: int) -> tuple[Any, Any, Tensor]:
    weights = policy.model.state_dict()
    config = policy.model.config.raw
    pictures = [
        part
        for camera in policy.options.cameras
        for part in slow_vla.pixels(seen[camera][i].numpy(), config["image_sizes"][0])
    ]
    words = re.findall(r"\w+|[^\w\s]+", prompt(seen["instruction"][i]))
    vocabulary = json.loads(policy.tokenizer.json)["model"]["vocab"]
    ids = [1, *(vocabulary[word] for word in words), 3]
    return weights, config, slow_vla.prompt_embeddings(weights, config, ids, pictures)


@torch.no_grad()
def test_openvla_gives_the_tokens_and_logprobs_of_the_slow_one() -> None:
    policy, seen = tiny("openvla"), observations()
    for greedy in (True, False):
        output = policy.act(seen, seeds=SEEDS, greedy=greedy)
        for i in range(3):
            weights, config, prefix = slow_prefix(policy, seen, i)
            tokens = output.tokens[i, 0].tolist()
            slow = slow_vla.openvla_logprobs(weights, config, prefix, tokens)
            index = output.tokens[i, 0] - policy.bins.first_token
            if greedy:
                assert torch.equal(slow.argmax(-1), index)
            chosen = slow.gather(1, index[:, None]).squeeze(1)
            torch.testing.assert_close(output.logprobs[i, 0], chosen, rtol=1e-4, atol=1e-4)
            judged = policy.evaluate(seen, output.tokens)
            entropy = -(slow.exp() * slow).sum(-1)
            torch.testing.assert_close(judged.entropy[i, 0], entropy, rtol=1e-4, atol=1e-4)


def slow_oft(policy: Any, seen: dict[str, Any], i: int, *, causal: bool = False) -> Tensor:
    weights, config, prefix = slow_prefix(policy, seen, i)
    if policy.proprio_projector is not None:
        projector = policy.proprio_projector.state_dict()
        scaled = (2 * (seen["state"][i] + 1) / (4 + 1e-8) - 1).clamp(-1, 1)
        hidden = slow_vla.gelu(slow_vla.linear(projector, "fc1", scaled))
        token = slow_vla.linear(projector, "fc2", hidden)[None]
        patches = 1 + 16 * len(policy.options.cameras)
        prefix = torch.cat([prefix[:patches], token, prefix[patches:]])
    count = policy.options.chunk * 7
    return slow_vla.oft_hidden(weights, config, prefix, count, causal=causal)


@torch.no_grad()
def test_oft_gives_the_tokens_and_logprobs_of_the_slow_one() -> None:
    policy, seen = tiny("oft"), observations(2)
    output = policy.act(seen, seeds=SEEDS[:2], greedy=True)
    assert output.tokens.shape == (2, 8, 7)
    for i in range(2):
        hidden = slow_oft(policy, seen, i)
        slow = slow_vla.bin_logprobs(policy.model.state_dict(), hidden, policy.bins.vocabulary)
        index = (output.tokens[i] - policy.bins.first_token).flatten()
        assert torch.equal(slow.argmax(-1), index)
        chosen = slow.gather(1, index[:, None]).squeeze(1)
        torch.testing.assert_close(output.logprobs[i].flatten(), chosen, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_causal_mask_over_the_actions_gives_another_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the field a causal mask there costs 40 points of success."""
    policy, seen = tiny("oft"), observations(1)
    right = policy.act(seen, seeds=[1], greedy=True)
    slow = slow_vla.bin_logprobs(
        policy.model.state_dict(), slow_oft(policy, seen, 0, causal=True), policy.bins.vocabulary
    )
    index = (right.tokens[0] - policy.bins.first_token).flatten()
    wrong = slow.gather(1, index[:, None]).squeeze(1)
    assert (right.logprobs.flatten() - wrong).abs().max() > 0.01
    monkeypatch.setattr(parallel, "everything", causal)
    broken = policy.evaluate(seen, right.tokens).logprobs
    torch.testing.assert_close(broken.flatten(), wrong, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_every_action_position_sees_every_other() -> None:
    policy = tiny("oft")
    prefix = policy._prefix(observations(1))
    embedding = torch.nn.Parameter(prefix.embeddings.clone())
    with torch.enable_grad():
        placed = torch.zeros(1, 57, embedding.shape[2], requires_grad=True)
        mask = torch.ones(1, embedding.shape[1] + 57, dtype=torch.bool)
        hidden = policy.model.decode(
            torch.cat([embedding, placed], 1),
            parallel.everything(mask),
            torch.arange(mask.shape[1])[None],
        )
        first_action = hidden[0, embedding.shape[1] - 1].sum()
        first_action.backward()
    assert placed.grad is not None
    assert (placed.grad[0].abs().sum(-1) > 0).all()


@torch.no_grad()
def test_the_l1_head_gives_the_actions_of_the_slow_one() -> None:
    policy, seen = tiny("l1"), observations(1)
    output = policy.act(seen, seeds=[0], greedy=True)
    head = policy.l1_head.state_dict()
    x = slow_oft(policy, seen, 0).view(8, -1)
    x = slow_vla.layer_norm(head, "model.layer_norm1", x, 1e-5)
    x = slow_vla.linear(head, "model.fc1", x).relu()
    for block in range(2):
        at = f"model.mlp_resnet_blocks.{block}.ffn"
        y = slow_vla.layer_norm(head, f"{at}.0", x, 1e-5)
        x = x + slow_vla.linear(head, f"{at}.1", y).relu()
    x = slow_vla.layer_norm(head, "model.layer_norm2", x, 1e-5)
    slow = slow_vla.linear(head, "model.fc2", x)
    torch.testing.assert_close(output.tokens[0], slow, rtol=1e-4, atol=1e-4)
    assert torch.equal(output.actions[0, :, 6], output.tokens[0, :, 6])
    with pytest.raises(UserError, match="no distribution"):
        policy.act(seen, seeds=[0])
    with pytest.raises(UserError, match="no distribution"):
        policy.evaluate(seen, output.tokens)


@pytest.mark.parametrize("kind", ["openvla", "oft"])
@pytest.mark.parametrize("restricted", [True, False])
def test_evaluate_gives_what_act_gave_whatever_the_batch(kind: str, restricted: bool) -> None:
    base = {"restricted": restricted, "temperature": 1.3}
    if kind == "oft":
        options = VLAOptions(chunk=4, critic=True, **base)
    else:
        options = VLAOptions(critic=True, **base)
    policy = tiny_openvla(INSTRUCTIONS, STATISTICS, options, parallel=kind == "oft")
    seen = observations()
    output = policy.act(seen, seeds=SEEDS)
    judged = policy.evaluate(seen, output.tokens)
    torch.testing.assert_close(judged.logprobs, output.logprobs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(judged.values, output.values, rtol=1e-4, atol=1e-5)
    for i in range(3):
        alone = policy.act({k: v[i : i + 1] for k, v in seen.items()}, seeds=[SEEDS[i]])
        assert torch.equal(alone.tokens[0], output.tokens[i])
        torch.testing.assert_close(alone.logprobs[0], output.logprobs[i], rtol=1e-4, atol=1e-5)
    count = 256 if restricted else policy.model.language_model.config.vocab_size
    assert (judged.entropy <= math.log(count)).all()
    assert at_level(judged.logprobs, "chunk").shape == (3,)
    if restricted:
        assert (output.tokens >= policy.bins.first_token).all()
        assert (output.tokens < policy.bins.vocabulary).all()
    at_level(judged.logprobs, "chunk").sum().backward()
    unused = {
        name
        for name, parameter in policy.model.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    }
    # The last block and the norms of the towers, the pooling of SigLIP: in the checkpoint, not
    # in the network.
    assert all(re.search(r"blocks\.1\.|featurizer\.norm\.|attn_pool", name) for name in unused)


def test_instructions_matter() -> None:
    policy, seen = tiny("openvla"), observations(1)
    tokens = policy.act(seen, seeds=[1]).tokens
    said = policy.evaluate(seen, tokens).logprobs
    other = policy.evaluate({**seen, "instruction": [INSTRUCTIONS[1]]}, tokens).logprobs
    assert (said - other).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["openvla", "oft", "l1"])
def test_a_checkpoint_comes_back_as_it_was(kind: str, tmp_path: Path) -> None:
    policy, seen = tiny(kind), observations()
    save_policy(policy, tmp_path)
    if kind == "openvla":
        again: Any = load_openvla(tmp_path, ONE, torch.float32)
    else:
        head: Any = "l1" if kind == "l1" else "discrete"
        again = load_openvla_oft(tmp_path, OFT, head=head, proprioception=True, dtype=torch.float32)
    before, after = (p.act(seen, seeds=SEEDS, greedy=True) for p in (policy, again))
    assert torch.equal(before.tokens, after.tokens)
    assert torch.equal(before.values, after.values)
    assert json.loads((tmp_path / "config.json").read_text()) == policy.model.config.raw
    save_policy(again, tmp_path / "twice")
    first, second = (f / "model.safetensors" for f in (tmp_path, tmp_path / "twice"))
    assert first.read_bytes() == second.read_bytes()


def test_shards_are_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2flow.models.policies.vla.checkpoint._SHARD_BYTES", 300_000)
    policy = tiny("openvla")
    save_policy(policy, tmp_path)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    again = load_openvla(tmp_path, ONE, torch.float32)
    for name, weight in policy.model.state_dict().items():
        assert torch.equal(weight, again.model.state_dict()[name]), name


def test_published_heads_are_read(tmp_path: Path) -> None:
    """`.pt` files whose names carry the training step, keys with the wrapper's `module.`."""
    policy = tiny("l1")
    save_policy(policy, tmp_path)
    for name, head in (
        ("action_head", policy.l1_head),
        ("proprio_projector", policy.proprio_projector),
    ):
        (tmp_path / f"{name}.safetensors").unlink()
        wrapped = {f"module.{key}": value for key, value in head.state_dict().items()}
        torch.save(wrapped, tmp_path / f"{name}--150000_checkpoint.pt")
    again = load_openvla_oft(tmp_path, OFT, head="l1", proprioception=True, dtype=torch.float32)
    seen = observations(1)
    one, two = (p.act(seen, seeds=[0], greedy=True).actions for p in (policy, again))
    assert torch.equal(one, two)


def names_of_fixture(file: str = "openvla_7b_names.txt") -> dict[str, tuple[int, ...]]:
    names = {}
    for line in (FIXTURES / file).read_text().splitlines():
        if line.startswith("#"):
            continue
        pattern, shape = line.split()
        found = re.search(r"\{0\.\.(\d+)\}", pattern)
        numbers = range(int(found[1]) + 1) if found else [0]
        for number in numbers:
            name = re.sub(r"\{.*\}", str(number), pattern)
            names[name] = tuple(int(size) for size in shape.split(","))
    return names


def test_the_real_7b_has_its_names_shapes_and_size() -> None:
    raw = json.loads((FIXTURES / "openvla_7b_config.json").read_text())
    model = build_empty(VLAConfig.of(raw))
    found = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    assert found == names_of_fixture()
    count = sum(parameter.numel() for parameter in model.parameters())
    # As the hub counts them for openvla-7b, and the bytes (two each) of its index.
    assert count == 7_541_237_184
    parts = [name.partition(".")[0] for name in found]
    named = {part: parts.count(part) for part in parts}
    assert named == {"vision_backbone": 685, "projector": 6, "language_model": 291}
    assert model.config.vocabulary == 32000
    assert model.vision_backbone.patches == 256
    # What timm's newer releases might change for the same name: OpenVLA was trained with these.
    block = model.vision_backbone.fused_featurizer.blocks[0]
    assert isinstance(block.mlp.act, torch.nn.GELU)
    assert block.mlp.act.approximate == "none"
    assert block.norm1.eps == 1e-6


def test_the_heads_of_oft_have_their_names_and_shapes() -> None:
    with torch.device("meta"):
        heads = {"action_head": L1Head(4096, 7), "proprio_projector": ProprioProjector(8, 4096)}
    found = {
        f"{head}.{name}": tuple(weight.shape)
        for head, module in heads.items()
        for name, weight in module.state_dict().items()
    }
    assert found == names_of_fixture("openvla_oft_heads_names.txt")


def test_bins_are_the_published_ones() -> None:
    bins = ActionBins(32000)
    edges = np.linspace(-1, 1, 256)
    centres = (edges[:-1] + edges[1:]) / 2
    values = np.concatenate([np.linspace(-1.2, 1.2, 997), edges])
    ids = bins.encode(torch.tensor(values))
    assert ids.tolist() == (32000 - np.digitize(np.clip(values, -1, 1), edges)).tolist()
    expected = centres[np.clip(32000 - ids.numpy() - 1, 0, 254)]
    np.testing.assert_allclose(bins.decode(ids).numpy(), expected, atol=1e-7)
    assert (ids.min(), ids.max()) == (31744, 31999)
    assert bins.first_token == 31744
    # Outside the bins: the nearest one, as the published decoding has it.
    assert bins.decode(torch.tensor([0, 32063])).tolist() == pytest.approx(
        [centres[-1], centres[0]]
    )


def test_scale_is_the_percentiles_and_leaves_the_masked() -> None:
    raw = json.loads((FIXTURES / "openvla_7b_config.json").read_text())
    statistics = VLAConfig.of(raw).statistics("bridge_orig")
    scale = ActionScale(statistics)
    ends = scale(torch.tensor([[-1.0] * 6 + [0.3], [1.0] * 6 + [0.7]]))
    assert ends[0, :6].tolist() == pytest.approx(statistics["action"]["q01"][:6])
    assert ends[1, :6].tolist() == pytest.approx(statistics["action"]["q99"][:6])
    assert ends[:, 6].tolist() == pytest.approx([0.3, 0.7])
    torch.testing.assert_close(scale.inverse(ends)[:, :6], torch.tensor([[-1.0] * 6, [1.0] * 6]))


@pytest.mark.parametrize(("gripper", "closed", "opened"), [("libero", 1, -1), ("widowx", -1, 1)])
def test_the_gripper_is_in_the_convention_of_the_simulator(
    gripper: Any, closed: float, opened: float
) -> None:
    scale = ActionScale(STATISTICS, gripper)
    data = torch.tensor([[0.0] * 6 + [0.02], [0.0] * 6 + [0.97]])  # 0 closed, 1 open
    actions = scale(data)
    assert actions[:, 6].tolist() == [closed, opened]
    assert scale.inverse(actions)[:, 6].tolist() == [0.0, 1.0]


def test_proprioception_is_scaled_and_clamped() -> None:
    state = torch.tensor([[-1.0, 1.0, 3.0, 9.0, -9.0, 0.0, 0.0, 0.0]])
    scaled = scale_proprioception(state, STATISTICS)
    assert scaled[0, :5].tolist() == pytest.approx([-1, 0, 1, 1, -1])
    with pytest.raises(UserError, match="another size"):
        scale_proprioception(state[:, :3], STATISTICS)
    with pytest.raises(UserError, match="no proprioception"):
        scale_proprioception(state, {"action": {}})


@pytest.mark.parametrize("size", [(256, 256), (480, 640), (128, 128), (224, 224)])
def test_resizing_is_pillows(size: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(1, 3, 12, 12, generator=generator)
    smooth = torch.nn.functional.interpolate(noise, size, mode="bilinear")
    picture = (smooth[0].permute(1, 2, 0) * 255).byte()
    ours = preprocess(picture[None], 224, centre_crop=False)[0]
    for tower, expected in enumerate(slow_vla.pixels(picture.numpy(), 224)):
        levels = (ours[3 * tower : 3 * tower + 3] - expected).abs() * 255 * slow_vla.STDS[tower][0]
        assert levels.max() < 2.2  # two levels of 256, where rounding falls to the other side
        assert levels.mean() < 0.02


@pytest.mark.parametrize("size", [(256, 256), (480, 640), (128, 128), (224, 224)])
def test_lanczos_is_that_of_pillow_on_single_precision(size: tuple[int, int]) -> None:
    """There Pillow neither rounds nor clips between the axes, as tf.image.resize does not."""
    generator = torch.Generator().manual_seed(0)
    picture = torch.randint(0, 256, (*size, 3), generator=generator).byte()
    ours = preprocess(picture[None], 224, centre_crop=False, resize="lanczos")[0, 3:] * 127.5
    channels = picture.permute(2, 0, 1).float().numpy()
    lanczos = Image.Resampling.LANCZOS
    theirs = [np.array(Image.fromarray(one).resize((224, 224), lanczos)) for one in channels]
    levels = (ours + 127.5 - torch.tensor(np.stack(theirs)).clamp(0, 255)).abs()
    assert levels.max() < 0.51
    bicubic = preprocess(picture[None], 224, centre_crop=False)[0, 3:] * 127.5
    assert (bicubic - ours).abs().max() > 5 or size == (224, 224)


def test_the_crop_is_the_middle_nine_tenths_of_the_area() -> None:
    """A ramp stays a ramp, of the part between the crop's edges; bilinear, corners on corners.

    Levels are cut as TensorFlow's `convert_image_dtype` cuts them: x * 255.5, rounded down.
    """
    ramp = torch.linspace(0, 255, 224)
    picture = ramp.round().byte()[None, None, :, None].expand(1, 224, 224, 3).contiguous()
    ours = preprocess(picture, 224, centre_crop=True)[0, 3, 100]
    margin = (1 - math.sqrt(0.9)) / 2
    places = np.linspace(margin * 223, (1 - margin) * 223, 224)
    drawn = np.interp(places, np.arange(224), picture[0, 0, :, 0].numpy())
    levels = np.floor(drawn / 255 * 255.5)
    exact = np.rint((ours.numpy() + 1) * 127.5)
    assert (exact == levels).mean() > 0.98, "but where float32 and float64 part"
    assert np.abs(exact - levels).max() <= 1
    # Pillow's box gives the same but for its convention at the corners.
    box = tuple(224 * x for x in (margin, margin, 1 - margin, 1 - margin))
    cropped = Image.fromarray(picture[0].numpy()).resize((224, 224), Image.Resampling.BILINEAR, box)
    assert np.abs(np.array(cropped)[100, :, 0] / 127.5 - 1 - ours.numpy()).max() < 0.03


def test_the_l1_head_keeps_to_the_environments_bounds() -> None:
    """What it regresses has none: a figure beyond the environment's had ended the run."""
    policy, seen = tiny("l1"), observations(1)
    free = policy.act(seen, seeds=[0], greedy=True)
    low, high = (-0.1,) * free.actions.shape[-1], (0.1,) * free.actions.shape[-1]
    policy.options = replace(policy.options, low=low, high=high)
    held = policy.act(seen, seeds=[0], greedy=True)
    assert float(free.actions.abs().max()) > 0.1
    torch.testing.assert_close(held.actions, free.actions.clamp(-0.1, 0.1))
    torch.testing.assert_close(held.tokens, free.tokens)


@pytest.mark.parametrize(
    "figures", [{}, {"action": {"min": [0.0], "max": [1.0]}}, {"action": {"q01": [0.0], "q99": []}}]
)
def test_statistics_without_percentiles_are_refused_before_weights_are_read(
    tmp_path: Path, figures: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_load_model", None)
    save_policy(tiny("openvla"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["norm_stats"] = {"mine": figures}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for load in (load_openvla, load_openvla_oft):
        with pytest.raises(UserError, match=r"statistics: .*percentiles of actions .*mine"):
            load(tmp_path)


def test_the_prompt_is_the_published_one() -> None:
    assert prompt("Pick up the Bowl") == (
        "In: What action should the robot take to pick up the bowl?\nOut:"
    )
    tokenizer = tiny("openvla").tokenizer
    ids = tokenizer.ids(INSTRUCTIONS[0])
    assert (ids[0], ids[-1]) == (1, 3)  # the begin token; the empty word, 29871 of Llama 2
    rows, mask = tokenizer.batch(INSTRUCTIONS, torch.device("cpu"))
    assert mask.sum(1).tolist() == [len(tokenizer.ids(text)) for text in INSTRUCTIONS]
    assert rows[0, len(ids) :].unique().tolist() == [2]


def test_lora_starts_as_the_model_and_is_saved_in_it(tmp_path: Path) -> None:
    policy, seen = tiny("oft"), observations(2)
    before = policy.act(seen, seeds=SEEDS[:2])
    add_lora(policy, rank=4)
    after = policy.act(seen, seeds=SEEDS[:2])
    torch.testing.assert_close(after.logprobs, before.logprobs)
    trained = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)
    assert not any("lm_head" in name or "attn_pool" in name for name in trained)
    optimiser = torch.optim.SGD((p for p in policy.parameters() if p.requires_grad), lr=0.1)
    policy.evaluate(seen, before.tokens).logprobs.sum().backward()
    optimiser.step()
    moved = policy.evaluate(seen, before.tokens).logprobs
    assert not torch.allclose(moved, before.logprobs)
    save_policy(policy, tmp_path)
    again = load_openvla_oft(tmp_path, OFT, proprioception=True, dtype=torch.float32)
    torch.testing.assert_close(
        again.evaluate(seen, before.tokens).logprobs, moved, rtol=1e-4, atol=1e-4
    )
    assert set(published_weights(policy.model)) == set(again.model.state_dict())


def test_behaviour_cloning_learns_what_the_instruction_says() -> None:
    """Two instructions, two actions, one picture: after some steps the right one is greedy."""
    texts = ["go left", "go right"]
    policy = tiny_openvla(texts, unit_statistics(2), VLAOptions(chunk=2), parallel=True)
    seen = {"image": torch.full((2, 32, 32, 3), 99, dtype=torch.uint8), "instruction": texts}
    wanted = torch.tensor([[[-0.5, 0.1]] * 2, [[0.5, 0.1]] * 2])
    tokens = policy.tokens_of(wanted)
    optimiser = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    for _ in range(80):
        loss = -policy.evaluate(seen, tokens).logprobs.mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    actions = policy.act(seen, seeds=[0, 0], greedy=True).actions
    torch.testing.assert_close(actions, wanted, rtol=0, atol=1 / 255)


def two_things(count: int, seed: int) -> tuple[dict[str, Any], Tensor]:
    """Pictures of a red and a blue square, left and right, and the way to the one named."""
    random = np.random.default_rng(seed)
    pictures = np.full((count, 32, 32, 3), 122, np.uint8)
    red_left, red_asked = random.integers(2, size=(2, count)).astype(bool)
    for picture, left in zip(pictures, red_left, strict=True):
        for colour, is_left in (([220, 50, 47], left), ([38, 100, 210], not left)):
            row, column = random.integers(8, 16), random.integers(8) + 16 * (not is_left)
            picture[row : row + 8, column : column + 8] = colour
    asked = ["go to red" if red else "go to blue" for red in red_asked]
    way = np.where(red_left == red_asked, -0.5, 0.5)
    actions = np.stack([way, np.zeros(count)], axis=1)[:, None].astype(np.float32)
    return {"image": torch.from_numpy(pictures), "instruction": asked}, torch.from_numpy(actions)


def test_a_tiny_model_learns_to_find_what_the_instruction_names() -> None:
    """Neither the picture nor the sentence alone says where to go."""
    policy = tiny_openvla(["go to red", "go to blue"], unit_statistics(2), bins=32)
    optimiser = torch.optim.AdamW(policy.parameters(), lr=5e-4)
    for step in range(150):
        seen, actions = two_things(32, step)
        loss = -policy.evaluate(seen, policy.tokens_of(actions)).logprobs.mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    seen, actions = two_things(128, seed=1000)
    chosen = policy.act(seen, seeds=range(128), greedy=True).actions
    right = (chosen[..., 0].sign() == actions[..., 0].sign()).float().mean()
    assert right > 0.9


@pytest.mark.parametrize("kind", ["openvla", "oft"])
@pytest.mark.parametrize("rank", [0, 2])
def test_activations_that_are_computed_again_give_the_same_gradients(kind: str, rank: int) -> None:
    """And less is kept: for 7B, what lies between the passes would fill an accelerator."""
    found, kept = [], []
    for again in (False, True):
        policy, seen = tiny(kind), observations(2)
        if rank:
            add_lora(policy, rank, seed=1)
        policy.eval()
        if again:
            policy.compute_activations_again()
        tokens = policy.act(seen, seeds=SEEDS[:2]).tokens
        sizes: dict[int, int] = {}

        def note(one: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            if not one.requires_grad or not one.is_leaf:
                sizes[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
            return one

        with torch.autograd.graph.saved_tensors_hooks(note, lambda one: one):
            judged = policy.evaluate(seen, tokens)
        (judged.logprobs.sum() + judged.values.sum()).backward()
        kept.append(sum(sizes.values()))
        found.append({n: p.grad for n, p in policy.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=1e-4, atol=1e-5, msg=name)
    assert kept[1] < 0.5 * kept[0]


def test_missing_statistics_list_those_there_are() -> None:
    known = {"a_no_noops": STATISTICS, "b": STATISTICS}
    config = VLAConfig.of({**tiny("openvla").model.config.raw, "norm_stats": known})
    assert config.statistics("a") == STATISTICS
    for name in ("c", None):
        with pytest.raises(UserError, match="a_no_noops, b"):
            config.statistics(name)


@pytest.mark.parametrize("family", ["pi0", "smolvla", "prismatic", None])
def test_another_family_is_refused_in_one_line(family: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(UserError, match=r"another family.*openvla") as raised:
        load_config(tmp_path)
    assert "\n" not in str(raised.value)


def test_statistics_of_a_fine_tuned_checkpoint_are_added(tmp_path: Path) -> None:
    save_policy(tiny("openvla"), tmp_path)
    (tmp_path / "dataset_statistics.json").write_text(json.dumps({"libero_spatial": STATISTICS}))
    assert set(load_config(tmp_path).norm_stats) == {"tiny", "libero_spatial"}


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    policy = tiny("openvla")
    broken = tiny_openvla(INSTRUCTIONS, STATISTICS, VLAOptions(cameras=("wrist_image",)))
    with pytest.raises(UserError, match="wrist_image"):
        broken.act({"image": observations()["image"], "instruction": ["x"]}, seeds=[0])
    with pytest.raises(UserError, match="gives one action"):
        tiny_openvla(INSTRUCTIONS, STATISTICS, VLAOptions(chunk=8))
    with pytest.raises(UserError, match="temperature"):
        tiny_openvla(INSTRUCTIONS, STATISTICS, VLAOptions(temperature=0))
    save_policy(policy, tmp_path)
    with pytest.raises(UserError, match="0 files of the head"):
        load_openvla_oft(tmp_path, OFT, head="l1")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["text_config"]["num_hidden_layers"] += 1
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match="9 weights are missing"):
        load_openvla(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    raw["text_config"]["num_hidden_layers"] -= 1
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=r"tokenizer\.json is missing"):
        load_openvla(tmp_path)


def test_a_critic_is_read_from_a_folder_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network was, and its critic was drawn anew."""
    monkeypatch.setenv("HOME", str(tmp_path))
    policy = tiny_openvla(["lift"], unit_statistics(2), ONE, seed=3)
    save_policy(policy, tmp_path / "one")
    read = load_openvla("~/one", ONE, torch.float32)
    assert policy.value_head is not None
    assert read.value_head is not None
    for name, tensor in policy.value_head.state_dict().items():
        assert torch.equal(read.value_head.state_dict()[name], tensor), name
