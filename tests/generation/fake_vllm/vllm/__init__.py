"""What m2flow calls of vLLM, slowly: a stand-in where vLLM is not installed.

It computes with transformers, a whole forward pass for each token, and has the traps of the real
one: a tied head is a copy that is replaced by its own name alone, keys and values of prompts
outlive the weights, seed -1 is no seed, an update of the weights that was begun must be finished
before anything is drawn. Memory of a GPU is a file here, which both sides map.
`test_external_engines.py` holds both to the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.sampling_params import SamplingParams

__all__ = ["EngineArgs", "SamplingParams"]


@dataclass
class EngineArgs:
    model: str
    trust_remote_code: bool  # has a default there, which nobody is to rely on
    dtype: str
    max_num_seqs: int
    skip_tokenizer_init: bool
    logprobs_mode: str
    disable_log_stats: bool
    kv_cache_memory_bytes: int
    gpu_memory_utilization: float
    max_model_len: int  # would be another one where a rope is stretched
    enforce_eager: bool = False
    enable_chunked_prefill: bool = True
    max_num_batched_tokens: int | None = None
    enable_sleep_mode: bool = False
    weight_transfer_config: dict[str, str] | None = None
