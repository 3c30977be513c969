"""What its tokenizer manager is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class PauseGenerationReqInput:
    mode: Literal["abort", "retract", "in_place"] = "abort"


@dataclass
class ContinueGenerationReqInput:
    pass


@dataclass
class UpdateWeightFromDiskReqInput:
    model_path: str
    load_format: str | None = None
    weight_version: str | None = None
    flush_cache: bool = True


@dataclass
class ReleaseMemoryOccupationReqInput:
    tags: list[str] | None = None


@dataclass
class ResumeMemoryOccupationReqInput:
    tags: list[str] | None = None
