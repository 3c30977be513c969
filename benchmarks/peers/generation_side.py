"""One engine that draws answers, in a process of its own: `python -m peers.generation_side`.

A step draws the same requests each time: prompts in groups, each answer as long as it is told to
be, since no token ends one. Engines: `native`, `generate` (transformers, batch after batch),
`continuous` (transformers' continuous batching) and `vllm`.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from peers.wire import StepRecord, Wire


@dataclass(frozen=True)
class Settings:
    """What is drawn; the same for all engines.

    Attributes:
        engine: which of them.
        folder: the model, in Hugging Face layout.
        lengths: tokens of each answer.
        prompt_tokens: of each prompt; `group` answers after one another have the same.
        running: answers drawn together at most.
    """

    engine: str
    folder: str
    dtype: str
    threads: int
    lengths: tuple[int, ...]
    prompt_tokens: int
    group: int
    running: int

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """A prompt for each answer."""
        rng = random.Random(0)
        groups = -(-len(self.lengths) // self.group)
        found = [
            [rng.randrange(vocab_size) for _ in range(self.prompt_tokens)] for _ in range(groups)
        ]
        return [found[n // self.group] for n in range(len(self.lengths))]


Draw = Callable[[], list[int]]
"""Draws all answers, and says how many tokens each has."""


def of_m2flow(settings: Settings) -> Draw:
    import torch
    from transformers import AutoConfig

    from m2flow.generation.records import Request, SamplingParams

    dtype, engine = getattr(torch, settings.dtype), None
    config: Any = AutoConfig.from_pretrained(settings.folder, local_files_only=True)
    if settings.engine == "native":
        from m2flow.generation.native import NativeEngine
        from m2flow.models.causal_lm import load_model

        engine = NativeEngine(config, max_running=settings.running, dtype=dtype)
        engine.install(load_model(settings.folder, dtype).state_dict(), 0)
    else:
        from m2flow.generation.vllm_engine import VLLMEngine

        engine = VLLMEngine(settings.folder, version=0, max_running=settings.running, dtype=dtype)
    prompts = settings.prompts(config.vocab_size)

    def draw() -> list[int]:
        engine.submit(
            Request(n, prompt, n, SamplingParams(length, 1.0))
            for n, (prompt, length) in enumerate(zip(prompts, settings.lengths, strict=True))
        )
        done = {}
        while engine.busy:
            done |= {one.id: len(one.token_ids) for one in engine.step()}
        return [done[n] for n in range(len(prompts))]

    return draw


def _of_transformers(settings: Settings) -> tuple[Any, Any, list[list[int]]]:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(
        settings.folder, dtype=getattr(torch, settings.dtype), local_files_only=True
    ).eval()
    how = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None, pad_token_id=0,
        max_new_tokens=max(settings.lengths),
    )  # fmt: skip
    model.generation_config = how
    model.config.eos_token_id = None
    return model, how, settings.prompts(model.config.vocab_size)


def of_generate(settings: Settings) -> Draw:
    """Batches in the order of the requests; each goes on until its longest answer is done."""
    import torch

    model, how, prompts = _of_transformers(settings)

    def draw() -> list[int]:
        for first in range(0, len(prompts), settings.running):
            rows = slice(first, first + settings.running)
            ids = torch.tensor(prompts[rows])
            longest = max(settings.lengths[rows])
            found = model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=how,
                max_new_tokens=longest,
            )  # fmt: skip
            assert found.shape[1] == ids.shape[1] + longest
        return list(settings.lengths)

    return draw


def of_continuous(settings: Settings) -> Draw:
    from transformers import ContinuousBatchingConfig

    model, how, prompts = _of_transformers(settings)
    longest = settings.prompt_tokens + max(settings.lengths)
    manager = model.init_continuous_batching(
        generation_config=how,
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=32,
            num_blocks=settings.running * -(-longest // 32) + 64,
            max_batch_tokens=2048,
            max_requests_per_batch=settings.running,
        ),
    )
    manager.start()

    def draw() -> list[int]:
        numbers = {
            manager.add_request(prompt, max_new_tokens=length): n
            for n, (prompt, length) in enumerate(zip(prompts, settings.lengths, strict=True))
        }
        done: dict[int, int] = {}
        deadline = time.monotonic() + 3600
        while len(done) < len(prompts):
            result = manager.get_result(timeout=5.0)
            if result is not None and result.is_finished():
                assert result.error is None, result.error
                done[numbers[result.request_id]] = len(result.generated_tokens)
            assert manager.is_running(), "continuous batching has ended"
            assert time.monotonic() < deadline
        return [done[n] for n in range(len(prompts))]

    return draw


KINDS = {
    "native": of_m2flow,
    "vllm": of_m2flow,
    "generate": of_generate,
    "continuous": of_continuous,
}


def main() -> None:
    wire = Wire()
    settings = wire.settings(lambda **said: Settings(**{**said, "lengths": tuple(said["lengths"])}))
    import torch

    torch.set_num_threads(settings.threads)
    torch.manual_seed(0)
    draw = KINDS[settings.engine](settings)
    records: list[StepRecord] = []
    while steps := wire.next_request(records):
        records = []
        for _ in range(steps):
            start = time.perf_counter()
            with torch.inference_mode():
                lengths = draw()
            records.append(StepRecord(time.perf_counter() - start, [], lengths))
            assert lengths == list(settings.lengths)
    import os

    os._exit(0)  # threads of continuous batching would go on


if __name__ == "__main__":
    main()
