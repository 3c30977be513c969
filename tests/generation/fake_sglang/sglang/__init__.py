"""What m2flow calls of SGLang 0.5.21, slowly: a stand-in, since SGLang is built for GPUs alone.

It computes with transformers, a whole forward pass for each token, and has the traps that SGLang's
code has: `ignore_eos` ignores the stop tokens too, and without it the model's own end token ends
answers; seeds count in deterministic inference alone; a name drops all requests that begin with it;
keys and values outlive the weights unless they are flushed, which fails while a request runs;
weights that slept without a copy on the host are lost; log-probabilities know nothing of top-k.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from sglang.scheduling import Running, Scheduler
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
)

__all__ = ["Engine"]

SETTINGS = {
    "model_path",
    "trust_remote_code",
    "dtype",
    "max_running_requests",
    "skip_tokenizer_init",
    "enable_deterministic_inference",
    "log_level",
    "device",
    "base_gpu_id",
    "enable_memory_saver",
    "enable_weights_cpu_backup",
    "max_total_tokens",
    "mem_fraction_static",
    "weight_version",
}
"""Fields of its `ServerArgs` that m2flow sets."""

SAMPLING = {
    "sampling_seed",
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "stop_token_ids",
    "ignore_eos",
    "stop",
}
"""Fields of its `SamplingParams` that m2flow sets."""


class Engine:
    def __init__(self, **settings: Any) -> None:
        assert settings.keys() <= SETTINGS
        assert settings["trust_remote_code"] is False
        try:
            asyncio.get_running_loop()
            raise AssertionError("the real one takes a loop that runs for its own")
        except RuntimeError:
            self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = TokenizerManager(Scheduler(settings))

    async def async_generate(
        self,
        *,
        input_ids: list[int],
        sampling_params: dict[str, Any],
        return_logprob: bool,
        rid: str,
    ) -> dict[str, Any]:
        assert return_logprob
        assert sampling_params.keys() <= SAMPLING
        return await self.tokenizer_manager.generate(input_ids, sampling_params, rid)


class TokenizerManager:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._steps: asyncio.Task[None] | None = None
        self._condition = asyncio.Condition()
        self._paused = False
        self.rid_to_state: dict[str, Running] = {}

    async def generate(self, prompt: list[int], how: dict[str, Any], rid: str) -> dict[str, Any]:
        if self._steps is None:
            self._steps = asyncio.create_task(self._scheduler.run())
        self.rid_to_state[rid] = one = Running(rid, prompt, how, asyncio.Event())
        async with self._condition:
            await self._condition.wait_for(lambda: not self._paused)
        self._scheduler.waiting.append(one)
        await one.ended.wait()
        del self.rid_to_state[rid]
        return {"output_ids": one.tokens, "meta_info": one.about(self._scheduler.version)}

    def abort_request(self, rid: str = "") -> None:
        if rid in self.rid_to_state:
            self._scheduler.abort(rid)

    async def pause_generation(self, asked: PauseGenerationReqInput) -> None:
        async with self._condition:
            self._paused = True
            self._scheduler.pause(asked.mode)

    async def continue_generation(self, asked: ContinueGenerationReqInput) -> None:
        async with self._condition:
            self._paused = self._scheduler.paused = False
            self._condition.notify_all()

    async def update_weights_from_disk(
        self, asked: UpdateWeightFromDiskReqInput
    ) -> tuple[bool, str, int]:
        while not self._paused and self.rid_to_state:  # its lock waits for all requests
            await asyncio.sleep(0.01)
        try:
            self._scheduler.load(asked.model_path)
        except (KeyError, RuntimeError) as error:
            return False, f"Failed to update weights: {error}", 0
        assert not asked.flush_cache or self._scheduler.flush(), "the cache was not flushed"
        self._scheduler.set_version(asked.weight_version)
        return True, "done", 0

    async def release_memory_occupation(self, asked: ReleaseMemoryOccupationReqInput) -> None:
        assert self._scheduler.flush(), "it is not idle"
        self._scheduler.release()

    async def resume_memory_occupation(self, asked: ResumeMemoryOccupationReqInput) -> None:
        with torch.no_grad():
            self._scheduler.resume()
