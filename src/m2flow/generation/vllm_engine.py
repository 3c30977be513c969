"""vLLM, in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from m2flow.generation import vllm_transfer
from m2flow.generation.external_engine import EMBEDDING, HEAD, SEEDS, ExternalEngine, Started
from m2flow.generation.records import Request
from m2flow.models.lora import unsummed

BATCHED_TOKENS = 2048
"""Tokens that are computed together, or more where more requests run; on a CPU also where one
prompt may be longer."""


class VLLMEngine(ExternalEngine):
    """Generation by vLLM on one lane.

    On an accelerator weights are handed over there, by vLLM's weight transfer.
    """

    package, label = "vllm", "vLLM"

    def _settings(self, started: Started) -> dict[str, Any]:
        self._device, self._tied = started.device, bool(started.config.tie_word_embeddings)
        settings: dict[str, Any] = {
            "model": started.folder,
            "trust_remote_code": False,  # code in a model folder never runs
            "dtype": started.dtype,
            "max_num_seqs": started.max_running,
            "skip_tokenizer_init": not started.reads_text,
            "logprobs_mode": "processed_logprobs",  # of what is drawn from, temperature included
            "disable_log_stats": True,
            "tied_embeddings": self._tied,
            "max_model_len": self.context,  # vLLM would multiply it by a rope's factor
            "max_num_batched_tokens": max(BATCHED_TOKENS, started.max_running),
        }
        if started.device == "cpu":
            settings["enforce_eager"] = True  # compiling takes a minute, and gains little
            # On a CPU vLLM 0.32 fails where the prompt of a request with a seed is cut.
            settings["enable_chunked_prefill"] = False
            batched = max(BATCHED_TOKENS, started.max_running, self.context)
            settings["max_num_batched_tokens"] = batched
        else:
            settings["enable_sleep_mode"] = True
            settings["weight_transfer_config"] = vllm_transfer.BACKEND
        if started.cache_bytes is not None:
            settings["kv_cache_memory_bytes"] = started.cache_bytes
            # vLLM would demand so much of all memory to be free, however little it then takes.
            settings["gpu_memory_utilization"] = 0.01
        return settings

    def _hand_over(self, weights: Mapping[str, Tensor], version: int) -> None:
        if self._device == "cpu":
            super()._hand_over(weights, version)
        else:
            self._transfer(weights, version)

    def _transfer(self, weights: Mapping[str, Tensor], version: int) -> None:
        alike = unsummed(weights)
        if self._tied:  # vLLM keeps the head's own copy, which would stay as it was
            weights, alike = WithHead(weights), WithHead(alike)
        try:
            self._ask("start_update")
            for update in vllm_transfer.updates(weights, self._device, alike):
                self._ask("update", update)
            self._ask("finish_update", version)
        except BaseException:
            if self._end is None:
                self._given_up("was left with a part of an update")
            raise
        vllm_transfer.collect()

    def _environment(self, device: str) -> dict[str, str]:
        environment = {
            "VLLM_NO_USAGE_STATS": "1",
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # which would count, and not `cache_bytes`
        if device == "cpu":
            environment |= {
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": str(torch.get_num_threads()),
            }
        return environment

    def _sampling(self, request: Request) -> dict[str, Any]:
        params = request.params
        return {
            "seed": request.seed & SEEDS,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "stop_token_ids": list(params.stop_token_ids),
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "stop": list(params.stop_strings),
        }


class WithHead(Mapping[str, Tensor]):
    """Weights of which the head is the embedding, each made when it is asked for."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[name if name in self._weights else EMBEDDING]

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self._weights if name != HEAD)
        yield HEAD

    def __len__(self) -> int:
        return len(self._weights) + (HEAD not in self._weights)
