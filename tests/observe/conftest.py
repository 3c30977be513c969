"""A run directory with believable numbers, written through the package's own writers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from m2flow.engine.spans import Span, SpanKind
from m2flow.observe.run_directory import RunDirectory
from m2flow.observe.timeline import Timeline

START = 1_790_000_000.0
PLAN = {
    "mode": "hybrid",
    "lanes": [{"id": 0, "kind": "cpu", "cores": [0]}, {"id": 1, "kind": "cpu", "cores": [1]}],
    "placements": {
        "generator": {"replicas": [[0], [1]], "state_bytes": 3_200_000},
        "verifier": {"replicas": [[0], [1]], "state_bytes": 0},
        "group_advantage": {"replicas": [[0]], "state_bytes": 0},
        "learner": {"replicas": [[0, 1]], "state_bytes": 12_600_000},
    },
    "stages": {
        "generator.generate": {"chunk": None, "max_running": 128},
        "verifier.score": {"chunk": 16},
        "learner.train": {"chunk": 64},
    },
    "predicted_seconds": 0.41,
}


def write_fake_run(path: Path, *, num_steps: int = 80, planned_steps: int | None = None) -> Path:
    """Write what a run of `num_steps` steps out of `planned_steps` would have left."""
    draw = random.Random(7)
    timeline = Timeline(keep_first=2, keep_last=3)
    run = RunDirectory.create(path, "grpo_addition")
    run.write_run(
        recipe="recipes/grpo_addition.yaml",
        mode="auto",
        seed=1,
        steps=planned_steps or num_steps,
        machine="2 cores · AMD EPYC 9B14 · 24 GiB · no accelerator",
        started=START,
        versions={"m2flow": "0.1.0", "torch": "2.13.0"},
    )
    run.write_config(
        {
            "recipe": "grpo_addition",
            "seed": 1,
            "steps": planned_steps or num_steps,
            "prompts_per_step": 32,
            "samples_per_prompt": 8,
            "minibatches": 2,
            "learning_rate": 1e-4,
            "model": {"hidden": 128, "layers": 4, "name": "qwen2-tiny"},
        }
    )
    run.write_json(run.plan, json.dumps(PLAN))
    run.append_metrics(0, {"time": START, "eval/accuracy": 0.47})
    now = 100.0
    for step in range(1, num_steps + 1):
        begin, now = now, _fake_step(timeline, step, now, draw)
        run.append_metrics(step, _fake_metrics(step, num_steps, now - begin, now, draw))
        run.append_samples(step, _fake_samples(step, num_steps, draw))
    timeline.write(run.timeline)
    if planned_steps is None:
        run.write_run(finished=START + now)
    return path


def _fake_metrics(
    step: int, num_steps: int, taken: float, now: float, draw: random.Random
) -> dict[str, float]:
    share = 1 / (1 + math.exp(-(step - 25) / 8))
    accuracy = min(1.0, max(0.0, 0.42 + 0.47 * share + draw.gauss(0, 0.025)))
    tokens = int(256 * (11 + 4.5 * share + draw.gauss(0, 0.2)))
    row = {
        "time": START + now - 100.0,
        "reward/mean": accuracy,
        "accuracy/mean": accuracy,
        "tokens/generated": tokens,
        "length/mean": tokens / 256,
        "samples": 256,
        "seconds/step": taken,
        "seconds/generate": taken * 0.31,
        "seconds/score": taken * 0.06,
        "seconds/logprobs": taken * 0.14,
        "seconds/train": taken * 0.42,
        "throughput/tokens_per_s": tokens / taken,
        "throughput/samples_per_s": 256 / taken,
        "version": step,
        "staleness/mean": 0.0,
        "plan/predicted_seconds": 0.41,
        "loss/policy": 0.02 * math.exp(-step / 30) + draw.gauss(0, 0.004) - 0.004,
        "entropy/mean": 0.9 - 0.55 * share + draw.gauss(0, 0.01),
        "grad_norm": 0.6 * math.exp(-step / 60) + abs(draw.gauss(0.25, 0.06)),
        "health/zero_variance_share": 0.28 + 0.3 * share + draw.gauss(0, 0.03),
        "health/truncated_share": max(0.0, 0.05 - 0.04 * share + draw.gauss(0, 0.006)),
    }
    if step % 10 == 0 or step == num_steps:
        row["eval/accuracy"] = min(1.0, 0.46 + 0.52 * share + draw.gauss(0, 0.008))
    return row


def _fake_samples(step: int, num_steps: int, draw: random.Random) -> list[dict[str, object]]:
    samples: list[dict[str, object]] = []
    for item in range(0, 24, 6):
        a, b = draw.randrange(100, 9999), draw.randrange(100, 999)
        right = draw.random() < 0.4 + 0.6 * step / num_steps
        shown = a + b if right else a + b + draw.choice([-100, -10, 10, 1])
        thinks = draw.random() < step / num_steps
        sums = ",".join(f"{a // 10**k % 10 + b // 10**k % 10:02d}" for k in range(3))
        samples.append(
            {
                "item": item,
                "prompt": f"{a}+{b}=",
                "completion": (sums if thinks else "") + f"#{shown}",
                "reward": float(right),
                "answer": str(a + b),
                "finish_reason": "stop",
            }
        )
    return samples


def record(
    spans: list[Span], lane: int, name: str, kind: SpanKind, start: float, end: float, **args: int
) -> None:
    """Add a span."""
    spans.append(Span(lane, name, kind, start, end, args))


def _fake_step(timeline: Timeline, step: int, begin: float, draw: random.Random) -> float:
    """Spans of one step on two lanes; returns when it ends."""
    spans: list[Span] = []
    ends = []
    for lane in (0, 1):
        now = begin + 0.002
        generated = now + draw.uniform(0.112, 0.148)
        record(spans, lane, "generator.generate", "call", now, generated, items=128, tokens=1820)
        for chunk in range(3):
            scored = now + (chunk + 1.1) * 0.034
            record(spans, lane, "payload", "transfer", scored, scored + 0.003, bytes=4096)
        now = generated
        for _ in range(4):
            done = now + draw.uniform(0.004, 0.008)
            record(spans, lane, "verifier.score", "call", now, done, items=32)
            now = done + 0.0005
        ends.append(now)
    advantage = max(ends)
    record(spans, 0, "group_advantage", "call", advantage, advantage + 0.004, items=256)
    start = advantage + 0.005
    ends = []
    for lane in (0, 1):
        record(spans, lane, "group_advantage", "wait", advantage - 0.01, start)
        record(spans, lane, "payload", "transfer", start - 0.003, start, bytes=4096)
        record(spans, lane, "learner", "switch", start, start + 0.009, bytes=12_600_000)
        now = start + 0.009
        done = now + draw.uniform(0.050, 0.058)
        record(spans, lane, "learner.logprobs", "call", now, done, items=128)
        now = done
        for minibatch in range(2):
            done = now + draw.uniform(0.074, 0.090)
            record(spans, lane, "learner.train", "call", now, done, items=64, minibatch=minibatch)
            record(spans, lane, "learner.train", "finish", done, done + 0.009)
            now = done + 0.012
        ends.append(now)
    end = max(ends)
    for lane in (0, 1):
        record(spans, lane, "generator", "publish", end, end + 0.006, version=step)
    timeline.add(step, spans, begin, end + 0.007)
    return end + 0.007


@pytest.fixture
def fake_run() -> Callable[..., Path]:
    """`write_fake_run`, for tests."""
    return write_fake_run
