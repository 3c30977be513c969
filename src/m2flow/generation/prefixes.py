"""Prompts that were prefilled: each once, for all requests that have it.

Prompts are prefilled in the order of their requests, `MAX_TOKENS` of them in a step at most; a
longer prompt in pieces, a step each, so that running requests go on in between. What a prefill left
behind is kept while a request with that prompt waits, so that a group may be spread over many
steps; running ones have it in the cache, within its budget. Must be cleared when the weights
change.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from m2flow.generation.decoder import Decoder, Prefilled
from m2flow.generation.kernels import on_device
from m2flow.generation.kv_cache import KVCache
from m2flow.generation.own_forward import OwnForward, OwnSlots
from m2flow.generation.pages import PagedCache
from m2flow.generation.sequence import RunningSequence

Ids = tuple[int, ...]

MAX_TOKENS = 8192
"""Of prompts, in a step; and of a prefill pass, padding included."""


class _Prompt(NamedTuple):
    """A prompt's place in what was prefilled, and a number that no other has had."""

    made: Prefilled
    place: int
    number: int


class Prefixes:
    """Prefills prompts and copies them to slots.

    Args:
        decoder, cache: compute and hold keys and values.
        max_tokens: of prompts, in a step; None for `MAX_TOKENS`.
    """

    def __init__(
        self,
        decoder: Decoder | OwnForward,
        cache: KVCache | PagedCache | OwnSlots,
        max_tokens: int | None = None,
    ) -> None:
        self._decoder, self._cache = decoder, cache
        self._max_tokens = max_tokens
        self._users: dict[Ids, set[int]] = {}
        self._kept: dict[Ids, _Prompt] = {}
        self._numbers = itertools.count()
        self._begun: dict[Ids, tuple[Prefilled, int]] = {}
        """Contexts that are in pieces, and how many tokens of them are done."""

    def __len__(self) -> int:
        """Prompts of requests that have not begun, prefilled or not."""
        return len(self._users)

    def acquire(self, sequence: RunningSequence) -> None:
        """A request has come."""
        self._users.setdefault(sequence.prompt, set()).add(sequence.number)

    def release(self, sequence: RunningSequence) -> None:
        """A request has gone, or has begun; what the last one with its prompt leaves is dropped."""
        prompt = sequence.prompt
        if sequence.tokens:  # put off, it was no other's beginning
            self._begun.pop(sequence.context, None)
        waiting = self._users.get(prompt, set())
        waiting.discard(sequence.number)
        if not waiting:
            self._users.pop(prompt, None)
            self._kept.pop(prompt, None)
            self._begun.pop(prompt, None)

    def clear(self) -> None:
        """Forgets what was computed; the requests stay known."""
        self._kept.clear()
        self._begun.clear()

    def tensors(self) -> Iterator[Tensor]:
        """All that is kept; what several prompts share comes several times."""
        kept = (one.made for one in self._kept.values())
        begun = (made for made, _ in self._begun.values())
        for made in itertools.chain(kept, begun):
            yield made.logits_UV
            yield from self._cache.tensors_of(made.kv)

    def prefill(self, sequences: Sequence[RunningSequence]) -> int:
        """Prefills what a step may; returns how many sequences, from the first on, are prefilled.

        A prompt that was put off keeps what was done of it.
        """
        limit = MAX_TOKENS if self._max_tokens is None else self._max_tokens
        left, whole, ready = limit, dict[Ids, None](), 0
        for sequence in sequences:
            ids = sequence.context
            if ids not in self._kept and ids not in whole:
                if len(ids) <= left:
                    left -= len(ids)
                    whole[ids] = None
                elif len(ids) <= limit or not left:  # there will be room for it in a later step
                    break
                else:
                    left -= self._go_on(ids, left)
                    if ids not in self._kept:
                        break
            ready += 1
        for batch in batches(whole, limit):
            made = self._decoder.prefill(batch)
            for place, ids in enumerate(batch):
                self._keep(ids, made, place)
        return ready

    def _keep(self, ids: Ids, made: Prefilled, place: int) -> None:
        self._kept[ids] = _Prompt(made, place, next(self._numbers))

    def _go_on(self, ids: Ids, tokens: int) -> int:
        """Prefill up to so many further tokens of a long context; return how many it were."""
        begun = self._begun.pop(ids, None)
        done = 0 if begun is None else begun[1]
        kv = self._decoder.room(1, len(ids)) if begun is None else begun[0].kv
        end = min(len(ids), done + tokens)
        made = self._decoder.prefill([ids[:end]], done, kv)
        if end == len(ids):
            self._keep(ids, made, 0)
        else:
            self._begun[ids] = made, end
        return end - done

    def fill(self, sequences: Sequence[RunningSequence], first: int) -> Tensor:
        """Fills the slots from `first` on with sequences that are prefilled.

        Returns:
            logits_BV of each sequence's next token.
        """
        contexts = [sequence.context for sequence in sequences]
        passes: dict[int, tuple[Prefilled, list[int]]] = {}
        for order, ids in enumerate(contexts):
            kept = self._kept[ids]
            sequences[order].prefix = kept.number, len(ids)
            passes.setdefault(id(kept.made), (kept.made, []))[1].append(order)
        device, some_UV = self._decoder.device, next(iter(passes.values()))[0].logits_UV
        logits_BV = some_UV.new_empty(len(sequences), some_UV.shape[1])
        for prefilled, orders in passes.values():
            prompts = on_device([self._kept[contexts[i]].place for i in orders], device)
            targets = on_device(orders, device)
            columns = max(sequences[i].length for i in orders)
            self._cache.write_prompts(targets + first, prefilled.kv, prompts, columns)
            logits_BV[targets] = prefilled.logits_UV[prompts]
        for sequence in sequences:
            self.release(sequence)
        for ids in contexts:
            if ids not in self._users:  # what a request has drawn before is no other's beginning
                self._kept.pop(ids, None)
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
