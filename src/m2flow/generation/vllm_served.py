"""vLLM in the process that `external_process` runs: a step of vLLM between two orders."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

from m2flow.generation.external_process import WORKING_SECONDS, Orders
from m2flow.generation.vllm_transfer import INIT


def serve(connection: Connection, orders: Orders) -> None:
    """Start vLLM as the first order says, then do what is asked until the owner is gone."""
    _VllmWorkerProcess(connection, orders).serve()


class _VllmWorkerProcess:
    def __init__(self, connection: Connection, orders: Orders) -> None:
        self._connection, self._orders = connection, orders
        _, settings, version = orders.get()
        self._tied: bool = settings.pop("tied_embeddings")
        self._sleeps: bool = settings.get("enable_sleep_mode", False)
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**settings))
        self._engine.set_weight_version(str(version))
        if settings.get("weight_transfer_config") is not None:
            init = {"init_info": INIT}
            self._engine.collective_rpc("init_weight_transfer_engine", kwargs=init)
        connection.send(("done",))

    def serve(self) -> None:
        """Do what is asked as it comes, and a step of vLLM in between."""
        engine, said_at = self._engine, time.monotonic()
        while True:
            while not self._orders.empty() or not engine.has_unfinished_requests():
                order, *arguments = self._orders.get()
                getattr(self, f"_{order}")(*arguments)
            finished = [self._record(output) for output in engine.step() if output.finished]
            if finished:
                self._connection.send(("finished", finished))
            elif time.monotonic() - said_at > WORKING_SECONDS:
                self._connection.send(("working",))
            else:
                continue
            said_at = time.monotonic()

    def _submit(self, requests: list[tuple[int, list[int], dict[str, Any]]]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        for number, prompt, settings in requests:
            params = SamplingParams(
                **settings,
                ignore_eos=True,  # the stop ids say what ends an answer
                logprobs=0,
                detokenize=bool(settings["stop"]),  # a stop string is looked for in text
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            self._engine.add_request(str(number), {"prompt_token_ids": prompt}, params)

    def _abort(self, numbers: list[int]) -> None:
        self._engine.abort_request([str(number) for number in numbers])

    def _install(self, file: str, version: int, embedding: str) -> None:
        from safetensors.torch import load_file

        weights = load_file(file)
        if self._tied:  # vLLM keeps the head's own copy, which would stay as it was
            weights["lm_head.weight"] = weights[embedding]
        iterator = list(weights.items())
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iterator})
        self._installed(version)

    def _start_update(self) -> None:
        """Take a whole update in: a step in the middle of it would draw with half of the weights.

        Whatever fails ends this process.
        """
        self._engine.collective_rpc("start_weight_update")
        self._connection.send(("done",))
        order, said = self._orders.get()
        while order == "update":
            self._engine.collective_rpc("update_weights", kwargs={"update_info": said})
            self._connection.send(("done",))
            order, said = self._orders.get()
        if order != "finish_update":
            raise RuntimeError(f"{order!r} in the middle of an update of the weights")
        self._engine.collective_rpc("finish_weight_update")
        self._installed(said)

    def _installed(self, version: int) -> None:
        # Without the running ones nothing is dropped while any request runs, and prompts that are
        # asked again would start from keys and values of the old weights.
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM keeps keys and values of weights that were replaced")
        self._engine.set_weight_version(str(version))
        self._connection.send(("done",))

    def _sleep(self) -> None:
        if self._sleeps:
            self._engine.sleep(level=1)
        self._connection.send(("done",))

    def _wake(self) -> None:
        if self._sleeps:
            self._engine.wake_up()
        self._connection.send(("done",))

    @staticmethod
    def _record(output: Any) -> tuple[int, list[int], list[float], list[int], str]:
        (drawn,) = output.outputs
        ids = list(drawn.token_ids)
        logprobs = [given[token].logprob for token, given in zip(ids, drawn.logprobs, strict=True)]
        versions = [
            int(span.version) for span in drawn.weight_versions for _ in range(span.start, span.end)
        ]
        return int(output.request_id), ids, logprobs, versions, drawn.finish_reason
