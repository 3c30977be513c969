"""The worker that draws completions, and hands each on when it is finished."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Generator as Coroutine
from typing import TYPE_CHECKING, Any

from m2flow.errors import UserError
from m2flow.flow import Batch, Layout, Place, Worker, stage
from m2flow.flow.worker import ONE_LANE
from m2flow.generation.supported import ENGINES
from m2flow.plan.profile.hardware import USABLE_MEMORY
from m2flow.workloads.common.loading import in_turn
from m2flow.workloads.reasoning.config import CACHE_SHARE
from m2flow.workloads.reasoning.supported import is_divided, key_value_heads
from m2flow.workloads.reasoning.workers.drawing import Drawing
from m2flow.workloads.reasoning.workers.further_draws import equal_rows, next_prompts, put_back
from m2flow.workloads.reasoning.workers.source import (
    AdaptedSource,
    ModelSource,
    by_heads,
    dtype_on,
)

if TYPE_CHECKING:
    import torch

    from m2flow.generation.captured import Capture
    from m2flow.generation.engine import GenerationEngine
    from m2flow.generation.native import NativeEngine
    from m2flow.generation.records import SamplingParams


class Generator(Worker):
    """Draws completions by continuous batching.

    On a gang the lanes draw each completion together: the model is divided among them, and each
    takes just its part of the weights that are published.

    Args:
        model: initial weights.
        samples_per_prompt: completions for each prompt.
        max_new_tokens, temperature, top_k, top_p, min_p: how they are drawn; greedily all tokens
            count.
        max_running: sequences decoded together at most.
        engine: a name of `m2flow.generation.supported.ENGINES`.
        dtype: what is computed in; None for the model's.
        cache_gb: 10**9 bytes that keys and values may take on a lane; None for `CACHE_SHARE` of an
            accelerator's memory, or what weights leave of it, or what is needed of a CPU's.
        captured_decode: whether the native engine records its decode steps on an accelerator.
        key_value_heads: of the model, which layouts divide; None for what the model's folder says.
        stop: strings that end an answer, beside the model's end tokens; special tokens by name.
        chat_options: variables of the chat template that writes prompts, where the tokenizer has
            one; None where prompts are no turns of a conversation.
        tokens_per_step: most that a step draws of an answer; what has not ended then is carried
            over. None for all of it.
        adapted: what adapters stand on, where they alone are published; None for whole weights.
    """

    collective = True

    engine: GenerationEngine

    def __init__(
        self,
        model: ModelSource,
        *,
        samples_per_prompt: int,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        max_running: int = 256,
        engine: str = "native",
        dtype: str | None = None,
        cache_gb: float | None = None,
        captured_decode: bool = True,
        key_value_heads: int | None = None,
        stop: Sequence[str] = (),
        chat_options: Mapping[str, Any] | None = None,
        tokens_per_step: int | None = None,
        adapted: AdaptedSource | None = None,
    ) -> None:
        self.adapted, self.chat_options = adapted, chat_options
        self.tokens_per_step = tokens_per_step
        self.model, self.key_value_heads, self.stop = model, key_value_heads, tuple(stop)
        self.samples_per_prompt = samples_per_prompt
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        self.top_k, self.top_p, self.min_p = top_k, top_p, min_p
        self.max_running = max_running
        self.engine_name = engine
        self.dtype, self.cache_gb = dtype or model.dtype, cache_gb
        self.captured_decode = captured_decode

    def layouts(self, kind: str, lanes: int) -> Sequence[Layout]:
        """Tensor parallel over any number of lanes that divides the key-value heads.

        An engine of another package stands on one lane, and so does a model that transformers' own
        forward pass computes.
        """
        if not ENGINES[self.engine_name].divides or not is_divided(self.model.path):
            return [ONE_LANE]
        heads = self.key_value_heads or key_value_heads(self.model.path)
        return [by_heads(size, heads) for size in range(1, lanes + 1)]

    def load(self, place: Place) -> None:
        super().load(place)
        self._check_gang(place)
        self._stop_ids, self._stop_strings = self.model.ends(self.stop_strings())
        dtype = dtype_on(self.dtype, place.device)
        self._whole = None if self.adapted is None else self.adapted.tensors(place.device)
        cache_bytes = self._cache_bytes(place, dtype)
        implementation = ENGINES[self.engine_name].implementation
        if implementation is not None:
            from m2flow.models.folder import model_folder

            module, _, kind = implementation.partition(":")
            self.engine = getattr(importlib.import_module(module), kind)(
                str(model_folder(self.model.path)),
                version=place.version,
                max_running=self.max_running,
                dtype=dtype,
                device=place.device,
                cache_bytes=cache_bytes,
                stop_strings=bool(self._stop_strings),
                scratch=place.spill,
            )
            return
        with in_turn(place, self.model):
            self.engine = self._native(place, dtype, cache_bytes)

    def _check_gang(self, place: Place) -> None:
        """Refuse a gang over which the model is not divided: its lanes would not draw as one."""
        kind, size = "cpu" if place.device == "cpu" else "gpu", place.gang.size
        if all(layout.lanes != size for layout in self.layouts(kind, size)):
            raise UserError(
                f"has no layout of {size} lanes",
                key=type(self).__name__,
                expected="replicas of 1 lane",
            )

    def _cache_bytes(self, place: Place, dtype: torch.dtype) -> int | None:
        """What keys and values may take beside the weights: the same on all lanes of the gang.

        Collective: lanes that had room for unequally many sequences would not draw in step.
        """
        from m2flow.generation.tensor_parallel import TensorParallel
        from m2flow.models.folder import weight_count

        weight_bytes = weight_count(self.model.path, place.gang.size) * dtype.itemsize
        here = _cache_bytes(self.cache_gb, place, weight_bytes)
        return None if here is None else TensorParallel.of(place.gang).least(here)

    def _native(self, place: Place, dtype: torch.dtype, cache_bytes: int | None) -> NativeEngine:
        """The native engine with the initial weights, copied out of the model that is loaded."""
        from m2flow.generation.native import NativeEngine
        from m2flow.generation.tensor_parallel import TensorParallel

        model = self.model.load(place.device, stays=False)
        engine = NativeEngine(
            model.config,
            max_running=self.max_running,
            dtype=dtype,
            device=place.device,
            spill=place.spill,
            parallel=TensorParallel.of(place.gang),
            cache_bytes=cache_bytes,
            capture=_capture(place.device) if self.captured_decode else None,
            text_of=_text_of(self.model.tokenizer()) if self._stop_strings else None,
        )
        engine.install(model.state_dict(), place.version)
        return engine

    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end an answer, special tokens among them.

        Where prompts are turns of a conversation, what ends the model's turn is one of them.
        """
        if self.chat_options is None or not self.model.has_chat_template():
            return self.stop
        from m2flow.workloads.reasoning.encoding import turn_end

        end = turn_end(self.model.tokenizer(), self.chat_options)
        return self.stop if end is None or end in self.stop else (*self.stop, end)

    @stage(unit="group")
    def draw_again(self, samples: Batch, *, draw: int) -> Batch:
        """Answers to the next spare prompt in place of each group whose rewards are all the same.

        On a gang the lanes draw all that any of them has, together. Adds `again`: which samples are
        new, and so not scored.

        Args:
            samples: scored, in whole groups.
            draw: how many prompts of a slot were given up before.
        """
        size = self.samples_per_prompt
        rows = equal_rows(samples, size)
        wanted = samples.select(rows)
        wanted = next_prompts(wanted, size, draw) if rows else wanted
        everyone = [some for some in self._of_all_lanes(wanted) if len(some)]
        if everyone:
            drawn = self._anew(Batch.concat(everyone))
            samples = put_back(samples, rows, drawn.take(wanted.ids)) if rows else samples
        new = set(rows)
        return samples.with_columns(again=[row in new for row in range(len(samples))])

    def _of_all_lanes(self, samples: Batch) -> list[Batch]:
        """The samples of each lane of the gang, in order. Collective."""
        from m2flow.generation.tensor_parallel import TensorParallel

        together = TensorParallel.of(self.place.gang)
        if together.size == 1:
            return [samples]
        import torch.distributed as dist

        told: list[Any] = [None] * together.size
        dist.all_gather_object(told, samples, group=together.group)
        return told

    @stage(streaming=True, expands="samples_per_prompt")
    def generate(
        self,
        prompts: Batch,
        *,
        samples_per_prompt: int | None = None,
        temperature: float | None = None,
        without: Collection[int] = (),
    ) -> Coroutine[Batch, Batch | None, None]:
        """One prompt in, several samples out, each when it is finished, less those that are there.

        A call that is closed before its end drops what it has begun.
        """
        params = self.params_at(self.temperature if temperature is None else temperature)
        count = samples_per_prompt or self.samples_per_prompt
        call = Drawing(self.engine, params, count, without, self.tokens_per_step)
        try:
            yield from call.drawn(prompts)
        finally:
            self.engine.abort(list(call.running))

    def _anew(self, samples: Batch) -> Batch:
        """Other answers to some samples, all of them, in no particular order."""
        call = Drawing(self.engine, self.params_at(self.temperature), self.samples_per_prompt)
        try:
            pieces = []
            for piece in call.all_of(samples):
                self.place.goes_on()
                pieces.append(piece)
            return Batch.concat([piece for piece in pieces if len(piece)])
        finally:
            self.engine.abort(list(call.running))

    def params_at(self, temperature: float) -> SamplingParams:
        """How answers are drawn."""
        from m2flow.generation.records import SamplingParams

        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=temperature,
            stop_token_ids=self._stop_ids,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            stop_strings=self._stop_strings,
        )

    def install(self, weights: Mapping[str, Any], version: int) -> None:
        self.engine.install(weights if self._whole is None else self._whole(weights), version)

    def weight_boxes(self, layout: Any) -> Mapping[str, Any] | None:
        """All of what one lane is given; of adapters each lane needs all."""
        whole = self.place.gang.size == 1 or self._whole is not None
        return None if whole else self.engine.weight_boxes()

    def close(self) -> None:
        engine = getattr(self, "engine", None)
        if engine is not None:
            engine.close()

    def offload(self) -> None:
        self.engine.sleep()

    def onload(self) -> None:
        self.engine.wake()

    def state_bytes(self) -> int:
        return self.engine.state_bytes()


def _text_of(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """The text of tokens, as rewards see it."""

    def text_of(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=True)
        return text

    return text_of


def _capture(device: str) -> Capture | None:
    """What records decode steps; None on a CPU, where launching them costs nothing."""
    if device == "cpu":
        return None
    import torch

    from m2flow.generation.captured import CudaCapture

    return CudaCapture(torch.device(device))


def _cache_bytes(cache_gb: float | None, place: Place, weight_bytes: int = 0) -> int | None:
    """What keys and values may take at a place, beside so many bytes of weights."""
    if cache_gb is not None:
        return int(1e9 * cache_gb)
    if place.device == "cpu":
        return None
    import torch

    there = torch.cuda.get_device_properties(place.device).total_memory
    if place.memory_bytes is not None:  # a lane's limit is what is usable of its device
        there = min(there, int(place.memory_bytes / USABLE_MEMORY))
    return max(0, int(min(CACHE_SHARE * there, USABLE_MEMORY * there - weight_bytes)))
