"""The driver's end: a side in a process of its own, asked for blocks of steps."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from peers.wire import StepRecord


class Runnable(Protocol):
    """What a side is told to run."""

    def to_json(self) -> str:
        """One line."""


class SideFailed(RuntimeError):
    """A side ended before it was told to; its own error is in its log file."""


@dataclass(frozen=True)
class Block:
    """Some steps in a row: their records, and the processor seconds of all the side's processes."""

    records: list[StepRecord]
    cpu_seconds: float

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of the steps, without the waiting between blocks."""
        return sum(record.seconds for record in self.records)


class Side:
    """One system under measurement, running `module` under `python` with `settings`.

    Starting it does not wait: `ready` does. `run` blocks until the steps are done, and between two
    calls the side waits. Use it in a `with` statement, which ends the process.
    """

    def __init__(
        self, module: str, python: Path, settings: Runnable, search_path: str, log: Path
    ) -> None:
        self.settings, self.log = settings, log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(python), "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={
                    **os.environ,
                    "OMP_WAIT_POLICY": "PASSIVE",
                    "OMP_NUM_THREADS": "1",
                    "TOKENIZERS_PARALLELISM": "false",
                    "HF_HUB_OFFLINE": "1",
                    "PYTHONPATH": search_path,
                },
            )
        self._send(settings.to_json())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            print(line, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise SideFailed(f"exit code {self._process.wait()}; see {self.log}") from None

    def _receive(self) -> list[StepRecord]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SideFailed(f"exit code {self._process.wait()}; see {self.log}")
        return [StepRecord(**record) for record in json.loads(line)]

    def ready(self) -> None:
        """Wait until the side stands before its first step."""
        assert self._receive() == []

    def run(self, steps: int) -> Block:
        """Let the side make `steps` more training steps."""
        before = cpu_seconds(self._process.pid)
        self._send(json.dumps({"steps": steps}))
        records = self._receive()
        assert len(records) == steps
        return Block(records, cpu_seconds(self._process.pid) - before)


def cpu_seconds(pid: int) -> float:
    """Processor seconds that a process and all that descend from it and live have used (Linux)."""
    ticks, waiting = 0, [pid]
    while waiting:
        process = Path(f"/proc/{waiting.pop()}")
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
            for thread in (process / "task").iterdir():
                waiting += [int(child) for child in (thread / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue  # It ended while we looked: it has used nothing since.
    return ticks / os.sysconf("SC_CLK_TCK")
