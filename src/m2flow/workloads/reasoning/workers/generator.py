"""The worker that draws completions, and hands each on when it is finished."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Generator as Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from m2flow.errors import RunFailed
from m2flow.flow import Batch, Layout, Place, Ragged, Worker, stage
from m2flow.flow.worker import ONE_LANE
from m2flow.workloads.reasoning.supported import is_divided, key_value_heads
from m2flow.workloads.reasoning.workers.source import ModelSource, by_heads, dtype_on

if TYPE_CHECKING:
    from m2flow.generation.native import NativeEngine
    from m2flow.generation.records import Completion, Request, SamplingParams
    from m2flow.generation.vllm_engine import VLLMEngine

HANDED_ON = 4
"""Completions are handed on once they are 1 / HANDED_ON of those that still run: many at a time
while many run, and one by one in the tail."""

LISTEN_EVERY = 4
"""Steps of the engine after which the call stops for a moment to hear if anything has come."""


CACHE_SHARE = 0.5
"""Of an accelerator's memory, for keys and values where the recipe does not say."""


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
        engine: native or vllm.
        dtype: what is computed in; None for the model's.
        cache_gb: 10**9 bytes that keys and values may take on a lane; None for `CACHE_SHARE` of an
            accelerator's memory, or what is needed of a CPU's.
        key_value_heads: of the model, which layouts divide; None for what the model's folder says.
        stop: strings that end an answer, beside the model's end tokens.
    """

    collective = True

    engine: NativeEngine | VLLMEngine

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
        key_value_heads: int | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        self.model, self.key_value_heads, self.stop = model, key_value_heads, tuple(stop)
        self.samples_per_prompt = samples_per_prompt
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        self.top_k, self.top_p, self.min_p = top_k, top_p, min_p
        self.max_running = max_running
        self.engine_name = engine
        self.dtype, self.cache_gb = dtype or model.dtype, cache_gb

    def layouts(self, kind: str, lanes: int) -> Sequence[Layout]:
        """Tensor parallel over any number of lanes that divides the key-value heads.

        vLLM stands on one lane, and so does a model that transformers' own forward pass computes.
        """
        if self.engine_name == "vllm" or not is_divided(self.model.path):
            return [ONE_LANE]
        heads = self.key_value_heads or key_value_heads(self.model.path)
        return [by_heads(size, heads) for size in range(1, lanes + 1)]

    def load(self, place: Place) -> None:
        super().load(place)
        from m2flow.generation.native import NativeEngine
        from m2flow.generation.tensor_parallel import TensorParallel

        self._stop_ids, stops = self.model.stop_ids(), bool(self.stop_strings())
        dtype = dtype_on(self.dtype, place.device)
        cache_bytes = _cache_bytes(self.cache_gb, place.device)
        if self.engine_name == "vllm":
            from m2flow.generation.vllm_engine import VLLMEngine
            from m2flow.models.folder import model_folder

            self.engine = VLLMEngine(
                str(model_folder(self.model.path)),
                version=place.version,
                max_running=self.max_running,
                dtype=dtype,
                device=place.device,
                cache_bytes=cache_bytes,
                stop_strings=stops,
            )
            return
        model = self.model.load(place.device, stays=False)
        self.engine = NativeEngine(
            model.config,
            max_running=self.max_running,
            dtype=dtype,
            device=place.device,
            spill=place.spill,
            parallel=TensorParallel.of(place.gang),
            cache_bytes=cache_bytes,
            text_of=_text_of(self.model.tokenizer()) if stops else None,
        )
        self.engine.install(model.state_dict(), place.version)

    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end an answer."""
        return self.stop

    @stage(streaming=True, expands="samples_per_prompt")
    def generate(
        self,
        prompts: Batch,
        *,
        samples_per_prompt: int | None = None,
        temperature: float | None = None,
    ) -> Coroutine[Batch, Batch | None, None]:
        """One prompt in, several samples out, each when it is finished.

        A call that is closed before its end drops what it has begun.
        """
        from m2flow.generation.records import SamplingParams

        params = SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature if temperature is None else temperature,
            stop_token_ids=self._stop_ids,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            stop_strings=self.stop_strings(),
        )
        call = _Call(self.engine, params, samples_per_prompt or self.samples_per_prompt)
        try:
            yield from call.drawn(prompts)
        finally:
            self.engine.abort(list(call.running))

    def install(self, weights: Mapping[str, Any], version: int) -> None:
        self.engine.install(weights, version)

    def weight_boxes(self, layout: Any) -> Mapping[str, Any] | None:
        return None if self.place.gang.size == 1 else self.engine.weight_boxes()

    def close(self) -> None:
        from m2flow.generation.vllm_engine import VLLMEngine

        engine = getattr(self, "engine", None)
        if isinstance(engine, VLLMEngine):
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


def _cache_bytes(cache_gb: float | None, device: str) -> int | None:
    """What keys and values may take on a device."""
    if cache_gb is not None:
        return int(1e9 * cache_gb)
    if device == "cpu":
        return None
    import torch

    return int(CACHE_SHARE * torch.cuda.get_device_properties(device).total_memory)


@dataclass(slots=True)
class _Call:
    """The samples that one call draws.

    Attributes:
        engine: draws them.
        params: how.
        count: samples of a prompt.
        running: sample to the Batch and row that hold its prompt's columns.
    """

    engine: NativeEngine | VLLMEngine
    params: SamplingParams
    count: int
    running: dict[int, tuple[Batch, int]] = field(default_factory=dict)

    def drawn(self, prompts: Batch) -> Coroutine[Batch, Batch | None, None]:
        """Draw until nothing runs; takes further prompts at each yield."""
        self._submit(prompts)
        nothing = Batch({}, [])
        finished: list[Completion] = []
        steps = 0
        while self.engine.busy:
            finished += self.engine.step()
            steps += 1
            if finished and len(finished) * HANDED_ON >= self.engine.num_running:
                arrived = yield self._handed_on(finished)
                finished = []
            elif steps % LISTEN_EVERY == 0:
                arrived = yield nothing
            else:
                continue
            if arrived is not None:
                self._submit(arrived)

    def _submit(self, prompts: Batch) -> None:
        from m2flow.algorithms.sampling import derive_seed
        from m2flow.generation.records import Request

        samples = prompts.repeat(self.count)
        requests: list[Request] = []
        rows = zip(samples.ids, samples["prompt_ids"].rows(), samples["seed"], strict=True)
        for row, (item, prompt, seed) in enumerate(rows):
            own_seed = derive_seed(int(seed), item % self.count)
            requests.append(Request(item, prompt, own_seed, self.params))
            self.running[item] = (samples, row)
        self.engine.submit(requests)

    def _handed_on(self, finished: list[Completion]) -> Batch:
        """Finished samples as a Batch, with the columns of their prompts."""
        for done in finished:
            if not 0 < len(done.token_ids) <= self.params.max_new_tokens:
                raise RunFailed(
                    f"the engine gave item {done.id} {len(done.token_ids)} tokens; it was asked "
                    f"for 1 to {self.params.max_new_tokens} (generation.max_new_tokens)"
                )
        rows_of: dict[int, tuple[Batch, list[int], list[Completion]]] = {}
        for done in finished:
            batch, row = self.running.pop(done.id)
            _, rows, some = rows_of.setdefault(id(batch), (batch, [], []))
            rows.append(row)
            some.append(done)
        return Batch.concat(
            [
                batch.select(rows).with_columns(
                    completion_ids=Ragged.from_rows([done.token_ids for done in some]),
                    behaviour_logprobs=Ragged.from_rows([done.logprobs for done in some]),
                    finish_reason=[done.finish_reason for done in some],
                    version=[done.versions for done in some],
                    token_versions=Ragged.from_rows([done.token_versions for done in some]),
                )
                for batch, rows, some in rows_of.values()
            ]
        )
