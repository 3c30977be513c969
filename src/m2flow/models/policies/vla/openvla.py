"""OpenVLA's network: vision towers, projector and Llama decoder, in the published key layout.

The sequence is the begin token, the patches of all cameras (and the robot's state, if there is a
projector for it), the rest of the prompt, and what the decoding adds. Prompts of a batch differ in
length: shorter ones are padded on the right, the padding is masked, and positions count real
tokens only, so that an item's result does not depend on its batch.

Legend: B batch, P patches, L prompt tokens, T tokens of the prefix, E embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from m2flow.models.policies.vla.config import VLAConfig
from m2flow.models.policies.vla.vision import Projector, VisionBackbone


@dataclass(frozen=True)
class Prefix:
    """Everything before the actions.

    Attributes:
        embeddings: [B, T, E].
        mask: bool [B, T], False on padding.
        last: int64 [B], index of the last real token, from which the first action is predicted.
    """

    embeddings: Tensor
    mask: Tensor
    last: Tensor

    @property
    def lengths(self) -> Tensor:
        """Number of real tokens, int64 [B]."""
        return self.mask.sum(dim=1)


class OpenVLA(nn.Module):
    """The network alone: embeddings in, hidden states out."""

    def __init__(self, config: VLAConfig) -> None:
        super().__init__()
        vision_backbone = VisionBackbone(config)  # first: transformers imports torchvision too
        from transformers import LlamaConfig, LlamaForCausalLM

        text = {key: value for key, value in config.text.items() if key != "torch_dtype"}
        llama = LlamaConfig(**text)
        llama._attn_implementation = "sdpa"
        self.config = config
        self.vision_backbone = vision_backbone
        self.projector = Projector(self.vision_backbone.channels, llama.hidden_size)
        self.language_model = LlamaForCausalLM(llama)

    @property
    def embedding_size(self) -> int:
        """Width of the decoder."""
        return self.language_model.config.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """That of the weights."""
        return self.projector.fc1.weight.dtype

    @property
    def device(self) -> torch.device:
        """That of the weights."""
        return self.projector.fc1.weight.device

    def prefix(
        self, ids_BL: Tensor, mask_BL: Tensor, pixels: Tensor, extra_BXE: Tensor | None = None
    ) -> Prefix:
        """Embed prompt and pictures.

        Args:
            ids_BL: int64, begin token first.
            mask_BL: bool, False on padding.
            pixels: [B, cameras * 6, side, side].
            extra_BXE: further embeddings after the patches.
        """
        patches = self.projector(self.vision_backbone(pixels.to(self.dtype)))
        if extra_BXE is not None:
            patches = torch.cat([patches, extra_BXE.to(self.dtype)], dim=1)
        words = self.embed(ids_BL)
        embeddings = torch.cat([words[:, :1], patches, words[:, 1:]], dim=1)
        seen = mask_BL.new_ones(patches.shape[:2])
        mask = torch.cat([mask_BL[:, :1], seen, mask_BL[:, 1:]], dim=1)
        return Prefix(embeddings, mask, mask.sum(dim=1) - 1)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the decoder's embeddings of token ids."""
        return self.language_model.model.embed_tokens(ids)

    def decode(
        self, embeddings: Tensor, attend: Tensor, position: Tensor, cache: Any = None
    ) -> Tensor:
        """Run the decoder.

        Args:
            embeddings: [B, Q, E].
            attend: bool [B, Q, keys], True where a query sees a key (of the cache first).
            position: int64 [B, Q].
            cache: a cache of transformers, which is extended; None to keep none.

        Returns:
            The last hidden states after the final norm, [B, Q, E].
        """
        output = self.language_model.model(
            inputs_embeds=embeddings,
            attention_mask=attend.unsqueeze(1),
            position_ids=position,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return output.last_hidden_state

    def logits(self, hidden: Tensor, first: int = 0, end: int | None = None) -> Tensor:
        """Return float32 logits of the token ids from `first` to before `end`."""
        head = self.language_model.lm_head
        if first == 0 and end is None:
            return head(hidden).float()
        return torch.nn.functional.linear(hidden, head.weight[first:end]).float()


def positions(mask_BT: Tensor) -> Tensor:
    """Number the real tokens of each row from 0, int64 [B, T]."""
    return (mask_BT.long().cumsum(dim=1) - 1).clamp(min=0)


def causal(mask_BT: Tensor) -> Tensor:
    """Return bool [B, T, T]: each token sees the real ones up to itself."""
    length = mask_BT.shape[1]
    lower = torch.ones(length, length, dtype=torch.bool, device=mask_BT.device).tril()
    return mask_BT.unsqueeze(1) & lower


def take(hidden_BTE: Tensor, index_B: Tensor) -> Tensor:
    """Return the hidden state at one index of each row, [B, E]."""
    rows = torch.arange(hidden_BTE.shape[0], device=hidden_BTE.device)
    return hidden_BTE[rows, index_B]
