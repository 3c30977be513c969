"""Host memory of a node holds a model once, however many lanes load it: bytes, and no times.

Several processes load one folder of safetensors in several files, as lanes do on their way to a
device or to shards. What they hold between them is their proportional set sizes: pages of files
that they share count once over all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from m2flow.models.causal_lm import TinySpec, build_tiny
from m2flow.models.tokenizer import character_tokenizer
from m2flow.runtime.transport.groups import LaneGroups
from m2flow.workloads.reasoning.workers import ModelSource
from m2flow.workloads.reasoning.workers.source import divided
from tests.training.lane_processes import LaneProcesses
from tests.training.test_sharded import FOUR, place_on

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="needs the sizes that Linux keeps"
)

MB = 1_000_000
LANES = 4


def held() -> int:
    """Bytes of memory that are this process's, shared pages by their share."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("no Pss")


def together(before: int) -> int:
    """What all lanes hold more than before, at the same moment."""
    dist.barrier()
    grown = torch.tensor([held() - before])
    dist.all_reduce(grown)
    dist.barrier()
    return int(grown)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    spec = TinySpec(1024, 8, 16, 4, 3072, 64)
    model = build_tiny(spec, vocab_size=15, eos_token_id=13, pad_token_id=14, seed=0)
    model.save_pretrained(path, max_shard_size="50MB")
    character_tokenizer("0123456789+=#").save_pretrained(path)
    assert len(list(path.glob("*.safetensors"))) > 5
    return path


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.fixture(scope="module")
def lanes() -> Iterator[LaneProcesses]:
    with LaneProcesses(LANES) as lanes:
        yield lanes


def read_all(model: Any) -> float:
    """Every number of a model, so that its pages are in memory."""
    return sum(float(parameter.detach().sum()) for parameter in model.parameters())


def on_their_way(groups: LaneGroups, folder: Path) -> int:
    """Load for a device or an engine, which takes copies; and read all of it."""
    warm = ModelSource(str(folder), "float32").load("cpu", stays=False)
    read_all(warm)  # libraries and allocators have grown
    del warm
    before = held()
    model = ModelSource(str(folder), "float32").load("cpu", stays=False)
    read_all(model)
    return together(before)


def in_shards(groups: LaneGroups, folder: Path, root: Path) -> int:
    """Load as a learner in fsdp4 does."""
    place = place_on(groups, FOUR, root)
    assert place is not None
    before = held()
    model, shards = divided(place, ModelSource(str(folder), "float32").load)
    assert shards.size == LANES
    assert sum(1 for _ in model.parameters()) > 90
    return together(before)


def copies(groups: LaneGroups, folder: Path) -> int:
    """Load to compute with whole copies on the CPU lanes, which are the devices then."""
    before = held()
    model = ModelSource(str(folder), "float32").load("cpu")
    read_all(model)
    return together(before)


def test_lanes_that_hand_a_model_on_share_its_pages(lanes: LaneProcesses, folder: Path) -> None:
    size = size_of(folder)
    assert size > 250 * MB
    grown = lanes(on_their_way, folder)[0]
    assert grown < 1.25 * size, f"{grown / MB:.0f} MB for a model of {size / MB:.0f} MB"


def test_lanes_in_shards_hold_it_once(lanes: LaneProcesses, folder: Path, tmp_path: Path) -> None:
    """On CPU lanes shards are the devices' copies: the model once, and no page of a file is kept
    that would make it twice."""
    size = size_of(folder)
    grown = lanes(in_shards, folder, tmp_path)[0]
    assert 0.9 * size < grown < 1.35 * size, f"{grown / MB:.0f} of {size / MB:.0f} MB"


def test_the_measure_sees_whole_copies(lanes: LaneProcesses, folder: Path) -> None:
    size = size_of(folder)
    grown = lanes(copies, folder)[0]
    assert grown > 0.9 * LANES * size, f"{grown / MB:.0f} of {size / MB:.0f} MB"
