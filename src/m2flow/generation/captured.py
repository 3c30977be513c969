"""Decode steps that are recorded once and then replayed, each as one CUDA graph.

A decode step of a few rows takes the device less time than Python takes to launch its kernels. A
CUDA graph launches them together, and is bound to what it was recorded with: sizes and addresses.
So a step is padded to one of a few sizes, its inputs lie where the batch keeps them, and what was
recorded is dropped when addresses change: where the cache is laid out anew, or weights and cache
have left the device and come back elsewhere. A size is recorded when it has cost `PLAIN_STEPS`
plain steps, so that recording never costs much more than it saves; one that was recorded before, as
soon as it is there again: what its kernels need is set up by then.

Knows nothing of models, requests or sampling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from m2flow.errors import M2FlowError
from m2flow.runtime.lane.exhausted import is_exhaustion

PLAIN_STEPS = 3
"""Steps of a size that run plainly before the size is recorded: about what recording costs."""

MOST_RECORDED = 128
"""Recorded steps that are kept: the driver has a few kilobytes for each kernel of each of them."""

COLUMN_STEP = 64
"""Columns of the cache that a step reads come in multiples of it."""

Places = tuple[int, ...]
"""Where memory lies, and how it is laid out there; equal numbers, equal places."""

Step = Callable[[], Tensor]
"""A decode step over inputs at fixed addresses; its result is there until the next step."""


class Capture(Protocol):
    """Records steps."""

    def record(self, step: Step, *, again: bool = False) -> Step:
        """What does the same as `step`, again and again; `step` may be run meanwhile.

        Any number of runs of `step` has the effect of one.

        Args:
            step: the step.
            again: whether one of this size was recorded before.
        """

    def forget(self) -> None:
        """Nothing that was recorded is used any more."""


class CudaCapture:
    """Records CUDA graphs, which share the memory of what is computed in between.

    Args:
        device: where steps run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: Any = None

    def record(self, step: Step, *, again: bool = False) -> Step:
        """Record a run of the step; the first time after a run beside, which sets libraries up.

        Raises:
            M2FlowError: it does what cannot be recorded, such as waiting for the device.
            Exception: memory ran out, in the words of whoever asked for it.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            if self._stream is None:
                make_stream: Any = torch.cuda.Stream  # not annotated in torch
                self._stream = make_stream(self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            if not again:
                with torch.cuda.stream(self._stream):
                    step()
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            try:
                # Other threads of the lane may go on with copies of their own.
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ):
                    result = step()
            except RuntimeError as error:
                # To end the recording of a step that has failed may fail, too.
                for one in (error, error.__context__):
                    if one is not None and is_exhaustion(one):
                        raise one from None
                raise M2FlowError(
                    f"a decode step cannot be recorded as a CUDA graph: {error}; "
                    "generation.captured_decode=false decodes without"
                ) from error
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    def forget(self) -> None:
        self._pool = None  # a pool without graphs gives its memory back


@dataclass(frozen=True, slots=True)
class Size:
    """What a recorded step is bound to beside addresses.

    Attributes:
        rows: that are computed.
        columns: of the cache that are read.
        passed: columns that every row has, so that layers with a window may leave some out.
        teams: that read prompts together.
    """

    rows: int
    columns: int
    passed: int = 0
    teams: int = 0


class CapturedSteps:
    """The recorded steps of an engine.

    Args:
        capture: records them.
        places: gives the addresses and shapes of all memory that may move.

    Attributes:
        recorded: how many were recorded so far.
        replayed: how many steps were replays.
    """

    def __init__(self, capture: Capture, places: Callable[[], Places]) -> None:
        self._capture, self._places_now = capture, places
        self._places: Places = ()
        self._kept: dict[Size, Step] = {}
        self._plain: Counter[Size] = Counter()
        self._known: set[Size] = set()
        self._layout: int | None = None
        self.recorded = self.replayed = 0

    def run(self, size: Size, layout: int, step: Step) -> Tensor:
        """What `step` gives: a replay where the size is recorded.

        Args:
            size: of the step.
            layout: number of the cache's layout; with another one addresses may be others.
            step: always does the same for the same size and layout.
        """
        if layout != self._layout:
            if (places := self._places_now()) != self._places:
                self.drop()
            self._layout, self._places = layout, places
        replay = self._kept.pop(size, None)
        if replay is None:
            again = size in self._known
            self._plain[size] += 1
            if self._plain[size] <= PLAIN_STEPS and not again:
                return step()
            replay = self._capture.record(step, again=again)
            self._known.add(size)
            self.recorded += 1
        self._kept[size] = replay  # the last one used stands last
        if len(self._kept) > MOST_RECORDED:
            oldest = next(iter(self._kept))
            del self._kept[oldest], self._plain[oldest]
            self._known.discard(oldest)
        self.replayed += 1
        return replay()

    def moves(self) -> None:
        """Memory is given back: before the next step it is looked where it lies then."""
        self._layout = None

    def drop(self) -> None:
        """Forget all that was recorded, and give its memory back: addresses change."""
        self._kept.clear()
        self._plain.clear()
        self._capture.forget()


def padded_count(count: int) -> int:
    """The smallest of 1, 2, ..., 16, 18, 20, ..., 32, 36, ... that is not below `count`.

    Eight sizes from one power of 2 to the next: few enough to record them, and padding is an eighth
    at most.
    """
    step = 1 << max(0, (count - 1).bit_length() - 4)
    return -(-count // step) * step


def padded_to_pages(count: int) -> int:
    """`padded_count`, but below 64 only 1, 2, 4, ..., 32, 48, 64.

    Over pages a row of the padding has next to nothing to read, and products take up to 64 rows in
    one go. The last answers of a batch end one by one, and each size more is a recording.
    """
    if count > 64:
        return padded_count(count)
    return 48 if 32 < count <= 48 else 1 << (count - 1).bit_length()


def padded_columns(columns: int) -> int:
    """The smallest number of columns that is recorded and not below this one.

    It is `padded_count` of them in multiples of `COLUMN_STEP`.
    """
    return padded_count(-(-columns // COLUMN_STEP)) * COLUMN_STEP
