"""Folders of OpenVLA and OpenVLA-OFT: read without running their code, written in their layout.

| file | content |
|---|---|
| `config.json` | structure, `norm_stats` |
| `model*.safetensors` | the network, names as `OpenVLA.state_dict()` gives them |
| `tokenizer.json` | the tokenizer |
| `dataset_statistics.json` | statistics of a fine-tuned checkpoint; added to `norm_stats` |
| `action_head*`, `proprio_projector*` | OpenVLA-OFT's heads, `.pt` as published or `.safetensors` |
| `value_head.safetensors` | the critic of a checkpoint that m2flow wrote |

The published `.pt` files are read with `weights_only`, which runs no code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from m2flow.errors import UserError
from m2flow.models.folder import checked_folder, read_json, weight_files
from m2flow.models.policies.vla.autoregressive import OpenVLAPolicy
from m2flow.models.policies.vla.config import VLAConfig
from m2flow.models.policies.vla.heads import L1Head, ProprioProjector
from m2flow.models.policies.vla.openvla import OpenVLA
from m2flow.models.policies.vla.parallel import OpenVLAOFTPolicy
from m2flow.models.policies.vla.policy import VLAOptions, VLAPolicy
from m2flow.models.policies.vla.prompts import PromptTokenizer

Head = Literal["discrete", "l1"]
M = TypeVar("M", bound=nn.Module)
_SHARD_BYTES = 5 * 10**9


def load_config(folder: str | Path) -> VLAConfig:
    """Read the structure and the statistics of a checkpoint."""
    path = Path(folder)
    raw = read_json(path / "config.json", "the architecture")
    statistics = path / "dataset_statistics.json"
    if statistics.is_file():
        own = read_json(statistics, "the scale of actions")
        raw["norm_stats"] = {**raw.get("norm_stats", {}), **own}
    return VLAConfig.of(raw, f"{path}/config.json")


def load_openvla(
    folder: str | Path, options: VLAOptions | None = None, dtype: torch.dtype = torch.bfloat16
) -> OpenVLAPolicy:
    """Load an OpenVLA checkpoint as a policy that decodes token by token."""
    options = options or VLAOptions()
    path = checked_folder(folder)
    load_config(path).statistics(options.statistics)  # refused before weights are read
    for part in ("action_head", "proprio_projector"):
        _refuse_unread(path, part, "kind", "openvla", "openvla-oft")
    model, tokenizer = _load_model(path, dtype)
    policy = OpenVLAPolicy(model, tokenizer, options)
    _load_value_head(policy, path)
    return policy


def load_openvla_oft(
    folder: str | Path,
    options: VLAOptions | None = None,
    *,
    head: Head = "discrete",
    proprioception: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> OpenVLAOFTPolicy:
    """Load an OpenVLA-OFT checkpoint as a policy that decodes chunks in parallel.

    Args:
        folder: the checkpoint.
        options: `chunk` is 8 where nothing is given, as on LIBERO.
        head: "discrete" for action bins (Haozhan72/Openvla-oft-SFT-libero*), "l1" for regression
            (moojink/openvla-7b-oft-finetuned-libero-*).
        proprioception: whether the robot's state is read; needs `proprio_projector*`.
        dtype: of the network and its heads.
    """
    if head not in ("discrete", "l1"):
        raise UserError("unknown head", key="head", value=head, expected="discrete or l1")
    path = checked_folder(folder)
    options = options or VLAOptions(chunk=8)
    statistics = load_config(path).statistics(options.statistics)
    if not proprioception:
        _refuse_unread(path, "proprio_projector", "proprioception", False, "true")
    if head != "l1":
        hint = "to be trained it wants to decode tokens, as Haozhan72/Openvla-oft-SFT-* do"
        _refuse_unread(path, "action_head", "head", head, "l1, which evaluates it", hint)
    model, tokenizer = _load_model(path, dtype)
    projector = l1_head = None
    if proprioception:
        weights = _head_weights(path, "proprio_projector")
        size = weights["fc1.weight"].shape[1]
        projector = _filled(ProprioProjector(size, model.embedding_size), weights, path, dtype)
    if head == "l1":
        weights = _head_weights(path, "action_head")
        actions = len(statistics["action"]["q01"])
        l1_head = _filled(L1Head(model.embedding_size, actions), weights, path, dtype)
    policy = OpenVLAOFTPolicy(model, tokenizer, options, projector, l1_head)
    _load_value_head(policy, path)
    return policy


def _refuse_unread(
    folder: Path, part: str, key: str, value: object, expected: str, hint: str | None = None
) -> None:
    """Refuse a checkpoint that was trained with a part which the policy would not read."""
    if any(folder.glob(f"{part}*")):
        raise UserError(
            f"{folder} was trained with its {part}, which would not be read",
            key=f"policy.{key}",
            value=value,
            expected=expected,
            hint=hint,
        )


def build_empty(config: VLAConfig) -> OpenVLA:
    """Build the network without memory for its weights."""
    with torch.device("meta"):
        return OpenVLA(config)


def published_weights(
    model: OpenVLA, held: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the weights under their published names, with LoRA adapters added in.

    Args:
        model: the network.
        held: copies of its weights, in place of its own: whole, where it is divided.
    """
    adapted = {
        name: module for name, module in model.named_modules() if hasattr(module, "base_layer")
    }
    weights = {}
    for name, weight in (model.state_dict() if held is None else held).items():
        owner, _, rest = name.partition(".base_layer.")
        if rest:
            if rest == "weight":
                weight = weight + adapted[owner].get_delta_weight("default").to(weight)
            weights[f"{owner}.{rest}"] = weight
        elif ".lora_" not in name:
            weights[name] = weight
    return weights


def save_policy(
    policy: VLAPolicy, folder: str | Path, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write a policy as a checkpoint folder that `load_openvla` and `load_openvla_oft` read.

    Args:
        policy: with its tokenizer and configuration.
        folder: where to.
        weights: copies of the policy's, in place of its own: whole, where it is divided.
    """
    from safetensors.torch import save_file

    held = dict(policy.state_dict()) if weights is None else weights

    def part(name: str) -> dict[str, Tensor]:
        start = f"{name}."
        return {k.removeprefix(start): x for k, x in held.items() if k.startswith(start)}

    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    _save_sharded(published_weights(policy.model, part("model")), path)
    heads = {"value_head": "value_head", "proprio_projector": "proprio_projector",
             "action_head": "l1_head"}  # fmt: skip
    for name, attribute in heads.items():
        if tensors := {key: value.contiguous() for key, value in part(attribute).items()}:
            save_file(tensors, path / f"{name}.safetensors", metadata={"format": "pt"})
    (path / "tokenizer.json").write_text(policy.tokenizer.json, encoding="utf-8")
    # Last: a folder without config.json is no model folder, so half a checkpoint is not read.
    whole = json.dumps(dict(policy.model.config.raw), indent=2)
    temporary = path / "config.json.tmp"
    temporary.write_text(whole, encoding="utf-8")
    os.replace(temporary, path / "config.json")


def _load_model(folder: Path, dtype: torch.dtype) -> tuple[OpenVLA, PromptTokenizer]:
    from safetensors import safe_open
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = load_config(folder)
    model = build_empty(config)
    wanted = model.state_dict()
    weights: dict[str, Tensor] = {}
    for file in weight_files(folder):
        with safe_open(str(file), framework="pt") as tensors:
            weights |= {name: tensors.get_tensor(name).to(dtype) for name in tensors.keys()}  # noqa: SIM118
    check_names(wanted, weights, str(folder))
    model.load_state_dict(weights, assign=True)
    # The one buffer that checkpoints do not hold: it follows from the configuration.
    llama = model.language_model
    llama.model.rotary_emb = LlamaRotaryEmbedding(config=llama.config)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return model, PromptTokenizer.load(folder)


def check_names(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], where: str) -> None:
    """Raise a UserError if names or shapes differ; it counts and shows the first of them."""
    missing, unknown = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    shapes = [name for name in wanted if name in found and wanted[name].shape != found[name].shape]
    for names, problem in (
        (missing, "missing from"),
        (unknown, "unknown in"),
        (shapes, "of another shape in"),
    ):
        if names:
            raise UserError(
                f"{len(names)} weights are {problem} the checkpoint, the first is {names[0]}",
                key=where,
                hint="config.json and the weights belong to different models",
            )


def _head_weights(folder: Path, name: str) -> dict[str, Tensor]:
    """Read the only file of that head; published ones name their training step and wrapper."""
    files = sorted(
        file for file in folder.glob(f"{name}*") if file.suffix in {".pt", ".safetensors"}
    )
    if len(files) != 1:
        raise UserError(
            f"{len(files)} files of the head",
            key=f"{folder}/{name}*",
            expected=f"one {name}--STEP_checkpoint.pt or {name}.safetensors",
        )
    if files[0].suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(files[0])
    weights: dict[str, Any] = torch.load(files[0], map_location="cpu", weights_only=True)
    return {key.removeprefix("module."): value for key, value in weights.items()}


def _filled(module: M, weights: Mapping[str, Tensor], folder: Path, dtype: torch.dtype) -> M:
    check_names(module.state_dict(), weights, str(folder))
    module.load_state_dict(dict(weights))
    return module.to(dtype)


def _load_value_head(policy: VLAPolicy, folder: Path) -> None:
    file = folder / "value_head.safetensors"
    if policy.value_head is not None and file.is_file():
        _filled(policy.value_head, _head_weights(folder, "value_head"), folder, torch.float32)


def _save_sharded(weights: Mapping[str, Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    shards: list[dict[str, Tensor]] = [{}]
    room = _SHARD_BYTES
    for name, weight in weights.items():
        size = weight.numel() * weight.element_size()
        if size > room and shards[-1]:
            shards.append({})
            room = _SHARD_BYTES
        shards[-1][name] = weight.detach().cpu().contiguous()
        room -= size
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    where = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    total = sum(weight.numel() * weight.element_size() for weight in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
