"""Our losses beside TRL's own, on the same tensors: the same number and the same gradients.

TRL's run in an environment of its own: `M2FLOW_TRL_PYTHON` names its interpreter, or
`benchmarks/peers_trl.py` has made one. Where definitions differ `docs/explanation/algorithms.md`
says how.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from m2flow.algorithms.kl import kl_per_token
from m2flow.algorithms.policy_loss import gap_weights
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.learning import loss_of

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).parents[2]
SIZE, WIDTH = 8, 24


@dataclass(frozen=True)
class Same:
    """What TRL is told, and what says the same in a recipe's `algorithm`.

    Attributes:
        trl, ours: the settings.
        spread: standard deviation of the log-ratios.
        gap: of the policy of the ratio to the one that drew; 0 where they are the same.
    """

    trl: dict[str, Any]
    ours: dict[str, Any]
    spread: float = 0.3
    gap: float = 0.0


PLAIN_KL = {"use_bias_correction_kl": False}
"""TRL multiplies the KL by the ratio unless it is told not to."""

CASES = {
    "grpo": Same({"loss_type": "grpo"}, {}),
    "grpo, ratios far off": Same({"loss_type": "grpo"}, {}, spread=2.0),
    "grpo, k3 in the loss": Same(
        {"loss_type": "grpo", "beta": 0.1, **PLAIN_KL},
        {"kl_coefficient": 0.1, "kl_estimator": "k3"},
    ),
    "bnpo": Same({"loss_type": "bnpo"}, {"aggregation": "token-mean"}),
    "dr_grpo": Same({"loss_type": "dr_grpo"}, {"name": "dr-grpo"}),
    "dapo": Same({"loss_type": "dapo", "epsilon_high": 0.28}, {"name": "dapo"}),
    "dapo, k3 in the loss": Same(
        {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.05, **PLAIN_KL},
        {"name": "dapo", "kl_coefficient": 0.05},
    ),
    "gspo": Same(
        {
            "loss_type": "grpo", "importance_sampling_level": "sequence",
            "epsilon": 3e-4, "epsilon_high": 4e-4,
        },
        {"name": "gspo"},
    ),
    "gspo, wider": Same(
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2},
    ),
    "cispo": Same({"loss_type": "cispo", "epsilon_high": 5.0}, {"name": "cispo"}, spread=1.5),
    "dual clip": Same({"loss_type": "dapo", "delta": 3.0},
                      {"aggregation": "token-mean", "dual_clip": 3.0}, spread=1.5),
    "truncated importance sampling": Same(
        {"loss_type": "dapo", "beta": 0.1, **PLAIN_KL},
        {"aggregation": "token-mean", "kl_coefficient": 0.1, "gap_cap": 2.0},
        gap=0.5,
    ),
}  # fmt: skip


WEIGHTED_KL = Same({"loss_type": "bnpo", "beta": 0.1}, {"aggregation": "token-mean"})
"""What TRL does by default, and we do not."""


@dataclass(frozen=True)
class Tensors:
    """Random tensors of a case; B samples, width T, of which `mask_BT` is there."""

    mask_BT: Tensor
    logprobs_BT: Tensor
    old_BT: Tensor
    behaviour_BT: Tensor
    reference_BT: Tensor
    advantages_B: Tensor
    lengths_B: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths_B", self.mask_BT.sum(dim=1))

    @classmethod
    def of(cls, case: Same, seed: int) -> Tensors:
        random = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float64)

        lengths_B = torch.randint(1, WIDTH + 1, (SIZE,), generator=random)
        lengths_B[0], lengths_B[1] = 1, WIDTH
        logprobs_BT = -normal(SIZE, WIDTH).abs()
        old_BT = logprobs_BT + case.spread * normal(SIZE, WIDTH)
        advantages_B = normal(SIZE)
        advantages_B[2] = 0.0
        return cls(
            torch.arange(WIDTH) < lengths_B[:, None],
            logprobs_BT,
            old_BT,
            old_BT + case.gap * normal(SIZE, WIDTH),
            logprobs_BT + 0.3 * normal(SIZE, WIDTH),
            advantages_B,
        )

    def weights_T(self, case: Same) -> Tensor:
        cap = case.ours["gap_cap"]
        old_T, behaviour_T = self.old_BT[self.mask_BT], self.behaviour_BT[self.mask_BT]
        return gap_weights(old_T, behaviour_T, self.lengths_B, cap=cap)

    def for_trl(self, case: Same) -> dict[str, Any]:
        weights_BT = None
        if case.gap:
            weights_BT = torch.zeros(SIZE, WIDTH, dtype=torch.float64)
            weights_BT[self.mask_BT] = self.weights_T(case)
        return {
            "settings": case.trl,
            "mask": self.mask_BT,
            "logprobs": self.logprobs_BT,
            "old": self.old_BT,
            "reference": self.reference_BT,
            "advantages": self.advantages_B,
            "weights": weights_BT,
        }


def our_loss(case: Same, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Loss and gradient of the padded log-probabilities, by the loss that a recipe trains with."""
    training = {"recompute_logprobs": True}  # so that the gap is weighted
    words = {"samples_per_prompt": 2, "algorithm": case.ours, "training": training}
    recipe = ReasoningRecipe.model_validate({**words, "generation": {"max_new_tokens": WIDTH}})
    algorithm, mask_BT = loss_of(recipe), tensors.mask_BT
    logprobs_BT = tensors.logprobs_BT.clone().requires_grad_(True)
    terms = algorithm.loss(
        logprobs_BT[mask_BT],
        tensors.old_BT[mask_BT],
        tensors.advantages_B.repeat_interleave(tensors.lengths_B),
        tensors.lengths_B,
        behaviour_logprobs_T=tensors.behaviour_BT[mask_BT] if case.gap else None,
        reference_logprobs_T=tensors.reference_BT[mask_BT] if algorithm.needs_reference else None,
    )
    loss = terms.loss / algorithm.denominator(tensors.lengths_B)
    loss.backward()
    assert logprobs_BT.grad is not None
    return loss.detach(), logprobs_BT.grad


def trl_python() -> Path:
    """TRL's interpreter."""
    named = os.environ.get("M2FLOW_TRL_PYTHON")
    python = Path(named) if named else PROJECT / ".bench" / "trl" / "bin" / "python"
    if named and not python.is_file():
        pytest.fail(f"M2FLOW_TRL_PYTHON={named}: there is no such interpreter")
    if not python.is_file():
        pytest.skip("needs TRL in an environment of its own: make test-trl")
    return python


@pytest.fixture(scope="module")
def of_trl(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """TRL's losses and gradients of all cases, in one process of its own."""
    python, folder = trl_python(), tmp_path_factory.mktemp("trl")
    cases = {
        f"{name}/{seed}": Tensors.of(case, seed).for_trl(case)
        for name, case in {**CASES, "weighted kl": WEIGHTED_KL}.items()
        for seed in range(3)
    }
    torch.save(cases, folder / "cases.pt")
    done = subprocess.run(
        [str(python), str(Path(__file__).with_name("trl_loss.py")), "cases.pt", "found.pt"],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = torch.load(folder / "found.pt")
    return found


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_trl(name: str, of_trl: dict[str, Any]) -> None:
    for seed in range(3):
        tensors, theirs = Tensors.of(CASES[name], seed), of_trl[f"{name}/{seed}"]
        loss, gradient_BT = our_loss(CASES[name], tensors)
        assert loss.item() == pytest.approx(theirs["loss"].item(), rel=1e-6, abs=1e-9)
        assert gradient_BT.abs().max() > 0
        assert torch.allclose(gradient_BT, theirs["gradient"], rtol=1e-6, atol=1e-9)


def test_another_loss_would_be_seen(of_trl: dict[str, Any]) -> None:
    """Each of TRL's losses differs from that of another case of ours: the test above can fail."""
    for name, other in (("grpo", "bnpo"), ("dapo", "dr_grpo"), ("gspo", "grpo"), ("cispo", "dapo")):
        loss, gradient_BT = our_loss(CASES[other], Tensors.of(CASES[name], 0))
        theirs = of_trl[f"{name}/0"]
        assert not torch.allclose(gradient_BT, theirs["gradient"], rtol=1e-3)
        assert loss.item() != pytest.approx(theirs["loss"].item(), rel=1e-4)


def test_the_kl_that_trl_has_by_default_is_weighted_by_the_ratio(of_trl: dict[str, Any]) -> None:
    """The difference that the documentation names, and no other."""
    tensors, theirs = Tensors.of(WEIGHTED_KL, 0), of_trl["weighted kl/0"]
    loss, gradient_BT = our_loss(WEIGHTED_KL, tensors)
    mask_BT = tensors.mask_BT
    logprobs_BT = tensors.logprobs_BT.clone().requires_grad_(True)
    kl_BT = kl_per_token(logprobs_BT, tensors.reference_BT, "k3")
    ratio_BT = (logprobs_BT - tensors.old_BT).exp()
    more = 0.1 * (ratio_BT * kl_BT)[mask_BT].mean()
    more.backward()
    assert logprobs_BT.grad is not None
    assert (loss + more).item() == pytest.approx(theirs["loss"].item(), rel=1e-9)
    assert torch.allclose(gradient_BT + logprobs_BT.grad, theirs["gradient"], rtol=1e-6, atol=1e-9)
