"""A lane's executor without Ray: signs of life, and calls that are withdrawn."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from m2flow.engine.messages import (
    LAUNCHER,
    AbortCall,
    CallAborted,
    CallFailed,
    CallFinished,
    ItemsProduced,
    MoveState,
    Part,
    RunCall,
    RunFinish,
)
from m2flow.flow import SOURCE, Batch, Flow, Stream, Worker, stage
from m2flow.runtime.lane import executor
from m2flow.runtime.lane.executor import LaneExecutor
from m2flow.runtime.lane.exhausted import name_residents
from m2flow.runtime.lane.host import LaneHost
from m2flow.runtime.lane.orders import (
    CallMethod,
    DropStep,
    Execute,
    GoesOn,
    MethodResult,
    Order,
    Save,
    from_bytes,
    to_bytes,
)


class Patient(Worker):
    @stage(streaming=True)
    def think(self, batch: Batch) -> Generator[Batch, Batch | None, None]:
        """One item after the other, with a pause before each."""
        for row in range(len(batch)):
            yield Batch({}, [])
            yield batch.select([row])


class Thinking(Flow):
    worker: Patient

    def step(self, items: Stream) -> Stream:
        return self.worker.think(items)


class PlayedLine:
    """The launcher's end: orders that come after so many looks, and what the lane says."""

    def __init__(self, *later: tuple[int, Order]) -> None:
        self.later, self.looks = deque(later), 0
        self.said: list[Any] = []

    def send(self, frame: bytes) -> None:
        self.said += [report.event for report in from_bytes(frame).reports]

    def waiting(self) -> bool:
        self.looks += 1
        return bool(self.later) and self.later[0][0] <= self.looks

    def receive(self) -> bytes:
        return to_bytes(self.later.popleft()[1])


def carried_out(line: PlayedLine, *, in_pieces: bool) -> list[Any]:
    """What a lane says of a call on three items."""
    lane: Any = LaneExecutor(0, line, None, None)  # type: ignore[arg-type]
    flow = Thinking(worker=Patient())
    lane._host = LaneHost(0, {"step": flow.trace()}, {"worker": flow.worker})
    lane._exchange = type("Here", (), {"unwrap": lambda *_: Batch({"x": [1, 2, 3]})})()
    call = RunCall(1, 0, 0, (0,), (((Part(SOURCE, (0, 1, 2), LAUNCHER),),),))
    lane._execute(Execute("step", call, sources=[None], in_pieces=in_pieces))
    return line.said


def test_a_streaming_call_on_one_lane_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for its items, but its deadline counts from the last of them."""
    monkeypatch.setattr(executor, "SILENCE_SECONDS", -1.0)
    said = carried_out(PlayedLine(), in_pieces=False)
    made = [event.items for event in said if isinstance(event, ItemsProduced)]
    assert made == [(), (0,), (), (1,), (), (2,)]


def test_where_nobody_waits_items_are_told_of_together() -> None:
    said = carried_out(PlayedLine(), in_pieces=False)
    assert [type(event) for event in said] == [ItemsProduced] * 3 + [CallFinished]


def test_a_streaming_call_that_is_withdrawn_stops_between_two_items() -> None:
    line = PlayedLine((4, Execute("step", AbortCall(1, (0,)))))
    said = carried_out(line, in_pieces=True)
    assert [event.items for event in said[:-1]] == [(0,), (1,)]
    assert said[-1] == CallAborted(1, 0)


SAVE = Save(5, "worker", 0)


def saving_lane(*behind: Order) -> tuple[Any, PlayedLine]:
    """A lane whose worker can be saved, and its line, on which these orders wait."""
    line = PlayedLine(*((0, order) for order in behind))
    lane: Any = LaneExecutor(0, line, None, None)  # type: ignore[arg-type]
    flow = Thinking(worker=Patient())
    flow.worker.save = dict  # type: ignore[method-assign]
    lane._host = LaneHost(0, {"step": flow.trace()}, {"worker": flow.worker})
    here = {"unwrap": lambda *_: Batch({"x": [1, 2, 3]}), "room": lambda *_: torch.empty(0)}
    lane._exchange = type("Here", (), here)()
    return lane, line


class Learner(Worker):
    """Takes three optimizer steps at the end of a step."""

    @stage(accumulates=True)
    def train(self, batch: Batch) -> Batch:
        return batch

    @train.finish
    def train_finish(self) -> None:
        for _ in range(3):
            self.place.goes_on()


class Learning(Flow):
    worker: Learner

    def step(self, items: Stream) -> Stream:
        return self.worker.train(items)


@pytest.mark.parametrize(("silence", "signs"), [(-1.0, 3), (3600.0, 0)])
def test_a_finish_that_makes_progress_gives_signs_of_life(
    silence: float, signs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All optimizer steps of a step stood under the deadline of one call."""
    monkeypatch.setattr(executor, "SILENCE_SECONDS", silence)
    line = PlayedLine()
    lane: Any = LaneExecutor(0, line, None, None)  # type: ignore[arg-type]
    flow = Learning(worker=Learner())
    lane._host = LaneHost(0, {"step": flow.trace()}, {"worker": flow.worker})
    lane._execute(Execute("step", RunFinish(7, 0, 0, 0, (0,))))
    assert line.said == [*[ItemsProduced(7, 0, ())] * signs, CallFinished(7, 0)]
    flow.worker.train_finish()
    assert len(line.said) == signs + 1, "no call is at hand any more"


class Writer(Worker):
    """Writes three files."""

    def write(self) -> str:
        for _ in range(3):
            self.place.goes_on()
        return "written"

    def save(self) -> dict[str, Any]:
        self.write()
        return {}


@pytest.mark.parametrize(("silence", "signs"), [(-1.0, 3), (3600.0, 0)])
@pytest.mark.parametrize("order", [CallMethod(5, "worker", "write", pickle.dumps(())), SAVE])
def test_a_method_that_makes_progress_gives_signs_of_life(
    order: CallMethod | Save, silence: float, signs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that took longer to write than a call may ended the run."""
    monkeypatch.setattr(executor, "SILENCE_SECONDS", silence)
    lane, _ = saving_lane()
    lane._host.workers = {"worker": Writer()}
    said: list[Any] = []
    lane._say = said.append
    work = lane._called if isinstance(order, CallMethod) else lane._saved
    lane._answer(order.number, lambda: work(order))
    assert said[:-1] == [GoesOn(5)] * signs
    assert isinstance(said[-1], MethodResult)
    assert not said[-1].raised


DROP = DropStep("step", 7)
RUN = Execute(
    "step",
    RunCall(1, 0, 0, (0,), (((Part(SOURCE, (0, 1, 2), LAUNCHER),),),)),
    sources=[None],
    in_pieces=True,
)


@pytest.mark.parametrize(("behind", "held_up"), [([], False), ([DROP], False), ([DROP, RUN], True)])
def test_a_save_holds_up_what_has_come_meanwhile(behind: list[Order], held_up: bool) -> None:
    lane, _ = saving_lane(*behind)
    seconds = lane._saved(SAVE)
    assert seconds.busy > 0
    assert seconds.held_up == (seconds.busy if held_up else 0.0)


def test_what_waits_behind_a_save_is_not_taken_from_its_call() -> None:
    """That the call is withdrawn was heard before it had begun, and so not while it ran."""
    lane, line = saving_lane(RUN, Execute("step", AbortCall(1, (0,))))
    lane._saved(SAVE)
    lane._execute(lane._next_order())
    assert line.said == [CallAborted(1, 0)]


def test_the_withdrawal_of_a_call_that_has_ended_is_answered() -> None:
    line = PlayedLine()
    lane: Any = LaneExecutor(0, line, None, None)  # type: ignore[arg-type]
    lane._execute(Execute("step", AbortCall(1, (0,))))
    assert line.said == [CallAborted(1, 0)]


def test_the_launcher_is_the_first_to_lose_patience() -> None:
    """A lane that others ask for items, and that says nothing: who waits for whom the launcher
    tells, whose deadline for a call is the shorter one."""
    flow, asked = Thinking(worker=Patient()), []

    class There:
        def ask_alike(self, lane: int, _: Any, seconds: float) -> list[Batch]:
            asked.append((lane, seconds))
            return [Batch({"x": [1, 2, 3]})]

    lane: Any = LaneExecutor(0, PlayedLine(), There(), None)  # type: ignore[arg-type]
    host = LaneHost(0, {"step": flow.trace()}, {"worker": flow.worker})
    lane._loader = SimpleNamespace(load=lambda *_: host)
    lane._say = lane._report = lane._close_workers = lambda *_: None
    lane._load(SimpleNamespace(keep=("worker",), deadline_seconds=12.0, number=1))
    call = RunCall(1, 0, 0, (0,), (((Part(SOURCE, (0, 1, 2), 3),),),))
    lane._execute(Execute("step", call))
    assert asked[0][0] == 3
    assert asked[0][1] > 12.0


class Greedy(Worker):
    """Asks for more than there is."""

    error: BaseException = MemoryError()

    @stage
    def take(self, batch: Batch) -> Batch:
        raise self.error

    def state_bytes(self) -> int:
        return 12_300_000_000


class Taking(Flow):
    worker: Greedy
    other: Patient
    away: Greedy

    def step(self, items: Stream) -> Stream:
        return self.other.think(self.worker.take(items))


TRIED = "CUDA out of memory. Tried to allocate 2.00 GiB."
BESIDE_TORCH = [
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "ncclUnhandledCudaError: Call to CUDA function failed.\nCuda failure 2 'out of memory'",
    "Cuda failure 'out of memory'",
    "Triton Error [CUDA]: out of memory",
]
"""What is said where memory of a GPU is taken by others than torch's allocator."""


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (torch.OutOfMemoryError(TRIED), TRIED),
        (MemoryError(), "MemoryError"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), "8 bytes"),
        (torch.AcceleratorError(BESIDE_TORCH[0]), BESIDE_TORCH[0]),
        *((RuntimeError(words), words) for words in BESIDE_TORCH),
    ],
)
def test_a_call_that_runs_out_of_memory_says_who_held_it(error: Exception, asked: str) -> None:
    line = PlayedLine()
    lane: Any = LaneExecutor(3, line, None, None)  # type: ignore[arg-type]
    flow = Taking(worker=Greedy(), other=Patient(), away=Greedy())
    flow.worker.error = error
    lane._host = LaneHost(3, {"step": flow.trace()}, dict(flow.workers))
    lane._exchange = type("Here", (), {"unwrap": lambda *_: Batch({"x": [1]})})()
    lane._execute(Execute("step", MoveState("offload", "away", 3)))
    call = RunCall(1, 0, 0, (3,), (((Part(SOURCE, (0,), LAUNCHER),),),))
    lane._execute(Execute("step", call, sources=[None]))
    (failed,) = [event for event in line.said if isinstance(event, CallFailed)]
    assert type(failed.error) is type(error)
    told = str(failed.error)
    assert told.startswith("worker.take (step 0, call 1) ran out of memory on lane 3, which held ")
    assert ", which held worker 12.3 GB: " in told
    assert told.endswith(asked)
    assert "away" not in told


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("matrices do not fit"),
        RuntimeError("the game is out of memory cards"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"),
        ValueError(BESIDE_TORCH[0]),
    ],
)
def test_other_errors_keep_their_words(error: Exception) -> None:
    words = str(error)
    name_residents(error, 0, "worker.take", {"worker": Greedy()}, ())
    assert str(error) == words
