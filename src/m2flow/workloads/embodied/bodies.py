"""Sizes of the policies of an embodied recipe, for prices: what is computed, held and trained.

A published model's sizes are read from its `config.json`; where a recipe names none they are those
of the published checkpoints. Neither weights nor torch are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from m2flow.errors import UserError
from m2flow.models.shape import ModelShape, config_of, model_from_config
from m2flow.workloads.embodied.config import IN_BLOCKS, TINY, EmbodiedRecipe

LLAMA_2: Mapping[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32064,
}  # fmt: skip
"""What a published `text_config` does not repeat: it is Llama 2 7B's."""

GEMMA_2B: Mapping[str, Any] = {
    "model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384,
    "num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
    "vocab_size": 257152, "tie_word_embeddings": True,
}  # fmt: skip
"""The decoder of pi0's vision-language model."""

GEMMA_300M: Mapping[str, Any] = {
    **GEMMA_2B, "hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 1,
}  # fmt: skip
"""Its action expert, without the table of embeddings that nothing looks into."""

PATCHES, PROMPT_TOKENS = 256, 30
"""Of a picture of 224 pixels in patches of 14; of an instruction with its template."""

PROJECTOR = 71_385_600
"""Parameters of OpenVLA's, between its towers and its decoder."""

ACTION_SIZE = 7
"""Of an arm with a gripper."""


@dataclass(frozen=True)
class Body:
    """A published model as it acts.

    Attributes:
        text: its decoder, which reads `tokens` of each observation at once.
        vision: parameters of towers and projector; a picture's patches pass through them.
        projector: parameters of that alone, where they are counted by themselves.
        widths: of the residual streams of the towers, summed over their layers.
        pictures: of an observation.
        tokens: of an observation, those of a chunk that is decoded in parallel too.
        decoded: tokens decoded one after the other behind the first.
        expert: layers that are asked `denoising` times, with `moved` tokens each; None for none.
        idle: parameters that are held, and neither computed with nor trained.
    """

    text: ModelShape
    vision: float
    widths: float
    pictures: int
    tokens: int
    decoded: int = 0
    expert: ModelShape | None = None
    denoising: int = 0
    moved: int = 0
    projector: float = 0.0
    idle: float = 0.0

    @property
    def parameters(self) -> float:
        """All that is held."""
        return self.trainable + self.idle

    @property
    def trainable(self) -> float:
        """All that anything is computed with."""
        return self.text.parameters + self.vision + self._of_expert

    @property
    def _of_expert(self) -> float:
        return 0.0 if self.expert is None else self.expert.shared_parameters

    def forward_flops(self) -> float:
        """Of one observation, without tokens that are decoded one after the other.

        Of the decoder's layers alone: pi0 has no logits, and others have a few bins' of actions.
        """
        text, tokens = self.text, self.tokens
        seen = 2 * self.vision * PATCHES * self.pictures
        moved = 2 * self._of_expert * self.moved * self.denoising
        read = 2 * text.shared_parameters * tokens + text.attention_flops(tokens, tokens / 2)
        return seen + moved + read


def body_of(recipe: EmbodiedRecipe, model: str | Path | None) -> Body:
    """The model of a recipe, or the one that is named in its place.

    Raises:
        UserError: there is no such folder, or it holds a model of another family.
    """
    policy = recipe.policy
    source = model or recipe.model
    raw = _published(recipe, source)
    pictures = len(policy.cameras)
    seen = PATCHES * pictures + PROMPT_TOKENS + policy.proprioception
    if policy.kind in IN_BLOCKS:
        shape = model_from_config({**LLAMA_2, **raw.get("text_config", {})}, "openvla")
        widths = 24 * 1024 + 27 * 1152
        body = Body(shape, 802_297_280, widths, pictures, seen, projector=PROJECTOR)
        if policy.kind == "openvla":
            body = replace(body, decoded=ACTION_SIZE - 1)
        else:
            body = replace(body, tokens=seen + policy.chunk * ACTION_SIZE + 1)
    else:
        vlm = raw.get("vlm_config", {})
        shape = model_from_config({**GEMMA_2B, **vlm.get("text_config", {})}, "pi0")
        expert = model_from_config(
            {**GEMMA_300M, **raw.get("dit_config", {}), "vocab_size": 1}, "pi0"
        )
        steps = policy.denoising_steps or int(raw.get("num_inference_steps", 10))
        moved = int(raw.get("chunk_size", 50)) + 1
        body = Body(
            shape,
            415e6,
            27 * 1152,
            pictures,
            seen,
            expert=expert,
            denoising=steps,
            moved=moved,
            idle=shape.vocabulary * expert.hidden,
        )
    if source == TINY:
        small = replace(shape, name=TINY, layers=2, hidden=64, intermediate=128, vocabulary=300,
                        heads=4, kv_heads=4, head_dim=16)  # fmt: skip
        return replace(
            body,
            text=small,
            vision=1e5,
            widths=256,
            projector=0.0,
            expert=body.expert and small,
            idle=0.0,
        )
    return body


def _published(recipe: EmbodiedRecipe, source: str | Path | None) -> dict[str, Any]:
    if source is None or source == TINY:
        return {}
    raw, where = config_of(source)
    wanted = "openvla" if recipe.policy.kind in IN_BLOCKS else recipe.policy.kind
    if raw.get("model_type") != wanted:
        raise UserError(
            "a checkpoint of another family of models",
            key=where,
            value=raw.get("model_type"),
            expected=f'model_type "{wanted}", which policy.kind {recipe.policy.kind} reads',
        )
    return raw
