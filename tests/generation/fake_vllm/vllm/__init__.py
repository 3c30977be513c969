"""What m2flow calls of vLLM, drawing by rule: token k of a request is (seed + k + shift) % 7."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import SamplingParams

__all__ = ["EngineArgs", "SamplingParams"]


class EngineArgs:
    def __init__(self, **settings: Any) -> None:
        self.settings = settings


@dataclass
class Logprob:
    logprob: float


@dataclass
class Drawn:
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    finish_reason: str


@dataclass
class Output:
    request_id: str
    outputs: list[Drawn]
    finished: bool = True
