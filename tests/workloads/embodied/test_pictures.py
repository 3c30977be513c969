"""Policies of pictures on every plan: the same pictures, the same tokens, the same weights."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import m2flow
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.embodied.experiment import EmbodiedExperiment

HERE = Path(__file__).parent
STEPS = 4
SMALL: dict[str, Any] = {
    "workload": "embodied",
    "name": "pictures",
    "rollouts_per_step": 4,
    "environment": {"name": "logged_table:LoggedTable"},
    "rollout": {"horizon": 6},
    "update": {"epochs": 1, "minibatches": 2},
    "optimizer": {"learning_rate": 0.003},
    "evaluation": {"episodes": 0, "films": 0},
}
CNN = {"policy": {"kind": "cnn", "features": 16}}
VLA = {"model": "tiny", "policy": {"kind": "openvla", "lora_rank": 0}, "rollout": {"horizon": 3}}
needs_vla = pytest.mark.skipif(
    find_spec("timm") is None or find_spec("peft") is None, reason="needs the extra vla"
)


def trained(
    changes: dict[str, Any], mode: str, log: Path, lanes: Any = "cpu:1"
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """The lines of all steps of all episodes, sorted, and the weights after them."""
    some: Any = read_recipe({**SMALL, **changes}, {"environment.options.log": str(log)})
    experiment = EmbodiedExperiment(some)
    with m2flow.launch(
        experiment.flow(), items_per_step=some.items_per_step, mode=mode, lanes=lanes
    ) as run:
        log.unlink(missing_ok=True)  # what was tried out before the run
        for _ in run.steps(experiment.batch(step) for step in range(STEPS)):
            pass
        return sorted(log.read_text().splitlines()), run.worker_call("learner", "weights")


@pytest.mark.parametrize("changes", [CNN, pytest.param(VLA, marks=needs_vla)], ids=["cnn", "vla"])
def test_every_plan_sees_and_does_the_same(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures by their hashes, and actions by theirs: those of a vision-language-action model
    are the middles of the bins that its tokens name."""
    pytest.importorskip("ray")
    from m2flow.engine.plan import LaneSpec
    from m2flow.runtime.driver.pool import LanePool

    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    wanted, weights = trained(changes, "eager", tmp_path / "eager")
    assert len({line.split()[2] for line in wanted}) > len(wanted) / 2, "pictures of all kinds"
    with LanePool([LaneSpec(0), LaneSpec(1)]) as lanes:
        for mode in ("collocated", "disaggregated", "hybrid", "auto"):
            found, others = trained(changes, mode, tmp_path / mode, lanes)
            if changes is CNN:  # whose actions are real numbers, told apart by rounding
                assert _seen(found) == _seen(wanted), mode
            else:
                assert found == wanted, mode
            for name, tensor in weights.items():
                found_weights = _felt(name, others[name])
                torch.testing.assert_close(_felt(name, tensor), found_weights, atol=1e-4, rtol=1e-4)


def _seen(lines: list[str]) -> list[str]:
    """The lines without what was done."""
    return [line.rpartition(" ")[0] for line in lines]


def _felt(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The weights without the biases of attention's keys: they add the same to all scores of a
    query, so no output feels them, their gradients are rounding, and AdamW makes steps of it."""
    if not name.endswith("attn.qkv.bias"):
        return tensor
    query, _, value = tensor.chunk(3)
    return torch.cat([query, value])
