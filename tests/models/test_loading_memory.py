"""Host memory of a node holds a model once, however many lanes load it: bytes, and no times.

Several processes load one folder of safetensors in several files, as lanes do on their way to a
device or to shards. What they hold between them is their proportional set sizes: pages of files
that they share count once over all of them. Where loading itself makes copies (experts that lie
singly in the files, another dtype), what counts is the most that all lanes have of their own at one
moment, in processes that have loaded next to nothing before. Lanes are CPUs here, so the parts that
they keep are in host memory too.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from m2flow.flow import Place
from m2flow.models.causal_lm import TinySpec, build_tiny
from m2flow.models.tokenizer import character_tokenizer
from m2flow.runtime.transport.groups import LaneGroups
from m2flow.workloads.common.loading import in_turn
from m2flow.workloads.reasoning.workers import Generator, ModelSource
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
    source = ModelSource(str(folder), "float32")
    model, shards = divided(place, source, source.load)
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


# --- where loading itself makes copies ------------------------------------------------------------


def save(model: PreTrainedModel, path: Path) -> Path:
    model.to(torch.bfloat16).save_pretrained(path, max_shard_size="50MB")
    character_tokenizer("0123456789+=#").save_pretrained(path)
    return path


def mixture(path: Path, width: int) -> Path:
    """32 experts in each of 4 layers, which lie singly in files of bfloat16."""
    config = Qwen3MoeConfig(
        vocab_size=15,
        hidden_size=width,
        moe_intermediate_size=width,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=width // 8,
        num_experts=32,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        eos_token_id=13,
        pad_token_id=14,
    )
    return save(Qwen3MoeForCausalLM(config), path)


def dense(path: Path, width: int) -> Path:
    """A dense model in files of bfloat16."""
    spec = TinySpec(2 * width, 6, 16, 4, 6 * width, 64)
    return save(build_tiny(spec, vocab_size=15, eos_token_id=13, pad_token_id=14, seed=0), path)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """A small and a large model of each kind."""
    root = tmp_path_factory.mktemp("copied")
    return {
        "mixture": (mixture(root / "few experts", 64), mixture(root / "experts", 512)),
        "dense": (dense(root / "narrow", 32), dense(root / "wide", 512)),
    }


def private_bytes(pids: list[int]) -> int:
    """What processes have of their own, and no page of a file."""
    status = "".join(Path(f"/proc/{pid}/status").read_text() for pid in pids)
    found = [line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:")]
    return 1024 * sum(map(int, found))


def peak(load: Callable[..., Any], small: Path, large: Path, *arguments: Any) -> int:
    """The most that fresh lanes have of their own at one moment in loading a large model.

    Above what they have when they have loaded a small one, so that all is imported.
    """
    with LaneProcesses(LANES) as lanes:
        lanes(load, small, *arguments)
        before, found, over = private_bytes(lanes.pids), [0], threading.Event()

        def watch() -> None:
            while not over.wait(0.002):
                found.append(private_bytes(lanes.pids))

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            lanes(load, large, *arguments)
        finally:
            over.set()
            watching.join()
    return max(found) - before


def at(groups: LaneGroups, layout: str, root: Path) -> Place:
    if layout == "one":
        return Place(dist.get_rank(), dist.get_rank(), LANES, spill=root)
    place = place_on(groups, FOUR, root, layout)
    assert place is not None
    return place


def to_train(groups: LaneGroups, folder: Path, dtype: str, layout: str, root: Path) -> None:
    """Load as a learner or a reference does."""
    source = ModelSource(str(folder), dtype)
    divided(at(groups, layout, root), source, source.load)


def to_generate(groups: LaneGroups, folder: Path, dtype: str, layout: str, root: Path) -> None:
    """Load as a generator does."""
    source = ModelSource(str(folder), dtype)
    generator = Generator(source, samples_per_prompt=1, max_new_tokens=1)
    generator.load(at(groups, layout, root))


@pytest.mark.parametrize(
    ("kind", "dtype", "load", "layout", "kept", "on_its_way"),
    [
        ("mixture", "bfloat16", to_train, "fsdp4", 1, 1),
        pytest.param("mixture", "bfloat16", to_train, "ep4", 1, 1, marks=pytest.mark.slow),
        ("mixture", "bfloat16", to_generate, "tp4", 1, 1),
        ("mixture", "float32", to_train, "ep4", 1, 2),  # single experts are in float32 first
        pytest.param("dense", "float32", to_train, "tp4", 1, 1, marks=pytest.mark.slow),
        ("dense", "float32", to_generate, "one", LANES, 1),
    ],
)
def test_lanes_make_copies_in_turn(
    folders: dict[str, tuple[Path, Path]],
    tmp_path: Path,
    kind: str,
    dtype: str,
    load: Callable[..., Any],
    layout: str,
    kept: int,
    on_its_way: int,
) -> None:
    """A model is on its way to one lane at a time, beside what all lanes keep of it."""
    small, large = folders[kind]
    size = size_of(large) * (2 if dtype == "float32" else 1)
    most = (kept + on_its_way + 0.4) * size
    grown = peak(load, small, large, dtype, layout, tmp_path)
    assert grown < most, f"{grown / MB:.0f} MB for a model of {size / MB:.0f} MB"


def test_lanes_wait_for_copies_alone(folders: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    spill, (dense, _), (mixture, _) = tmp_path / "spill", folders["dense"], folders["mixture"]
    place = Place(spill=spill)
    with in_turn(place, ModelSource(str(dense), "bfloat16")):
        assert not spill.exists()
    for path, dtype in ((mixture, "bfloat16"), (dense, "float32")):
        with in_turn(place, ModelSource(str(path), dtype)):
            other = os.open(spill, os.O_RDONLY)
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)
