"""FSDP2 on two processes: exported to a whole replica and to tensor-parallel parts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from m2flow.runtime.weights.boxes import Box
from m2flow.runtime.weights.manifest import TensorManifest, merged, wanted_boxes
from m2flow.runtime.weights.transfers import Assembler, transfers

from .two_ranks import Model, trained

SCRIPT = Path(__file__).with_name("two_ranks.py")


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> dict[int, tuple[TensorManifest, dict[str, torch.Tensor]]]:
    """Rank -> what it holds, and the values."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    return {rank: torch.load(folder / f"export{rank}.pt", weights_only=False) for rank in range(2)}


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    """What the same step gives on one process."""
    torch.manual_seed(0)
    model = Model()
    trained(model)
    return model.state_dict()


def published(exports, wanted):
    layouts = {rank: layout for rank, (layout, _) in exports.items()}
    plan = transfers(layouts, wanted)
    pieces = [(t, t.source.of(exports[t.lane][1][t.name])) for t in plan]
    return Assembler().assemble(wanted, merged(layouts), pieces)


def test_shards_to_a_whole_replica(exports, expected):
    layout = merged({rank: layout for rank, (layout, _) in exports.items()})
    assert layout.tied == {"head.weight": "embed.weight"}
    got = published(exports, wanted_boxes(layout, None))
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor)
    replica = Model()
    replica.load_state_dict(got)
    tokens = torch.arange(7)
    reference = Model()
    reference.load_state_dict(expected)
    torch.testing.assert_close(replica(tokens), reference(tokens))
    assert got["head.weight"] is got["embed.weight"]


@pytest.mark.parametrize("part", [0, 1])
def test_shards_to_tensor_parallel_parts(exports, expected, part):
    """Columns of the first matrix, rows of the second, the vocabulary cut unevenly."""
    rows = slice(4 * part, 4 if part == 0 else 9)
    height = rows.stop - rows.start
    wanted = {
        "up.weight": Box((rows.start, 0), (height, 5)),
        "up.bias": Box((rows.start,), (height,)),
        "down.weight": Box((0, rows.start), (5, height)),
        "head.weight": Box((2 * part, 0), (2 + 3 * part, 5)),
    }
    layout = merged({rank: layout for rank, (layout, _) in exports.items()})
    got = published(exports, wanted_boxes(layout, wanted))
    assert got.keys() == wanted.keys() | {"embed.weight"}
    for name, box in wanted.items():
        torch.testing.assert_close(got[name], box.of(expected[name]))
    assert got["head.weight"] is got["embed.weight"]
