"""Prompts that were prefilled: each once, for all requests that have it.

What a prefill left behind is kept while a request with that prompt is here, waiting or running,
so that a group may be spread over many steps. Must be cleared when the weights change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from m2flow.generation.decoder import Decoder, Prefilled
from m2flow.generation.kv_cache import KVCache
from m2flow.generation.sequence import RunningSequence

Ids = tuple[int, ...]

MAX_TOKENS = 8192
"""Of one prefill pass, padding included; a longer prompt has a pass of its own."""


class Prefixes:
    """Prefills prompts and copies them to slots."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self._decoder, self._cache = decoder, cache
        self._users: Counter[Ids] = Counter()
        self._kept: dict[Ids, tuple[Prefilled, int]] = {}

    def __len__(self) -> int:
        """Prompts in use, prefilled or not."""
        return len(self._users)

    def acquire(self, prompt: Ids) -> None:
        """A request with this prompt has come."""
        self._users[prompt] += 1

    def release(self, prompt: Ids) -> None:
        """A request with this prompt has gone; what the last one leaves is dropped."""
        self._users[prompt] -= 1
        if not self._users[prompt]:
            del self._users[prompt]
            self._kept.pop(prompt, None)

    def clear(self) -> None:
        """Forgets what was computed; the requests stay known."""
        self._kept.clear()

    def tensors(self) -> Iterator[Tensor]:
        """All that is kept; what several prompts share comes several times."""
        for prefilled, _ in self._kept.values():
            yield from (prefilled.kv_LUKPW, prefilled.logits_UV)

    def fill(self, sequences: Sequence[RunningSequence], first: int) -> Tensor:
        """Fills the slots from `first` on with the sequences' prompts, and what they have drawn.

        Returns:
            logits_BV of each sequence's next token.
        """
        contexts = [sequence.context for sequence in sequences]
        found = {ids: self._kept[ids] for ids in contexts if ids in self._kept}
        missing = [ids for ids in dict.fromkeys(contexts) if ids not in found]
        for batch in batches(missing, MAX_TOKENS):
            made = self._decoder.prefill(batch)
            found.update((ids, (made, index)) for index, ids in enumerate(batch))
        # What a request has drawn before it had to wait is no other's beginning.
        self._kept.update((ids, found[ids]) for ids in contexts if ids in self._users)
        passes: dict[int, tuple[Prefilled, list[int]]] = {}
        for order, ids in enumerate(contexts):
            prefilled, _ = found[ids]
            passes.setdefault(id(prefilled), (prefilled, []))[1].append(order)
        device = self._decoder.device
        logits_BV = torch.empty(
            len(sequences),
            self._decoder.architecture.vocab_size,
            dtype=self._decoder.logprob_dtype,
            device=device,
        )
        for prefilled, orders in passes.values():
            prompts = torch.tensor([found[contexts[i]][1] for i in orders]).to(device)
            targets = torch.tensor(orders, device=device)
            columns = max(sequences[i].length for i in orders)
            self._cache.write_prompts(targets + first, prefilled.kv_LUKPW, prompts, columns)
            logits_BV[targets] = prefilled.logits_UV[prompts]
        return logits_BV


def batches(prompts: Iterable[Ids], max_tokens: int) -> Iterator[list[Ids]]:
    """Batches of similar length, longest first, of at most `max_tokens` with padding."""
    batch: list[Ids] = []
    for prompt in sorted(prompts, key=len, reverse=True):
        if batch and (len(batch) + 1) * len(batch[0]) > max_tokens:
            yield batch
            batch = []
        batch.append(prompt)
    if batch:
        yield batch
