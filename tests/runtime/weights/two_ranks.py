"""One of two ranks: shards a model and exports it; run by test_two_ranks.py."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from m2flow.runtime.weights.manifest import describe, local_tensor


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


def main(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    export(folder, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
