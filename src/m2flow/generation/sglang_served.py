"""SGLang in the process that `external_process` runs: each request is a task beside the orders.

SGLang's own processes end with this one. Weights are installed while its scheduler is paused, with
running requests taken back into its queue ("retract"): their keys and values are computed again,
and those of prompts that were kept are dropped. That it works is said by this process; SGLang's
watchdog ends its scheduler, and with it all of them, where that hangs.
"""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from m2flow.generation.external_process import WORKING_SECONDS, Orders


def serve(connection: Connection, orders: Orders) -> None:
    """Start SGLang as the first order says, then do what is asked until the owner is gone."""
    served = _SglangWorkerProcess(connection, orders)
    served.engine.loop.run_until_complete(served.serve())


class _SglangWorkerProcess:
    def __init__(self, connection: Connection, orders: Orders) -> None:
        self._connection, self._orders = connection, orders
        _, settings, version = orders.get()
        self._sleeps: bool = settings.get("enable_memory_saver", False)
        from sglang import Engine

        self.engine: Any = Engine(**settings, weight_version=str(version))
        self._manager: Any = self.engine.tokenizer_manager
        self._dropped: set[int] = set()
        connection.send(("done",))

    async def serve(self) -> None:
        """Do what is asked as it comes; the first request that fails ends all."""
        waiting = asyncio.get_running_loop().run_in_executor
        try:
            async with asyncio.TaskGroup() as self._requests:
                self._requests.create_task(self._says_that_it_works())
                while True:
                    order, *arguments = await waiting(None, self._orders.get)
                    await getattr(self, f"_{order}")(*arguments)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _says_that_it_works(self) -> None:
        while True:
            await asyncio.sleep(WORKING_SECONDS)
            if self._manager.rid_to_state:
                self._connection.send(("working",))

    async def _submit(self, requests: list[tuple[int, list[int], dict[str, Any]]]) -> None:
        for request in requests:
            self._requests.create_task(self._answered(*request))

    async def _answered(self, number: int, prompt: list[int], sampling: dict[str, Any]) -> None:
        output = await self.engine.async_generate(
            input_ids=prompt, sampling_params=sampling, return_logprob=True, rid=_name(number)
        )
        about = output["meta_info"]
        reason = about["finish_reason"]
        if number in self._dropped:
            self._dropped.remove(number)
        elif reason["type"] == "abort":
            raise RuntimeError(f"SGLang gave up a request: {reason.get('message')}")
        else:
            self._connection.send(("finished", [_record(number, about, reason["type"])]))

    async def _abort(self, numbers: list[int]) -> None:
        for number in numbers:
            if _name(number) in self._manager.rid_to_state:
                self._dropped.add(number)
                self._manager.abort_request(rid=_name(number))

    async def _install(self, file: str, version: int, _embedding: str) -> None:
        from sglang.srt.managers.io_struct import (
            ContinueGenerationReqInput,
            PauseGenerationReqInput,
            UpdateWeightFromDiskReqInput,
        )

        await self._manager.pause_generation(PauseGenerationReqInput(mode="retract"))
        asked = UpdateWeightFromDiskReqInput(
            model_path=str(Path(file).parent),
            load_format="safetensors",
            weight_version=str(version),
        )
        installed, message, *_ = await self._manager.update_weights_from_disk(asked)
        if not installed:
            raise RuntimeError(message)
        await self._manager.continue_generation(ContinueGenerationReqInput())
        self._connection.send(("done",))

    async def _sleep(self) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        if self._sleeps:
            await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput())
        self._connection.send(("done",))

    async def _wake(self) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        if self._sleeps:
            await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput())
        self._connection.send(("done",))


def _name(number: int) -> str:
    """SGLang also drops requests whose names begin with the one that is dropped: none does."""
    return f"{number:020d}"


def _record(
    number: int, about: dict[str, Any], reason: str
) -> tuple[int, list[int], list[float], list[int], str]:
    logprobs, ids, *_ = zip(*about["output_token_logprobs"], strict=True)
    versions = [
        int(span["version"])
        for span in about["weight_versions"]
        for _ in range(span["start"], span["end"])
    ]
    return number, list(ids), list(logprobs), versions, reason
