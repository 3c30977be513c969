"""An engine of another package in a process of its own, behind the calls of the native engine.

Such an engine brings process groups, threads and allocators of its own along, and may crash; beside
the lane it disturbs nobody, its end is an error within a second, and it ends with its owner.
Weights travel through a file in shared memory, unless an engine has a better way, and are installed
between steps: requests that are
running go on, their keys and values computed again with the new ones.

What a request draws depends on its prompt, its seed and the weights as with the native engine, but
the draws are others, and rounding may depend on what else is running.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from m2flow.errors import CannotWrite, ProcessEnded, RunFailed, writing
from m2flow.generation.records import Completion, Request
from m2flow.generation.supported import check_installed, limit_of
from m2flow.models.folder import from_folder
from m2flow.models.lora import unsummed

SHARED_MEMORY = Path("/dev/shm")

WAIT_SECONDS = 0.05
"""Longest that `step` waits for an answer to be finished."""

SILENT_SECONDS = 300.0
"""So long an engine that draws may say nothing, not even that it works, before it is given up."""

LAST_LINES = 15
"""Of the engine's log, in the message that it has failed."""

CACHE_BYTES = 1 << 30
"""For keys and values on a CPU where nothing is said: an engine takes it at the start."""

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

MOST_POSITIONS = 1 << 15
"""Of a request to a model that sets no limit."""

SEEDS = (1 << 63) - 1
"""Seeds have 63 bits: vLLM takes -1 for none, SGLang a signed number of 64 bits."""


@dataclass(frozen=True)
class Started:
    """What an engine is started with.

    Attributes:
        folder: the model, in Hugging Face layout.
        config: of its text model, from transformers.
        max_running: sequences decoded together at most.
        dtype: of weights, keys and values, as "float32".
        device: "cpu" or "cuda:0".
        cache_bytes: for keys and values; None for what the engine takes by itself.
        reads_text: whether requests may have stop strings.
    """

    folder: str
    config: Any
    max_running: int
    dtype: str
    device: str
    cache_bytes: int | None
    reads_text: bool


class ExternalEngine(ABC):
    """Generation on one lane by an engine of another package.

    Args:
        folder: the model, in Hugging Face layout.
        version: of its weights.
        max_running: sequences decoded together at most.
        dtype: of weights, keys and values.
        device: "cpu" or "cuda:0".
        cache_bytes: for keys and values; None for `CACHE_BYTES` on a CPU, and on an accelerator
            for what the engine takes by itself.
        start_seconds: longest that it may take to load the model; weights may take as long to be
            installed.
        stop_strings: whether requests may have some; then it reads the model's tokenizer.
        scratch: folder for its files; None for the system's temporary one. Who owns the folder
            removes what is left there, and in shared memory under the folder's name: Ray may kill
            the engine together with the lane, and then neither of them can.

    Raises:
        UserError: the package is not installed.
        ProcessEnded: the engine was ended from outside, or does not answer.
        RunFailed: it has failed.
    """

    package: ClassVar[str]
    """The module to import; `external_process` serves it by `m2flow.generation.PACKAGE_served`."""

    label: ClassVar[str]
    """Its name in messages."""

    def __init__(
        self,
        folder: str,
        *,
        version: int,
        max_running: int = 256,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        cache_bytes: int | None = None,
        start_seconds: float = 1800.0,
        stop_strings: bool = False,
        scratch: Path | None = None,
    ) -> None:
        check_installed(self.package)
        from transformers import AutoConfig

        config = from_folder(AutoConfig, Path(folder)).get_text_config()
        self._vocab_size = config.vocab_size
        self.context = limit_of(config.to_dict())[1] or MOST_POSITIONS
        self.version, self._reads_text = version, stop_strings
        self._seconds = start_seconds
        self._submitted = 0
        self._numbers: dict[int, int] = {}  # of live requests, to the engine's names for them
        self._live: dict[int, int] = {}  # and back; a name is never used again
        self._finished: list[tuple[int, list[int], list[float], list[int], str]] = []
        self._heard = time.monotonic()
        self._end: RunFailed | None = None
        if device == "cpu" and cache_bytes is None:
            cache_bytes = CACHE_BYTES
        files = Path(folder).glob("*.safetensors")
        self._state_bytes = (cache_bytes or 0) + sum(file.stat().st_size for file in files)
        dtype_name = str(dtype).removeprefix("torch.")
        settings = self._settings(
            Started(folder, config, max_running, dtype_name, device, cache_bytes, stop_strings)
        )
        places = [
            scratch or Path(tempfile.gettempdir()),
            *([SHARED_MEMORY] if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) else []),
        ]
        prefix = f"{'m2flow' if scratch is None else scratch.name}-{self.package}-"
        self._folders = [Path(tempfile.mkdtemp(prefix=prefix, dir=place)) for place in places]
        self._log = self._folders[0] / "log"
        self._connection, there = Pipe()
        module = "m2flow.generation.external_process"
        words = [module, self.package, there.fileno(), *self._folders]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *map(str, words)],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    "GLOO_SOCKET_IFNAME": "lo",  # or its group of one would listen to the network
                    **self._environment(device),
                    "TMPDIR": str(self._folders[0]),
                },
            )
        there.close()
        try:
            self._ask("start", settings, version)
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _settings(self, started: Started) -> dict[str, Any]:
        """The engine's own settings, for the process that serves it."""

    def _environment(self, device: str) -> dict[str, str]:
        """Environment variables of its process."""
        return dict(os.environ)

    @abstractmethod
    def _sampling(self, request: Request) -> dict[str, Any]:
        """How a request is drawn, by the engine's names."""

    @property
    def busy(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self._live)

    logprob_dtype = torch.float32
    """Of the log-probabilities of completions."""

    @property
    def num_running(self) -> int:
        """Requests that are not finished."""
        return len(self._live)

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests; all of them or, if one is wrong, none.

        Raises:
            UserError: a prompt is empty, holds an id outside the vocabulary, or is too long for
                the context with its `max_new_tokens`.
            RunFailed: the engine has ended.
        """
        requests = list(requests)
        sent: list[tuple[int, list[int], dict[str, Any]]] = []
        for request in requests:
            assert request.id not in self._numbers, f"request {request.id} is already here"
            ids, stops = request.prompt_ids, request.params.stop_strings
            prompt = ids.tolist() if isinstance(ids, Tensor) else list(ids)
            request.check(prompt, vocab_size=self._vocab_size, context=self.context)
            assert self._reads_text or not stops, f"{self.label} was started without text"
            sent.append((self._submitted + len(sent), prompt, self._sampling(request)))
        if not self._live:
            self._heard = time.monotonic()
        for request, (number, *_) in zip(requests, sent, strict=True):
            self._numbers[request.id], self._live[number] = number, request.id
        self._submitted += len(sent)
        self._send("submit", sent)

    def step(self) -> list[Completion]:
        """What has been finished meanwhile; waits a moment for the first.

        Raises:
            RunFailed: the engine has ended, or has said nothing for `SILENT_SECONDS`.
        """
        if not self._finished:
            self._receive(WAIT_SECONDS)
        while self._connection.poll(0):
            self._receive(0)
        if self._live and time.monotonic() - self._heard > SILENT_SECONDS:
            raise self._given_up(f"has said nothing for {SILENT_SECONDS:g} s while it was to draw")
        completions = []
        for number, ids, logprobs, versions, reason in self._finished:
            if number not in self._live:  # aborted meanwhile
                continue
            request = self._live.pop(number)
            del self._numbers[request]
            completions.append(
                Completion(
                    id=request,
                    token_ids=torch.tensor(ids, dtype=torch.int64),
                    logprobs=torch.tensor(logprobs, dtype=torch.float32),
                    token_versions=torch.tensor(versions, dtype=torch.int64),
                    current_version=self.version,
                    finish_reason="stop" if reason == "stop" else "length",
                )
            )
        self._finished = []
        return completions

    def abort(self, ids: Iterable[int]) -> list[Completion]:
        """Drop requests, unless the engine has ended; what they had drawn is not given back."""
        gone = [self._numbers.pop(number) for number in ids if number in self._numbers]
        for number in gone:
            del self._live[number]
        if gone and self._process.poll() is None:
            self._send("abort", gone)
        return []

    def install(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace all weights, between two of the engine's steps; running requests go on with them.

        Raises:
            RunFailed: the engine has ended, which it does where an update fails.
        """
        if self._end is not None:
            raise self._ended()
        self._hand_over(with_single_experts(weights), version)
        self.version = version

    def _hand_over(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Have the engine install weights, by a file: in shared memory, or where that is full
        beside the log."""
        from safetensors.torch import save_file

        kept = {name: x.detach().cpu().contiguous() for name, x in weights.items()}
        embedding = _embedding_of_head(weights)
        if embedding is not None:  # a file of tensors holds none twice
            kept.pop(HEAD)
        for folder in reversed(self._folders):
            file = folder / "weights.safetensors"
            try:
                with writing(f"weights for {self.label}", file):
                    save_file(kept, file)
                self._ask("install", str(file), version, embedding or EMBEDDING)
                return
            except CannotWrite:
                if folder == self._folders[0]:
                    raise
            finally:
                file.unlink(missing_ok=True)

    def weight_boxes(self) -> Mapping[str, Any] | None:
        """None: all weights are taken whole."""
        return None

    def sleep(self) -> None:
        """Give back the accelerator's memory; on a CPU all of it is kept."""
        assert not self._live, f"{self.label} drops what is running when it goes to sleep"
        self._ask("sleep")

    def wake(self) -> None:
        """Take it back."""
        self._ask("wake")

    def state_bytes(self) -> int:
        """Bytes of weights and of the room for keys and values."""
        return self._state_bytes

    def close(self) -> None:
        """End the engine's process, and remove its files."""
        self._connection.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._remove_files()

    def _remove_files(self) -> None:
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _send(self, *order: Any) -> None:
        try:
            self._connection.send(order)
        except ConnectionError:
            raise self._ended() from None

    def _ask(self, *order: Any) -> None:
        """Send an order and wait until it is done; answers that come before are kept."""
        self._send(*order)
        deadline = time.monotonic() + self._seconds
        while not self._receive(1.0):
            if time.monotonic() > deadline:
                raise self._given_up(f"has not done {order[0]!r} within {self._seconds:g} s")

    def _receive(self, seconds: float) -> bool:
        """Take in what the engine says within some seconds, if anything; whether it was "done"."""
        try:
            if not self._connection.poll(seconds):
                if self._process.poll() is not None:
                    raise self._ended()
                return False
            kind, *said = self._connection.recv()
        except (EOFError, ConnectionError):
            raise self._ended() from None
        self._heard = time.monotonic()
        if kind == "failed":
            raise self._ended(said[0])
        if kind == "finished":
            self._finished += said[0]
        return kind == "done"

    def _ended(self, why: str = "") -> RunFailed:
        """The error that the engine's process is gone. Its files go with the first one: who hears
        of it may be ended as well."""
        if self._end is None:
            self._end = self._how_it_ended(why)
            self._remove_files()
        return type(self._end)(*self._end.args)

    def _given_up(self, why: str) -> RunFailed:
        """The error that it does not answer; then it is no more."""
        self._end = ProcessEnded(f"{self.label}'s process {self._process.pid} {why}")
        self._process.kill()  # one that is stopped would not notice the end of its owner
        self._remove_files()
        return self._ended()

    def _how_it_ended(self, why: str) -> RunFailed:
        """With the log, if it failed by itself."""
        try:
            code: int | None = self._process.wait(5)
        except subprocess.TimeoutExpired:
            code = None
        if code in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT):
            return ProcessEnded(
                f"{self.label}'s process was ended by {signal.Signals(-code).name}: somebody "
                "stopped it, or the machine ran out of memory"
            )
        lines = self._log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        log = "".join(f"\n  {line}" for line in lines)
        what = f"{self.label}'s process has ended (exit code {code}). {why}"
        kind = RunFailed if why else ProcessEnded  # without a word: a fault of native code
        return kind(what.rstrip() + log)


def with_single_experts(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Weights with each expert of a mixture by itself, as published checkpoints have them.

    transformers holds the experts of a block stacked: `gate_up_proj` [E, 2 I, H], `down_proj`
    [E, H, I]. The parts share their memory.
    """
    if not any(".experts." in name for name in weights):
        return weights  # of which each tensor may be made when it is asked for
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        block, _, kind = name.rpartition(".experts.")
        if not block or kind not in ("gate_up_proj", "down_proj"):
            found[name] = tensor
            continue
        for number, one in enumerate(tensor):
            parts = {"down_proj": one}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), one.chunk(2), strict=True))
            for part, values in parts.items():
                found[f"{block}.experts.{number}.{part}.weight"] = values
    return found


def _embedding_of_head(weights: Mapping[str, Tensor]) -> str | None:
    """The name under which the head's memory is there again; None if it is a tensor of its own."""
    weights = unsummed(weights)  # no adapter stands on either
    head = weights.get(HEAD)
    if head is None:
        return None
    others = ((name, weights[name]) for name in weights if name != HEAD)
    return next((name for name, x in others if x.data_ptr() == head.data_ptr()), None)
