"""A transformers model whose layers are divided over lanes, by the plan that transformers has.

After Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3: a lane has some of the heads and
of the MLP's channels, and what it makes of them is its term of a sum over the lanes, twice a layer.
The embedding and the head are divided by rows of the vocabulary. What the plan leaves out, such as
norms, is on every lane, and computed alike there. A layer may have an adapter (LoRA by peft).
Parameters that are divided become DTensors; between layers tensors stay plain, so the model's own
code runs on this lane's heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from m2flow.errors import UserError
from m2flow.generation.causal_lms import configuration_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DIVIDED_INPUT = "replicated_with_grad_allreduce"
"""The plan's name for a layer that is whole on every lane but works on this lane's heads alone, so
that its gradient there is a term of a sum."""


def divide_layers(model: Any, mesh: DeviceMesh) -> set[str]:
    """Divide a model over a mesh of one dimension, in place.

    Args:
        model: a causal LM, or a critic of one; whole, and the same on every lane.
        mesh: the lanes.

    Returns:
        Names of the parameters of which a lane's gradient is a term of a sum over the lanes.

    Raises:
        UserError: transformers has no plan for the model, or one of another kind, or the model has
            parameters that cannot be divided so.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    body, plan = model.base_model, _plan_of(model)
    _check_parameters(model, plan)
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    layers = {
        part: styles[kind]()
        for name, kind in plan.items()
        if kind in styles
        for part in _divided_parts(body, name, kind)
    }
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    parallelize_module(body, mesh, layers, src_data_rank=None)
    by_rows = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(embedding, mesh, by_rows, src_data_rank=None)
    _own_memory(body)
    if head is not None:
        _divide_head(head, mesh, embedding.weight if tied else None)
    sums = [name for name, kind in plan.items() if kind == DIVIDED_INPUT]
    prefix = f"{model.base_model_prefix}."
    names = [name.removeprefix(prefix) for name, _ in model.named_parameters()]
    return {prefix + name for name in names if any(fnmatch(name, f"{one}.*") for one in sums)}


def check_divisible(config: Mapping[str, Any]) -> None:
    """Refuse a model that `divide_layers` refuses, told from its configuration alone.

    Args:
        config: the content of a `config.json`.

    Raises:
        UserError: as `divide_layers`, or transformers cannot build such a model.
    """
    from transformers import AutoModelForCausalLM

    known = configuration_of(config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(known, trust_remote_code=False)
    except (AssertionError, AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"transformers cannot build a model of this configuration ({error})",
            key="model_type",
            value=config.get("model_type"),
            expected="the configuration that the model was published with",
        ) from error
    _check_parameters(model, _plan_of(model))


def _plan_of(model: Any) -> dict[str, str]:
    """The body's plan: names of modules with `*` for numbers, and the style of each."""
    plan: dict[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    embedding = model.get_input_embeddings()  # divided here, whether the plan has it or not
    modules = [name for name, one in model.base_model.named_modules() if one is not embedding]
    plan = {name: kind for name, kind in plan.items() if any(fnmatch(m, name) for m in modules)}
    known = {"colwise", "rowwise", DIVIDED_INPUT}
    if not plan or set(plan.values()) - known:
        raise _refusal(model, "the layers of this kind of model cannot be divided over lanes")
    return plan


def _check_parameters(model: Any, plan: dict[str, str]) -> None:
    """Refuse what would be trained wrongly: a parameter beside divided layers, of which a lane's
    gradient is of its own heads or channels alone, where the plan does not say so; a head's bias.
    """
    body, head = model.base_model, model.get_output_embeddings()
    divided = [name for name, kind in plan.items() if kind != DIVIDED_INPUT]
    parents = {
        f"{path.rpartition('.')[0]}."
        for path, _ in body.named_modules()
        if any(fnmatch(path, name) for name in divided)
    }
    for name, _ in body.named_parameters():
        beside = name.startswith(tuple(parents))
        if beside and not any(fnmatch(name, f"{one}.*") for one in plan):
            raise _refusal(
                model, f"{name} lies between layers that are divided, and it cannot be divided"
            )
    if head is not None and head.bias is not None:
        raise _refusal(model, "a head with a bias cannot be divided over lanes")


def _refusal(model: Any, why: str) -> UserError:
    return UserError(
        why,
        key="model_type",
        value=model.config.model_type,
        expected="a dense decoder for which transformers has a tensor-parallel plan",
        hint="the layouts fsdpN divide any model",
    )


def _divided_parts(body: Any, name: str, kind: str) -> list[str]:
    """Modules of a layer that are divided as it is: it alone, or of one with an adapter two.

    `W + B A` is divided by rows in `W` and `B`, and by columns in `W` and `A`; the other factor is
    on every lane, where its gradient is whole.
    """
    adapted = any(
        hasattr(module, "lora_A") for path, module in body.named_modules() if fnmatch(path, name)
    )
    factor = "lora_B" if kind == "colwise" else "lora_A"
    return [f"{name}.base_layer", f"{name}.{factor}.default"] if adapted else [name]


def _divide_head(head: Any, mesh: DeviceMesh, tied: nn.Parameter | None) -> None:
    """Divide the head by rows of the vocabulary; its logits are gathered.

    Its own forward is replaced and no hook is set, so that whoever replaces it in turn, to compute
    logits in chunks, gives and gets plain tensors.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    if tied is None:
        divided = distribute_tensor(head.weight.data, mesh, [Shard(0)], src_data_rank=None)
        tied = nn.Parameter(_copied(divided), requires_grad=head.weight.requires_grad)
    head.weight = tied

    def forward(x: Tensor) -> Tensor:
        everywhere: Any = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        logits: Any = nn.functional.linear(everywhere, head.weight)
        whole: Tensor = logits.redistribute(placements=[Replicate()]).to_local()
        return whole

    head.forward = forward


def _own_memory(model: nn.Module) -> None:
    """Copy pieces out of the whole tensors that they were cut from, which can go then."""
    from torch.distributed.tensor import DTensor

    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                copy = nn.Parameter(_copied(parameter), requires_grad=parameter.requires_grad)
                setattr(module, name, copy)


def _copied(divided: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        divided.detach().to_local().clone(),
        divided.device_mesh,
        divided.placements,
        run_check=False,
        shape=divided.shape,
        stride=divided.stride(),
    )
