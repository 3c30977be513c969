"""DTensors of every placement, seen from each rank in turn; no process is started."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Along
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from m2flow.runtime.weights.boxes import Box
from m2flow.runtime.weights.manifest import (
    ManifestError,
    describe,
    local_tensor,
    merged,
    wanted_boxes,
)
from m2flow.runtime.weights.transfers import Assembler, transfers


def seen_from_each_rank(mesh_shape, make):
    """Rank -> what `make(mesh)` gives there."""
    assert not dist.is_initialized()
    size = 1
    for length in mesh_shape:
        size *= length
    seen = {}
    for rank in range(size):
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        try:
            seen[rank] = make(init_device_mesh("cpu", mesh_shape))
        finally:
            dist.destroy_process_group()
    return seen


CASES = [
    ((4,), (12, 5), [Along(0)]),
    ((4,), (10, 5), [Along(0)]),  # 3, 3, 3, 1
    ((4,), (5, 3), [Along(0)]),  # 2, 2, 1, 0
    ((4,), (1, 3), [Along(0)]),
    ((4,), (3, 10), [Along(1)]),
    ((4,), (7,), [Replicate()]),
    ((2, 3), (7, 8), [Along(0), Along(1)]),
    ((2, 3), (7, 8), [Along(1), Along(0)]),
    ((2, 3), (13, 2), [Along(0), Along(0)]),
    ((2, 3), (7, 8), [Replicate(), Along(0)]),
    ((2, 3), (7, 8), [Along(1), Replicate()]),
    ((2, 2), (8, 3), [_StridedShard(0, split_factor=2), Along(0)]),
    ((2, 2), (9, 3), [_StridedShard(0, split_factor=2), Along(0)]),
    ((2, 2, 2), (8, 6, 3), [Along(2), Along(0), Along(1)]),
]


@pytest.mark.parametrize(("mesh_shape", "shape", "placements"), CASES)
def test_each_rank_holds_what_its_box_says(mesh_shape, shape, placements):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)

    def make(mesh):
        tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        return describe({"w": tensor}), {"w": local_tensor(tensor)}

    seen = seen_from_each_rank(mesh_shape, make)
    layouts = {rank: layout for rank, (layout, _) in seen.items()}
    for layout, local in seen.values():
        assert torch.equal(local["w"], layout.held["w"].box.of(whole))
        assert layout.held["w"].global_shape == shape
    for wanted in (
        wanted_boxes(merged(layouts), None),
        {"w": Box((0, 0, 0)[: len(shape)], (shape[0] // 2, *shape[1:]))},
        {"w": Box((shape[0] // 2, 0, 0)[: len(shape)], (shape[0] - shape[0] // 2, *shape[1:]))},
    ):
        plan = transfers(layouts, wanted)
        pieces = [(t, t.source.of(seen[t.lane][1][t.name])) for t in plan]
        got = Assembler().assemble(wanted, merged(layouts), pieces)
        assert torch.equal(got["w"], wanted["w"].of(whole))


def test_rows_that_do_not_lie_side_by_side_are_refused():
    def make(mesh):
        tensor = distribute_tensor(
            torch.arange(8), mesh, [_StridedShard(0, split_factor=2)], src_data_rank=None
        )
        assert local_tensor(tensor).tolist() != list(range(4))
        with pytest.raises(ManifestError, match=r"w: this rank's part .* is not one block"):
            describe({"w": tensor})

    seen_from_each_rank((2,), make)


def test_partial_sums_are_refused():
    def make(mesh):
        tensor = DTensor.from_local(torch.ones(4), mesh, [Partial()])
        with pytest.raises(ManifestError, match="w: holds partial sums"):
            describe({"w": tensor})

    seen_from_each_rank((2,), make)


def test_tied_parameters_of_a_sharded_model_are_one():
    def make(mesh):
        table = distribute_tensor(torch.ones(4, 2), mesh, [Along(0)], src_data_rank=None)
        return describe({"embed": table, "head": table})

    for layout in seen_from_each_rank((2,), make).values():
        assert list(layout.held) == ["embed"]
        assert layout.tied == {"head": "embed"}
