"""LoRA on causal language models by peft: adapters on the linear layers of every block.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685: a frozen weight
`W` acts as `W + alpha / rank * B A`. Only `A` and `B` are trained, so an optimizer holds 18 bytes
for each of their numbers and none for the model's. Whoever is given the weights gets the sum, under
the names of the model that was adapted; or the adapters alone, to add them to the model that they
stand on (`Summed`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from m2flow.errors import UserError
from m2flow.runtime.weights.manifest import is_dtensor, local_tensor

ROUTERS = ("gate", "router", "shared_expert_gate")
"""Linear layers of a block that choose experts; they are not adapted, and experts are not."""

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
    names = adapted_layers(model)
    if not names:
        raise UserError(
            "the model has no blocks with linear layers, which LoRA adapts",
            key="model.lora_rank",
            value=rank,
            hint="take it out to train all weights",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LoraConfig(
            r=rank,
            lora_alpha=2 * rank if alpha is None else alpha,
            target_modules=[f"whole.{name}" for name in names],
        )
        # By a model's type peft would take names of dense layers for those of fused experts: it is
        # given a module that has no type.
        inject_adapter_in_model(config, nn.ModuleDict({"whole": model}))
    adapted = {name.partition(_ADAPTER)[0] for name in adapter_weights(model)}
    assert adapted == set(names), f"peft has adapted other layers: {adapted ^ set(names)}"


def adapted_layers(model: nn.Module) -> list[str]:
    """The names of the linear layers of a model's blocks, which are numbered in its names."""

    def is_adapted(name: str) -> bool:
        *outside, last = name.split(".")
        in_block = any(part.isdigit() for part in outside)
        return in_block and "experts" not in outside and last not in ROUTERS

    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and is_adapted(name)
    ]


def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a model's state dict, adapters added to what they adapt; any model will do.

    Of a divided model tensors are DTensors, and going through them is collective in the gang.
    """
    for name, tensor in model.state_dict().items():
        module, adapted, kind = name.rpartition(_BASE)
        if _ADAPTER in name:
            continue
        if adapted and kind == "weight":
            tensor = _added(tensor, _delta(model.get_submodule(module), tensor))
        yield (f"{module}.{kind}" if adapted else name), tensor


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's adapters alone, as `MODULE.lora_A.weight` and `lora_B`.

    Of a divided model some are DTensors; nothing here is collective.
    """
    return {
        name.replace(".default.", "."): tensor
        for name, tensor in model.state_dict().items()
        if _ADAPTER in name
    }


class Summed(Mapping[str, Tensor]):
    """A model's tensors with adapters added, each summed up whenever it is asked for.

    No more than one sum need be in memory at a time. Equal to what `merged_weights` gives of the
    same model on the same kind of device. Whoever wants to know names, shapes or dtypes alone asks
    `unsummed`, and no sum is taken for it.

    Args:
        base: every tensor of the model that the adapters stand on, by its name.
        adapters: what `adapter_weights` gives, whole.
        scale: of their products.
        device: where sums are taken.

    Raises:
        ValueError: an adapter stands on nothing here, lacks its other half, or has another shape.
    """

    def __init__(
        self,
        base: Mapping[str, Tensor],
        adapters: Mapping[str, Tensor],
        scale: float,
        device: torch.device | str = "cpu",
    ) -> None:
        self.base, self._adapters, self._scale, self._device = base, adapters, scale, device
        self._adapted = {f"{name.partition(_ADAPTER)[0]}.weight" for name in adapters}
        pairs = {name for one in self._adapted for name in _pair(one)}
        if unknown := sorted((self._adapted - base.keys()) | (pairs ^ adapters.keys())):
            raise ValueError(f"adapters do not fit the model: {unknown}")
        if wrong := sorted(name for name in self._adapted if not self._fits(name)):
            raise ValueError(f"adapters do not fit the shapes of the model: {wrong}")

    def _fits(self, name: str) -> bool:
        a, b = (self._adapters[half] for half in _pair(name))
        return a.shape[0] == b.shape[1] and self.base[name].shape == (b.shape[0], a.shape[1])

    def __contains__(self, name: object) -> bool:
        return name in self.base

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.base[name]
        if name not in self._adapted:
            return tensor
        a, b = (self._adapters[half].to(self._device) for half in _pair(name))
        return _added(tensor.to(self._device), _product(a, b, self._scale))

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)


def unsummed(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Tensors with the names, shapes and dtypes of any weights, for which no sum is taken."""
    return weights.base if isinstance(weights, Summed) else weights


def _pair(name: str) -> tuple[str, str]:
    """The names of the two halves of a weight's adapter."""
    module = name.removesuffix(".weight")
    return f"{module}{_ADAPTER}A.weight", f"{module}{_ADAPTER}B.weight"


def _product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    wide = torch.promote_types(a.dtype, torch.float32)
    return (b.to(wide) @ a.to(wide)) * scale


def _added(weight: Any, delta: Any) -> Any:
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + delta.to(wide)).to(weight.dtype)


def _delta(layer: Any, weight: Any) -> Any:
    """What an adapter adds to a weight, laid out as that is."""
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    scale = layer.scaling["default"]
    if is_dtensor(a) == is_dtensor(b):
        return _product(a, b, scale)
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        _product(local_tensor(a), local_tensor(b), scale),  # one divided as the weight is
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
