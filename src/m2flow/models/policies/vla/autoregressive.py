"""OpenVLA: the tokens of one action are decoded one after the other.

Legend: B batch, A action size (tokens), T tokens of the prefix, E embedding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from m2flow.algorithms.sampling import sample_tokens
from m2flow.errors import UserError
from m2flow.models.policies.protocol import Observations, PolicyOutput, seed_tensor
from m2flow.models.policies.vla.openvla import OpenVLA, Prefix, causal, positions, take
from m2flow.models.policies.vla.policy import VLAOptions, VLAPolicy
from m2flow.models.policies.vla.prompts import PromptTokenizer


class OpenVLAPolicy(VLAPolicy):
    """One action per decision, its coordinates in order, each seeing those before it."""

    def __init__(self, model: OpenVLA, tokenizer: PromptTokenizer, options: VLAOptions) -> None:
        if options.chunk != 1:
            raise UserError(
                "decoding token by token gives one action",
                key="chunk",
                value=options.chunk,
                expected="1",
                hint="chunks need a checkpoint of OpenVLA-OFT, and OpenVLAOFTPolicy",
            )
        super().__init__(model, tokenizer, options)

    @torch.no_grad()
    def act(
        self, observations: Observations, *, seeds: Sequence[int], greedy: bool = False
    ) -> PolicyOutput:
        from transformers import DynamicCache

        prefix, cache = self._prefix(observations), DynamicCache(config=self._llama)
        seed_B = seed_tensor(seeds, self.model.device)
        hidden = self.model.decode(
            prefix.embeddings, causal(prefix.mask), positions(prefix.mask), cache
        )
        state_BE = take(hidden, prefix.last)
        seen, current_BE = prefix.mask, state_BE
        drawn, logprobs = [], []
        for coordinate in range(self.scale.size):
            logits_BV = self._logits(current_BE)
            if greedy:
                index_B = logits_BV.argmax(dim=-1)
                logprob_B = logits_BV.log_softmax(-1).gather(1, index_B[:, None]).squeeze(1)
            else:
                at = torch.full_like(seed_B, coordinate)
                index_B, logprob_B = sample_tokens(logits_BV, seed_B, at, 1.0)
            drawn.append(index_B + self._first_id)
            logprobs.append(logprob_B)
            if coordinate + 1 < self.scale.size:
                seen = torch.cat([seen, seen.new_ones(len(seed_B), 1)], dim=1)
                embedding = self.model.embed(drawn[-1].unsqueeze(1))
                at_B1 = (prefix.lengths + coordinate).unsqueeze(1)
                hidden = self.model.decode(embedding, seen.unsqueeze(1), at_B1, cache)
                current_BE = hidden[:, 0]
        tokens = torch.stack(drawn, dim=1).unsqueeze(1)
        return PolicyOutput(
            self._environment_actions(tokens),
            tokens,
            torch.stack(logprobs, dim=1).unsqueeze(1),
            self._value(state_BE),
        )

    def _judge(self, prefix: Prefix, tokens_B1A: Tensor) -> tuple[Tensor, Tensor]:
        before_BA = tokens_B1A[:, 0, :-1]
        embeddings = torch.cat([prefix.embeddings, self.model.embed(before_BA)], dim=1)
        mask = torch.cat([prefix.mask, torch.ones_like(before_BA, dtype=torch.bool)], dim=1)
        hidden = self.model.decode(embeddings, causal(mask), positions(mask))
        state_BE = take(hidden, prefix.last)
        after = hidden[:, prefix.mask.shape[1] :]
        return self._logits(torch.cat([state_BE[:, None], after], dim=1)).unsqueeze(1), state_BE

    @property
    def _llama(self) -> object:
        return self.model.language_model.config
