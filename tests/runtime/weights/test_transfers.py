"""Plans of transfers and what is assembled from them, against the tensor that was cut up."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.runtime.weights.boxes import Box
from m2flow.runtime.weights.manifest import (
    ManifestError,
    Shard,
    TensorManifest,
    TensorPart,
    describe,
    local_tensor,
    merged,
    wanted_boxes,
)
from m2flow.runtime.weights.transfers import Assembler, transfers

from .random_layouts import boxes, shapes, sources, tensor_of


def cells(box: Box) -> set[tuple[int, ...]]:
    spans = (range(a, b) for a, b in zip(box.offsets, box.ends, strict=True))
    return set(itertools.product(*spans))


@given(st.data())
def test_box_arithmetic_is_that_of_sets_of_cells(data):
    shape = data.draw(shapes)
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    common = a.intersect(b)
    assert (cells(common) if common else set()) == cells(a) & cells(b)
    rest = a.minus(b)
    assert sum(box.numel for box in rest) == len(cells(a) - cells(b))
    assert set().union(*map(cells, rest)) == cells(a) - cells(b)
    assert len(rest) <= 2 * max(1, len(shape))


def published(held, wanted, layouts=None):
    """Plan, cut, assemble: what a target gets."""
    layouts = layouts or {lane: describe(weights) for lane, weights in held.items()}
    plan = transfers(layouts, wanted)
    pieces = [(t, t.source.of(local_tensor(held[t.lane][t.name]))) for t in plan]
    return plan, Assembler().assemble(wanted, merged(layouts), pieces)


@settings(deadline=None)
@given(st.data())
def test_whatever_the_layouts_the_target_gets_its_slice(data):
    tensors = {
        f"w{i}": tensor_of(data.draw(shapes), data.draw(st.sampled_from(DTYPES))) for i in range(2)
    }
    held = data.draw(sources(tensors))
    wanted = {name: data.draw(boxes(tuple(tensor.shape))) for name, tensor in tensors.items()}
    plan, got = published(held, wanted)
    for name, box in wanted.items():
        assert torch.equal(got[name], box.of(tensors[name]))
        assert got[name].dtype == tensors[name].dtype
        targets = [cells(t.target) for t in plan if t.name == name]
        assert sum(map(len, targets)) == len(set().union(*targets)) == box.numel


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


def test_default_is_everything_whole():
    layout = TensorManifest({"a": TensorPart((2, 3), "float32", 4, Box.whole((2, 3)))}, {"b": "a"})
    assert wanted_boxes(layout, None) == {"a": Box((0, 0), (2, 3))}
    assert wanted_boxes(layout, {"b": Box((0, 0), (1, 3))}) == {"a": Box((0, 0), (1, 3))}


def test_a_region_comes_in_few_pieces():
    held = {
        0: {"w": Shard(torch.zeros(4), Box((0,), (4,)), (8,))},
        1: {"w": Shard(torch.ones(8), Box((0,), (8,)), (8,))},
    }
    plan, got = published(held, {"w": Box((0,), (8,))})
    assert [t.lane for t in plan] == [1]
    assert got["w"].tolist() == [1.0] * 8


def test_one_piece_is_passed_on_and_buffers_are_reused():
    tensor = torch.arange(8.0)
    halves = {
        0: {"w": Shard(tensor[:4], Box((0,), (4,)), (8,)), "v": tensor},
        1: {"w": Shard(tensor[4:], Box((4,), (4,)), (8,)), "v": tensor},
    }
    layouts = {lane: describe(weights) for lane, weights in halves.items()}
    wanted = wanted_boxes(merged(layouts), None)
    plan = transfers(layouts, wanted)
    pieces = [(t, t.source.of(local_tensor(halves[t.lane][t.name]))) for t in plan]
    assembler = Assembler()
    out = [assembler.assemble(wanted, merged(layouts), pieces) for _ in range(2)]
    assert out[0]["v"].data_ptr() == tensor.data_ptr()
    assert torch.equal(out[1]["w"], tensor)
    assert out[0]["w"].data_ptr() == out[1]["w"].data_ptr()


def test_tied_tensors_travel_once_and_arrive_tied():
    table = torch.arange(6.0).view(2, 3)
    held = {0: {"embed": table, "norm": torch.ones(3), "head": table.detach()}}
    layout = describe(held[0])
    assert list(layout.held) == ["embed", "norm"]
    assert layout.tied == {"head": "embed"}
    assert layout.num_bytes == 36
    plan, got = published(held, wanted_boxes(merged({0: layout}), None))
    assert [t.name for t in plan] == ["embed", "norm"]
    assert got["head"] is got["embed"]


def test_views_of_one_tensor_are_not_tied():
    fused = torch.arange(8.0).view(4, 2)
    layout = describe({"all": fused, "first": fused[:2], "flat": fused.view(-1), "t": fused.T})
    assert not layout.tied


def test_a_lane_without_elements_does_not_undo_a_tie():
    table = torch.ones(2, 2)
    empty = Box((2, 0), (0, 2))
    held = {
        0: {"embed": table, "head": table},
        1: {
            "embed": Shard(table[2:], empty, (2, 2)),
            "head": Shard(table[2:], empty, (2, 2)),
        },
    }
    layouts = {lane: describe(weights) for lane, weights in held.items()}
    assert set(layouts[1].held) == {"embed", "head"}
    assert set(merged(layouts).held) == {"embed"}


def test_refusals_name_the_tensor():
    layout = TensorManifest({"model.norm": TensorPart((4,), "float32", 4, Box((0,), (2,)))})
    with pytest.raises(ManifestError, match=r"model\.nrom: .*did you mean 'model\.norm'"):
        wanted_boxes(merged({0: layout}), {"model.nrom": Box.whole((4,))})
    with pytest.raises(ManifestError, match=r"model\.norm: the box asked for does not fit"):
        wanted_boxes(merged({0: layout}), {"model.norm": Box.whole((5,))})
    with pytest.raises(
        ManifestError, match=r"model\.norm: 2 of the 4 elements wanted are on no lane"
    ):
        transfers({0: layout}, {"model.norm": Box.whole((4,))})
    longer = TensorManifest({"model.norm": TensorPart((5,), "float32", 4, Box((0,), (2,)))})
    with pytest.raises(ManifestError, match="lane 0 says global_shape"):
        merged({0: layout, 1: longer})
    with pytest.raises(ManifestError, match="weights must be tensors"):
        describe({"w": [1.0]})
    with pytest.raises(ManifestError, match="shard of shape"):
        describe({"w": Shard(torch.zeros(3), Box((0,), (2,)), (4,))})


def calls_of_a_plan(lanes, names):
    """How many calls, of Python's functions and of C's, planning takes; a lane has one row."""
    layouts = {
        lane: TensorManifest(
            {
                f"w{i}": TensorPart((lanes, 8), "bfloat16", 2, Box((lane, 0), (1, 8)))
                for i in range(names)
            }
        )
        for lane in range(lanes)
    }
    calls = 0

    def count(frame, event, what):
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        plan = transfers(layouts, wanted_boxes(merged(layouts), None))
    finally:
        sys.setprofile(before)
    assert len(plan) == lanes * names
    return calls


def test_planning_for_many_lanes_grows_with_what_is_sent():
    """Four times the lanes, or the tensors, are four times the work, and not the square of it."""
    some = calls_of_a_plan(16, 16)
    assert some < 300 * 16 * 16
    assert calls_of_a_plan(64, 16) < 5 * some
    assert calls_of_a_plan(16, 64) < 5 * some
