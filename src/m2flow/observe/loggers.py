"""Services that keep figures of runs: Weights & Biases, MLflow, trackio, SwanLab.

Promises: one protocol for all of them; a resumed run goes on in the record that it began. A service
that fails while a run goes on costs that service's record alone: it is told once, and left out
from then on. Where a service lies and who may write there is said by its own environment
variables; each works offline.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from m2flow.errors import UserError
from m2flow.observe.run_directory import RunDirectory, read_document

PROJECT = "m2flow"
"""Where runs are kept, unless the service's own environment variable names a project."""

MLFLOW_BATCH = 1000
"""The most figures that MLflow takes at once."""

MLFLOW_AHEAD = 1000
"""The most requests to MLflow that may be on their way."""

MLFLOW_REFUSED = re.compile(r"[^\w./ :-]")
"""Characters that MLflow refuses in the name of a figure, such as that of `seconds/x.y#2`."""


class Logger(Protocol):
    """A record of one run at a service. Whatever the service raises comes through."""

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the figures of a step."""

    def close(self, failed: bool) -> None:
        """Wait until everything is written, and say how the run ended."""


@dataclass(frozen=True)
class Entry:
    """A run as services know it.

    Attributes:
        id: the same in every process that goes on with the run.
        name: of its directory.
        folder: where a service may write beside the run's own files.
        config: the resolved recipe.
    """

    id: str
    name: str
    folder: str
    config: Mapping[str, Any]


class WandbLogger:
    """Weights & Biases: `WANDB_PROJECT`, `WANDB_MODE=offline`; files in the run directory."""

    def __init__(self, entry: Entry) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=entry.id,
            resume="allow",
            name=entry.name,
            dir=entry.folder,
            config=dict(entry.config),
        )

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MlflowLogger:
    """MLflow: `MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`; sent beside the steps."""

    def __init__(self, entry: Entry) -> None:
        mlflow = importlib.import_module("mlflow")
        self._metric, self._client = mlflow.entities.Metric, mlflow.MlflowClient()
        self._sent: deque[Any] = deque()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if known is None else known.experiment_id
        found = self._client.search_runs([experiment], f"tags.`m2flow.run` = '{entry.id}'")
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            made = self._client.create_run(
                experiment, tags={"m2flow.run": entry.id}, run_name=entry.name
            )
            self._run = made.info.run_id
            self._client.log_dict(self._run, dict(entry.config), "config.yaml")

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        figures = [
            self._metric(MLFLOW_REFUSED.sub("_", key), value, now, step)
            for key, value in metrics.items()
        ]
        for start in range(0, len(figures), MLFLOW_BATCH):
            part = figures[start : start + MLFLOW_BATCH]
            self._await_all_but(MLFLOW_AHEAD - 1)
            self._sent.append(self._client.log_batch(self._run, metrics=part, synchronous=False))

    def _await_all_but(self, most: int) -> None:
        """Wait until at most so many requests are open; raise what one that is done failed with.

        The client gives up by itself: MLFLOW_HTTP_REQUEST_TIMEOUT.
        """
        while len(self._sent) > most or (self._sent and _is_done(self._sent[0])):
            self._sent.popleft().wait()

    def close(self, failed: bool) -> None:
        self._await_all_but(0)
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


def _is_done(request: Any) -> bool:
    """Whether a request to MLflow has been answered, if that can be seen."""
    futures = getattr(request, "_operation_futures", None)
    return isinstance(futures, list) and all(future.done() for future in futures)


class TrackioLogger:
    """trackio: a data base on this machine, in `TRACKIO_DIR`, or a space, by `TRACKIO_SPACE_ID`."""

    def __init__(self, entry: Entry) -> None:
        trackio = importlib.import_module("trackio")
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{entry.name}-{entry.id}",  # trackio finds a run by its name
            resume="allow",
            config=dict(entry.config),
            embed=False,
        )

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish()


class SwanlabLogger:
    """SwanLab: `SWANLAB_PROJ_NAME`, `SWANLAB_MODE=offline`; files in the run directory."""

    def __init__(self, entry: Entry) -> None:
        swanlab = importlib.import_module("swanlab")
        self._run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJ_NAME", PROJECT),
            name=entry.name,
            id=entry.id,
            resume="allow",
            log_dir=f"{entry.folder}/swanlab",
            config=dict(entry.config),
        )

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish("crashed" if failed else "success")


SERVICES: Mapping[str, Callable[[Entry], Logger]] = {
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
    "trackio": TrackioLogger,
    "swanlab": SwanlabLogger,
}
"""By the name in a recipe's `logger`, which is that of the package and of m2flow's extra too."""


def check_services(names: Sequence[str]) -> None:
    """Refuse a service whose package is not installed.

    Raises:
        UserError: it is missing; says which extra brings it.
    """
    for name in names:
        if name in SERVICES and importlib.util.find_spec(name) is None:
            raise UserError(
                f"the {name} package is not installed",
                key="logger",
                value=name,
                hint=f"pip install 'm2flow[{name}]', or take it out of logger",
            )


class Services:
    """The services of a run, opened with it; each works until it fails.

    Args:
        run: the run's directory; its `run.json` keeps the id by which services know the run.
        names: of the recipe's `logger`; those that are no services are passed over.
        note: is told of a service that has failed.
    """

    def __init__(
        self, run: RunDirectory, names: Sequence[str], note: Callable[[str], None]
    ) -> None:
        self._note = note
        self._open: dict[str, Logger] = {}
        wanted = [name for name in names if name in SERVICES]
        if not wanted:
            return
        entry = _entry(run)
        for name in wanted:
            if (logger := self._tried(name, partial(SERVICES[name], entry))) is not None:
                self._open[name] = logger

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the figures of a step at every service."""
        for name, logger in list(self._open.items()):
            self._tried(name, partial(logger.add, step, metrics))

    def close(self, failed: bool) -> None:
        """Wait until every service has written what it was given."""
        for name, logger in list(self._open.items()):
            self._tried(name, partial(logger.close, failed))
        self._open.clear()

    def _tried(self, name: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # any of a service's own: it costs that service's record
            self._open.pop(name, None)
            why = " ".join(str(error).split())
            self._note(f"{name} is left out from here on: {type(error).__name__}: {why}")
            return None


def _entry(run: RunDirectory) -> Entry:
    known = read_document(run.run) or {}
    number = known.get("id")
    if not isinstance(number, str):
        number = uuid.uuid4().hex[:12]
        run.write_run(id=number)
    config = read_document(run.config) or {}
    path = run.path.resolve()
    return Entry(number, path.name, str(path), config)
