"""Its engine, in this process."""

from __future__ import annotations

import os
import time
from typing import Any

from vllm import Drawn, EngineArgs, Logprob, Output, SamplingParams


class LLMEngine:
    def __init__(self, settings: dict[str, Any]) -> None:
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert settings["logprobs_mode"] == "processed_logprobs"
        self.waiting: dict[str, tuple[list[int], SamplingParams, list[int]]] = {}
        self.shift, self.resets = 0, 0

    @classmethod
    def from_engine_args(cls, arguments: EngineArgs) -> LLMEngine:
        return cls(arguments.settings)

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def add_request(self, name: str, prompt: dict[str, list[int]], params: SamplingParams) -> None:
        if prompt["prompt_token_ids"] == [666]:
            raise ValueError("a prompt that vLLM refuses")
        self.waiting[name] = prompt["prompt_token_ids"], params, []

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.waiting.pop(name, None)

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        assert method == "reload_weights"
        weights = dict(kwargs["weights_iterator"])
        assert (weights["lm_head.weight"] == weights["model.embed_tokens.weight"]).all()
        self.shift, self.resets = int(weights["model.embed_tokens.weight"][0]), self.resets - 1

    def reset_prefix_cache(self) -> None:
        self.resets += 1
        assert self.resets == 0, "after each update, once"

    def step(self) -> list[Output]:
        time.sleep(0.001)
        done = []
        for name, (_, params, drawn) in list(self.waiting.items()):
            drawn.append((params.seed + len(drawn) + self.shift) % 7)
            stopped = drawn[-1] in params.stop_token_ids
            if stopped or len(drawn) == params.max_tokens:
                del self.waiting[name]
                logprobs = [{token: Logprob(-0.5 * token)} for token in drawn]
                reason = "stop" if stopped else "length"
                done.append(Output(name, [Drawn(drawn, logprobs, reason)]))
        return done
