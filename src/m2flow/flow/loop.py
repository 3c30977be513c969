"""`loop`: a cycle of stages, applied to the stream that enters it."""

from __future__ import annotations

from collections.abc import Callable

from m2flow.errors import FlowError
from m2flow.flow.stage import BoundStage, Stage
from m2flow.flow.trace import LoopSpec, Stream, check_same_trace


def loop(
    *stages: BoundStage | Stage, until: str = "done", max_turns: int | None = None
) -> Callable[[Stream], Stream]:
    """A cycle of stages, such as environment and policy; apply it to the stream that enters it.

        trajectories = loop(self.env.step, self.policy.act, until="done")(observations)

    Args:
        stages: the stages an item passes through in turn; none may expand or accumulate.
        until: a column; an item leaves after the first stage whose output holds a true value in it.
            Without `max_turns` some stage must give it in every turn, or the run stops. Where items
            have it already as they enter, it must be false, or the first stage must replace it.
        max_turns: the most often an item may pass through the loop (then it leaves after the last
            stage); None for no bound.

    Raises:
        FlowError: no stages, no exit, or a member that cannot stand in a loop.
    """
    if not stages:
        raise FlowError("a loop needs at least one stage", key="loop")
    if not until and max_turns is None:
        raise FlowError(
            "a loop without an exit never ends", key="loop", hint="give `until` or `max_turns`"
        )
    if max_turns is not None and (not isinstance(max_turns, int) or max_turns < 1):
        raise FlowError(
            "max_turns must be a whole number of at least 1", key="loop", value=max_turns
        )
    if until and not isinstance(until, str):
        raise FlowError("until must be the name of a column", key="loop", value=until)
    members = tuple(_bound(member) for member in stages)
    for member in members:
        spec = member.spec
        if spec.expands != 1 or spec.accumulates or spec.streaming or spec.unit != "item":
            raise FlowError(
                "only plain stages on single items can stand in a loop "
                "(not expanding, accumulating, streaming, or on groups)",
                key=spec.name,
            )
        if spec.length is not None:
            raise FlowError(
                "declares a length, but in a loop items are taken in the order of their turns",
                key=spec.name,
                hint="leave `length` out",
            )

    def around(items: Stream) -> Stream:
        """Send `items` around the loop; the stream of items that have left it."""
        if not isinstance(items, Stream):
            raise FlowError("takes one Stream", key="loop", value=type(items).__name__)
        trace, producer = items.trace, items.producer
        check_same_trace(trace, items, "loop")
        indices: list[int] = []
        for member in members:
            producer = trace.add(member, [producer], {})
            trace.calls[producer].loop = len(trace.loops)
            indices.append(producer)
        trace.loops.append(LoopSpec(tuple(indices), until, max_turns))
        return Stream(trace, producer)

    return around


def _bound(member: BoundStage | Stage) -> BoundStage:
    """A member of a loop; a pure function belongs to no Worker."""
    if isinstance(member, Stage):
        return BoundStage(member, None)
    if not isinstance(member, BoundStage):
        raise FlowError("is not a stage", key="loop", value=member, hint="declare it with @stage")
    return member
