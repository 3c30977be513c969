"""Tracing: `Flow.step` runs once with symbolic Streams, and every stage call leaves a record.

No worker is started and no item exists while this happens. Python control flow inside `step` is
ordinary code as long as it does not look at a Stream's content; where it does, the error says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

from m2flow.errors import FlowError

TracedStage: TypeAlias = Any
"""A stage that is called: an `m2flow.flow.stage.BoundStage`, which stands on this module."""


class Stream:
    """A handle to items that will exist. Only a stage can look inside."""

    __slots__ = ("producer", "trace")

    def __init__(self, trace: Recording, producer: int | None) -> None:
        self.trace = trace
        self.producer = producer
        """Index of the record that makes the items; None for the input of the step."""

    def _opaque(self, *_: Any, **__: Any) -> NoReturn:
        raise FlowError(
            "the content of a Stream is not known while the flow is traced: step() runs once, "
            "before any item exists",
            key=self.trace.name_of(self),
            hint="put what depends on the items into a stage, or on a loop's `until` column",
        )

    __bool__ = __len__ = __iter__ = __getitem__ = __contains__ = _opaque
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _opaque
    __add__ = __sub__ = __mul__ = __truediv__ = __radd__ = __rsub__ = __rmul__ = _opaque
    __int__ = __float__ = __index__ = _opaque
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # let copy, pickle and inspect ask their questions
            raise AttributeError(name)
        self._opaque()

    def __repr__(self) -> str:
        return f"<Stream {self.trace.name_of(self)}>"


@dataclass(slots=True)
class CallRecord:
    """One stage call seen while tracing.

    Attributes:
        stage: what was called.
        inputs: producers of the input streams (None is the step's input).
        options: keyword arguments, constant over the run.
        loop: number of the loop it is part of, or None.
    """

    stage: TracedStage
    inputs: list[int | None]
    options: dict[str, Any]
    loop: int | None = None


@dataclass(frozen=True, slots=True)
class LoopSpec:
    """A cycle: items pass through the stages `members` in turn until column `until` is true."""

    members: tuple[int, ...]
    until: str
    max_turns: int | None


@dataclass(slots=True)
class Recording:
    """What tracing has recorded so far."""

    flow_name: str
    worker_names: dict[int, str]
    calls: list[CallRecord] = field(default_factory=list)
    loops: list[LoopSpec] = field(default_factory=list)
    weight_edges: list[tuple[str, str]] = field(default_factory=list)
    in_sync: bool = False

    def label(self, stage: TracedStage) -> str:
        """`worker.method`, or the function's name."""
        if stage.owner is None:
            return str(stage.spec.name)
        return f"{self.worker_name(stage.owner)}.{stage.spec.name}"

    def worker_name(self, worker: Any) -> str:
        name = self.worker_names.get(id(worker))
        if name is None:
            raise FlowError(
                "is used in the flow but is not one of its workers",
                key=type(worker).__name__,
                hint=f"declare it as an attribute of {self.flow_name} and pass it to the flow",
            )
        return name

    def name_of(self, stream: Stream) -> str:
        if stream.producer is None:
            return f"the input of {self.flow_name}.step"
        return self.label(self.calls[stream.producer].stage)

    def add(self, stage: TracedStage, inputs: list[int | None], options: dict[str, Any]) -> int:
        name = self.label(stage)  # refuses a stranger's worker at the call that names it
        _check_taken(name, stage, len(inputs), options)
        self.calls.append(CallRecord(stage, inputs, options))
        return len(self.calls) - 1


def _check_taken(name: str, stage: TracedStage, streams: int, options: dict[str, Any]) -> None:
    """Refuse a call with other arguments than the stage's function takes."""
    if stage.owner is not None and not hasattr(stage.owner, stage.spec.name):
        raise FlowError(
            "is no attribute of its worker under this name",
            key=name,
            hint="give the function the name that the worker has it by (functools.wraps)",
        )
    function = stage.stage.function
    itself = 0 if stage.owner is None else 1
    try:
        signature = inspect.signature(function, follow_wrapped=False)
        signature.bind(*[None] * (itself + streams), **options)
    except TypeError as error:
        raise FlowError(
            f"cannot be called with {streams} {'stream' if streams == 1 else 'streams'} and "
            f"{', '.join(options) or 'no constants'}: {error}",
            key=name,
            hint="streams go by position, and constants by keyword",
        ) from None


_current: ContextVar[Recording | None] = ContextVar("m2flow_trace", default=None)


@contextmanager
def tracing(trace: Recording) -> Iterator[Recording]:
    """Make `trace` the one that stage calls and publishes are recorded in."""
    token = _current.set(trace)
    try:
        yield trace
    finally:
        _current.reset(token)


def current_trace() -> Recording | None:
    """The trace that stage calls are recorded in, if any."""
    return _current.get()


def record_call(stage: TracedStage, args: tuple[Any, ...], options: dict[str, Any]) -> Stream:
    """Record a stage call whose positional arguments are Streams; returns its output."""
    values = (*args, *options.values())
    trace = next(value.trace for value in values if isinstance(value, Stream))
    name = trace.label(stage) if trace is current_trace() else stage.spec.name
    for arg in args:
        if not isinstance(arg, Stream):
            raise FlowError(
                "takes Streams as positional arguments and constants as keywords",
                key=name,
                value=arg,
            )
        check_same_trace(trace, arg, name)
    for key, value in options.items():
        if isinstance(value, Stream):
            raise FlowError(f"keyword {key!r} is a Stream", key=name, hint="pass it by position")
    return Stream(trace, trace.add(stage, [arg.producer for arg in args], dict(options)))


def check_same_trace(trace: Recording, stream: Stream, name: str) -> None:
    """Refuse a Stream that was made outside the step that is traced."""
    if stream.trace is not trace or current_trace() is not trace:
        raise FlowError(
            "was given a Stream that was made outside this step",
            key=name,
            hint="a Stream lives only while its step is traced; do not store it",
        )


def record_publish(source: Any, targets: tuple[Any, ...]) -> None:
    """Record weight edges from one Worker to others."""
    trace = current_trace()
    if trace is None or not trace.in_sync:
        raise FlowError(
            "publish is a declaration and belongs into Flow.sync", key=type(source).__name__
        )
    name = trace.worker_name(source)
    for target in targets:
        other = trace.worker_name(target)
        if other == name:
            raise FlowError("publishes its weights to itself", key=name)
        if (name, other) not in trace.weight_edges:
            trace.weight_edges.append((name, other))
