"""What it gives back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Logprob:
    logprob: float


@dataclass
class WeightVersionSpan:
    version: str
    start: int
    end: int


@dataclass
class CompletionOutput:
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    weight_versions: list[WeightVersionSpan]
    finish_reason: str


@dataclass
class RequestOutput:
    request_id: str
    outputs: list[CompletionOutput]
    finished: bool = True
