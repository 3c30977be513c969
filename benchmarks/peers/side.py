"""The driver's end: a side in a process of its own, asked for blocks of steps."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from peers.wire import Settings, StepRecord


class SideFailed(RuntimeError):
    """A side ended before it was told to; its own error stands on standard error."""


class Side:
    """One system under measurement, running `module` under `python` with `settings`.

    Starting it does not wait: `ready` does. `run` blocks until the steps are done.
    """

    def __init__(
        self, module: str, python: Path, settings: Settings, environment: Mapping[str, str], log: Path
    ) -> None:
        self.settings, self.log = settings, log
        self._stderr = log.open("w")
        self._process = subprocess.Popen(
            [str(python), "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={
                **os.environ,
                "OMP_WAIT_POLICY": "PASSIVE",
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "HF_HUB_OFFLINE": "1",
                "PYTHONPATH": str(Path(__file__).parents[1]),
                **environment,
            },
        )
        self._send(settings.to_json())

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def _receive(self) -> list[StepRecord]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SideFailed(f"exit code {self._process.wait()}; see {self.log}")
        return [StepRecord(**record) for record in json.loads(line)]

    def ready(self) -> None:
        """Wait until the side stands before its first step."""
        assert self._receive() == []

    def run(self, steps: int) -> list[StepRecord]:
        """Let the side make `steps` more training steps."""
        self._send(json.dumps({"steps": steps}))
        records = self._receive()
        assert len(records) == steps
        return records

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()
        self._stderr.close()
