"""SGLang, in a process of its own.

SGLang records log-probabilities before `top_k`, `top_p` and `min_p` take tokens away: with any of
them the record is not of what was drawn from, and recipes refuse them.
"""

from __future__ import annotations

from typing import Any

import torch

from m2flow.generation.external_engine import SEEDS, ExternalEngine, Started
from m2flow.generation.records import Request

MEMORY_SHARE = 0.95
"""Of an accelerator that SGLang may use where keys and values have bytes of their own: those are
the bound then, and not this share."""


class SGLangEngine(ExternalEngine):
    """Generation by SGLang on one lane."""

    package, label = "sglang", "SGLang"

    def _settings(self, started: Started) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "model_path": started.folder,
            "trust_remote_code": False,  # code in a model folder never runs
            "dtype": started.dtype,
            "max_running_requests": started.max_running,
            "skip_tokenizer_init": not started.reads_text,
            "enable_deterministic_inference": True,  # without it the seeds of requests are ignored
            "log_level": "warning",
        }
        if started.device == "cpu":
            settings["device"] = "cpu"
        else:
            settings["base_gpu_id"] = torch.device(started.device).index or 0
            settings["enable_memory_saver"] = True
            settings["enable_weights_cpu_backup"] = True  # else waking up leaves them undefined
        if started.cache_bytes is not None:
            settings["max_total_tokens"] = max(
                started.cache_bytes // _bytes_per_token(started.config, started.dtype), 1
            )
            settings["mem_fraction_static"] = MEMORY_SHARE
        return settings

    def _sampling(self, request: Request) -> dict[str, Any]:
        params = request.params
        return {
            "sampling_seed": request.seed & SEEDS,
            "max_new_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k or -1,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": not params.stop_token_ids,  # it would ignore the stop tokens too
            "stop": list(params.stop_strings),
        }


def _bytes_per_token(config: Any, dtype: str) -> int:
    """Of keys and values in all layers."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    itemsize: int = getattr(torch, dtype).itemsize
    return 2 * int(config.num_hidden_layers) * int(heads) * int(width) * itemsize
