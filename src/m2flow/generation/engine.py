"""What every generation engine does, whoever wrote it: the calls that workers make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from m2flow.generation.records import Completion, Request


class GenerationEngine(Protocol):
    """Draws completions on a lane, or on a gang of lanes whose engines are asked the same.

    It is stepped by its owner. What an engine can be asked for is in
    `m2flow.generation.supported.ENGINES`.

    Attributes:
        version: of the weights.
    """

    version: int

    @property
    def busy(self) -> bool:
        """Whether any request is running or waiting."""

    @property
    def context(self) -> int:
        """Tokens that prompt and completion may have together."""

    @property
    def num_running(self) -> int:
        """Requests that are being drawn."""

    @property
    def logprob_dtype(self) -> torch.dtype:
        """Of the log-probabilities of completions."""

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests; all of them or, if one is wrong, none."""

    def step(self) -> list[Completion]:
        """Go on drawing; what has finished meanwhile."""

    def abort(self, ids: Iterable[int]) -> list[Completion]:
        """Drop requests; what they had drawn, where the engine gives it back."""

    def install(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace all weights, between two steps; running requests go on with the new ones."""

    def weight_boxes(self) -> Mapping[str, Any] | None:
        """The part of each parameter that this engine takes; None for all of every one."""

    def sleep(self) -> None:
        """Give back the accelerator's memory."""

    def wake(self) -> None:
        """Take it back."""

    def state_bytes(self) -> int:
        """Bytes of weights, keys and values."""

    def close(self) -> None:
        """Let go of everything that would outlive the worker."""
