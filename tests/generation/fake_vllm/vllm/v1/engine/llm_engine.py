"""Its engine, in this process."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from m2flow.algorithms.sampling import likeliest
from m2flow.models.causal_lm import load_tokenizer
from vllm import EngineArgs, SamplingParams
from vllm.distributed.weight_transfer import WeightTransfer
from vllm.outputs import CompletionOutput, Logprob, RequestOutput, WeightVersionSpan


@dataclass
class Running:
    prompt: list[int]
    params: SamplingParams
    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)


class LLMEngine:
    def __init__(self, args: EngineArgs) -> None:
        from transformers import AutoModelForCausalLM

        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert args.logprobs_mode == "processed_logprobs"
        assert args.trust_remote_code is False
        on_cpu = args.enforce_eager
        assert not (on_cpu and args.enable_chunked_prefill), "with seeds it ends vLLM on a CPU"
        batched = args.max_num_batched_tokens
        assert batched is None or batched >= args.max_num_seqs
        assert args.enable_chunked_prefill or batched is None or batched >= args.max_model_len
        assert not (on_cpu and os.environ.get("VLLM_CPU_KVCACHE_SPACE")), "it would count"
        self.tokenizer = None if args.skip_tokenizer_init else load_tokenizer(args.model)
        self.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).eval()
        self.model.config.tie_word_embeddings = False
        self.model.lm_head.weight = torch.nn.Parameter(self.model.lm_head.weight.detach().clone())
        self.running: dict[str, Running] = {}
        self.cached: dict[tuple[int, ...], Tensor] = {}
        self.version = "default"
        self.transfer = WeightTransfer(args.weight_transfer_config, self._load)
        self.may_sleep = args.enable_sleep_mode
        self.asleep: dict[str, Tensor] | None = None
        """While it sleeps: its weights, on the host."""

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLMEngine:
        return cls(args)

    def set_weight_version(self, version: str) -> None:
        print(f"called set_weight_version {version}", flush=True)
        self.version = version

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def add_request(self, name: str, prompt: dict[str, list[int]], params: SamplingParams) -> None:
        generator = torch.Generator()
        if params.seed == -1:
            generator.seed()
        else:
            generator.manual_seed(params.seed)
        self.running[name] = Running(prompt["prompt_token_ids"], params, generator)

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.running.pop(name, None)

    def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> None:
        print(f"called {method}", flush=True)
        if method == "reload_weights":
            assert kwargs is not None
            self._load(kwargs["weights_iterator"])
        else:
            getattr(self.transfer, method)(**(kwargs or {}))

    def _load(self, weights: list[tuple[str, Tensor]]) -> None:
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, weight in weights:
                own[name].copy_(weight)

    @torch.no_grad()
    def sleep(self, level: int = 1) -> None:
        """Weights go to the host; keys and values are forgotten, and requests with them."""
        print(f"called sleep {level}", flush=True)
        assert self.may_sleep
        assert level == 1
        self.running.clear()
        self.cached.clear()
        self.asleep = {name: x.clone() for name, x in self.model.named_parameters()}
        for weight in self.model.parameters():
            weight.fill_(torch.nan)

    def wake_up(self) -> bool:
        print("called wake_up", flush=True)
        assert self.asleep is not None, "it does not sleep"
        self._load(list(self.asleep.items()))
        self.asleep = None
        return True

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        if self.running and not reset_running_requests:
            return False
        self.cached.clear()
        return True

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        assert not self.transfer.active, "a step in the middle of an update"
        assert self.asleep is None, "a step while it sleeps"
        done = []
        for name, one in list(self.running.items()):
            ids = (*one.prompt, *one.tokens)
            if ids not in self.cached:
                self.cached[ids] = self.model(torch.tensor([ids])).logits[0, -1].double()
            token, logprob = drawn(self.cached[ids], one)
            one.tokens.append(token)
            one.logprobs.append(logprob)
            one.versions.append(self.version)
            stopped = token in one.params.stop_token_ids or self._said_stop(one)
            if stopped or len(one.tokens) == one.params.max_tokens:
                done.append(self._output(name, "stop" if stopped else "length"))
        return done

    def _said_stop(self, one: Running) -> bool:
        assert one.params.detokenize == bool(one.params.stop)
        if not one.params.stop:
            return False
        assert self.tokenizer is not None, "skip_tokenizer_init: no text"
        text = self.tokenizer.decode(one.tokens, skip_special_tokens=True)
        return any(string in text for string in one.params.stop)

    def _output(self, name: str, reason: str) -> RequestOutput:
        one = self.running.pop(name)
        spans: list[WeightVersionSpan] = []
        for at, version in enumerate(one.versions):
            if not spans or spans[-1].version != version:
                spans.append(WeightVersionSpan(version, at, at))
            spans[-1].end = at + 1
        drawn = zip(one.tokens, one.logprobs, strict=True)
        logprobs = [{token: Logprob(logprob)} for token, logprob in drawn]
        return RequestOutput(name, [CompletionOutput(one.tokens, logprobs, spans, reason)])


def drawn(logits_V: Tensor, one: Running) -> tuple[int, float]:
    params = one.params
    if params.temperature == 0:
        prob_V = logits_V.softmax(-1)
        token = int(prob_V.argmax())
    else:
        prob_V = likeliest(
            (logits_V / params.temperature).softmax(-1)[None],
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
        )[0]
        token = int(torch.multinomial(prob_V, 1, generator=one.generator))
    return token, float(prob_V[token].log())
