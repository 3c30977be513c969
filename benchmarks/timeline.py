"""What a span of the timeline costs: made on a lane, sent with its report, written to the trace.

Counted in CPU seconds of each part on its own, for spans of stage calls, in reports as lanes send
them (one span in a report).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness import Target, arguments, conclude, table

from m2flow.engine.messages import CallFinished, Part, RunCall
from m2flow.engine.spans import Span
from m2flow.flow import Batch, Flow, Stream, stage
from m2flow.observe.trace import StepSpans, Trace, write_trace
from m2flow.runtime.lane.orders import Reports, from_bytes, to_bytes
from m2flow.runtime.lane.reports import Report, call_span


@stage
def look(batch: Batch) -> Batch:
    return batch


class Looking(Flow):
    """One call a step."""

    def step(self, items: Stream) -> Stream:
        return look(items)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    options = parser.parse_args()
    count = 5_000 if options.quick else 50_000
    graph = Looking().trace()
    call = RunCall(1, 0, 0, (0,), (((Part(-1, tuple(range(32)), -1),),),))
    bare = Report(CallFinished(1, 0))
    spans: list[Span] = []

    def make() -> None:
        start = time.time()
        spans.append(call_span(graph, call, 0, start, time.time()))

    def send(report: Report) -> Callable[[], None]:
        return lambda: from_bytes(to_bytes(Reports([report])))

    made = _seconds(make, count)
    sent = _seconds(send(Report(bare.event, (spans[0],))), count) - _seconds(send(bare), count)
    with tempfile.TemporaryDirectory() as folder:
        step = StepSpans(0, spans[0].start, spans[-1].end, spans)
        start = time.process_time()
        write_trace(Path(folder) / "timeline.json", Trace([step], num_steps=1))
        written = (time.process_time() - start) / len(spans)
    parts = {"made": made, "sent and received": sent, "written": written}
    table(["part", "us a span"], [[name, 1e6 * seconds] for name, seconds in parts.items()])
    total = 1e6 * sum(parts.values())
    conclude(
        "timeline",
        {"spans": len(spans), "microseconds": {name: 1e6 * s for name, s in parts.items()}},
        [Target("us a span, all parts together", total, 20.0, at_most=True)],
        options,
    )


def _seconds(act: Callable[[], None], count: int) -> float:
    """CPU seconds of one call, the best of three rounds."""
    rounds = []
    for _ in range(3):
        start = time.process_time()
        for _ in range(count):
            act()
        rounds.append((time.process_time() - start) / count)
    return min(rounds)


if __name__ == "__main__":
    main()
