"""An independent, slow OpenVLA: loops over items, heads and tokens, from the weights by name.

It shares no code with the package or with timm and transformers: plain tensor operations on the
published names, one observation at a time, without padding, cache or batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

Weights = Mapping[str, Tensor]
MEANS = ((0.484375, 0.455078125, 0.40625), (0.5, 0.5, 0.5))
STDS = ((0.228515625, 0.2236328125, 0.224609375), (0.5, 0.5, 0.5))


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def layer_norm(weights: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int, visible: Tensor | None) -> Tensor:
    size = q.shape[-1] // heads
    parts = []
    for head in range(heads):
        at = slice(head * size, (head + 1) * size)
        scores = q[:, at] @ k[:, at].T / math.sqrt(size)
        if visible is not None:
            scores = scores.masked_fill(~visible, -math.inf)
        parts.append(scores.softmax(-1) @ v[:, at])
    return torch.cat(parts, dim=-1)


def tower(weights: Weights, name: str, picture: Tensor, heads: int, patch: int) -> Tensor:
    """[3, H, W] to the patches of the second-to-last block."""
    weights = {k.removeprefix(f"{name}."): v for k, v in weights.items() if k.startswith(name)}
    rows = picture.shape[1] // patch
    kernel = weights["patch_embed.proj.weight"].flatten(1)
    patches = torch.stack(
        [
            kernel @ picture[:, r * patch : (r + 1) * patch, c * patch : (c + 1) * patch].flatten()
            for r in range(rows)
            for c in range(rows)
        ]
    )
    x = patches + weights["patch_embed.proj.bias"] + weights["pos_embed"][0]
    extra = [weights[k][0] for k in ("cls_token", "reg_token") if k in weights]
    x = torch.cat([*extra, x])
    depth = 1 + max(int(k.split(".")[1]) for k in weights if k.startswith("blocks."))
    for i in range(depth - 1):  # the last block does not count
        at = f"blocks.{i}"
        q, k, v = linear(
            weights, f"{at}.attn.qkv", layer_norm(weights, f"{at}.norm1", x, 1e-6)
        ).chunk(3, dim=-1)
        y = linear(weights, f"{at}.attn.proj", attention(q, k, v, heads, None))
        x = x + y * weights.get(f"{at}.ls1.scale_factor", torch.ones(()))
        y = gelu(linear(weights, f"{at}.mlp.fc1", layer_norm(weights, f"{at}.norm2", x, 1e-6)))
        y = linear(weights, f"{at}.mlp.fc2", y)
        x = x + y * weights.get(f"{at}.ls2.scale_factor", torch.ones(()))
    return x[len(torch.cat(extra)) if extra else 0 :]


def rms_norm(weight: Tensor, x: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, heads: int) -> Tensor:
    size = x.shape[-1] // heads
    out = x.clone()
    for position in range(x.shape[0]):
        for head in range(heads):
            for i in range(size // 2):
                angle = position * 10000.0 ** (-2 * i / size)
                a, b = head * size + i, head * size + i + size // 2
                cos, sin = math.cos(angle), math.sin(angle)
                out[position, a] = x[position, a] * cos - x[position, b] * sin
                out[position, b] = x[position, b] * cos + x[position, a] * sin
    return out


def llama(weights: Weights, x: Tensor, heads: int, visible: Tensor) -> Tensor:
    name = "language_model.model"
    depth = 1 + max(int(k.split(".")[3]) for k in weights if k.startswith(f"{name}.layers."))
    for i in range(depth):
        at = f"{name}.layers.{i}"
        y = rms_norm(weights[f"{at}.input_layernorm.weight"], x)
        q, k, v = (linear(weights, f"{at}.self_attn.{n}_proj", y) for n in "qkv")
        y = attention(rotate(q, heads), rotate(k, heads), v, heads, visible)
        x = x + linear(weights, f"{at}.self_attn.o_proj", y)
        y = rms_norm(weights[f"{at}.post_attention_layernorm.weight"], x)
        gate = linear(weights, f"{at}.mlp.gate_proj", y)
        y = gate * torch.sigmoid(gate) * linear(weights, f"{at}.mlp.up_proj", y)
        x = x + linear(weights, f"{at}.mlp.down_proj", y)
    return rms_norm(weights[f"{name}.norm.weight"], x)


def pixels(picture: np.ndarray, size: int) -> list[Tensor]:
    """Pillow's resizing, then one normalisation per tower."""
    resized = Image.fromarray(picture).resize((size, size), Image.Resampling.BICUBIC)
    scaled = torch.tensor(np.array(resized), dtype=torch.float32) / 255
    return [
        ((scaled - torch.tensor(mean)) / torch.tensor(std)).permute(2, 0, 1)
        for mean, std in zip(MEANS, STDS, strict=True)
    ]


def prompt_embeddings(
    weights: Weights, config: Mapping[str, Any], ids: list[int], pictures: list[Tensor]
) -> Tensor:
    """Begin token, patches of all cameras, the rest; `pictures` alternate between the towers."""
    patch = weights["vision_backbone.featurizer.patch_embed.proj.weight"].shape[-1]
    heads = [overrides.get("num_heads", 16) for overrides in config["timm_overrides"]]
    names = ("vision_backbone.featurizer", "vision_backbone.fused_featurizer")
    cameras = []
    for first in range(0, len(pictures), 2):
        both = [tower(weights, names[i], pictures[first + i], heads[i], patch) for i in range(2)]
        x = torch.cat(both, dim=-1)
        x = gelu(linear(weights, "projector.fc1", x))
        x = gelu(linear(weights, "projector.fc2", x))
        cameras.append(linear(weights, "projector.fc3", x))
    words = weights["language_model.model.embed_tokens.weight"][ids]
    return torch.cat([words[:1], *cameras, words[1:]])


def bin_logprobs(weights: Weights, hidden: Tensor, vocabulary: int, bins: int = 256) -> Tensor:
    """Log-probabilities [..., bins] over the last ids of the vocabulary."""
    logits = hidden @ weights["language_model.lm_head.weight"].T
    return F.log_softmax(logits[..., vocabulary - bins : vocabulary], dim=-1)


def openvla_logprobs(
    weights: Weights, config: Mapping[str, Any], prefix: Tensor, tokens: list[int]
) -> Tensor:
    """Autoregressive: [A, bins], each row given the tokens before it; everything anew each time."""
    heads = config["text_config"]["num_attention_heads"]
    vocabulary = config["text_config"]["vocab_size"] - config["pad_to_multiple_of"]
    rows = []
    for count in range(len(tokens)):
        words = weights["language_model.model.embed_tokens.weight"][tokens[:count]]
        x = torch.cat([prefix, words])
        visible = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        rows.append(bin_logprobs(weights, llama(weights, x, heads, visible)[-1], vocabulary))
    return torch.stack(rows)


def oft_hidden(
    weights: Weights, config: Mapping[str, Any], prefix: Tensor, count: int, *, causal: bool = False
) -> Tensor:
    """Parallel: the hidden states [count, E] that predict the action tokens."""
    heads = config["text_config"]["num_attention_heads"]
    empty = torch.zeros(count, prefix.shape[1])
    stop = weights["language_model.model.embed_tokens.weight"][2:3]
    x = torch.cat([prefix, empty, stop])
    visible = torch.ones(len(x), len(x), dtype=torch.bool)
    if causal:  # what must not be: the actions see nothing behind themselves
        visible = visible.tril()
    hidden = llama(weights, x, heads, visible)
    return hidden[len(prefix) - 1 : len(prefix) - 1 + count]
