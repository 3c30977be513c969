"""Context switching on a real device; skipped where there is none."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from m2flow.flow import Place
from m2flow.runtime.lane.state import MovableState, module_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

DEVICE = "cuda:0"


def model_and_state(layers: int = 100) -> tuple[nn.Module, MovableState]:
    """Layers of 4 MB."""
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(layers)]).to(DEVICE)
    return model, MovableState(lambda: module_tensors(model), Place(device=DEVICE))


def free_bytes() -> int:
    return int(torch.cuda.mem_get_info(DEVICE)[0])


def test_device_memory_is_given_back_and_every_bit_returns() -> None:
    model, state = model_and_state()
    expected = [tensor.cpu() for tensor in model.state_dict().values()]
    for _ in range(2):
        before = free_bytes()
        state.offload()
        assert free_bytes() - before > 0.95 * state.nbytes()
        state.onload()
        for tensor, wanted in zip(model.state_dict().values(), expected, strict=True):
            assert torch.equal(tensor.cpu(), wanted)


def test_work_still_queued_is_part_of_what_is_put_away() -> None:
    model, state = model_and_state(4)
    weight = model[0].weight.detach()
    expected = weight.cpu() + 100
    for _ in range(100):
        weight += 1
    state.offload()
    state.onload()
    torch.testing.assert_close(weight.cpu(), expected)


def test_one_state_returns_while_another_computes() -> None:
    here, _ = model_and_state(8)
    away, state = model_and_state()
    expected = [tensor.cpu() for tensor in away.state_dict().values()]
    state.offload()
    mover = threading.Thread(target=state.onload)
    input_BE = torch.randn(4096, 1024, device=DEVICE)
    with torch.no_grad():
        wanted = here(input_BE)
        mover.start()
        found = [here(input_BE) for _ in range(50)]
    mover.join()
    assert all(torch.equal(output, wanted) for output in found)
    for tensor, kept in zip(away.state_dict().values(), expected, strict=True):
        assert torch.equal(tensor.cpu(), kept)
