"""`Flow`: the user's macro workflow.

A subclass names its workers as annotated attributes and says in `step` what one training step
does. Queues, devices, chunks, offloading and modes do not appear here: they belong to the plan.
"""

from __future__ import annotations

import typing
from typing import Any

from m2flow.errors import FlowError, suggestion
from m2flow.flow.graph import FlowGraph, build_graph
from m2flow.flow.trace import Recording, Stream, tracing
from m2flow.flow.worker import Worker


class Flow:
    """Base class of flows.

    The constructor takes every annotated attribute by name (a class-level value is its default),
    so a flow needs no `__init__` of its own.
    """

    def __init__(self, **attributes: Any) -> None:
        declared = _declared(type(self))
        for name in attributes:
            if name not in declared:
                raise FlowError(
                    "is not declared by the flow",
                    key=f"{type(self).__name__}.{name}",
                    hint=suggestion(name, declared),
                )
        for name, kind in declared.items():
            if hasattr(Flow, name):
                raise FlowError(
                    "has the name of something that every Flow has",
                    key=f"{type(self).__name__}.{name}",
                    hint="give it another name",
                )
            if name not in attributes and not hasattr(type(self), name):
                raise FlowError("is missing", key=f"{type(self).__name__}.{name}")
            value = attributes.get(name, getattr(type(self), name, None))
            if isinstance(kind, type) and issubclass(kind, Worker) and not isinstance(value, kind):
                raise FlowError(
                    "is of the wrong type",
                    key=f"{type(self).__name__}.{name}",
                    value=type(value).__name__,
                    expected=kind.__name__,
                )
            setattr(self, name, value)

    def step(self, items: Stream) -> Stream:
        """What happens to the items of one training step. Traced once."""
        raise NotImplementedError

    def sync(self) -> None:
        """Declare the weight edges: `self.learner.publish(self.generator)`."""

    def alone(self, method: str) -> Flow:
        """A flow whose step is this flow's `method`, such as "evaluate": nobody else is loaded."""
        return _Alone(self, method)

    @property
    def workers(self) -> dict[str, Worker]:
        """The flow's workers by attribute name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Worker)}

    def trace(self, method: str = "step") -> FlowGraph:
        """Recording one method symbolically; no worker is started.

        Args:
            method: "step", or another method of the same form, such as "evaluate". Weight edges
                belong to "step".

        Raises:
            FlowError: the flow makes no sense, looks at a Stream's content, or has no such method.
        """
        if not callable(getattr(self, method, None)):
            methods = [name for name in dir(type(self)) if not name.startswith("_")]
            raise FlowError(
                "the flow has no such method",
                key=f"{type(self).__name__}.{method}",
                hint=suggestion(method, methods),
            )
        _check_distinct(self.workers)
        trace = Recording(
            type(self).__name__, {id(worker): name for name, worker in self.workers.items()}
        )
        with tracing(trace):
            output = getattr(self, method)(Stream(trace, None))
            if not isinstance(output, Stream):
                raise FlowError(
                    "must return a Stream",
                    key=f"{type(self).__name__}.{method}",
                    value=type(output).__name__,
                )
            if method == "step":
                trace.in_sync = True
                self.sync()
        return build_graph(trace, output, method)


class _Alone(Flow):
    """One method of another flow, on that flow's workers."""

    def __init__(self, flow: Flow, method: str) -> None:
        vars(self).update(flow.workers)
        self._method = getattr(flow, method)

    def step(self, items: Stream) -> Stream:
        output: Stream = self._method(items)
        return output


def _check_distinct(workers: dict[str, Worker]) -> None:
    names: dict[int, str] = {}
    for name, worker in workers.items():
        if id(worker) in names:
            raise FlowError(
                f"is the same worker as {names[id(worker)]}", key=name, hint="make two of them"
            )
        names[id(worker)] = name


def _declared(flow: type) -> dict[str, Any]:
    """Annotated attributes, resolved to types where the names can be resolved."""
    try:
        return typing.get_type_hints(flow)
    except NameError:  # annotations that only a type checker can see
        names: dict[str, Any] = {}
        for base in reversed(flow.__mro__):
            names.update(getattr(base, "__annotations__", {}))
        return names
