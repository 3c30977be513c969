"""Where the figures of a step go: `metrics.jsonl` always, TensorBoard and services if asked for."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from m2flow.errors import UserError, writing
from m2flow.observe.loggers import Services
from m2flow.observe.progress import Progress
from m2flow.observe.run_directory import RunDirectory

SHOWN_NOWHERE = Progress()


class MetricsLog:
    """Writes the figures of steps into a run's directory.

    Args:
        run: the directory.
        loggers: names of the recipe's `logger` key; with `tensorboard`, scalars go to
            `tensorboard/` as well, without torch.
        resumed_step: steps after it are hidden in event files of earlier processes; None for a
            fresh run.
        progress: takes each step's figures as well, and is told of a service that fails.

    Raises:
        UserError: the tensorboard package is missing.
    """

    def __init__(
        self,
        run: RunDirectory,
        loggers: Sequence[str],
        resumed_step: int | None = None,
        progress: Progress = SHOWN_NOWHERE,
    ) -> None:
        self._run, self._progress = run, progress
        self._services = Services(run, loggers, progress.note)
        self._writer: Any = None
        if "tensorboard" in loggers:
            self._event, self._summary, writer, session = tensorboard()
            self._writer = writer(str(run.tensorboard))
            if resumed_step is not None:
                self._write(resumed_step + 1, session_log=session(status=session.START))

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the figures of `step`; the line in `metrics.jsonl` is flushed at once."""
        self._run.append_metrics(step, metrics)
        self._progress.add(step, metrics)
        self._services.add(step, metrics)
        if self._writer is not None:
            value = self._summary.Value
            values = [value(tag=key, simple_value=float(x)) for key, x in metrics.items()]
            self._write(step, summary=self._summary(value=values))

    def close(self) -> None:
        """Write what is buffered. While an error is handled, services take the run for failed."""
        self._services.close(failed=sys.exception() is not None)
        if self._writer is not None:
            with writing("TensorBoard's events", self._run.tensorboard):
                self._writer.close()

    def _write(self, step: int, **content: Any) -> None:
        with writing("TensorBoard's events", self._run.tensorboard):
            self._writer.add_event(self._event(wall_time=time.time(), step=step, **content))


def tensorboard() -> tuple[Any, Any, Any, Any]:
    """TensorBoard's classes of an event, a summary, a writer of event files, and a session log.

    Raises:
        UserError: the package is missing.
    """
    try:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise UserError(
            "the tensorboard package is not installed",
            key="logger",
            value="tensorboard",
            hint="pip install 'm2flow[dash]', or take it out of logger",
        ) from error
    return event_pb2.Event, summary_pb2.Summary, EventFileWriter, event_pb2.SessionLog
