"""vLLM in a process of its own, behind the calls of the native engine.

vLLM brings process groups, threads and allocators of its own along, and may crash; beside the lane
it disturbs nobody, its end is an error within a second, and it ends with its owner. Weights travel
through a file in shared memory and are installed between steps: requests that are running go on,
their keys and values computed again with the new ones.

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
from collections.abc import Iterable, Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m2flow.errors import RunFailed
from m2flow.generation.records import Completion, Request
from m2flow.generation.supported import check_vllm_installed

SHARED_MEMORY = Path("/dev/shm")

WAIT_SECONDS = 0.05
"""Longest that `step` waits for an answer to be finished."""

LAST_LINES = 15
"""Of vLLM's log, in the message that it has failed."""

CACHE_BYTES = 1 << 30
"""For keys and values on a CPU where nothing is said: vLLM takes it at the start."""

BATCHED_TOKENS = 2048
"""Tokens of prompts that are computed together on a CPU, or more where one prompt may be longer."""

SEEDS = (1 << 63) - 1
"""vLLM takes seeds of 63 bits, and -1 for none."""


class VLLMEngine:
    """Generation by vLLM on one lane.

    Args:
        folder: the model, in Hugging Face layout.
        version: of its weights.
        max_running: sequences decoded together at most.
        dtype: of weights, keys and values.
        device: "cpu" or "cuda:0".
        cache_bytes: for keys and values; None for `CACHE_BYTES` on a CPU, and on an accelerator
            for what vLLM takes by itself.
        start_seconds: longest that vLLM may take to load the model; weights may take as long to be
            installed.
        stop_strings: whether requests may have some; then vLLM reads the model's tokenizer.

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
        stop_strings: bool = False,
    ) -> None:
        check_vllm_installed()
        from transformers import AutoConfig

        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
        self._vocab_size, self._context = config.vocab_size, config.max_position_embeddings
        self.version, self._reads_text = version, stop_strings
        self._seconds = start_seconds
        self._submitted = 0
        self._numbers: dict[int, int] = {}  # of live requests, to vLLM's names for them
        self._live: dict[int, int] = {}  # and back; a name is never used again
        self._finished: list[tuple[int, list[int], list[float], list[int], str]] = []
        if device == "cpu" and cache_bytes is None:
            cache_bytes = CACHE_BYTES
        files = Path(folder).glob("*.safetensors")
        self._state_bytes = (cache_bytes or 0) + sum(file.stat().st_size for file in files)
        settings: dict[str, Any] = {
            "model": folder,
            "dtype": str(dtype).removeprefix("torch."),
            "max_num_seqs": max_running,
            "skip_tokenizer_init": not stop_strings,
            "logprobs_mode": "processed_logprobs",  # of what is drawn from, temperature included
            "disable_log_stats": True,
            "tied_embeddings": bool(config.tie_word_embeddings),
        }
        places = [Path(tempfile.gettempdir()), *([SHARED_MEMORY] if SHARED_MEMORY.is_dir() else [])]
        self._folders = [Path(tempfile.mkdtemp(prefix="m2flow-vllm-", dir=one)) for one in places]
        self._log = self._folders[0] / "log"
        environment = {
            "VLLM_NO_USAGE_STATS": "1",
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TMPDIR": str(self._folders[0]),
        }
        if device == "cpu":
            settings["enforce_eager"] = True  # compiling takes a minute, and gains little
            # On a CPU vLLM 0.32 fails where the prompt of a request with a seed is cut.
            settings["enable_chunked_prefill"] = False
            settings["max_num_batched_tokens"] = max(BATCHED_TOKENS, self._context)
            environment |= {
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": str(torch.get_num_threads()),
            }
        else:
            settings["enable_sleep_mode"] = True
        if cache_bytes is not None:
            settings["kv_cache_memory_bytes"] = cache_bytes
            # vLLM would demand so much of all memory to be free, however little it then takes.
            settings["gpu_memory_utilization"] = 0.01
        self._connection, there = Pipe()
        words = ["-m", "m2flow.generation.vllm_process", there.fileno(), *self._folders]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *map(str, words)],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        there.close()
        try:
            self._ask("start", settings, version)
        except BaseException:
            self.close()
            raise

    @property
    def busy(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self._live)

    @property
    def num_running(self) -> int:
        """Requests that are not finished."""
        return len(self._live)

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests; all of them or, if one is wrong, none.

        Raises:
            UserError: a prompt is empty, holds an id outside the vocabulary, or is too long for
                the context with its `max_new_tokens`.
            RunFailed: vLLM has ended.
        """
        requests = list(requests)
        sent: list[tuple[int, list[int], dict[str, Any]]] = []
        for request in requests:
            assert request.id not in self._numbers, f"request {request.id} is already here"
            params, ids = request.params, request.prompt_ids
            prompt = ids.tolist() if isinstance(ids, Tensor) else list(ids)
            request.check(prompt, vocab_size=self._vocab_size, context=self._context)
            settings = {
                "seed": request.seed & SEEDS,
                "max_tokens": params.max_new_tokens,
                "temperature": params.temperature,
                "stop_token_ids": list(params.stop_token_ids),
                "top_k": params.top_k,
                "top_p": params.top_p,
                "min_p": params.min_p,
                "stop": list(params.stop_strings),
            }
            assert self._reads_text or not params.stop_strings, "vLLM was started without text"
            sent.append((self._submitted + len(sent), prompt, settings))
        for request, (number, *_) in zip(requests, sent, strict=True):
            self._numbers[request.id], self._live[number] = number, request.id
        self._submitted += len(sent)
        self._send("submit", sent)

    def step(self) -> list[Completion]:
        """What has been finished meanwhile; waits a moment for the first.

        Raises:
            RunFailed: vLLM has ended.
        """
        if not self._finished:
            self._receive(WAIT_SECONDS)
        while self._connection.poll(0):
            self._receive(0)
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
        """Drop requests, if vLLM has not ended; what they had drawn is not given back."""
        gone = [self._numbers.pop(number) for number in ids if number in self._numbers]
        for number in gone:
            del self._live[number]
        if gone and self._process.poll() is None:
            self._send("abort", gone)
        return []

    def install(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace all weights, between two of vLLM's steps; running requests go on with the new.

        Raises:
            RunFailed: vLLM has ended, which it does where an update fails.
        """
        from safetensors.torch import save_file

        kept = {name: x.detach().cpu().contiguous() for name, x in weights.items()}
        if _tied(weights):  # a file of tensors holds none twice
            kept.pop("lm_head.weight")
        file = self._folders[-1] / "weights.safetensors"
        try:
            save_file(kept, file)
            self._ask("install", str(file), version)
        finally:
            file.unlink(missing_ok=True)
        self.version = version

    def weight_boxes(self) -> None:
        """All weights are taken whole."""

    def sleep(self) -> None:
        """Give back the accelerator's memory; vLLM keeps a CPU's."""
        assert not self._live, "vLLM drops what is running when it goes to sleep"
        self._ask("sleep")

    def wake(self) -> None:
        """Take it back."""
        self._ask("wake")

    def state_bytes(self) -> int:
        """Bytes of weights and of the room for keys and values."""
        return self._state_bytes

    def close(self) -> None:
        """End vLLM's process, and remove its files."""
        self._connection.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
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
        """The error that vLLM's process is gone; with its log, if it failed by itself."""
        try:
            code: int | None = self._process.wait(5)
        except subprocess.TimeoutExpired:
            code = None
        if code in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT):
            return RunFailed(
                f"vLLM's process was ended by {signal.Signals(-code).name}: somebody stopped it, "
                "or the machine ran out of memory"
            )
        lines = self._log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        log = "".join(f"\n  {line}" for line in lines)
        return RunFailed(f"vLLM's process has ended (exit code {code}). {why}".rstrip() + log)


def _tied(weights: Mapping[str, Tensor]) -> bool:
    """Whether the head lies in the embedding's memory."""
    head, embedding = weights.get("lm_head.weight"), weights.get("model.embed_tokens.weight")
    return head is not None and embedding is not None and head.data_ptr() == embedding.data_ptr()
