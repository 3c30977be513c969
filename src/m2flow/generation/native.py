"""Continuous batching in PyTorch: requests share slots, decode steps and prefills.

Each step decodes one token for all running sequences, retires those that ended, and gives their
slots to waiting requests at once. A prompt is prefilled once for all requests that have it, and in
pieces where it is long, so that running ones need not wait for it. What a
request draws depends on its prompt, its seed, its parameters and the weights, and not on what else
is running. The engine is stepped by its owner and never runs on its own.

On a gang each lane has an engine with a part of the decoder and of the cache. What an engine does
depends on what was asked of it alone, so engines that are asked the same, in the same order, stay
in step; `step` is collective.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m2flow.errors import RunFailed, UserError
from m2flow.flow.worker import Place
from m2flow.generation.architecture import Architecture
from m2flow.generation.captured import (
    Capture,
    CapturedSteps,
    Places,
    Size,
    padded_count,
    padded_to_pages,
)
from m2flow.generation.decoder import Decoder
from m2flow.generation.kv_cache import KVCache
from m2flow.generation.own_forward import OwnForward, OwnSlots
from m2flow.generation.paged_attention import PageReader, reader_of, reason_against
from m2flow.generation.pages import PagedCache
from m2flow.generation.prefixes import Prefixes
from m2flow.generation.records import Completion, FinishReason, Request
from m2flow.generation.running import Drawn, RunningBatch
from m2flow.generation.sequence import RunningSequence
from m2flow.generation.stop_strings import TextOf
from m2flow.generation.supported import check_supported
from m2flow.generation.tensor_parallel import WHOLE, TensorParallel
from m2flow.runtime.lane.state import MovableState
from m2flow.runtime.weights.boxes import Box

_log = logging.getLogger(__name__)

ROOM_TO_GROW = 8
"""A request is admitted while all could grow by a 1 / ROOM_TO_GROW of the longest."""


class NativeEngine:
    """Generation with causal language models, on a lane or a gang of lanes.

    Args:
        config: the model's `transformers` configuration.
        max_running: sequences decoded together at most.
        dtype: of weights, cache and activations.
        device: where all of them live.
        spill: folder for them while an engine on the CPU sleeps; None for the system's temporary
            folder.
        parallel: which part of the decoder is here; by default all.
        cache_bytes: what keys and values may take on this device; None for what is needed. Where
            running requests would need more, those that came last wait, and what they had drawn is
            computed again when there is room. It is taken at once, and given back with the last
            request.
        prefill_tokens: of prompts, computed in a step at most; None for `prefixes.MAX_TOKENS`. A
            longer prompt takes several steps, in which running requests go on.
        text_of: the text of tokens, where requests may have stop strings.
        capture: records decode steps, where they can be; None: they run plainly. Steps of several
            lanes, of models with experts and of transformers' own forward pass always do.
        read: attends over keys and values in pages; None: what the device has for it, and where it
            has nothing they are kept in slots.
        ahead: whether a decode step is begun before the tokens of the one before are here, so that
            the device need not wait for the host; a sequence that ends by them has drawn one token
            in vain. None: where steps are recorded on CUDA.

    Raises:
        UserError: the architecture is not computed here, or does not divide over so many lanes.
    """

    def __init__(
        self,
        config: Any,
        *,
        max_running: int = 256,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        spill: Path | None = None,
        parallel: TensorParallel = WHOLE,
        cache_bytes: int | None = None,
        prefill_tokens: int | None = None,
        text_of: TextOf | None = None,
        capture: Capture | None = None,
        read: PageReader | None = None,
        ahead: bool | None = None,
    ) -> None:
        self._text_of = text_of
        self.device = torch.device(device)
        self.max_running = max_running
        self.version = -1
        self.notice = check_supported(config.to_dict())
        """That transformers' own forward pass is run, and why; None where it is not."""
        records = capture is not None and _is_recordable(config, parallel, self.notice)
        self._decoder, self._cache = _computing(
            config,
            dtype,
            self.device,
            parallel,
            cache_bytes,
            fused=self.notice is None,
            padded=padded_count if records else int,
            read=read,
            rows=padded_to_pages(max_running),
        )
        self.captured: CapturedSteps | None = None
        """The recorded decode steps; None where none is recorded."""
        if capture is not None and records:
            self.captured = CapturedSteps(capture, self._places)
        self._running = RunningBatch(
            self._cache,
            max_running=max_running,
            device=self.device,
            parallel=parallel,
        )
        on_cuda = self.captured is not None and self.device.type == "cuda"
        self._ahead = on_cuda if ahead is None else ahead
        self._in_flight: list[Drawn] = []
        self._done: list[Completion] = []  # that the next step gives
        self._prefixes = Prefixes(self._decoder, self._cache, prefill_tokens)
        self._state = MovableState(self._tensors, Place(device=str(self.device), spill=spill))
        self._waiting: deque[RunningSequence] = deque()
        self._live: dict[int, RunningSequence] = {}
        self._submitted = 0
        self.preemptions = 0
        """How often a request had to wait after it had begun."""

    @property
    def busy(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self._live or self._done)

    @property
    def logprob_dtype(self) -> torch.dtype:
        """Of the log-probabilities of completions."""
        return self._decoder.logprob_dtype

    @property
    def context(self) -> int:
        """Tokens that prompt and completion may have together."""
        return self._decoder.architecture.max_position

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests, first in first out; all of them or, if one is wrong, none.

        Raises:
            UserError: a prompt is empty, holds an id outside the vocabulary, or is too long for
                the context with its `max_new_tokens`.
        """
        new: dict[int, RunningSequence] = {}
        for request in requests:
            assert request.id not in self._live, f"request {request.id} is already here"
            assert request.id not in new, f"request {request.id} comes twice"
            new[request.id] = sequence = RunningSequence(request, self._text_of)
            self._check(sequence)
        beside = (*self._live.values(), *new.values())
        kinds = {sequence.request.params.distribution for sequence in beside}
        assert len(kinds) <= 1, f"requests beside each other draw alike: {kinds}"
        self._live.update(new)
        for sequence in new.values():
            sequence.number = self._submitted
            self._submitted += 1
            self._waiting.append(sequence)
            self._prefixes.acquire(sequence)

    def step(self) -> list[Completion]:
        """Draw a token for every running request; return those that finished, as far as is known.

        An engine that works ahead reads tokens a step after they were asked for.

        Raises:
            RunFailed: the weights give logits that are not finite.
        """
        assert self._state.is_resident, "the engine sleeps: wake() first"
        assert self.version >= 0, "no weights: install() first"
        with torch.inference_mode():
            if not self._in_flight:
                self._preempt()
                self._begin_step()
            self._finish_step(ahead=self._ahead)
            if self._waiting:
                self._admit()
        done, self._done = self._done, []
        return done

    def abort(self, ids: Iterable[int]) -> list[Completion]:
        """Drop requests and return what they had drawn; their slots are free at once.

        Ids that are not here are passed over: they may have finished the moment before. A request
        that finishes by what is in flight is returned as that.
        """
        assert self._state.is_resident, "the engine sleeps: wake() first"
        self._finish_step()
        wanted = dict.fromkeys(ids)
        finished = [one for one in self._done if one.id in wanted]
        self._done = [one for one in self._done if one.id not in wanted]
        aborted = {i: self._live[i] for i in wanted if i in self._live}
        self._waiting = deque(s for s in self._waiting if s.request.id not in aborted)
        running = enumerate(self._running.sequences)
        with torch.inference_mode():
            self._running.remove([row for row, s in running if s.request.id in aborted])
        return finished + [self._complete(sequence, "abort") for sequence in aborted.values()]

    def install(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace all weights, between steps; running requests go on with the new ones.

        Keys and values of what they have drawn stay; `Completion.token_versions` tells tokens
        apart. A prompt of which only pieces are computed is begun again.

        Args:
            weights: every parameter under its Hugging Face name, any float dtype and device.
            version: their number.

        Raises:
            ValueError: a name is missing or unknown, or a shape is wrong; nothing was replaced.
        """
        assert self._state.is_resident, "the engine sleeps: wake() first"
        self._finish_step()
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
        return self._decoder.boxes()

    def sleep(self) -> None:
        """Give back the device's memory; weights, keys and values are kept elsewhere.

        Until `wake`, no other method may be called that needs them: `step`, `abort`, `install`.
        """
        if not self._state.is_resident:
            return
        self._finish_step()
        self._rest()
        if isinstance(self._decoder, Decoder):
            self._decoder.weights.drop_prepacked()
        self._state.offload()

    def wake(self) -> None:
        """Take all of it back; requests go on where they were."""
        self._state.onload()

    def state_bytes(self) -> int:
        """Bytes on the device, now or again after `wake`: of weights, with copies of them that are
        laid out for products, and of caches."""
        more = self._decoder.weights.prepacked_bytes if isinstance(self._decoder, Decoder) else 0
        return self._state.nbytes() + more

    def close(self) -> None:
        """Nothing of it outlives its memory."""

    def _tensors(self) -> Iterator[Tensor]:
        yield from self._decoder.tensors()
        yield from self._cache.tensors()
        yield from self._prefixes.tensors()

    def _places(self) -> Places:
        """Of all that a recorded step reads and writes, and that may be elsewhere after a nap."""
        assert isinstance(self._cache, KVCache | PagedCache)
        weights = (tensor.data_ptr() for tensor in self._decoder.tensors())
        return (*self._cache.places(), *weights)

    def _check(self, sequence: RunningSequence) -> None:
        """Refuse a request that cannot be answered."""
        request, prompt, a = sequence.request, sequence.prompt, self._decoder.architecture
        request.check(prompt, vocab_size=a.vocab_size, context=self.context)
        new = request.params.max_new_tokens
        if not self._cache.fits([len(prompt) + new]):
            raise UserError(
                f"a prompt of {len(prompt)} tokens and {new} new ones do not fit the memory for "
                f"keys and values, which holds {self._cache.max_cells}",
                key=f"request {request.id}",
                hint="raise generation.cache_gb, or lower max_new_tokens",
            )

    def _preempt(self) -> None:
        """Take requests out that the cache has no room for, the last submitted first."""
        lengths = self._running.lengths
        if self._cache.fits(lengths):
            return
        latest_first = sorted(
            range(len(lengths)), key=lambda row: -self._running.sequences[row].number
        )
        left = [lengths[row] for row in latest_first]
        while left and not self._cache.fits(left):
            del left[0]
        out = latest_first[: len(lengths) - len(left)]
        if out:
            self._waiting.extendleft(self._running.sequences[row] for row in out)
            self._running.remove(sorted(out))
            self.preemptions += len(out)

    def _admit(self) -> None:
        """Give free slots to waiting requests, and draw their first token from the prefill."""
        lengths = self._running.lengths
        first = len(lengths)
        # Room to grow, so that who comes in need not leave at once.
        grown = [length + length // ROOM_TO_GROW for length in lengths]
        fitting: list[RunningSequence] = []
        for sequence in islice(self._waiting, self.max_running - first):
            length = sequence.length + 1
            grown.append(length + length // ROOM_TO_GROW)
            if len(grown) > 1 and not self._cache.fits(grown):
                break
            fitting.append(sequence)
        admitted = [self._waiting.popleft() for _ in range(self._prefixes.prefill(fitting))]
        if not admitted:
            return
        admitted.sort(key=lambda sequence: -sequence.length)
        lengths += [sequence.length + 1 for sequence in admitted]
        self._cache.ensure(lengths, keep=first)
        logits_BV = self._prefixes.fill(admitted, first)
        self._running.add(admitted)
        self._in_flight.append(self._running.draw(logits_BV, first))
        if not self._ahead or self._running.ends_by_length:  # nothing could be begun beside it
            self._finish_step()

    def _begin_step(self) -> None:
        """Have the next token of every running row drawn."""
        if self._running:
            self._in_flight.append(self._running.draw(self._decode()))

    def _finish_step(self, *, ahead: bool = False) -> None:
        """Take what is in flight, if anything is; with `ahead` the next step is begun before.

        It is not where a row ends by its length, or room is short: both are known beforehand.
        """
        drawn, self._in_flight = self._in_flight, []
        if not drawn:
            return
        with torch.inference_mode():
            running = self._running
            if ahead and self._cache.fits(running.lengths) and not running.ends_by_length:
                self._begin_step()
            self._take(drawn)

    def _decode(self) -> Tensor:
        """Logits of the next token of every running row, logits_BV."""
        running, decoder = self._running, self._decoder
        if self.captured is None:
            token_N, position_N, view = running.decode_inputs()
            return decoder.decode(token_N, position_N, len(running), view)
        assert isinstance(decoder, Decoder)
        assert isinstance(self._cache, KVCache | PagedCache)
        size = running.pad()
        hidden_NE = self.captured.run(size, self._cache.layout, partial(self._advance, size))
        return decoder.logits(hidden_NE[: len(running)])

    def _advance(self, size: Size) -> Tensor:
        """The decode step that is recorded for a size."""
        assert isinstance(self._decoder, Decoder)
        token_N, position_N, view = self._running.padded_inputs(size)
        return self._decoder.advance(token_N, position_N, size.rows, view)

    def _take(self, drawn: Sequence[Drawn]) -> None:
        """Have tokens that were drawn, once they are here; sequences that end by them go."""
        if not math.isfinite(math.fsum(chain.from_iterable(one.read() for one in drawn))):
            raise RunFailed(
                f"the weights of version {self.version} give logits that are not finite: lower "
                "optimizer.learning_rate and go back to an earlier checkpoint, if training has "
                "made them"
            )
        ended = [row for row, one in enumerate(self._running.sequences) if one.ended]
        gone = self._running.remove(ended)
        with torch.inference_mode(False):  # of a completion a loss can be taken
            for sequence in gone:
                reason: FinishReason = "stop" if sequence.stopped else "length"
                self._done.append(self._complete(sequence, reason))
        if not self._running:  # what is in flight is of those that have ended
            self._in_flight.clear()

    def _complete(self, sequence: RunningSequence, reason: FinishReason) -> Completion:
        del self._live[sequence.request.id]
        self._prefixes.release(sequence)
        sequence.mark(self.version)
        if not self._live and self._cache.max_cells is not None:
            self._rest()  # a budget is taken at once, and others on the lane have calls, too
        return sequence.completion(reason, self._decoder.logprob_dtype, self.version)

    def _rest(self) -> None:
        """Give back what only running requests need."""
        if not self._running:  # then nobody reads the slots again
            self._cache.free()
            if self.device.type == "cuda":
                # Else torch keeps the memory and cuts from it what others ask for: there would be
                # room for a budget, but not in one piece.
                torch.cuda.empty_cache()
        if self.captured is not None:
            self.captured.moves()


def _is_recordable(config: Any, parallel: TensorParallel, notice: str | None) -> bool:
    """Whether decode steps can be recorded: the host sizes the products of experts, and what
    transformers' own forward pass does is not known."""
    return notice is None and parallel.size == 1 and not getattr(config, "num_experts", 0)


def _computing(
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    parallel: TensorParallel,
    budget: int | None,
    *,
    fused: bool,
    padded: Callable[[int], int],
    read: PageReader | None,
    rows: int,
) -> tuple[Decoder | OwnForward, KVCache | PagedCache | OwnSlots]:
    """What computes a model's tokens, and what holds its keys and values."""
    if fused:
        decoder = Decoder(config, dtype=dtype, device=device, parallel=parallel)
        a = decoder.architecture
        read = read or _page_reader(a, dtype, device)
        if read is not None:
            return decoder, PagedCache(
                a, dtype=dtype, device=device, read=read, rows=rows, budget=budget
            )
        return decoder, KVCache(a, dtype=dtype, device=device, budget=budget, padded=padded)
    if parallel.size > 1:
        raise UserError(
            "transformers' own forward pass is not divided over lanes",
            key="model_type",
            value=config.model_type,
            hint="let the generator stand on gangs of 1",
        )
    forward = OwnForward(config, dtype=dtype, device=device)
    return forward, OwnSlots(forward, budget)


def _page_reader(a: Architecture, dtype: torch.dtype, device: torch.device) -> PageReader | None:
    """What attends over pages; None where keys and values are kept in slots, said on a GPU."""
    reason = reason_against(a, dtype, device)
    if reason is not None and device.type == "cuda":
        _log.warning("keys and values are kept in slots, each as long as the longest: %s", reason)
    return reader_of(a) if reason is None else None
