"""One of two ranks: shards a model, exports it, broadcasts; run by test_two_ranks.py."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from m2flow.runtime.weights.bits import same_bits
from m2flow.runtime.weights.buckets import broadcast_in_buckets
from m2flow.runtime.weights.layout import describe, local_tensor
from m2flow.runtime.weights.swap import WeightsDoNotFit, copy_parameters, swap_parameters


class Model(nn.Module):
    """Sizes that two ranks cannot split evenly, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.up = nn.Linear(5, 9)
        self.down = nn.Linear(9, 5)
        self.gate = nn.Parameter(torch.randn(1))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.gate * self.down(self.up(self.embed(tokens)).relu()))


def trained(model: nn.Module) -> None:
    """One step of gradient descent; torch's own optimizers import its compiler first."""
    model(torch.arange(7)).square().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def export(folder: Path, rank: int) -> None:
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained(model)
    weights = model.state_dict()
    local = {name: local_tensor(value) for name, value in weights.items()}
    torch.save((describe(weights), local), folder / f"export{rank}.pt")

    # And back: into the shards, in place; a sharded model cannot stand on a received tensor.
    copy_parameters(model, {name: tensor + 1 for name, tensor in local.items()})
    after = {name: local_tensor(value) for name, value in model.state_dict().items()}
    assert all(torch.equal(after[name], local[name]) for name in local)
    try:
        swap_parameters(model, local)
    except WeightsDoNotFit as refusal:
        assert "use copy_parameters" in str(refusal)  # noqa: PT017
    else:
        raise AssertionError("swapped under a sharded model")


def broadcast(rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float16]
    shapes = [(), (0,), (3,), (100, 7), (5000,), (1, 1), (33, 65)]
    sent = [
        torch.randn(shape, generator=generator).to(dtype) for dtype in dtypes for shape in shapes
    ]
    sent.append(torch.randn(40, 30, generator=generator).T)
    sent[3][0, 0] = -0.0
    sent[3][0, 1] = float("nan")
    for bucket_bytes in (64, 1024, 1 << 20):
        mine = sent if rank == 1 else [torch.zeros_like(tensor) for tensor in sent]
        kept = [tensor.data_ptr() for tensor in mine]
        broadcast_in_buckets(mine, src=1, bucket_bytes=bucket_bytes)
        assert all(same_bits(a, b) for a, b in zip(mine, sent, strict=True)), bucket_bytes
        assert kept == [tensor.data_ptr() for tensor in mine]


def main(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    export(folder, rank)
    broadcast(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
