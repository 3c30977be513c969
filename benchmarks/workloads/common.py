"""What a workload is, and answers of given lengths: for the workloads beside this file."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from ray import cloudpickle
from starting_point import quickstart

from m2flow import Batch, Flow, Place
from m2flow.engine.plan import LaneSpec
from m2flow.plan import parse_lanes, with_memory
from m2flow.workloads.reasoning.flow import recipe_flow
from m2flow.workloads.reasoning.workers import Generator, ModelSource, Verifier

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this file

LANES = parse_lanes("cpu:2")

LEARNING_RATE = 1e-6
"""Where answers or episodes would change their length: so small that the steps of a comparison are
alike."""


@dataclass(frozen=True)
class Workload:
    """What is run.

    Attributes:
        name: for people.
        make_flow: a fresh flow, nothing of it loaded.
        batch: the source items of a step.
        items: how many there are of them.
        lane_memory: bytes that states on a lane may take; None for no limit.
        max_staleness: steps that generation may run ahead.
    """

    name: str
    make_flow: Callable[[], Flow]
    batch: Callable[[int], Batch]
    items: int
    lane_memory: int | None = None
    max_staleness: int = 0

    @property
    def lanes(self) -> tuple[LaneSpec, ...]:
        """What it runs on."""
        return LANES if self.lane_memory is None else with_memory(LANES, self.lane_memory)


@dataclass(frozen=True)
class Lengths:
    """Lengths of answers: log-normal with a median, a spread (of the logarithm), and a limit."""

    median: float
    spread: float
    limit: int

    def of(self, seed: int) -> int:
        """That of the answer with a seed."""
        drawn = Random(seed).lognormvariate(math.log(self.median), self.spread)
        return min(max(1, round(drawn)), self.limit)


class Replaying(Generator):
    """A generator whose answers have the given lengths, whatever the model would say."""

    lengths: Lengths

    def load(self, place: Place) -> None:
        super().load(place)
        engine: Any = self.engine
        submit = engine.submit

        def with_lengths(requests: Sequence[Any]) -> None:
            submit([self._long_enough(request) for request in requests])

        engine.submit = with_lengths

    def _long_enough(self, request: Any) -> Any:
        tokens = self.lengths.of(request.seed)
        params = replace(request.params, max_new_tokens=tokens, stop_token_ids=())
        return replace(request, params=params)


class Odd:
    """Scores the share of odd digits: a reward that answers of any length can have."""

    def score(
        self,
        answer: str,
        completion: str,
        *,
        finished: bool = True,
        metadata: Mapping[str, Any] | None = None,
    ) -> float:
        digits = [character for character in completion if character.isdigit()]
        return sum(int(digit) % 2 for digit in digits) / max(1, len(digits))


def replayed(
    name: str, lengths: Lengths, scorer: Callable[[ModelSource], Verifier], *overrides: str
) -> Workload:
    """The quick start with answers of given lengths, scored by what `scorer` makes."""
    recipe, experiment, source = quickstart(
        f"generation.max_new_tokens={lengths.limit}", *overrides
    )

    def make_flow() -> Flow:
        flow = recipe_flow(recipe, source, experiment.task)
        flow.generator = Replaying(
            source,
            samples_per_prompt=recipe.samples_per_prompt,
            max_new_tokens=lengths.limit,
            max_running=recipe.generation.max_running,
        )
        flow.generator.lengths = lengths
        flow.verifier = scorer(source)
        return flow

    return Workload(
        name, make_flow, lambda step: experiment.batch(step, source), recipe.prompts_per_step
    )
