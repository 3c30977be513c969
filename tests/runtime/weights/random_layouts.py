"""Random ways to cut tensors up, for hypothesis."""

from __future__ import annotations

from itertools import pairwise, product

import torch
from hypothesis import strategies as st

from m2flow.runtime.weights.boxes import Box
from m2flow.runtime.weights.manifest import Shard, TensorManifest, TensorPart

shapes = st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple)


@st.composite
def boxes(draw, shape):
    offsets, sizes = [], []
    for size in shape:
        start = draw(st.integers(0, size))
        offsets.append(start)
        sizes.append(draw(st.integers(0, size - start)))
    return Box(tuple(offsets), tuple(sizes))


@st.composite
def tilings(draw, shape):
    """Disjoint boxes that cover a tensor: uneven cuts along every dimension."""
    cuts = []
    for size in shape:
        inner = draw(st.lists(st.integers(0, size), max_size=2))
        edges = sorted({0, size, *inner})
        cuts.append(list(pairwise(edges)) or [(0, 0)])
    return [
        Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans)) for spans in product(*cuts)
    ]


@st.composite
def sources(draw, tensors):
    """Lane -> name -> Shard: each tensor tiled over the lanes, spare lanes hold replicas."""
    lanes = draw(st.integers(1, 5))
    held = {lane: {} for lane in range(lanes)}
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        # A lane holds one box of a tensor: as many boxes as there are lanes, some of them replicas.
        tiling = draw(tilings(shape).filter(lambda t: len(t) <= lanes))
        order = draw(st.permutations(range(lanes)))
        for index, lane in enumerate(order):
            if index < len(tiling):
                box = tiling[index]
            else:
                box = draw(st.sampled_from(tiling) | boxes(shape))
            held[lane][name] = Shard(box.of(tensor), box, shape)
    return held


def tensor_of(shape, dtype=torch.float32):
    """A tensor whose elements all differ."""
    count = 1
    for size in shape:
        count *= size
    return torch.arange(1, count + 1).to(dtype).view(shape)


def replicas(lanes, shape, name="w", itemsize=4):
    """Lanes that all hold the whole of one tensor."""
    held = TensorPart(shape, "float32", itemsize, Box.whole(shape))
    return {lane: TensorManifest({name: held}) for lane in lanes}
