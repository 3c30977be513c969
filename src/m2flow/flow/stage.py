"""`@stage`: declares what is true of a computation, and nothing about where or when it runs.

Called with a Batch a stage simply runs, so it can be tried in a debugger or a test. Called with a
Stream, inside `Flow.step`, it adds itself to the graph that is being traced.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, get_args, overload

from m2flow.errors import FlowError, suggestion
from m2flow.flow.trace import Stream, record_call

Unit: TypeAlias = Literal["item", "group", "step"]


@dataclass(frozen=True, slots=True)
class StageSpec:
    """The declaration of a stage.

    Attributes:
        name: the function's name.
        unit: the smallest set of items the stage can work on.
        streaming: takes items while running and hands each one on when it is finished.
        accumulates: folds items into state, which its Worker has; `finish` runs at each mini-batch
            boundary.
        expands: how many items one item becomes; a number, or the name of the keyword argument or
            Worker attribute that holds it.
        sticky: an item must return to the lane that holds its state. Where stages of a step begin
            state of an item again, each time wants a name of its own: after the loss of a lane
            they may be run beside each other.
        minibatches: how many mini-batches a step is cut into by item index (accumulating stages
            only); a number, or a name as for `expands`.
        by_arrival: whether each mini-batch is made of the next items to arrive, whichever these
            are, and waits for none that takes long: what is learnt then depends on who was first.
            A truth value, or a name as for `expands`.
        waits: works elsewhere for a while, such as in processes of its own; the lane may do other
            work meanwhile.
        length: a column of the input that says how long an item is expected to take, in any
            measure (a ragged column counts by the lengths of its rows); whose items wait are then
            taken longest first. None where nothing is known.
    """

    name: str
    unit: Unit = "item"
    streaming: bool = False
    accumulates: bool = False
    expands: int | str = 1
    sticky: bool = False
    minibatches: int | str = 1
    by_arrival: bool | str = False
    waits: bool = False
    length: str | None = None


class Stage:
    """A declared function or Worker method. Made by `@stage`; not constructed by hand."""

    def __init__(self, function: Callable[..., Any], spec: StageSpec) -> None:
        self.function = function
        self.spec = spec
        self.finish_function: Callable[..., Any] | None = None
        functools.update_wrapper(self, function)

    def finish(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: the method to run when every item of a mini-batch has been folded in.

        It takes no argument beside `self` and returns a mapping of metric names to numbers.
        """
        if not self.spec.accumulates:
            raise FlowError(
                "has a finish but does not accumulate",
                key=self.spec.name,
                hint="declare @stage(accumulates=True)",
            )
        if function.__name__ == self.spec.name:
            raise FlowError(
                "its finish has the same name, and would stand in its place",
                key=self.spec.name,
                hint=f"call it {self.spec.name}_finish",
            )
        try:
            inspect.signature(function).bind(None)
        except TypeError:
            raise FlowError(
                "its finish must take no argument beside `self`", key=self.spec.name
            ) from None
        self.finish_function = function
        return function

    def __get__(self, owner: Any, owner_type: type | None = None) -> Stage | BoundStage:
        return self if owner is None else BoundStage(self, owner)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if _traced(args, options):
            return record_call(BoundStage(self, None), args, options)
        return _result(self.spec, self.function(*args, **options))


@dataclass(frozen=True, slots=True)
class BoundStage:
    """A stage together with the Worker it belongs to (None for a pure function)."""

    stage: Stage
    owner: Any

    @property
    def spec(self) -> StageSpec:
        return self.stage.spec

    def __call__(self, *args: Any, **options: Any) -> Any:
        if _traced(args, options):
            return record_call(self, args, options)
        return _result(self.spec, self.begin(*args, **options))

    def begin(self, *args: Any, **options: Any) -> Any:
        """What the Worker's own method returns: of a stage that waits, its generator."""
        return self.stage.function(self.owner, *args, **options)

    def resolve(self, declared: int | str, options: dict[str, Any], what: str) -> int:
        """The number behind `expands` or `minibatches`: itself, an option, or an attribute."""
        value = self._behind(declared, options)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._refused(f"{what}={declared!r} must be a whole number of at least 1", value)
        return value

    def resolve_truth(self, declared: bool | str, options: dict[str, Any], what: str) -> bool:
        """The truth value behind `by_arrival`, found as `resolve` does."""
        value = self._behind(declared, options)
        if not isinstance(value, bool):
            raise self._refused(f"{what}={declared!r} must be True or False", value)
        return value

    def _refused(self, why: str, value: Any) -> FlowError:
        hint = "give it as a keyword argument of the call or an attribute of the Worker"
        return FlowError(why, key=self.spec.name, value=value, hint=hint)

    def _behind(self, declared: Any, options: dict[str, Any]) -> Any:
        if not isinstance(declared, str):
            return declared
        return options.get(declared, getattr(self.owner, declared, None))


def _result(spec: StageSpec, returned: Any) -> Any:
    """What a stage gives: one that waits is waited for."""
    while spec.waits:
        try:
            next(returned)
        except StopIteration as end:
            return end.value
    return returned


def _traced(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    return any(isinstance(value, Stream) for value in (*args, *options.values()))


class Declarations(TypedDict, total=False):
    """What `@stage` may be given: the attributes of `StageSpec` but its name."""

    unit: Unit
    streaming: bool
    accumulates: bool
    expands: int | str
    sticky: bool
    minibatches: int | str
    by_arrival: bool | str
    waits: bool
    length: str | None


@overload
def stage(function: Callable[..., Any], /) -> Stage: ...
@overload
def stage(**declared: Unpack[Declarations]) -> Callable[[Callable[..., Any]], Stage]: ...


def stage(
    function: Callable[..., Any] | None = None, /, **declared: Unpack[Declarations]
) -> Stage | Callable[[Callable[..., Any]], Stage]:
    """Declare a Worker method, or a plain function, as a stage; see `StageSpec` for the promises.

    A stage takes one Batch per input stream, aligned by item, and returns one Batch with the same
    items in the same order (with `expands=n`, item i becomes items i*n ... i*n + n-1, as
    `Batch.repeat` makes them). Keyword arguments given in `Flow.step` are constants of the call.

    A streaming stage is a generator function. It yields Batches of finished items, whose `ids` say
    which they are, and receives from each `yield` either None or a Batch of items that have
    arrived meanwhile. It returns when it has nothing left to do. If it takes a keyword argument
    `without`, it is told the ids of outputs that it need not make, because they are there already.

    A stage that `waits` is a generator function that returns its Batch, and yields None when it has
    begun what goes on elsewhere. Other calls of it may be begun then; they go on in that order.

    Raises:
        FlowError: there is no such declaration, they contradict each other, or the function gives
            something else than a Batch when it is called.
    """
    known = [key.name for key in fields(StageSpec) if key.name != "name"]
    for key in declared:
        if key not in known:
            raise FlowError(f"cannot declare {key!r}", key="stage", hint=suggestion(key, known))

    def declare(function: Callable[..., Any]) -> Stage:
        spec = StageSpec(function.__name__, **declared)
        _check(spec)
        if spec.waits and not inspect.isgeneratorfunction(function):
            raise FlowError("waits, but is not a generator function", key=spec.name)
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise FlowError(
                "is a coroutine function, and nobody would await it",
                key=spec.name,
                hint="make it a plain one; @stage(waits=True) is for work that goes on elsewhere",
            )
        if inspect.isgeneratorfunction(function) and not (spec.streaming or spec.waits):
            raise FlowError(
                "is a generator function, and declares neither that it streams nor that it waits",
                key=spec.name,
                hint="declare @stage(streaming=True) or @stage(waits=True), or return a Batch",
            )
        return Stage(function, spec)

    return declare if function is None else declare(function)


def _check(spec: StageSpec) -> None:
    def refuse(reason: str) -> None:
        raise FlowError(reason, key=spec.name)

    if spec.unit not in get_args(Unit):
        refuse(f"unit {spec.unit!r} is not one of {', '.join(get_args(Unit))}")
    if spec.streaming and spec.unit != "item":
        refuse("a streaming stage works on single items, so its unit must be 'item'")
    if spec.waits and (spec.streaming or spec.accumulates):
        refuse("a stage that waits can neither stream its items on nor fold them into state")
    if spec.streaming and spec.accumulates:
        refuse("a stage cannot both stream its items on and fold them into state")
    if spec.sticky and spec.unit != "item":
        refuse("a sticky stage works on single items, so its unit must be 'item'")
    if spec.accumulates and spec.expands != 1:
        refuse("a stage that accumulates cannot expand its items")
    if spec.length is not None and (not isinstance(spec.length, str) or not spec.length):
        refuse(f"length={spec.length!r} is not the name of a column")
    if spec.minibatches != 1 and not spec.accumulates:
        refuse("minibatches is declared, but the stage does not accumulate")
    if spec.by_arrival is not False and not spec.accumulates:
        refuse("by_arrival is declared, but the stage does not accumulate")
