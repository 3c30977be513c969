"""What OpenVLA and OpenVLA-OFT share as policies: observations in, distribution of tokens out.

Tokens are ids of the vocabulary, as the checkpoint knows them. By default the distribution is
restricted to the 256 action bins: any other id has no action of its own (the published code gives
it the nearest bin without a word), so reinforcing it would reinforce another action than the one
executed, and the logits of 256 instead of 32,064 ids are computed. `restricted=False` is the
distribution as it was trained, over the whole vocabulary.

Legend: B batch, K actions of a chunk, A action size, E embedding, V ids in the distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from m2flow.errors import UserError
from m2flow.models.policies.distributions import categorical
from m2flow.models.policies.protocol import Evaluation, Observations, Policy
from m2flow.models.policies.vla.actions import (
    ActionBins,
    ActionScale,
    Gripper,
    scale_proprioception,
)
from m2flow.models.policies.vla.heads import ProprioProjector, ValueHead
from m2flow.models.policies.vla.images import Resize, preprocess
from m2flow.models.policies.vla.openvla import OpenVLA, Prefix
from m2flow.models.policies.vla.prompts import PromptTokenizer


@dataclass(frozen=True)
class VLAOptions:
    """How a checkpoint is used; nothing of it is stored in the checkpoint.

    Attributes:
        statistics: name of the data set whose scale the actions have; needed where the checkpoint
            has several.
        gripper: convention of the simulator, see `actions.ActionScale`.
        cameras: names of the observed pictures, in the order of training.
        centre_crop, resize: see `images.preprocess`.
        chunk: actions decided at once; more than one with parallel decoding only.
        temperature: of the distribution that tokens are drawn from and judged by.
        restricted: whether only action bins can be drawn.
        critic: whether there is a value head.
        low, high: what the environment takes, which the L1 head is clamped to; None for no bounds.
    """

    statistics: str | None = None
    gripper: Gripper = "as_it_is"
    cameras: tuple[str, ...] = ("image",)
    centre_crop: bool = False
    resize: Resize = "bicubic"
    chunk: int = 1
    temperature: float = 1.0
    restricted: bool = True
    critic: bool = False
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None


class VLAPolicy(Policy):
    """The parts of a policy on OpenVLA's network that do not depend on how it decodes."""

    def __init__(
        self,
        model: OpenVLA,
        tokenizer: PromptTokenizer,
        options: VLAOptions,
        proprio_projector: ProprioProjector | None = None,
    ) -> None:
        super().__init__()
        if options.temperature <= 0:
            raise UserError(
                "the temperature is not positive", key="temperature", value=options.temperature
            )
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self.statistics = model.config.statistics(options.statistics)
        self.bins = ActionBins(model.config.vocabulary, model.config.action_bins)
        self.scale = ActionScale(self.statistics, options.gripper)
        self.proprio_projector = proprio_projector
        # In float32 beside a bfloat16 decoder: a value is a regression over a wide range.
        self.value_head: nn.Module | None = None
        if options.critic:
            self.value_head = ValueHead(model.embedding_size).to(model.device)

    def evaluate(self, observations: Observations, tokens: Tensor) -> Evaluation:
        logits_BKAV, state_BE = self._judge(self._prefix(observations), tokens)
        logprobs, entropy = categorical(logits_BKAV, tokens - self._first_id)
        return Evaluation(logprobs, entropy, self._value(state_BE))

    def compute_activations_again(self) -> None:
        """From now on keep the inputs of blocks alone for the backward pass, and not all within.

        A third more arithmetic; the activations of a 7B model fill an accelerator otherwise.
        """
        towers = self.model.vision_backbone.towers
        of_towers = (block for tower in towers for block in tower.blocks)
        for block in (*of_towers, *self.model.language_model.model.layers):
            block.forward = partial(_computed_again, block.forward)

    def _judge(self, prefix: Prefix, tokens_BKA: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scaled logits that the tokens were drawn from, and the state [B, E]."""
        raise NotImplementedError

    def _prefix(self, observations: Observations) -> Prefix:
        device = self.model.device
        pictures = []
        for camera in self.options.cameras:
            if camera not in observations:
                raise UserError(
                    "the environment gives no such picture",
                    key="cameras",
                    value=camera,
                    expected=f"names among: {', '.join(sorted(observations))}",
                )
            picture = observations[camera].to(device)
            size, options = self.model.config.image_size, self.options
            pictures.append(preprocess(picture, size, options.centre_crop, options.resize))
        ids, mask = self.tokenizer.batch(observations["instruction"], device)
        extra = None
        if self.proprio_projector is not None:
            state = observations["state"].to(device)
            extra = self.proprio_projector(scale_proprioception(state, self.statistics))
        return self.model.prefix(ids, mask, torch.cat(pictures, dim=1), extra)

    @property
    def _first_id(self) -> int:
        return self.bins.first_token if self.options.restricted else 0

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] at the temperature; V begins at `_first_id`."""
        end = self.bins.vocabulary if self.options.restricted else None
        return self.model.logits(hidden, self._first_id, end) / self.options.temperature

    def _value(self, state_BE: Tensor) -> Tensor | None:
        return None if self.value_head is None else self.value_head(state_BE)

    def _environment_actions(self, tokens_BKA: Tensor) -> Tensor:
        return self.scale(self.bins.decode(tokens_BKA))

    def tokens_of(self, actions_BKA: Tensor) -> Tensor:
        """Return the tokens of environment actions, for behaviour cloning."""
        return self.bins.encode(self.scale.inverse(actions_BKA))


def _computed_again(block: Callable[..., Any], x: Tensor, **options: Any) -> Any:
    """Without a backward pass to come, as in acting, a block may have a cache and is left alone."""
    if not torch.is_grad_enabled():
        return block(x, **options)
    return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False, **options)
