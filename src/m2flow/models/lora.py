"""LoRA on causal language models by peft: adapters on the linear layers of every block.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685: a frozen weight
`W` acts as `W + alpha / rank * B A`. Only `A` and `B` are trained, so an optimizer holds 18 bytes
for each of their numbers and none for the model's. Whoever is given the weights gets the sum, under
the names of the model that was adapted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from m2flow.errors import UserError
from m2flow.runtime.weights.manifest import is_dtensor, local_tensor

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Layers of a block that are adapted; a mixture's experts are none of them."""

_ADAPTER, _BASE = ".lora_", ".base_layer."


def add_lora(model: nn.Module, rank: int, alpha: int | None = None, seed: int = 0) -> None:
    """Put adapters into a model, in place, and freeze everything else.

    Args:
        model: computes what it did until the adapters are trained, since `B` begins at 0.
        rank: rows of `A`.
        alpha: scale times rank; twice the rank where nothing is given.
        seed: of `A`.

    Raises:
        UserError: peft is not installed, or the model has none of the layers.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(
            f"LoRA needs {error.name}", key="model.lora_rank", hint="pip install 'm2flow[lora]'"
        ) from error
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if not names.intersection(TARGETS):
        raise UserError(
            "the model has no layer that LoRA knows",
            key="model.lora_rank",
            value=rank,
            expected=f"layers called {', '.join(TARGETS)}",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LoraConfig(
            r=rank,
            lora_alpha=2 * rank if alpha is None else alpha,
            target_modules=sorted(names.intersection(TARGETS)),
        )
        inject_adapter_in_model(config, model)


def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a model's state dict, adapters added to what they adapt; any model will do.

    Of a divided model tensors are DTensors, and going through them is collective in the gang.
    """
    for name, tensor in model.state_dict().items():
        module, adapted, kind = name.rpartition(_BASE)
        if _ADAPTER in name:
            continue
        if adapted and kind == "weight":
            delta = _delta(model.get_submodule(module), tensor)
            tensor = (tensor.float() + delta.float()).to(tensor.dtype)
        yield (f"{module}.{kind}" if adapted else name), tensor


def _delta(layer: Any, weight: Any) -> Tensor:
    """What an adapter adds to a weight, laid out as that is."""
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    if is_dtensor(a) == is_dtensor(b):
        delta: Tensor = layer.get_delta_weight("default")
        return delta
    product = local_tensor(b).float() @ local_tensor(a).float()  # one divided as the weight is
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        product * layer.scaling["default"],
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
