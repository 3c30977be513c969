"""OpenVLA-OFT: all tokens of a chunk of actions are decoded in one pass.

Kim et al., "Fine-Tuning Vision-Language-Action Models" (2025): the prompt is followed by one empty
embedding per action token and the stop token, and **no** mask hides later tokens. The authors
trained with every position seeing every other one, those of the prompt too
(github.com/moojink/openvla-oft, issues 27 and 89); a causal mask over the actions decodes another
model. An action token is predicted from the position before its own, as in autoregressive
decoding. The tokens of a chunk are independent given the observation.

Legend: B batch, K actions of a chunk, A action size, T tokens of the prefix, E embedding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from m2flow.algorithms.sampling import sample_tokens
from m2flow.errors import UserError
from m2flow.models.policies.protocol import Evaluation, Observations, PolicyOutput, seed_tensor
from m2flow.models.policies.vla.heads import L1Head, ProprioProjector
from m2flow.models.policies.vla.openvla import OpenVLA, Prefix, positions, take
from m2flow.models.policies.vla.policy import VLAOptions, VLAPolicy
from m2flow.models.policies.vla.prompts import PromptTokenizer


class OpenVLAOFTPolicy(VLAPolicy):
    """A chunk of actions per decision, from action bins or by the L1 regression head.

    With an L1 head the policy is deterministic: it acts greedily, its tokens are the scaled
    actions, their log-probability is 0, and there is nothing to evaluate. That is for evaluation;
    reinforcement learning needs the bins.
    """

    def __init__(
        self,
        model: OpenVLA,
        tokenizer: PromptTokenizer,
        options: VLAOptions,
        proprio_projector: ProprioProjector | None = None,
        l1_head: L1Head | None = None,
    ) -> None:
        super().__init__(model, tokenizer, options, proprio_projector)
        self.l1_head = l1_head

    @torch.no_grad()
    def act(
        self, observations: Observations, *, seeds: Sequence[int], greedy: bool = False
    ) -> PolicyOutput:
        hidden_BKAE, state_BE = self._decode(self._prefix(observations))
        values_B = self._value(state_BE)
        if self.l1_head is not None:
            if not greedy:
                raise _no_distribution()
            scaled = self.l1_head(hidden_BKAE)
            actions = self.scale(scaled).float()
            if self.options.low is not None and self.options.high is not None:
                ends = (self.options.low, self.options.high)
                actions = actions.clamp(*map(actions.new_tensor, ends))
            return PolicyOutput(actions, scaled, torch.zeros_like(scaled), values_B)
        logits_BKAV = self._logits(hidden_BKAE)
        if greedy:
            index_BKA = logits_BKAV.argmax(dim=-1)
            logprobs = logits_BKAV.log_softmax(-1).gather(-1, index_BKA[..., None]).squeeze(-1)
        else:
            shape = logits_BKAV.shape[:-1]
            draws = shape[1] * shape[2]
            seed_N = seed_tensor(seeds, self.model.device).repeat_interleave(draws)
            at_N = torch.arange(draws, device=seed_N.device).repeat(shape[0])
            drawn, logprob_N = sample_tokens(logits_BKAV.flatten(0, 2), seed_N, at_N, 1.0)
            index_BKA, logprobs = drawn.view(shape), logprob_N.view(shape)
        tokens = index_BKA + self._first_id
        return PolicyOutput(self._environment_actions(tokens), tokens, logprobs, values_B)

    def evaluate(self, observations: Observations, tokens: Tensor) -> Evaluation:
        if self.l1_head is not None:
            raise _no_distribution()
        return super().evaluate(observations, tokens)

    def _judge(self, prefix: Prefix, tokens_BKA: Tensor) -> tuple[Tensor, Tensor]:
        hidden_BKAE, state_BE = self._decode(prefix)
        return self._logits(hidden_BKAE), state_BE

    def _decode(self, prefix: Prefix) -> tuple[Tensor, Tensor]:
        """Return the hidden states that predict the tokens [B, K, A, E], and the first [B, E]."""
        batch, embedding = prefix.embeddings.shape[0], prefix.embeddings.shape[2]
        count = self.options.chunk * self.scale.size
        empty = prefix.embeddings.new_zeros(batch, count, embedding)
        stop = torch.full((batch, 1), self.tokenizer.stop, device=self.model.device)
        embeddings = torch.cat([prefix.embeddings, empty, self.model.embed(stop)], dim=1)
        mask = torch.cat([prefix.mask, prefix.mask.new_ones(batch, count + 1)], dim=1)
        hidden = self.model.decode(embeddings, everything(mask), positions(mask))
        state_BE = take(hidden, prefix.last)
        first = prefix.mask.shape[1]
        placed = hidden[:, first : first + count - 1]
        predicting = torch.cat([state_BE[:, None], placed], dim=1)
        return predicting.view(batch, self.options.chunk, self.scale.size, embedding), state_BE


def everything(mask_BT: Tensor) -> Tensor:
    """Return bool [B, T, T]: each token sees every real one, before and after itself."""
    length = mask_BT.shape[1]
    return mask_BT.unsqueeze(1).expand(-1, length, -1)


def _no_distribution() -> UserError:
    return UserError(
        "the L1 head gives one action and no distribution",
        key="head",
        expected="greedy evaluation, or the discrete head for reinforcement learning",
    )
