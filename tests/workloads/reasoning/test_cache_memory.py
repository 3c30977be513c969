"""What keys and values may take of an accelerator: beside the weights, and alike on a gang."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from m2flow.flow.worker import Gang, Place
from m2flow.generation.architecture import architecture_of
from m2flow.generation.native import NativeEngine
from m2flow.generation.records import Request, SamplingParams
from m2flow.generation.supported import ENGINES
from m2flow.generation.tensor_parallel import TensorParallel
from m2flow.generation.weights import DecoderWeights
from m2flow.models.causal_lm import TinySpec, build_tiny
from m2flow.models.folder import weight_count
from m2flow.models.tokenizer import byte_tokenizer
from m2flow.plan.profile.hardware import USABLE_MEMORY
from m2flow.runtime.transport.groups import LaneGroups
from m2flow.workloads.reasoning.config import CACHE_SHARE
from m2flow.workloads.reasoning.workers import Generator, ModelSource, generator
from tests.generation.small_models import drain
from tests.training.lane_processes import LaneProcesses

LANES = (0, 1)
SPEC = TinySpec(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
CELL_BYTES = 2 * 2 * 16 * 4
"""A position's keys and values on one of two lanes: both of them, layers, a head, float32."""
TIGHT, ROOMY = 50 * CELL_BYTES, 500 * CELL_BYTES
Drawn = tuple[dict[int, list[int]], int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model = build_tiny(SPEC, vocab_size=258, eos_token_id=256, pad_token_id=257, seed=0)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def lanes() -> Iterator[LaneProcesses]:
    with LaneProcesses(len(LANES)) as lanes:
        yield lanes


def drawn_by_a_gang(groups: LaneGroups, folder: str, budgets: tuple[int, int]) -> Drawn:
    groups.ensure([LANES, *((lane,) for lane in LANES)])
    rank = groups.group(LANES).rank()
    worker = Generator(ModelSource(folder), samples_per_prompt=1, max_new_tokens=20)
    gang = Gang(rank, len(LANES), mesh=groups.mesh([LANES]), layout="tp2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator, "_cache_bytes", lambda *_: budgets[rank])
        worker.load(Place(rank, rank, len(LANES), gang=gang))
    engine = worker.engine
    assert isinstance(engine, NativeEngine)
    params = SamplingParams(20, 1.0)
    engine.submit(Request(n, [n, 5, 7], n, params) for n in range(12))
    return {n: one.token_ids.tolist() for n, one in drain(engine).items()}, engine.preemptions


def test_lanes_of_unlike_memory_draw_as_the_smaller_one_can(
    folder: Path, lanes: LaneProcesses
) -> None:
    """Each had room of its own, and no longer decoded the same sequences when one was full."""
    alike = lanes(drawn_by_a_gang, str(folder), (TIGHT, TIGHT))
    assert alike[0] == alike[1]
    assert alike[0][1] > 0, "some sequences were put off"
    assert lanes(drawn_by_a_gang, str(folder), (ROOMY, TIGHT)) == alike
    assert lanes(drawn_by_a_gang, str(folder), (TIGHT, ROOMY)) == alike


class StandIn:
    """An engine of another package that says what it was given."""

    def __init__(self, folder: str, *, cache_bytes: int, **_: Any) -> None:
        self.cache_bytes = cache_bytes


def test_another_package_s_engine_has_room_for_its_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    itself = replace(ENGINES["vllm"], implementation=f"{__name__}:StandIn")
    monkeypatch.setitem(ENGINES, "vllm", itself)
    model = build_tiny(SPEC, vocab_size=258, eos_token_id=256, pad_token_id=257, seed=0)
    weights = 2 * sum(parameter.numel() for parameter in model.parameters())
    assert weights == 2 * weight_count(folder)
    for total in (2 * weights, 100 * weights):
        device = SimpleNamespace(total_memory=total)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, it=device: it)
        source = ModelSource(str(folder), "bfloat16")
        worker = Generator(source, samples_per_prompt=1, max_new_tokens=2, engine="vllm")
        worker.load(Place(device="cuda:0"))
        assert isinstance(worker.engine, StandIn)
        expected = min(CACHE_SHARE * total, USABLE_MEMORY * total - weights)
        assert worker.engine.cache_bytes == pytest.approx(expected, abs=1)


def test_a_lane_of_a_gang_has_all_of_the_embedding(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was counted as divided, and keys and values took the room of what was there whole."""
    told: list[int] = []
    monkeypatch.setattr(
        generator, "_cache_bytes", lambda _gb, _place, weights: told.append(weights)
    )
    worker = Generator(ModelSource(str(folder)), samples_per_prompt=1, max_new_tokens=2)
    worker._cache_bytes(Place(gang=Gang(0, 2, layout="tp2")), torch.float32)
    whole, cpu = architecture_of(AutoConfig.from_pretrained(folder)), torch.device("cpu")
    part = DecoderWeights(whole, torch.float32, cpu, TensorParallel(0, 2))
    held = sum(tensor.nbytes for tensor in part.tensors())
    assert told == [pytest.approx(held, rel=0.02)]
