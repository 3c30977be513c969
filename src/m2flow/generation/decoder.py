"""A decoder of the Llama or Gemma family: prompts in, keys, values, logits out; token by token.

Computes what transformers computes, rounding included where the dtype is not float32, over the
fused weights. On a gang each lane computes its part of the heads and channels, and all get the same
logits. Knows nothing of requests, seeds or sampling.

Legend: N rows of activations (tokens), U prompts, P prompt tokens (padded), B running sequences,
K key-value heads, G query heads per key-value head, D channels of a head, E hidden size,
V vocabulary, L layers; Y = N K and X = B K heads, row by row; S = G + 2 the queries, the key and
the value of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from m2flow.generation.architecture import Architecture, architecture_of, rotation_tables
from m2flow.generation.attention import capped, prompt_attention
from m2flow.generation.kernels import (
    Rotation,
    add_norm,
    linear,
    on_device,
    padded_rows,
    rms_norm,
    silu_gate,
)
from m2flow.generation.kv_cache import CacheView
from m2flow.generation.pages import PagedView
from m2flow.generation.tensor_parallel import WHOLE, TensorParallel
from m2flow.generation.weights import DecoderWeights, LayerWeights
from m2flow.models.device import sent
from m2flow.runtime.weights.boxes import Box

Attend = Callable[[int, Tensor, Rotation], Tensor]


@dataclass(frozen=True)
class Prefilled:
    """What a prefill of U prompts leaves behind.

    Attributes:
        kv: keys and values of every token, for the cache that belongs to what computed them; of a
            `Decoder` kv_LUKPW, side by side, and beyond a prompt's length garbage.
        logits_UV: after each prompt's last token.
    """

    kv: Any
    logits_UV: Tensor


class Decoder:
    """Weights and forward passes on one device; of a gang's decoder the part that is here.

    Passes are collective in the gang.

    Attributes:
        architecture: the sizes of the part.
    """

    def __init__(
        self,
        config: Any,
        *,
        dtype: torch.dtype,
        device: torch.device,
        parallel: TensorParallel = WHOLE,
    ) -> None:
        self.dtype, self.device, self._parallel = dtype, device, parallel
        self.weights = DecoderWeights(architecture_of(config), dtype, device, parallel)
        self.architecture: Architecture = self.weights.architecture
        self._rotations = [table.to(device) for table in rotation_tables(config, dtype)]
        # As transformers has it, rounded to the weights' dtype.
        self._embedding_scale = float(torch.tensor(self.architecture.embedding_scale, dtype=dtype))

    def install(self, weights: Mapping[str, Tensor]) -> None:
        """Copies all weights; see `NativeEngine.install`."""
        self.weights.install(weights)

    def boxes(self) -> dict[str, Box]:
        """Hugging Face parameter name -> the part of it that is here."""
        return self.weights.boxes()

    @property
    def logprob_dtype(self) -> torch.dtype:
        """float64 for a float64 model, else float32."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    def tensors(self) -> list[Tensor]:
        """Weights and tables."""
        return [*self.weights.tensors(), *self._rotations]

    def prefill(
        self, prompts: Sequence[Sequence[int]], first: int = 0, kv: Tensor | None = None
    ) -> Prefilled:
        """Runs prompts, padded on the right to the longest, from one position on.

        Args:
            prompts: all of their tokens.
            first: where to begin; what is before it has been run.
            kv: kv_LUKPW, which has room for the prompts, and what was made of the positions before
                `first`; None for room of its own.
        """
        a = self.architecture
        lengths = [len(prompt) - first for prompt in prompts]
        count, width = len(prompts), max(lengths)
        num_rows = padded_rows(count * width)
        ids_N = torch.zeros(num_rows, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids_N[row * width : row * width + lengths[row]] = torch.tensor(prompt[first:])
        position_N = first + torch.arange(num_rows, device=self.device) % width
        kv_LUKPW = self.room(count, width) if kv is None else kv

        def attend(layer: int, qkv_YSD: Tensor, rotation: Rotation) -> Tensor:
            rotation.turn(qkv_YSD)
            shape = (count, width, a.kv_heads, a.group + 2, a.head_dim)
            qkv_UPKSD = qkv_YSD[: count * width * a.kv_heads].view(shape)
            kv_UKPW = kv_LUKPW[layer][:, :, : first + width]
            kv_UKPW[:, :, first:].copy_(qkv_UPKSD[..., a.group :, :].flatten(3).transpose(1, 2))
            key_UKPD, value_UKPD = kv_UKPW.chunk(2, dim=-1)
            query_UPHD = qkv_UPKSD[..., : a.group, :].flatten(2, 3)
            # Padding lies behind every real token, where the causal mask hides it.
            out_UHPD = prompt_attention(
                query_UPHD.transpose(1, 2),
                key_UKPD,
                value_UKPD,
                scale=a.score_scale,
                window=a.windows[layer],
                cap=a.score_cap,
            )
            out_NE = qkv_YSD.new_zeros(num_rows, a.heads * a.head_dim)
            out_NE[: count * width] = out_UHPD.transpose(1, 2).reshape(count * width, -1)
            return out_NE

        hidden_NE = self._layers(sent(ids_N, self.device), position_N, attend)
        last_U = on_device(
            [row * width + length - 1 for row, length in enumerate(lengths)], self.device
        )
        return Prefilled(kv_LUKPW, self.logits(hidden_NE[last_U]))

    def room(self, prompts: int, tokens: int) -> Tensor:
        """Room for the keys and values of so many prompts of so many tokens, kv_LUKPW."""
        a = self.architecture
        shape = (a.layers, prompts, a.kv_heads, tokens, 2 * a.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def decode(
        self, token_N: Tensor, position_N: Tensor, num_running: int, cache: CacheView | PagedView
    ) -> Tensor:
        """Feeds one token to each of the first B sequences of the cache.

        Args:
            token_N: int64, N = `padded_rows(B)`; what lies behind the first B is computed and
                dropped.
            position_N: int64, the position of that token, so far absent from the cache.
            num_running: B.
            cache: takes the new keys and values.

        Returns:
            logits_BV.
        """
        return self.logits(self.advance(token_N, position_N, num_running, cache))[:num_running]

    def advance(
        self, token_N: Tensor, position_N: Tensor, num_running: int, cache: CacheView | PagedView
    ) -> Tensor:
        """What `decode` does without the logits: hidden_NE after the last layer.

        Nothing of it waits for the device, unless the model has experts.
        """
        a = self.architecture
        num_rows, num_heads = token_N.shape[0], num_running * a.kv_heads

        def attend(layer: int, qkv_YSD: Tensor, rotation: Rotation) -> Tensor:
            cache.append(layer, qkv_YSD, rotation)
            query_XGD = qkv_YSD[:num_heads, : a.group]
            out_YGD = qkv_YSD.new_empty(num_rows * a.kv_heads, a.group, a.head_dim)
            cache.attend(
                layer,
                query_XGD,
                window=a.windows[layer],
                scale=a.score_scale,
                cap=a.score_cap,
                out_XGD=out_YGD[:num_heads],
            )
            return out_YGD.view(num_rows, -1)

        return self._layers(token_N, position_N, attend)

    def _layers(self, ids_N: Tensor, position_N: Tensor, attend: Attend) -> Tensor:
        a, epsilon = self.architecture, self.architecture.norm_epsilon
        layers = self.weights.prepacked.layers
        shape = (-1, a.group + 2, a.head_dim)
        rotations = [Rotation(table, position_N, a.kv_heads) for table in self._rotations]
        hidden_NE = self.weights.embedding.index_select(0, ids_N)
        if a.embedding_scale != 1.0:
            hidden_NE.mul_(self._embedding_scale)
        normed_NE = rms_norm(hidden_NE, layers[0].attention_norm, epsilon)
        for index, layer in enumerate(layers):
            qkv_YSD = linear(normed_NE, layer.qkv, layer.qkv_bias).view(shape)
            if layer.qk_norm is not None:
                query_key = qkv_YSD.narrow(1, 0, a.group + 1)
                query_key.copy_(rms_norm(query_key, layer.qk_norm, epsilon))
            attended = attend(index, qkv_YSD, rotations[a.ropes[index]])
            made_NE = self._joined(attended, layer.out, layer.out_bias)
            if layer.attention_out_norm is not None:
                made_NE = rms_norm(made_NE, layer.attention_out_norm, epsilon)
            normed_NE = add_norm(hidden_NE, made_NE, layer.mlp_norm, epsilon)
            if layer.router is not None:
                made_NE = self._experts(normed_NE, layer, layer.router)
            else:
                gate_up_NI = linear(normed_NE, layer.gate_up, layer.gate_up_bias)
                made_NE = self._joined(self._gated(gate_up_NI), layer.down, layer.down_bias)
            if layer.mlp_out_norm is not None:
                made_NE = rms_norm(made_NE, layer.mlp_out_norm, epsilon)
            if index + 1 < len(layers):
                normed_NE = add_norm(hidden_NE, made_NE, layers[index + 1].attention_norm, epsilon)
            else:
                hidden_NE += made_NE
        return hidden_NE

    def _gated(self, gate_up_NI: Tensor) -> Tensor:
        """The activation of one half of the channels, times the other half."""
        if self.architecture.activation == "silu":
            return silu_gate(gate_up_NI)
        gate, up = gate_up_NI.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    def _experts(self, input_NE: Tensor, layer: LayerWeights, router_XE: Tensor) -> Tensor:
        """The sum of what each row's experts make of it, weighted; X experts, C chosen of a row.

        Shazeer et al., "Outrageously Large Neural Networks", arXiv 1701.06538, section 2; the
        softmax before the choice as Qwen3 has it.
        """
        a = self.architecture
        share_NX = linear(input_NE, router_XE).softmax(-1, dtype=torch.float32)
        share_NC, expert_NC = share_NX.topk(a.experts_per_token, dim=-1)
        if a.normalise_experts:
            share_NC = share_NC / share_NC.sum(dim=-1, keepdim=True)
        share_S, expert_S = share_NC.to(input_NE.dtype).flatten(), expert_NC.flatten()
        picks = expert_S.argsort(stable=True).split(expert_S.bincount(minlength=a.experts).tolist())
        sum_NE = torch.zeros_like(input_NE)
        for number, expert in enumerate(a.own_experts):
            pick_P = picks[expert]
            if pick_P.numel():
                row_P = pick_P // a.experts_per_token
                # Rows differ from call to call, for which `linear` would compile anew.
                gate_up_PI = F.linear(input_NE[row_P], layer.gate_up[number])
                made_PE = F.linear(self._gated(gate_up_PI), layer.down[number])
                sum_NE.index_add_(0, row_P, made_PE.mul_(share_S[pick_P].unsqueeze(1)))
        return self._parallel.sum(sum_NE)

    def _joined(self, part_NI: Tensor, weight_EI: Tensor, bias_E: Tensor | None) -> Tensor:
        """A product over features of which each lane has some."""
        if self._parallel.size == 1:
            return linear(part_NI, weight_EI, bias_E)
        hidden_NE = self._parallel.sum(linear(part_NI, weight_EI))
        return hidden_NE if bias_E is None else hidden_NE.add_(bias_E)

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Logits after each row, in the dtype of the weights."""
        normed_NE = rms_norm(hidden_NE, self.weights.norm, self.architecture.norm_epsilon)
        return capped(linear(normed_NE, self.weights.prepacked.head), self.architecture.logit_cap)
