"""A small OpenVLA of the published structure and key names, made on the spot.

For tests and for learning on two CPU cores. Its tokenizer knows the words of the instructions that
it is made for; the vocabulary ends in the action bins and is padded to a multiple, as in the
published checkpoints. Weights are random: it acts sensibly after behaviour cloning only.

With the usual small initial weights (deviation 0.02) the last hidden state of so narrow a network
hardly depends on the picture, by 3 % of its size, and cloning does not get beyond one of the things
at random. So the weights are drawn large enough to keep the size of what passes through them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from m2flow.models.policies.vla.autoregressive import OpenVLAPolicy
from m2flow.models.policies.vla.config import VLAConfig
from m2flow.models.policies.vla.heads import L1Head, ProprioProjector
from m2flow.models.policies.vla.openvla import OpenVLA
from m2flow.models.policies.vla.parallel import OpenVLAOFTPolicy
from m2flow.models.policies.vla.policy import VLAOptions
from m2flow.models.policies.vla.prompts import PromptTokenizer, prompt

_PADDING = 64
_SPECIAL = ("<unk>", "<s>", "</s>", "\N{LOWER ONE EIGHTH BLOCK}")
_PATCH = 8
_DECODER_STD, _TOWER_STD, _POSITION_STD = 0.15, 0.15, 0.5


def tiny_tokenizer_json(instructions: Sequence[str]) -> str:
    """Return a `tokenizer.json` with one token per word and punctuation mark of the prompts."""
    words = {word for text in instructions for word in re.findall(r"\w+|[^\w\s]+", prompt(text))}
    vocabulary = {token: i for i, token in enumerate([*_SPECIAL, *sorted(words)])}
    added = [
        {
            "id": vocabulary[token],
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token in _SPECIAL[:3]
    ]
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
        }
    )


def tiny_config(
    words: int,
    norm_stats: Mapping[str, Any],
    *,
    image_size: int = 32,
    hidden: int = 64,
    layers: int = 3,
    heads: int = 4,
    vision_width: int = 32,
    vision_depth: int = 2,
    bins: int = 256,
) -> VLAConfig:
    """Return the configuration of a small model with `words` tokens beside the action bins."""
    vocabulary = words + bins
    rows = -(-(vocabulary + 1) // _PADDING) * _PADDING
    tower = {
        "patch_size": _PATCH,
        "embed_dim": vision_width,
        "depth": vision_depth,
        "num_heads": 2,
        "mlp_ratio": 2.0,
    }
    return VLAConfig.of(
        {
            "model_type": "openvla",
            "architectures": ["OpenVLAForActionPrediction"],
            "arch_specifier": "no-align+fused-gelu-mlp",
            "hf_llm_id": "m2flow/tiny",
            "image_resize_strategy": "resize-naive",
            "image_sizes": [image_size, image_size],
            "n_action_bins": bins,
            "norm_stats": norm_stats,
            "pad_to_multiple_of": rows - vocabulary,
            "pad_token_id": vocabulary,
            "text_config": {
                "model_type": "llama",
                "vocab_size": rows,
                "hidden_size": hidden,
                "intermediate_size": 3 * hidden,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "pad_token_id": vocabulary,
                "initializer_range": _DECODER_STD,
            },
            "timm_model_ids": [
                "vit_large_patch14_reg4_dinov2.lvd142m",
                "vit_so400m_patch14_siglip_224",
            ],
            "timm_override_act_layers": [None, None],
            # DINOv2's layer scale begins at 1e-5, which a tower trained from nothing cannot use.
            "timm_overrides": [{**tower, "init_values": 1.0}, tower],
            "use_fused_vision_backbone": True,
        }
    )


def unit_statistics(action_size: int, state_size: int | None = None) -> dict[str, Any]:
    """Return statistics under which actions (and robot states) are their own scale."""

    def bounds(size: int) -> dict[str, list[float]]:
        return {"q01": [-1.0] * size, "q99": [1.0] * size}

    action = {**bounds(action_size), "mask": [True] * action_size}
    return {"action": action} | ({} if state_size is None else {"proprio": bounds(state_size)})


def tiny_openvla(
    instructions: Sequence[str],
    statistics: Mapping[str, Any],
    options: VLAOptions | None = None,
    *,
    parallel: bool = False,
    l1: bool = False,
    seed: int = 0,
    **sizes: int,
) -> OpenVLAPolicy | OpenVLAOFTPolicy:
    """Make a small policy with random weights.

    Args:
        instructions: those that it will be given, so that their words are known.
        statistics: scale of actions, see `unit_statistics`; with a field "proprio" a policy of
            parallel decoding reads the robot's state.
        options: see `VLAOptions`.
        parallel: decode as OpenVLA-OFT does.
        l1: with the regression head instead of the bins; needs `parallel`.
        seed: of the weights.
        sizes: see `tiny_config`.
    """
    tokenizer = PromptTokenizer(tiny_tokenizer_json(instructions), Path("tiny"))
    config = tiny_config(tokenizer.size, {"tiny": dict(statistics)}, **sizes)
    options = options or VLAOptions()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = OpenVLA(config)
        _draw_large(model)
        if not parallel:
            return OpenVLAPolicy(model, tokenizer, options)
        width = model.embedding_size
        projector = None
        if "proprio" in statistics:
            projector = ProprioProjector(len(statistics["proprio"]["q01"]), width)
        head = L1Head(width, len(statistics["action"]["q01"])) if l1 else None
        return OpenVLAOFTPolicy(model, tokenizer, options, projector, head)


@torch.no_grad()
def _draw_large(model: OpenVLA) -> None:
    """Draw the weights of towers and projector anew; see the module docstring."""
    towers = model.vision_backbone
    for tower in (towers.featurizer, towers.fused_featurizer):
        tower.pos_embed.normal_(0, _POSITION_STD)
        for module in tower.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, _TOWER_STD)
    for layer in (model.projector.fc1, model.projector.fc2, model.projector.fc3):
        nn.init.kaiming_normal_(layer.weight)
        nn.init.zeros_(layer.bias)
