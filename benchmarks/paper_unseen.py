"""Published figures of other systems that nothing here was fitted to, with predictions.

The sources are those of each figure. Where a set-up is not published it is assumed, before the
prediction was made, and said in the figure's note; no assumption was changed afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from paper_model import Parallel, Reasoning, temporal

from m2flow.models.lengths import Answers, fit_lengths
from m2flow.models.shape import KNOWN_MODELS, ModelShape
from m2flow.models.work import Rates, decoding, training_pass, update
from m2flow.plan.profile.hardware import DEVICES, NETWORK_FRACTION, Device
from m2flow.training.division import Division

H100, H200, H20 = (DEVICES[name] for name in ("H100", "H200", "H20"))
NEMO = "NeMo-RL performance summary"
VERL_ASYNC = "verl, fully asynchronous training"


@dataclass(frozen=True)
class Unseen:
    """A published figure beside its prediction.

    Attributes:
        source: who published it.
        what: what is measured, with its unit.
        assumed: what the source leaves open.
    """

    source: str
    what: str
    predicted: float
    published: float
    assumed: str

    @property
    def ratio(self) -> float:
        return self.predicted / self.published


def figures(rates: Rates) -> Iterator[Unseen]:
    """Every figure that nothing was fitted to."""
    yield from _nemo(rates)
    yield from _asynchronous(rates)
    yield from _trainer(rates)
    yield from _weights()


def _step(
    model: str, device: Device, tokens: float, longest: int, group: int, **more: object
) -> Reasoning:
    """A step of 2,048 samples of so many tokens, a prompt of 150 among them."""
    answers = Answers(150, fit_lengths(tokens - 150, longest - 150))
    work = Reasoning(
        KNOWN_MODELS[model], device, 2048, group, answers, 1, Parallel(1), 256, 256
    )  # fmt: skip
    return replace(work, **more)  # type: ignore[arg-type]


def _nemo(rates: Rates) -> Iterator[Unseen]:
    """Tokens a second and lane times seconds a step give the tokens of a sample."""
    note = "groups of 32, four updates, prompts of 150 tokens"
    small = _step("Llama-3.1-8B", H100, 1581 * 16 * 92.8 / 2048, 4096, 32, train=Parallel(1, 2))
    yield Unseen(NEMO, "Llama-3.1-8B, 16 H100, on-policy, s", temporal(small, 16, rates), 92.8,
                 f"{note}; generation on one lane, training on two")  # fmt: skip
    side_by_side = max(
        small.rolling_out(8, rates, 256), small.forward(8, rates) + small.training(8, rates)
    )
    yield Unseen(NEMO, "the same, one step off-policy, s", side_by_side, 64.8,
                 f"{note}; half of the lanes generate")  # fmt: skip
    dense = _step("Qwen3-32B", H100, 571 * 32 * 376 / 2048, 4096, 32, rollout=4,
                  train=Parallel(8))  # fmt: skip
    yield Unseen(NEMO, "Qwen3-32B, 32 H100, on-policy, s", temporal(dense, 32, rates), 376.0,
                 f"{note}; generation on four lanes, training on eight")  # fmt: skip
    mixture = _step("Qwen3-30B-A3B", H100, 1102 * 32 * 192 / 2048, 4096, 32, rollout=4,
                    train=Parallel(4, 1, 8))  # fmt: skip
    yield Unseen(NEMO, "Qwen3-30B-A3B, 32 H100, on-policy, s", temporal(mixture, 32, rates), 192.0,
                 f"{note}; generation on four lanes, training TP4 EP8")  # fmt: skip


def _asynchronous(rates: Rates) -> Iterator[Unseen]:
    """How many times as fast a run is whose generation never waits: its tail is hidden."""
    for lanes, published in ((32, 2.66), (128, 2.35)):
        work = replace(
            _step("Qwen2.5-7B", H20, 7650, 28_672, 16, rollout=2, train=Parallel(4)), number=8192
        )
        turns = temporal(work, lanes, rates)
        half = lanes // 2
        generating = work.tokens / _steady(work, half, rates)
        training = work.forward(half, rates) + work.training(half, rates)
        yield Unseen(VERL_ASYNC, f"Qwen2.5-7B, 28k, {lanes} H20, asynchronous over synchronous",
                     turns / max(generating, training), published,
                     "8,192 answers of GRPO 7B's lengths, half of the lanes generate")  # fmt: skip


def _steady(work: Reasoning, lanes: int, rates: Rates) -> float:
    """Tokens a second of generation that is always fed."""
    running = work.max_running
    held = running * work.answers.context
    step = decoding(work.model, running, held, work.rollout, rates).on(work.device)
    return running / step * lanes / work.rollout


def _trainer(rates: Rates) -> Iterator[Unseen]:
    model = KNOWN_MODELS["Qwen3-0.6B"]
    for length, published in ((16_384, 11_900.0), (65_536, None)):
        answers = Answers(0, fit_lengths(length * 0.999, length))
        seconds = training_pass(model, answers, 1, Division(), length, True, rates).on(H100)
        seconds += update(model, Division(), 1).on(H100)
        tokens = length / seconds
        if published is not None:
            yield Unseen("prime-rl", "Qwen3-0.6B, one H100, 16k, tokens/s", tokens, published,
                         "one sequence an update")  # fmt: skip
        share = tokens * model.forward_flops(1, answers.context) * 3 / H100.flops_per_second
        yield Unseen("prime-rl", f"the same, {length // 1024}k, share of the peak", share,
                     0.11 if published else 0.27, "one sequence an update")  # fmt: skip


def _weights() -> Iterator[Unseen]:
    """Each lane of a receiving replica takes its share over the network, or beside the sender."""

    def seconds(model: ModelShape, device: Device, lanes: int, far: bool) -> float:
        rate = device.network_bytes_per_second * NETWORK_FRACTION
        near = device.collective_bytes_per_second(lanes)
        return model.weight_bytes / lanes / (rate if far else near)

    for source, name, device, lanes, far, published in (
        ("TRL", "Qwen3-0.6B", H100, 1, False, 0.18),
        ("verl", "Qwen2.5-7B", H20, 4, False, 0.12),
        ("TRL", "Qwen3-32B", H200, 16, True, 2.3),
    ):
        yield Unseen(source, f"weights of {name} to the engine, s",
                     seconds(KNOWN_MODELS[name], device, lanes, far), published,
                     f"to a replica on {lanes} lanes, nothing but the wires")  # fmt: skip
