"""Behaviour cloning on a GPU: the same draws, and the losses that the host's cores give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.embodied.cloning import clone, device_with_room
from m2flow.workloads.embodied.experiment import EmbodiedExperiment, spec_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

CLONED: dict[str, Any] = {
    "workload": "embodied",
    "name": "cloned",
    "environment": {"name": "table:red"},
    "rollout": {"horizon": 24, "automatic_reset": False},
    "warmup": {"steps": 5, "episodes": 3, "batch_size": 8},
    "update": {"turns_per_microbatch": 3},
    "evaluation": {"episodes": 0},
}


class Losses:
    """What a warm-up says of its steps."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def phase(self, *_: Any) -> None: ...

    def update(self, _: int, metrics: Any = None) -> None:
        self.found.append(metrics["loss"])

    def note(self, _: str) -> None: ...


@pytest.mark.parametrize("kind", ["mlp", "cnn", "pi0"])
def test_a_warm_up_learns_there_what_it_does_on_the_host(kind: str, tmp_path: Path) -> None:
    own: Any = read_recipe({**CLONED, "policy": {"kind": kind, "chunk": 2}})
    source = EmbodiedExperiment(own).flow().learner.source
    told = Losses(), Losses()
    for device, losses in zip(("cpu", "cuda:0"), told, strict=True):
        clone(source.make(device), own, spec_of(own), losses)
    assert told[0].found == pytest.approx(told[1].found, rel=1e-2)
    assert device_with_room(source.make(), own) == "cuda:0"
    experiment = EmbodiedExperiment(own)
    experiment.prepare(tmp_path)
    experiment.flow().learner.source.make()
