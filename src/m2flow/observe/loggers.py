"""Where the figures of a step go: `metrics.jsonl` always, TensorBoard if asked for.

Promises: `make_loggers` turns the recipe's `logger: [jsonl, tensorboard]` into one logger or one
clear error; a package that is missing is named together with the command that brings it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from m2flow.errors import UserError, suggestion
from m2flow.observe.run_directory import RunDirectory

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter


class MetricsLogger(Protocol):
    """Takes the figures of a step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the figures of `step`; they have left this process's buffers before `close` ends."""

    def close(self) -> None:
        """Write what is buffered and let go of the file."""


class JsonlLogger:
    """One line per step in the run's `metrics.jsonl`, flushed at once."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.append_metrics(step, metrics)

    def close(self) -> None:
        self._run.close()


class TensorBoardLogger:
    """Scalars as TensorBoard events in `tensorboard/`, without torch.

    Args:
        run: whose directory to write to.
        resumed_step: steps after it are hidden in files of earlier processes; None for a fresh run.

    Raises:
        UserError: the tensorboard package is missing.
    """

    def __init__(self, run: RunDirectory, resumed_step: int | None = None) -> None:
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
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer: EventFileWriter = EventFileWriter(str(run.tensorboard))
        if resumed_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            event = self._event(wall_time=time.time(), step=resumed_step + 1, session_log=start)
            self._writer.add_event(event)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [
            self._summary.Value(tag=key, simple_value=float(value))
            for key, value in metrics.items()
        ]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        self._writer.add_event(event)

    def close(self) -> None:
        self._writer.close()


class Loggers:
    """Several loggers as one."""

    def __init__(self, loggers: Sequence[MetricsLogger]) -> None:
        self._loggers = tuple(loggers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for logger in self._loggers:
            logger.log(step, metrics)

    def close(self) -> None:
        for logger in self._loggers:
            logger.close()


LOGGERS: Mapping[str, Callable[[RunDirectory, int | None], MetricsLogger]] = {
    "jsonl": lambda run, _: JsonlLogger(run),
    "tensorboard": TensorBoardLogger,
}


def make_loggers(
    names: Sequence[str], run: RunDirectory, resumed_step: int | None = None
) -> Loggers:
    """The loggers of a recipe's `logger` key.

    Raises:
        UserError: an unknown name, `jsonl` left out, or a package that is missing.
    """
    for name in names:
        if name not in LOGGERS:
            raise UserError(
                "unknown logger", key="logger", value=name, hint=suggestion(name, LOGGERS)
            )
    if "jsonl" not in names:
        raise UserError(
            "jsonl is missing",
            key="logger",
            value=list(names),
            hint="add jsonl: the report and --resume read metrics.jsonl",
        )
    return Loggers([LOGGERS[name](run, resumed_step) for name in dict.fromkeys(names)])
