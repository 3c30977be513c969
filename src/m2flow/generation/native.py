"""Continuous batching in PyTorch: requests share slots, decode steps and prefills.

Each step decodes one token for all running sequences, retires those that ended, and gives their
slots to waiting requests at once. A prompt is prefilled once for all requests that have it. Where
the cache is too small for all that run, the youngest wait again and are recomputed later; no token
is lost, and what a request draws does not change. See `protocol` for the promises.

On a gang each lane has an engine with a part of the decoder and of the cache. What an engine does
depends on what was asked of it alone, so engines that are asked the same, in the same order, stay
in step; `step` is collective.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m2flow.errors import M2FlowError
from m2flow.flow.worker import Place
from m2flow.generation.decoder import Decoder
from m2flow.generation.kv_cache import KVCache
from m2flow.generation.limits import check_engine, check_request
from m2flow.generation.prefixes import Prefixes
from m2flow.generation.protocol import Completion, FinishReason, Request
from m2flow.generation.running import RunningBatch
from m2flow.generation.sequence import RunningSequence
from m2flow.generation.tensor_parallel import WHOLE, TensorParallel
from m2flow.runtime.lane.state import MovableState
from m2flow.runtime.weights.boxes import Box


class NativeEngine:
    """A `GenerationEngine` for dense models of the Llama family, on a lane or a gang of lanes.

    Args:
        config: the model's `transformers` configuration.
        max_running: sequences decoded together at most.
        context: tokens of prompt and completion at most; default: the model's positions.
        cache_tokens: slots times the longest sequence at most; default: no limit of its own.
        prefill_tokens: tokens, padding included, of one prefill pass.
        dtype: of weights, cache and activations.
        device: where all of them live.
        spill: folder for them while an engine on the CPU sleeps; None for the system's temporary
            folder.
        parallel: which part of the decoder is here; by default all.

    Raises:
        UserError: the architecture is not computed here, does not divide over so many lanes, or a
            limit makes no sense.
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
        spill: Path | None = None,
        parallel: TensorParallel = WHOLE,
    ) -> None:
        context = context or config.max_position_embeddings
        cache_tokens = cache_tokens or max_running * context
        check_engine(config, max_running=max_running, context=context, cache_tokens=cache_tokens)
        self.device = torch.device(device)
        self.context, self.max_running = context, max_running
        self.version = -1
        self._decoder = Decoder(
            config, context=context, dtype=dtype, device=self.device, parallel=parallel
        )
        self._cache = KVCache(
            self._decoder.architecture,
            context=context,
            capacity=cache_tokens,
            dtype=dtype,
            device=self.device,
        )
        self._running = RunningBatch(
            self._cache,
            max_running=max_running,
            device=self.device,
            parallel=parallel,
        )
        self._prefixes = Prefixes(self._decoder, self._cache, max_tokens=prefill_tokens)
        self._state = MovableState(self._tensors, Place(device=str(self.device), spill=spill))
        self._waiting: deque[RunningSequence] = deque()
        self._live: dict[int, RunningSequence] = {}
        self._submitted = 0

    @property
    def busy(self) -> bool:
        return bool(self._live)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, requests: Iterable[Request]) -> None:
        new: dict[int, RunningSequence] = {}
        vocab_size = self._decoder.architecture.vocab_size
        for request in requests:
            assert request.id not in self._live, f"request {request.id} is already here"
            assert request.id not in new, f"request {request.id} comes twice"
            sequence = RunningSequence(request, self._submitted + len(new))
            check_request(sequence, vocab_size=vocab_size, context=self.context)
            new[request.id] = sequence
        self._submitted += len(new)
        self._live.update(new)
        for sequence in new.values():
            self._waiting.append(sequence)
            self._prefixes.acquire(sequence.prompt)

    def step(self) -> list[Completion]:
        assert self._state.is_resident, "the engine sleeps: wake() first"
        assert self.version >= 0, "no weights: install() first"
        ended: list[RunningSequence] = []
        with torch.inference_mode():
            if self._running:
                ended += self._decode()
            if self._waiting:
                ended += self._admit()
        return [self._complete(s, "stop" if s.stopped else "length") for s in ended]

    def abort(self, ids: Iterable[int]) -> list[Completion]:
        assert self._state.is_resident, "the engine sleeps: wake() first"
        aborted = [self._live[i] for i in dict.fromkeys(ids) if i in self._live]
        orders = {sequence.order for sequence in aborted}
        self._waiting = deque(s for s in self._waiting if s.order not in orders)
        rows = [row for row, s in enumerate(self._running.sequences) if s.order in orders]
        with torch.inference_mode():
            self._running.remove(rows)
        return [self._complete(sequence, "abort") for sequence in aborted]

    def install(self, weights: Mapping[str, Tensor], version: int) -> None:
        assert self._state.is_resident, "the engine sleeps: wake() first"
        with torch.inference_mode():
            self._decoder.install(weights)
        for sequence in self._live.values():
            sequence.mark(self.version)
        self.version = version
        # A new request must not start from what older weights made of its prompt.
        self._prefixes.clear()

    def weight_boxes(self) -> dict[str, Box]:
        """Hugging Face parameter name -> the part of it that this engine takes; `install` may be
        given that part alone."""
        return self._decoder.weights.boxes()

    def drop_caches(self) -> None:
        assert self._state.is_resident, "the engine sleeps: wake() first"
        with torch.inference_mode():
            self._requeue(range(len(self._running)))
        self._prefixes.clear()
        self._cache.free()

    def sleep(self) -> None:
        if not self._state.is_resident:
            return
        if not self._running:  # then nobody reads the slots again
            self._cache.free()
        self._state.offload()

    def wake(self) -> None:
        self._state.onload()

    def state_bytes(self) -> int:
        return self._state.nbytes()

    def _tensors(self) -> Iterator[Tensor]:
        yield from self._decoder.tensors()
        yield from self._cache.tensors()
        yield from self._prefixes.tensors()

    def _decode(self) -> list[RunningSequence]:
        """One token for every running sequence; takes out and returns those that ended."""
        running = self._running
        while not self._cache.fits(len(running), running.longest):
            orders = [sequence.order for sequence in running.sequences]
            self._requeue([orders.index(max(orders))])
        token_N, position_N, view = running.decode_inputs()
        return self._draw(self._decoder.decode(token_N, position_N, len(running), view), first=0)

    def _admit(self) -> list[RunningSequence]:
        """Gives free slots to waiting requests, and draws their first token from the prefill.

        Takes out and returns those that ended by it.
        """
        admitted: list[RunningSequence] = []
        first, longest = len(self._running), self._running.longest
        while self._waiting and (count := first + len(admitted)) < self.max_running:
            needed = max(longest, self._waiting[0].length + 1)
            # Room to grow by a quarter, or the newcomer would soon be turned out again.
            grown = min(needed + needed // 4, self.context)
            if count and not self._cache.fits(count + 1, grown):
                break
            longest = needed
            admitted.append(self._waiting.popleft())
        if not admitted:
            return []
        admitted.sort(key=lambda sequence: -sequence.length)
        self._cache.ensure(first + len(admitted), longest, keep=first)
        logits_BV = self._prefixes.fill(admitted, first)
        self._running.add(admitted)
        return self._draw(logits_BV, first)

    def _draw(self, logits_BV: Tensor, first: int) -> list[RunningSequence]:
        """The next token of the rows from `first` on; takes out and returns those that ended."""
        tokens, logprobs = self._running.draw(logits_BV, first)
        if not math.isfinite(math.fsum(logprobs)):
            raise M2FlowError(
                f"the weights of version {self.version} give logits that are not finite"
            )
        drawn = zip(self._running.sequences[first:], tokens, logprobs, strict=True)
        ended = [row for row, (s, t, logp) in enumerate(drawn, start=first) if s.take(t, logp)]
        return self._running.remove(ended)

    def _requeue(self, rows: Sequence[int]) -> None:
        """Puts running rows back to the head of the queue, oldest first."""
        leaving = sorted(self._running.remove(rows), key=lambda sequence: sequence.order)
        self._waiting.extendleft(reversed(leaving))

    def _complete(self, sequence: RunningSequence, reason: FinishReason) -> Completion:
        del self._live[sequence.request.id]
        self._prefixes.release(sequence.prompt)
        sequence.mark(self.version)
        return sequence.completion(reason, self._decoder.logprob_dtype, self.version)
