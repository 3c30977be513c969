"""The requests of the stand-in, and their tokens."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m2flow.algorithms.sampling import likeliest
from m2flow.models.causal_lm import load_tokenizer


@dataclass
class Running:
    rid: str
    prompt: list[int]
    how: dict[str, Any]
    ended: asyncio.Event
    reason: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    changes: list[tuple[str, int]] = field(default_factory=list)
    """Versions that were replaced, and the tokens there were then."""

    def about(self, version: str) -> dict[str, Any]:
        spans, start = [], 0
        for old, end in [*self.changes, (version, len(self.tokens))]:
            if end > start or not spans:
                spans.append({"version": old, "start": start, "end": end})
                start = end
        drawn = zip(self.logprobs, self.tokens, strict=True)
        return {
            "finish_reason": {"type": self.reason, "message": "Abort"},
            "output_token_logprobs": [(logprob, token, None) for logprob, token in drawn],
            "weight_version": version,
            "weight_versions": spans,
        }


class Scheduler:
    def __init__(self, settings: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM

        self.settings, self.version = settings, settings["weight_version"]
        folder = settings["model_path"]
        self.tokenizer = None if settings["skip_tokenizer_init"] else load_tokenizer(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=settings["dtype"]).eval()
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self.cached: dict[tuple[int, ...], Tensor] = {}
        self.backup: dict[str, Tensor] = {}
        self.paused = False

    async def run(self) -> None:
        while True:
            if not self.paused:
                self.running += self.waiting
                self.waiting = []
                for one in list(self.running):
                    self._draw(one)
            await asyncio.sleep(0 if self.running else 0.005)

    def abort(self, rid: str) -> None:
        for one in [*self.running, *self.waiting]:
            if one.rid.startswith(rid):
                self._end(one, "abort")

    def pause(self, mode: str) -> None:
        self.paused = True
        if mode == "retract":
            self.waiting, self.running = [*self.running, *self.waiting], []

    def flush(self) -> bool:
        if self.running or (self.waiting and not self.paused):
            return False
        self.cached.clear()
        return True

    def load(self, folder: str) -> None:
        from safetensors.torch import load_file

        own = dict(self.model.named_parameters())  # a tied head is the embedding here
        (file,) = Path(folder).glob("*.safetensors")
        with torch.no_grad():
            for name, weight in load_file(file).items():
                own[name].copy_(weight)

    def set_version(self, version: str | None) -> None:
        assert version is not None
        for one in [*self.running, *self.waiting]:
            if one.tokens:
                one.changes.append((self.version, len(one.tokens)))
        self.version = version

    def release(self) -> None:
        assert self.settings["enable_memory_saver"]
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if self.settings["enable_weights_cpu_backup"]:
                    self.backup[name] = weight.clone()
                weight.fill_(torch.nan)

    def resume(self) -> None:
        for name, weight in self.model.named_parameters():
            if name in self.backup:
                weight.copy_(self.backup[name])

    @torch.inference_mode()
    def _draw(self, one: Running) -> None:
        ids, how = (*one.prompt, *one.tokens), one.how
        if ids not in self.cached:
            self.cached[ids] = self.model(torch.tensor([ids])).logits[0, -1].double()
        greedy = how["temperature"] < 1e-6
        prob_V = (self.cached[ids] / (1.0 if greedy else how["temperature"])).softmax(-1)
        kept_V = likeliest(
            prob_V[None],
            top_k=1 if greedy else max(how["top_k"], 0),
            top_p=how["top_p"],
            min_p=how["min_p"],
        )[0]
        generator = torch.Generator()
        if self.settings["enable_deterministic_inference"]:
            generator.manual_seed((how["sampling_seed"] * 8191 + len(one.tokens)) % (1 << 63))
        else:
            generator.seed()
        token = int(torch.multinomial(kept_V, 1, generator=generator))
        one.tokens.append(token)
        one.logprobs.append(float(prob_V[token].log()))
        if self._stops(one, token):
            self._end(one, "stop")
        elif len(one.tokens) == how["max_new_tokens"]:
            self._end(one, "length")

    def _stops(self, one: Running, token: int) -> bool:
        how = one.how
        ends = {*how["stop_token_ids"], self.model.config.eos_token_id}
        if not how["ignore_eos"] and token in ends:
            return True
        if not how["stop"]:
            return False
        assert self.tokenizer is not None, "stop is unavailable when skip_tokenizer_init=True"
        text = self.tokenizer.decode(one.tokens, skip_special_tokens=True)
        return any(string in text for string in how["stop"])

    def _end(self, one: Running, reason: str) -> None:
        one.reason = reason
        self.running = [other for other in self.running if other is not one]
        self.waiting = [other for other in self.waiting if other is not one]
        one.ended.set()
