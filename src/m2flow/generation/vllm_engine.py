"""vLLM, in a process of its own."""

from __future__ import annotations

import os
from typing import Any

import torch

from m2flow.generation.external_engine import SEEDS, ExternalEngine, Started
from m2flow.generation.records import Request

BATCHED_TOKENS = 2048
"""Tokens of prompts that are computed together on a CPU, or more where one prompt may be longer."""


class VLLMEngine(ExternalEngine):
    """Generation by vLLM on one lane."""

    package, label = "vllm", "vLLM"

    def _settings(self, started: Started) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "model": started.folder,
            "dtype": started.dtype,
            "max_num_seqs": started.max_running,
            "skip_tokenizer_init": not started.reads_text,
            "logprobs_mode": "processed_logprobs",  # of what is drawn from, temperature included
            "disable_log_stats": True,
            "tied_embeddings": bool(started.config.tie_word_embeddings),
        }
        if started.device == "cpu":
            settings["enforce_eager"] = True  # compiling takes a minute, and gains little
            # On a CPU vLLM 0.32 fails where the prompt of a request with a seed is cut.
            settings["enable_chunked_prefill"] = False
            settings["max_num_batched_tokens"] = max(BATCHED_TOKENS, self._context)
        else:
            settings["enable_sleep_mode"] = True
        if started.cache_bytes is not None:
            settings["kv_cache_memory_bytes"] = started.cache_bytes
            # vLLM would demand so much of all memory to be free, however little it then takes.
            settings["gpu_memory_utilization"] = 0.01
        return settings

    def _environment(self, device: str) -> dict[str, str]:
        environment = {
            "VLLM_NO_USAGE_STATS": "1",
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
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
