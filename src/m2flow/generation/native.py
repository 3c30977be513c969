"""Continuous batching in PyTorch: requests share slots, decode steps and prefills.

Each step decodes one token for all running sequences, retires those that ended, and gives their
slots to waiting requests at once. A prompt is prefilled once for all requests that have it. Where
the cache is too small for all that run, the youngest wait again and are recomputed later; no token
is lost, and what a request draws does not change. See `protocol` for the promises.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from m2flow.algorithms.sampling import sample_tokens
from m2flow.errors import M2FlowError, UserError
from m2flow.generation.decoder import Decoder, Prefilled
from m2flow.generation.kv_cache import KVCache
from m2flow.generation.linear import padded_rows
from m2flow.generation.protocol import Completion, FinishReason, Request
from m2flow.generation.segments import cut, waste
from m2flow.generation.sequence import RunningSequence

# Bytes that the processor reads from the cache in the time that one more set of kernels costs.
_SEGMENT_OVERHEAD_BYTES = {"cpu": 150_000, "cuda": 30_000_000}
# Sorting reads and writes the used cache twice.
_SORT_PASSES = 4
# Fields of a running row, one int64 each: the token to feed and its position, how many tokens are
# drawn, the seed, and the bits of the temperature in float64.
_TOKEN, _POSITION, _DRAWN, _SEED, _TEMPERATURE = range(5)


class NativeEngine:
    """A `GenerationEngine` for dense models of the Llama family, on the CPU or one GPU.

    Args:
        config: the model's `transformers` configuration.
        max_running: sequences decoded together at most.
        context: tokens of prompt and completion at most; default: the model's positions.
        cache_tokens: slots times the longest sequence at most; default: no limit of its own.
        prefill_tokens: tokens, padding included, of one prefill pass.
        dtype: of weights, cache and activations.
        device: where all of them live.

    Raises:
        UserError: the architecture is not computed here, or a limit makes no sense.
    """

    def __init__(
        self,
        config: Any,
        *,
        max_running: int = 256,
        context: int | None = None,
        cache_tokens: int | None = None,
        prefill_tokens: int = 8192,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self.context = context or config.max_position_embeddings
        cache_tokens = cache_tokens or max_running * self.context
        _check_limits(config, max_running, self.context, cache_tokens)
        self.max_running, self._prefill_tokens = max_running, prefill_tokens
        self.version = -1
        self._awake = True
        self._decoder = Decoder(config, context=self.context, dtype=dtype, device=self.device)
        architecture = self._decoder.architecture
        self._cache = KVCache(
            architecture,
            context=self.context,
            capacity=cache_tokens,
            dtype=dtype,
            device=self.device,
        )
        column_bytes = 2 * architecture.kv_heads * architecture.head_dim * dtype.itemsize
        self._segment_overhead = _SEGMENT_OVERHEAD_BYTES.get(self.device.type, 0) // column_bytes
        num_rows = padded_rows(max_running)
        self._state = torch.zeros((5, num_rows), dtype=torch.int64, device=self.device)
        self._temperature = self._state[_TEMPERATURE].view(torch.float64)
        self._waiting: deque[RunningSequence] = deque()
        self._rows: list[RunningSequence] = []
        self._live: dict[int, RunningSequence] = {}
        self._submitted = 0
        self._prompt_users: Counter[tuple[int, ...]] = Counter()
        self._prefixes: dict[tuple[int, ...], tuple[Prefilled, int]] = {}
        self._segments: list[tuple[int, int, int]] | None = None
        self._waste = self._sorted_waste = self._excess = 0
        self._same_temperature: float | None = None

    # --- the protocol -------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self._live)

    @property
    def num_running(self) -> int:
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, requests: Iterable[Request]) -> None:
        new: dict[int, RunningSequence] = {}
        for request in requests:
            assert request.id not in self._live, f"request {request.id} is already here"
            assert request.id not in new, f"request {request.id} comes twice"
            sequence = RunningSequence(request, self._submitted + len(new))
            self._check(sequence)
            new[request.id] = sequence
        self._submitted += len(new)
        self._live.update(new)
        self._waiting.extend(new.values())
        self._prompt_users.update(sequence.prompt for sequence in new.values())

    def step(self) -> list[Completion]:
        assert self._awake, "the engine sleeps: wake() first"
        assert self.version >= 0, "no weights: install() first"
        finished: list[RunningSequence] = []
        with torch.inference_mode():
            if self._rows:
                finished += self._decode()
            if self._waiting:
                finished += self._admit()
        return [self._complete(s, "stop" if s.stopped else "length") for s in finished]

    def abort(self, ids: Iterable[int]) -> list[Completion]:
        aborted = {id(s): s for s in (self._live.get(i) for i in ids) if s is not None}
        if not aborted:
            return []
        self._waiting = deque(s for s in self._waiting if id(s) not in aborted)
        with torch.inference_mode():
            self._vacate([row for row, s in enumerate(self._rows) if id(s) in aborted])
        return [self._complete(sequence, "abort") for sequence in aborted.values()]

    def install(self, weights: Mapping[str, Tensor], version: int) -> None:
        with torch.inference_mode():
            self._decoder.install(weights)
        for sequence in self._live.values():
            sequence.mark(self.version)
        self.version = version
        # A new request must not start from what older weights made of its prompt.
        self._prefixes.clear()

    def sleep(self) -> None:
        with torch.inference_mode():
            self._requeue(list(range(len(self._rows))))
        self._prefixes.clear()
        self._cache.free()
        self._decoder.to(torch.device("cpu"))
        self._awake = False

    def wake(self) -> None:
        self._decoder.to(self.device)
        self._awake = True

    def state_bytes(self) -> int:
        if not self._awake:
            return 0 if self.device.type != "cpu" else self._decoder.nbytes()
        prefills = {id(p): p for p, _ in self._prefixes.values()}.values()
        return self._decoder.nbytes() + self._cache.nbytes() + sum(p.nbytes() for p in prefills)

    # --- one step -----------------------------------------------------------------------------

    def _decode(self) -> list[RunningSequence]:
        """One token for every running row; returns the sequences that ended, slots vacated."""
        segments = self._make_room()
        count = len(self._rows)
        num_rows = padded_rows(count)
        state = self._state
        view = self._cache.view(state[_POSITION, :count], segments)
        token_N, position_N = state[_TOKEN, :num_rows], state[_POSITION, :num_rows]
        logits_BV = self._decoder.decode(token_N, position_N, count, view)
        token_B, logprob_B = self._sample(logits_BV, 0)
        state[_TOKEN, :count] = token_B
        state[_POSITION : _DRAWN + 1, :count] += 1
        self._segments = [(begin, end, window + 1) for begin, end, window in segments]
        return self._record(0, token_B, logprob_B)

    def _admit(self) -> list[RunningSequence]:
        """Gives free slots to waiting requests, and draws their first token from the prefill."""
        admitted: list[RunningSequence] = []
        longest = max((s.length for s in self._rows), default=0)
        while self._waiting and len(self._rows) + len(admitted) < self.max_running:
            needed = max(longest, self._waiting[0].length + 1)
            # Room to grow by a quarter, or the newcomer would soon be turned out again.
            grown = min(needed + needed // 4, self.context)
            running = len(self._rows) + len(admitted)
            if running and not self._cache.fits(running + 1, grown):
                break
            longest = needed
            admitted.append(self._waiting.popleft())
        if not admitted:
            return []
        admitted.sort(key=lambda sequence: -sequence.length)
        first = len(self._rows)
        self._cache.ensure(first + len(admitted), longest, keep=first)
        logits_BV = self._place(admitted, first)
        rows = slice(first, first + len(admitted))
        fields = [
            [0, s.length, len(s.tokens), s.request.seed, _float_bits(s.temperature)]
            for s in admitted
        ]
        self._state[:, rows] = torch.tensor(fields, device=self.device).T
        self._rows += admitted
        self._rows_changed()
        token_B, logprob_B = self._sample(logits_BV, first)
        self._state[_TOKEN, rows] = token_B
        self._state[_DRAWN, rows] += 1
        return self._record(first, token_B, logprob_B)

    def _place(self, sequences: Sequence[RunningSequence], first: int) -> Tensor:
        """Fills slots from `first` with the sequences' tokens; returns their next logits.

        Prompts that are not at hand are prefilled, once each, similar lengths together.
        """
        wanted = {sequence.prefix(): None for sequence in sequences}
        missing = [prefix for prefix in wanted if prefix not in self._prefixes]
        found = {prefix: self._prefixes[prefix] for prefix in wanted if prefix in self._prefixes}
        for batch in _batches(missing, self._prefill_tokens):
            prefilled = self._decoder.prefill(batch)
            found.update((prefix, (prefilled, row)) for row, prefix in enumerate(batch))
        self._prefixes.update((p, found[p]) for p in missing if p in self._prompt_users)
        groups: dict[int, tuple[Prefilled, list[int], list[int]]] = {}
        for row, sequence in enumerate(sequences, start=first):
            prefilled, index = found[sequence.prefix()]
            _, rows, indices = groups.setdefault(id(prefilled), (prefilled, [], []))
            rows.append(row)
            indices.append(index)
        logits_BV = None
        for prefilled, rows, indices in groups.values():
            self._cache.write_prompts(rows, prefilled.kv_LUKPW, indices)
            part_BV = prefilled.logits_UV[torch.tensor(indices, device=self.device)]
            if logits_BV is None:
                logits_BV = part_BV.new_empty(len(sequences), part_BV.shape[1])
            logits_BV[torch.tensor(rows, device=self.device) - first] = part_BV
        assert logits_BV is not None
        return logits_BV

    def _sample(self, logits_BV: Tensor, first: int) -> tuple[Tensor, Tensor]:
        rows = slice(first, first + logits_BV.shape[0])
        temperature: float | Tensor | None = self._same_temperature
        if temperature is None:
            temperature = self._temperature[rows]
        return sample_tokens(
            logits_BV, self._state[_SEED, rows], self._state[_DRAWN, rows], temperature
        )

    def _record(self, first: int, token_B: Tensor, logprob_B: Tensor) -> list[RunningSequence]:
        """Hands drawn tokens to rows from `first`; takes out and returns those that ended."""
        ended: list[int] = []
        logprobs = logprob_B.tolist()
        if not math.isfinite(math.fsum(logprobs)):
            raise M2FlowError(
                f"the weights of version {self.version} give logits that are not finite"
            )
        for row, (token, logprob) in enumerate(
            zip(token_B.tolist(), logprobs, strict=True), start=first
        ):
            if self._rows[row].take(token, logprob):
                ended.append(row)
        return self._vacate(ended)

    # --- rows ---------------------------------------------------------------------------------

    def _make_room(self) -> list[tuple[int, int, int]]:
        """Room for one more token in every running slot, and the segments to attend by."""
        segments = self._segments or self._cut()
        while not self._cache.fits(len(self._rows), _longest(segments)):
            self._requeue([max(range(len(self._rows)), key=lambda row: self._rows[row].order)])
            segments = self._cut()
        self._cache.ensure(len(self._rows), _longest(segments), keep=len(self._rows))
        self._excess += max(0, self._waste - self._sorted_waste)
        if self._excess > _SORT_PASSES * len(self._rows) * _longest(segments):
            self._sort()
            segments = self._cut()
            self._excess, self._sorted_waste = 0, self._waste
        return segments

    def _cut(self) -> list[tuple[int, int, int]]:
        lengths = [sequence.length for sequence in self._rows]
        self._segments = cut(lengths, self._segment_overhead)
        self._waste = waste(lengths, self._segments)
        return self._segments

    def _sort(self) -> None:
        """Longest first, so that few short rows lie in the segments of long ones.

        Called when what the disorder has cost since the last sort would have paid for this one.
        """
        order = sorted(range(len(self._rows)), key=lambda row: -self._rows[row].length)
        columns = self._rows[order[0]].length - 1
        self._cache.permute(order, columns)
        self._state[:, : len(order)] = self._state[:, torch.tensor(order, device=self.device)]
        self._rows = [self._rows[row] for row in order]

    def _vacate(self, rows: Sequence[int]) -> list[RunningSequence]:
        """Takes rows out; the last ones move into the gaps, so that the batch stays dense."""
        if not rows:
            return []
        leaving = [self._rows[row] for row in rows]
        gone = set(rows)
        kept = len(self._rows) - len(rows)
        targets = [row for row in rows if row < kept]
        sources = [row for row in range(kept, len(self._rows)) if row not in gone]
        if targets:
            columns = max(self._rows[row].length for row in sources)
            self._cache.move(sources, targets, min(columns, self._cache.columns))
            index = torch.tensor([targets, sources], device=self.device)
            self._state[:, index[0]] = self._state[:, index[1]]
            for source, target in zip(sources, targets, strict=True):
                self._rows[target] = self._rows[source]
        del self._rows[kept:]
        self._rows_changed()
        return leaving

    def _requeue(self, rows: Sequence[int]) -> None:
        """Puts running rows back to the head of the queue, oldest first."""
        leaving = sorted(self._vacate(rows), key=lambda sequence: sequence.order)
        self._waiting.extendleft(reversed(leaving))

    def _rows_changed(self) -> None:
        self._segments = None
        temperatures = {sequence.temperature for sequence in self._rows}
        self._same_temperature = temperatures.pop() if len(temperatures) == 1 else None

    # --- requests -----------------------------------------------------------------------------

    def _complete(self, sequence: RunningSequence, reason: FinishReason) -> Completion:
        del self._live[sequence.request.id]
        self._prompt_users[sequence.prompt] -= 1
        if not self._prompt_users[sequence.prompt]:
            del self._prompt_users[sequence.prompt]
            self._prefixes.pop(sequence.prompt, None)
        sequence.mark(self.version)
        return sequence.completion(reason, self._decoder.logprob_dtype, self.version)

    def _check(self, sequence: RunningSequence) -> None:
        prompt, params = sequence.prompt, sequence.request.params
        vocab_size = self._decoder.architecture.vocab_size
        if not prompt:
            raise UserError("the prompt is empty", key=f"request {sequence.request.id}")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise UserError(
                "the prompt holds a token that the model does not have",
                key=f"request {sequence.request.id}",
                value=max(prompt) if max(prompt) >= vocab_size else min(prompt),
                expected=f"ids from 0 to {vocab_size - 1}",
                hint="tokenizer and model do not belong together",
            )
        if params.max_new_tokens < 1:
            raise UserError(
                "at least one token is drawn", key="max_new_tokens", value=params.max_new_tokens
            )
        if not (params.temperature >= 0 and math.isfinite(params.temperature)):
            raise UserError(
                "no distribution", key="temperature", value=params.temperature, expected=">= 0"
            )
        if len(prompt) + params.max_new_tokens > self.context:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and {params.max_new_tokens} new ones "
                f"do not fit the context of {self.context}",
                key=f"request {sequence.request.id}",
                hint="lower max_new_tokens, drop long prompts, or raise the context",
            )


def _check_limits(config: Any, max_running: int, context: int, cache_tokens: int) -> None:
    if max_running < 1:
        raise UserError("nothing could run", key="max_running", value=max_running, expected=">= 1")
    if not 2 <= context <= config.max_position_embeddings:
        raise UserError(
            "the model has no such context",
            key="context",
            value=context,
            expected=f"2 to {config.max_position_embeddings} tokens",
        )
    if cache_tokens < context:
        raise UserError(
            "the cache could not hold one sequence",
            key="cache_tokens",
            value=cache_tokens,
            expected=f"at least the context of {context} tokens",
        )


def _batches(
    prefixes: Iterable[tuple[int, ...]], max_tokens: int
) -> Iterable[list[tuple[int, ...]]]:
    """Batches of similar length, longest first, of at most `max_tokens` with padding."""
    batch: list[tuple[int, ...]] = []
    for prefix in sorted(prefixes, key=len, reverse=True):
        if batch and (len(batch) + 1) * len(batch[0]) > max_tokens:
            yield batch
            batch = []
        batch.append(prefix)
    if batch:
        yield batch


def _longest(segments: Sequence[tuple[int, int, int]]) -> int:
    return max(window for _, _, window in segments)


def _float_bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float64).view(torch.int64))
