"""Its sampling parameters; it accepts no others."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class RequestOutputKind(Enum):
    FINAL_ONLY = 2


@dataclass
class SamplingParams:
    max_tokens: int
    temperature: float
    seed: int
    stop_token_ids: list[int]
    stop: list[str]
    ignore_eos: bool
    logprobs: int
    top_k: int
    top_p: float
    min_p: float
    detokenize: bool
    output_kind: RequestOutputKind
