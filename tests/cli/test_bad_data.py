"""NaN found late: the optimizer step is left out, counted, its rollouts kept; not for ever."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from m2flow.observe.run_directory import read_metrics
from m2flow.training.optimizer import SumOptimizer
from m2flow.workloads.reasoning.workers.drawing import Drawing

M2flow = Callable[..., Any]

FEW = ["evaluation.problems=0", "warmup.steps=1", "--run-dir", "run"]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[[range, float, bool], None]:
    """Spoil the gradient, or the loss, of some of the optimizer steps that a run takes."""
    take = SumOptimizer.step

    def arrange(which: range, value: float, in_loss: bool = False) -> None:
        taken = 0

        def step(self: SumOptimizer, sums: Tensor, *more: Any, **named: Any) -> Any:
            nonlocal taken
            if self._config.learning_rate == 0.003:  # not the warm-up's
                if taken in which:
                    (sums if in_loss else self._flats[0])[0] = value
                taken += 1
            return take(self, sums, *more, **named)

        monkeypatch.setattr(SumOptimizer, "step", step)

    return arrange


@pytest.mark.parametrize(
    ("value", "in_loss"), [(float("nan"), False), (float("inf"), False), (float("nan"), True)]
)
def test_one_bad_minibatch_is_left_out(
    tiny: Path, m2flow: M2flow, poison: Callable[..., None], value: float, in_loss: bool
) -> None:
    poison(range(3, 4), value, in_loss)  # the second mini-batch of step 2
    outcome = m2flow("train", tiny, *FEW)
    assert outcome.code == 0, outcome.err
    shares = [row["train/skipped_share"] for row in read_metrics("run")]
    assert shares == [0.0, 0.5, 0.0]
    assert "step 2: a loss or gradient was not finite: 50%" in outcome.out
    where = "the summed loss is nan" if in_loss else "(model.embed_tokens.weight)"
    (said,) = (x for x in outcome.out.splitlines() if "step 2: no step was taken: " in x)
    assert where in said
    assert [path.name for path in Path("run/skipped").iterdir()] == ["step_000002.jsonl"]
    rows = [json.loads(x) for x in Path("run/skipped/step_000002.jsonl").read_text().splitlines()]
    assert len({row["item"] for row in rows}) == len(rows) == 16
    assert all({"step", "prompt", "completion", "reward"} <= row.keys() for row in rows)
    weights = load_file("run/checkpoints/latest/model/model.safetensors")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_log_probabilities_of_the_engine_that_are_no_numbers(
    tiny: Path, m2flow: M2flow, monkeypatch: pytest.MonkeyPatch, kl_in: str
) -> None:
    """Of one token of step 2: its mini-batch is left out, with the KL in the reward too."""
    hand_on = Drawing.handed_on

    def spoilt(self: Drawing, finished: Any) -> Any:
        samples = hand_on(self, finished)
        if self.engine.version == 1 and 0 in samples.ids:
            samples["behaviour_logprobs"][samples.ids.index(0)][0] = float("nan")
        return samples

    monkeypatch.setattr(Drawing, "handed_on", spoilt)
    kl = ["algorithm.kl_coefficient=0.1", f"algorithm.kl_in={kl_in}"]
    outcome = m2flow("train", tiny, *FEW, *kl)
    assert outcome.code == 0, outcome.err
    assert [row["train/skipped_share"] for row in read_metrics("run")] == [0.0, 0.5, 0.0]
    assert "behaviour_logprobs: 1 of " in outcome.out
    assert Path("run/skipped/step_000002.jsonl").read_text().count("\n") == 16


def test_bad_minibatches_in_a_row_end_the_run(
    tiny: Path, m2flow: M2flow, poison: Callable[..., None]
) -> None:
    poison(range(1, 99), float("nan"))
    outcome = m2flow("train", tiny, *FEW, "max_skipped_updates=2", "checkpoint.every=1")
    assert outcome.code == 1
    assert "gradients of" in outcome.err.splitlines()[0]
    assert "3 times in a row (max_skipped_updates: 2)" in outcome.err.splitlines()[0]
    assert [row["train/skipped_share"] for row in read_metrics("run")] == [0.5]
    kept = {path.name: path.read_text() for path in Path("run/skipped").iterdir()}
    assert sorted(kept) == ["step_000001.jsonl", "step_000002.jsonl"], "of the last step, too"
    assert kept["step_000002.jsonl"].count("\n") == 16
    assert "step 2: a loss or gradient was not finite: 100%" in outcome.out
    assert Path("run/checkpoints/latest").readlink() == Path("step_000001")

    said = m2flow("doctor", "run")
    assert said.code == 0
    assert said.out.startswith("failed at ")
    assert "checkpoint: step 1, whole; 0 steps would run again" in said.out
    assert "first: see skipped/; raise max_skipped_updates, or lower " in said.out
    assert "to go on: m2flow train run/config.yaml --run-dir run --resume" in said.out
    assert "3 times in a row" in said.out.splitlines()[-1]
    goes_on = m2flow("train", "run/config.yaml", "max_skipped_updates=99", *FEW[2:], "--resume")
    assert goes_on.code == 0, goes_on.err


def test_a_policy_that_has_diverged_ends_the_run_in_one_line(tiny: Path, m2flow: M2flow) -> None:
    """Its weights are finite, and its logits are not: it had a traceback of 30 lines."""
    words = ["evaluation.problems=0", "optimizer.learning_rate=1e20", "--run-dir", "run"]
    outcome = m2flow("train", tiny, *words)
    assert outcome.code == 1
    assert outcome.err.startswith("the run failed: "), outcome.err
    assert outcome.err.count("\n") == 1
    assert "the weights of version 1 give logits that are not finite" in outcome.err
    assert "optimizer.learning_rate" in outcome.err


@pytest.mark.parametrize("bad", [1, 99])
def test_none_may_be_left_out(
    tiny: Path, m2flow: M2flow, poison: Callable[..., None], bad: int
) -> None:
    """Neither where the rest of the step can be taken, nor where it cannot."""
    poison(range(bad), float("nan"))
    outcome = m2flow("train", tiny, *FEW, "max_skipped_updates=0", "checkpoint.every=1")
    assert outcome.code == 1
    (line,) = outcome.err.splitlines()
    assert line.startswith("the run failed: NotFinite: no step was taken: ")
    assert line.endswith("; at once (max_skipped_updates: 0)")
    assert read_metrics("run") == []
    assert not Path("run/checkpoints/latest").exists()
    (kept,) = Path("run/skipped").iterdir()
    assert kept.name == "step_000001.jsonl"
    assert kept.read_text().count("\n") == 16


def rewards(body: str) -> str:
    """A reward function of this body, in a module that nobody has imported yet."""
    module = f"rewards_{uuid.uuid4().hex}"
    Path(f"{module}.py").write_text(
        "import zlib\n\n\ndef score(prompt, completion, completion_ids, row):\n"
        f"    which = zlib.crc32((prompt + completion).encode())\n    return {body}\n"
    )
    return f"reward={module}:score"


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_samples_whose_reward_is_no_number_are_left_out_counted_and_kept(
    tiny: Path, m2flow: M2flow, value: str
) -> None:
    reward = rewards(f"float({value!r}) if which % 4 == 0 else float(which % 2)")
    outcome = m2flow("train", tiny, *FEW, reward)
    assert outcome.code == 0, outcome.err
    shares = [row["reward/failed_share"] for row in read_metrics("run")]
    assert 0 < max(shares) < 0.5
    assert f"gave {value}, no number; the sample is not trained on" in outcome.out
    kept = {path.name: path.read_text() for path in Path("run/skipped").iterdir()}
    assert len(kept) == sum(share > 0 for share in shares)
    rows = [json.loads(line) for text in kept.values() for line in text.splitlines()]
    assert len(rows) == sum(16 * share for share in shares)
    assert all(value in row["failure"] for row in rows)


def test_rewards_that_go_on_being_no_numbers_end_the_run(tiny: Path, m2flow: M2flow) -> None:
    reward = rewards("float('nan') if which % 8 else 0.0")
    outcome = m2flow("train", tiny, *FEW, reward, "steps=9", "max_skipped_updates=2")
    assert outcome.code == 1
    first = outcome.err.splitlines()[0]
    assert "of 16 samples of step 3, and half or more of 3 steps in a row" in first
    assert "(max_skipped_updates: 2)" in first
    assert len(read_metrics("run")) == 2
    names = sorted(path.name for path in Path("run/skipped").iterdir())
    assert names == [f"step_{step:06d}.jsonl" for step in (1, 2, 3)], "of the last step, too"


def test_a_step_without_any_reward_ends_the_run(tiny: Path, m2flow: M2flow) -> None:
    outcome = m2flow("train", tiny, *FEW, rewards("float('nan')"))
    assert outcome.code == 1
    assert "so for all 16 samples of step 1" in outcome.err.splitlines()[0]
    assert Path("run/skipped/step_000001.jsonl").read_text().count("\n") == 16
