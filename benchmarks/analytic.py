"""The analytic profile beside measured tables: seconds of decoding and of prefill on H100 and H200.

The tables are those of aiconfigurator 0.12 for vLLM 0.24 (`peers/tables_side.py`), in a virtual
environment of its own; a CPU is enough. What is compared is what the planner takes for a decoding
step and for a prefill of a replica (`m2flow.models.work`), in bfloat16, on one lane and divided by
heads over several.

Models are ordered by their parameters, dense ones and mixtures of experts apart. Every other one,
from the first on, is what constants may be fitted to (`--fit` prints the fit); the others are held
out, and the targets are theirs alone. A point is a model on a kind of lane, on the fewest lanes
that have room and on twice as many, with a number of requests and of tokens; those that do not fit
into memory are left out. The error of a point is predicted over measured, less one, without sign.

Published seconds of whole steps (NeMo-RL, `paper_unseen.py`) stand beside, fitted to nowhere.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from harness import CACHE, Target, arguments, conclude, table
from paper_unseen import NEMO
from paper_unseen import figures as unseen_figures
from peers.environment import aiconfigurator_python

from m2flow.models.shape import ModelShape, model_from_config
from m2flow.models.work import RATES, Rates, decoding, prefill
from m2flow.plan.profile.hardware import DEVICES, Device

DENSE = (
    "Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "XiaomiMiMo/MiMo-7B-Base", "meta-llama/Meta-Llama-3.1-8B",
    "Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Meta-Llama-3.1-405B",
)  # fmt: skip
MIXTURES = (
    "Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x22B-v0.1",
    "Qwen/Qwen3-235B-A22B", "Qwen/Qwen3-Coder-480B-A35B-Instruct",
)  # fmt: skip
"""Those that the package has in bfloat16, with full attention, in order of parameters."""

SYSTEMS = {"h100_sxm": DEVICES["H100"], "h200_sxm": DEVICES["H200"]}

DECODED = tuple(product((1, 8, 32, 128, 256), (1024, 4096, 16_384)))
PREFILLED = ((1, 512), (1, 2048), (1, 8192), (8, 1024), (16, 512))
"""Requests, and tokens of each; the native engine computes 8,192 tokens of prompts together."""

CLOSE, WHOLE_STEP = 0.15, 0.40

KINDS = ("dense decode", "dense prefill", "MoE decode", "MoE prefill")


@dataclass(frozen=True)
class Point:
    """A step that is priced: a model on so many lanes of a kind, its requests and their tokens."""

    model: str
    system: str
    lanes: int
    what: str
    batch: int
    tokens: int
    shape: ModelShape
    measured: float = math.nan

    @property
    def device(self) -> Device:
        return SYSTEMS[self.system]

    @property
    def kind(self) -> str:
        return f"{'MoE' if self.shape.experts else 'dense'} {self.what}"

    @property
    def held_out(self) -> bool:
        names = MIXTURES if self.shape.experts else DENSE
        return names.index(self.model) % 2 == 1

    @property
    def fits(self) -> bool:
        held = self.shape.kv_bytes_on_lane(self.lanes) * self.batch * self.tokens
        return self.shape.weight_bytes / self.lanes + held <= self.device.usable_bytes

    def predicted(self, rates: Rates) -> float:
        """Seconds by the analytic profile."""
        if self.what == "prefill":
            tokens, context = self.batch * self.tokens, self.tokens / 2
            return prefill(self.shape, tokens, context, self.lanes, rates).on(self.device)
        held = self.batch * self.tokens
        return decoding(self.shape, self.batch, held, self.lanes, rates).on(self.device)

    def ratio(self, rates: Rates) -> float:
        return self.predicted(rates) / self.measured


def shapes(python: Path) -> dict[str, ModelShape]:
    """The shapes of all models, by the configurations that the package has."""
    nothing = [[model, "h100_sxm", 1, "decode", 1, 1024] for model in (*DENSE, *MIXTURES)]
    configs = asked(python, nothing)["configs"]
    return {model: model_from_config(config, model) for model, config in configs.items()}


def asked(python: Path, points: Sequence[Sequence[object]]) -> dict[str, object]:
    side = Path(__file__).parent / "peers" / "tables_side.py"
    ran = subprocess.run(
        [str(python), str(side)], input=json.dumps(points), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if ran.returncode:
        sys.exit(f"the tables cannot be read: {ran.stderr[-2000:]}")
    answer: dict[str, object] = json.loads(ran.stdout)
    return answer


def points(models: dict[str, ModelShape], quick: bool) -> Iterator[Point]:
    """Every point that fits, without its measurement."""
    for (model, shape), system in product(models.items(), SYSTEMS):
        sizes = [n for n in (1, 2, 4, 8) if shape.kv_heads % n == 0]
        room = [n for n in sizes if Point(model, system, n, "decode", 1, 1024, shape).fits]
        for lanes in room[:1] if quick else room[:2]:
            steps = [("decode", *one) for one in DECODED] + [("prefill", *one) for one in PREFILLED]
            for what, batch, tokens in steps[:: 3 if quick else 1]:
                one = Point(model, system, lanes, what, batch, tokens, shape)
                if one.fits:
                    yield one


def measured(python: Path, every: list[Point]) -> list[Point]:
    """The points with their seconds in the tables."""
    wanted = [[p.model, p.system, p.lanes, p.what, p.batch, p.tokens] for p in every]
    seconds = asked(python, wanted)["seconds"]
    assert isinstance(seconds, list)
    found = zip(every, seconds, strict=True)
    return [replace(point, measured=value) for point, value in found]


def error(some: Sequence[Point], rates: Rates) -> float:
    """Median error of some points."""
    return statistics.median(abs(point.ratio(rates) - 1) for point in some)


def fitted(every: list[Point], rates: Rates) -> Rates:
    """The rates with the least mean square of log ratios over the points that may be fitted to.

    Each name is moved alone, by ever smaller steps, as long as that helps.
    """
    for kind, names in FITTED.items():
        some = [point for point in every if point.kind == kind and not point.held_out]

        def loss(now: Rates, some: list[Point] = some) -> float:
            return statistics.fmean(math.log(point.ratio(now)) ** 2 for point in some)

        rates = descended(loss, rates, names)
    return rates


FITTED: dict[str, tuple[str, ...]] = {
    "dense decode": ("decode_bandwidth", "layer_seconds"),
    "dense prefill": ("prefill", "prefill_layer_seconds"),
    "MoE prefill": ("experts",),
}
"""What is fitted to which points, one after the other."""


def descended(loss: Callable[[Rates], float], rates: Rates, names: Sequence[str]) -> Rates:
    step, least = 0.2, loss(rates)
    while step > 1e-3:
        moved = False
        for name, factor in product(names, (1 + step, 1 / (1 + step))):
            tried = replace(rates, **{name: getattr(rates, name) * factor})
            if (here := loss(tried)) < least:
                rates, least, moved = tried, here, True
        step = step if moved else step / 2
    return rates


def rows(every: list[Point], rates: Rates) -> list[tuple[object, ...]]:
    """For each kind and half: points, median error, median ratio, ratios that a tenth exceeds."""
    found: list[tuple[object, ...]] = []
    for kind, held_out in product(KINDS, (True, False)):
        some = [p for p in every if p.kind == kind and p.held_out is held_out]
        ratios = sorted(point.ratio(rates) for point in some)
        tenth = len(ratios) // 10
        found.append(
            (kind, "held out" if held_out else "fitted to", len(some), error(some, rates),
             statistics.median(ratios), ratios[tenth], ratios[-1 - tenth])
        )  # fmt: skip
    return found


def by_model(every: list[Point], rates: Rates) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    for model, what in product(dict.fromkeys(p.model for p in every), ("decode", "prefill")):
        some = [point for point in every if point.model == model and point.what == what]
        if some:
            half = "held out" if some[0].held_out else "fitted to"
            ratio = statistics.median(point.ratio(rates) for point in some)
            found.append((model, what, half, len(some), error(some, rates), ratio))
    return found


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__ or "")
    parser.add_argument("--fit", action="store_true", help="fit the constants, and print them")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    python = aiconfigurator_python(CACHE / "aiconfigurator")
    every = measured(python, list(points(shapes(python), options.quick)))
    rates = RATES
    if options.fit:
        rates = fitted(every, rates)
        print(f"fitted: {rates}\n")
    of_models, of_kinds = by_model(every, rates), rows(every, rates)
    table(("model", "what", "half", "points", "median error", "median ratio"), of_models)
    print()
    header = (
        "what",
        "models",
        "points",
        "median error",
        "median ratio",
        "ratio at 10 %",
        "at 90 %",
    )
    table(header, of_kinds)
    steps = [one for one in unseen_figures(rates) if one.source == NEMO]
    whole = [(one.what, one.predicted, one.published, one.ratio) for one in steps]
    print()
    table(("NeMo-RL", "predicted", "published", "ratio"), whole)
    print()
    targets = [
        Target(f"{row[0]}, held out, median error", float(str(row[3])), CLOSE, at_most=True)
        for row in of_kinds
        if row[1] == "held out"
    ]
    furthest = max(abs(one.ratio - 1) for one in steps)
    targets.append(Target("published steps, the furthest", furthest, WHOLE_STEP, at_most=True))
    results = {"points": len(every), "kinds": of_kinds, "models": of_models, "steps": whole}
    conclude("analytic", results, targets, options)


if __name__ == "__main__":
    main()
