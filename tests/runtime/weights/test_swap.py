"""Installing into modules: all or nothing, tied parameters stay tied."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from m2flow.runtime.weights.swap import WeightsDoNotFit, copy_parameters, swap_parameters


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def received(module, tied=True):
    state = {
        name: torch.randn_like(t.float()).to(t.dtype) for name, t in module.state_dict().items()
    }
    state["head.weight"] = state["embed.weight"]
    if not tied:
        del state["head.weight"]
    return state


@pytest.mark.parametrize("tied", [True, False])
def test_swap_stands_on_the_received_tensors(tied):
    module = Tied()
    parameters = list(module.parameters())
    weights = received(module, tied)
    swap_parameters(module, weights)
    assert module.embed.weight.data_ptr() == weights["embed.weight"].data_ptr()
    assert module.norm.running_mean.data_ptr() == weights["norm.running_mean"].data_ptr()
    assert module.head.weight is module.embed.weight
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    assert all(parameter.requires_grad for parameter in parameters)


def test_swap_lets_go_of_the_version_before():
    module = Tied()
    weights = received(module)
    swap_parameters(module, weights)
    storage = weakref.ref(weights["embed.weight"].untyped_storage())
    del weights
    gc.collect()
    assert module.embed.weight.untyped_storage().nbytes() == 60
    swap_parameters(module, received(module))
    gc.collect()
    assert storage() is None


@pytest.mark.parametrize("tied", [True, False])
def test_copy_keeps_the_modules_own_memory(tied):
    module = Tied()
    address = module.embed.weight.data_ptr()
    weights = received(module, tied)
    weights = {
        name: tensor.bfloat16() if name == "norm.weight" else tensor
        for name, tensor in weights.items()
    }
    copy_parameters(module, weights)
    assert module.embed.weight.data_ptr() == address
    assert all(torch.equal(module.state_dict()[name], weights[name]) for name in weights)
    assert module.norm.weight.dtype == torch.float32


def changed(name, tensor):
    return lambda weights: weights | {name: tensor}


@pytest.mark.parametrize("install", [swap_parameters, copy_parameters])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda weights: {n: t for n, t in weights.items() if n != "norm.bias"},
            "1 of 7 .*norm.bias",
        ),
        (changed("norm.wieght", torch.ones(3)), "did you mean 'norm.weight'"),
        (changed("norm.bias", torch.ones(4)), r"norm.bias: has shape \[4\].*expected \[3\]"),
        (changed("head.weight", torch.ones(5, 3)), "head.weight: is tied to 'embed.weight'"),
        (changed("norm.bias", torch.ones(3).double()), "is torch.float64; expected torch.float32"),
    ],
)
def test_nothing_is_touched_if_one_is_wrong(install, spoil, message):
    module = Tied()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    weights = spoil(received(module))
    if install is copy_parameters and "float64" in message:
        copy_parameters(module, weights)
        return
    with pytest.raises(WeightsDoNotFit, match=message):
        install(module, weights)
    assert all(torch.equal(module.state_dict()[name], before[name]) for name in before)
