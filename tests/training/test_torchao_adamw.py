"""Moments of 8 bits and stochastic rounding: close to AdamW in float32, in less memory, resumed.

What torchao computes is run where it is installed; without it the settings are refused.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from m2flow.errors import UserError
from m2flow.flow import Gang
from m2flow.models.work import EIGHT_BIT_BYTES
from m2flow.runtime.transport.groups import LaneGroups
from m2flow.training.optimizer import AdamWConfig, SumOptimizer
from m2flow.training.policy import PolicyTrainer
from m2flow.training.sharded import WHOLE, Shards
from m2flow.training.torchao_adamw import check_installed
from m2flow.training.trainer_state import SavedState, write
from tests.training.lane_processes import LaneProcesses
from tests.training.test_precision import CONFIG, step, stepped_weights, trainer_in
from tests.training.test_sharded import gang_of
from tests.training.test_trainer_state import REPLICAS

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="pip install 'm2flow[torchao]'"
)

EIGHT_BIT: dict[str, Any] = {"moments_8bit": True}
ROUNDED: dict[str, Any] = {"stochastic_rounding": True}


def trainer_with(
    dtype: torch.dtype, learning_rate: float = 1e-6, shards: Shards = WHOLE, **settings: Any
) -> PolicyTrainer:
    optimizer = replace(CONFIG.optimizer, learning_rate=learning_rate, **settings)
    return trainer_in(dtype, replace(CONFIG, optimizer=optimizer), shards)


def update(trainer: PolicyTrainer, steps: int) -> Tensor:
    """By how much some steps move what is stepped."""
    before = stepped_weights(trainer).double()
    for seed in range(steps):
        step(trainer, seed)
    return stepped_weights(trainer).double() - before


def held(trainer: PolicyTrainer) -> int:
    own = {tensor.untyped_storage().data_ptr(): tensor for tensor in trainer.tensors()}
    return sum(tensor.untyped_storage().nbytes() for tensor in own.values())


@needs_torchao
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_of_8_bits_move_the_weights_as_float32_ones_do(dtype: torch.dtype) -> None:
    plain = update(trainer_with(dtype), 8)
    narrow = update(trainer_with(dtype, **EIGHT_BIT), 8)
    assert torch.cosine_similarity(plain, narrow, dim=0) > 0.99
    assert not torch.equal(plain, narrow)


@needs_torchao
@pytest.mark.parametrize("more", [{}, EIGHT_BIT], ids=["float32 moments", "8-bit moments"])
def test_stochastic_rounding_moves_bfloat16_weights_by_the_step_in_the_mean(more: Any) -> None:
    """A step of 1e-6 is a 488th of the spacing of the weights: to the nearest, none would move."""
    layer = nn.Linear(256, 256, bias=False, dtype=torch.bfloat16)
    weights = layer.weight
    with torch.no_grad():
        weights.fill_(0.1)
    start = weights.detach().double()
    settings = AdamWConfig(learning_rate=1e-6, **ROUNDED, **more)
    optimizer = SumOptimizer(layer.named_parameters(), settings)
    for _ in range(50):
        (layer.weight.sum() * 3).backward()
        optimizer.step(torch.tensor([1.0, 1.0], dtype=torch.float64), 1, None)
    moved = weights.detach().double() - start
    assert float(moved.mean()) == pytest.approx(-5e-5, rel=0.1)
    share = float((moved != 0).double().mean())
    assert share == pytest.approx(0.1, abs=0.02), "bits are drawn for each weight and step anew"


@needs_torchao
@pytest.mark.parametrize("settings", [EIGHT_BIT, ROUNDED, EIGHT_BIT | ROUNDED], ids=str)
def test_what_takes_memory_is_known_before_the_first_step(settings: dict[str, Any]) -> None:
    """Of a 16-bit parameter 2 + 4 bytes, 4 of a master copy, and 8 of moments or a little over 2;
    tensors under 4,096 numbers keep the 8."""
    trainer = trainer_with(torch.bfloat16, **settings)
    sizes = [parameter.numel() for parameter in trainer.model.parameters()]
    before = held(trainer)
    assert trainer.optimizer.bytes_to_come() == 0
    step(trainer, 0)
    assert held(trainer) == before
    master = 0 if "stochastic_rounding" in settings else 4
    moments = 2 * EIGHT_BIT_BYTES if "moments_8bit" in settings else 8
    wanted = sum((6 + master + (moments if size >= 4096 else 8)) * size for size in sizes)
    assert held(trainer) == pytest.approx(wanted, rel=0.05)


@needs_torchao
@pytest.mark.parametrize("settings", [EIGHT_BIT, ROUNDED, EIGHT_BIT | ROUNDED], ids=str)
def test_steps_are_repeated_to_the_bit_and_leave_the_global_generator_alone(
    settings: dict[str, Any],
) -> None:
    """So replicas of a model, which draw for themselves, stay equal."""
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, second = (trainer_with(torch.bfloat16, **settings) for _ in range(2))
    update(first, 2)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    update(second, 2)
    assert torch.equal(stepped_weights(first), stepped_weights(second))


@needs_torchao
@pytest.mark.parametrize("saved", [{}, EIGHT_BIT, ROUNDED], ids=str)
@pytest.mark.parametrize("resumed", [{}, EIGHT_BIT, ROUNDED], ids=str)
def test_state_goes_on_in_any_optimizer(saved: Any, resumed: Any, tmp_path: Path) -> None:
    """Through files: a step after them is that of the run that was not interrupted, but for the
    rounding that a setting makes in each step."""
    through = trainer_with(torch.bfloat16, 1e-3, **saved)
    update(through, 3)
    write(tmp_path, through.optimizer.parts())
    again = trainer_with(torch.bfloat16, 1e-3, **resumed)
    again.model.load_state_dict(through.model.state_dict())
    state = SavedState(tmp_path)
    again.optimizer.load(state.names, state.read)
    assert again.optimizer.num_steps == 3
    near = 0.05 if EIGHT_BIT in (saved, resumed) else 1e-6
    assert_near(moments_of(again), moments_of(through), near)
    one, other = (update(trainer, 1) for trainer in (through, again))
    assert torch.cosine_similarity(one, other, dim=0) > (0.99 if saved == resumed else 0.9)
    if saved == resumed and not saved.get("moments_8bit"):
        assert torch.equal(one, other)


def moments_of(trainer: PolicyTrainer) -> dict[str, Tensor]:
    items = trainer.optimizer.state_items()
    return {name: value.clone() for name, value in items if name.startswith("exp_avg")}


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor], near: float) -> None:
    assert found.keys() == wanted.keys()
    for name, moment in wanted.items():
        assert (found[name] - moment).norm() / moment.norm() < near, name


@pytest.fixture(scope="module")
def lanes() -> Iterator[LaneProcesses]:
    with LaneProcesses(4) as lanes:
        yield lanes


Stretch = tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]


def stretch(
    gang: Gang | None, dtype: torch.dtype, settings: Any, saved: Path | None, folder: Path
) -> Stretch:
    """Four steps, each on rows that all lanes have: the moments before them, by how much they move
    the weights, and the moments after them, which are saved in a folder."""
    shards = WHOLE if gang is None else Shards.of(gang)
    trainer = trainer_with(dtype, shards=shards, **settings)
    if saved is not None:
        state = SavedState(saved)
        trainer.optimizer.load(state.names, state.read)
    before = moments_of(trainer)
    moved = update(trainer, 4)
    write(folder, trainer.optimizer.parts(), shards.group)
    return before, moved, moments_of(trainer)


def stretch_on(groups: LaneGroups, layout: str, *arguments: Any) -> Stretch | None:
    gang = gang_of(groups, REPLICAS[layout], layout)
    return None if gang is None else stretch(gang, *arguments)


@needs_torchao
@pytest.mark.parametrize("settings", [EIGHT_BIT, ROUNDED, EIGHT_BIT | ROUNDED], ids=str)
@pytest.mark.parametrize(
    "layouts", [("fsdp2", "tp2", "one"), ("one", "tp2.fsdp2", "fsdp2")], ids="-".join
)
def test_layouts_step_as_one_lane_does_and_go_on_from_each_other(
    lanes: LaneProcesses, layouts: tuple[str, ...], settings: dict[str, Any], tmp_path: Path
) -> None:
    """Moments go on, and weights begin anew, which steps of 1e-6 hardly move. Where these are
    rounded at random, they are compared in the mean over all weights."""
    rounded = "stochastic_rounding" in settings
    dtype = torch.bfloat16 if rounded else torch.float32
    near = 0.05 if "moments_8bit" in settings else 1e-6
    plain, saved, last = trainer_with(dtype), None, dict[str, Tensor]()
    for layout in layouts:
        given = dtype, settings, saved, tmp_path / layout
        told = [stretch(None, *given)] if layout == "one" else lanes(stretch_on, layout, *given)
        found = [one for one in told if one is not None]
        expected = update(plain, 4)
        for before, moved, _ in found:
            if saved is not None:
                assert_near(before, last, near)
            assert moved.equal(found[0][1]), "lanes that have the same piece round it alike"
            if rounded:
                along = float(moved @ expected / expected.square().sum())
                assert along == pytest.approx(1, abs=0.15)
            else:
                assert torch.cosine_similarity(moved, expected, dim=0) > 0.99
        saved, last = tmp_path / layout, found[0][2]


@needs_torchao
def test_rounding_without_weights_of_bfloat16_is_refused() -> None:
    with pytest.raises(UserError, match="no trained weights are bfloat16") as caught:
        trainer_with(torch.float32, **ROUNDED)
    assert caught.value.key == "training.rounding"


def test_without_torchao_the_command_that_installs_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UserError, match=r"pip install 'm2flow\[torchao\]'"):
        check_installed("training.moments")
    with pytest.raises(UserError, match=r"pip install 'm2flow\[torchao\]'"):
        trainer_with(torch.bfloat16, **EIGHT_BIT)
