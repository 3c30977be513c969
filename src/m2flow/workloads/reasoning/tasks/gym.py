"""Any data set of reasoning-gym by name; `m2flow.rewards.gym_reward` scores answers.

Problems are generated, in blocks that are seeded for their place, so problem `index` is known
without the ones before it. What is held out is decided by the question's text, so training never
meets it. reasoning-gym is an extra (`pip install "m2flow[gym]"`) and takes seconds to import:
nothing of it is imported before a task is made.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from m2flow.errors import UserError, suggestion
from m2flow.rewards.gym import reasoning_gym
from m2flow.workloads.common.reading import check_option
from m2flow.workloads.reasoning.data import check_template
from m2flow.workloads.reasoning.tasks.problem import Problem, generator, reserved

DEFAULT_TEMPLATE = (
    "{question}\n\nThink step by step, then give the final answer between <answer> and </answer>.\n"
)

# Some data sets prepare a whole block when they are made, so a block is not the whole run.
_BLOCK_SIZE = 256
_MAX_BLOCKS = 8
_MAX_DRAWS = 200
_MAX_FAILURES = 20  # in a row: the options leave no problem, or hardly any
# Some data sets take a tenth of a second for a problem: few of those drawn may be thrown away.
_HELD_OUT_ONE_IN = 4


class Gym:
    """A reasoning-gym data set.

    Args:
        dataset: its name, such as "chain_sum".
        seed: fixes the training problems; held-out problems are the same for every seed.
        options: options of the data set, such as `{"min_terms": 2}`.
        template: the prompt, with `{question}` where the question goes.

    Raises:
        UserError: reasoning-gym is not installed, an unknown name, or options it refuses.
    """

    name = "gym"
    characters: str | None = None
    num_train: int | None = None

    def __init__(
        self,
        *,
        dataset: str,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
        template: str = DEFAULT_TEMPLATE,
    ) -> None:
        check_template(template)
        self.dataset = dataset
        self.seed = seed
        self.options = dict(options or {})
        self.template = template
        _check_options(dataset, self.options)
        self._blocks: dict[tuple[object, ...], Any] = {}
        self._make_block("check")

    def train(self, index: int) -> Problem:
        """Training problem number `index`, which is not held out.

        Raises:
            UserError: where all that the data set generates is held out (it has a handful of
                questions), or it can make none of these options.
        """
        block, place = divmod(index, _BLOCK_SIZE)
        draws = ((place, ("train", self.seed, draw, block)) for draw in range(_MAX_DRAWS))
        for entry in self._entries(draws):
            if not reserved(entry["question"], one_in=_HELD_OUT_ONE_IN):
                return self._problem(entry)
        raise UserError(
            "generates too few different questions to train on",
            key="data.dataset",
            value=self.dataset,
        )

    def held_out(self, count: int) -> list[Problem]:
        """`count` different problems, for every seed the same; fewer where few exist.

        Raises:
            UserError: the data set can make none of these options.
        """
        found: dict[str, Problem] = {}
        places = (divmod(number, _BLOCK_SIZE) for number in range(1000 + 40 * count))
        entries = self._entries((place, ("held out", block)) for block, place in places)
        while len(found) < count and (entry := next(entries, None)) is not None:
            if reserved(entry["question"], one_in=_HELD_OUT_ONE_IN):
                found.setdefault(entry["question"], self._problem(entry))
        return list(found.values())

    def _entries(
        self, places: Iterable[tuple[int, tuple[object, ...]]]
    ) -> Iterator[dict[str, Any]]:
        """What stands at these places of blocks, less what reasoning-gym cannot make.

        Raises:
            UserError: it cannot make `_MAX_FAILURES` in a row.
        """
        failures = 0
        for place, key in places:
            try:
                entry = self._entry(place, *key)
            except UserError:
                raise
            except Exception as error:
                self._blocks.pop(key, None)  # some data sets end there from then on
                failures += 1
                if failures == _MAX_FAILURES:
                    raise UserError(
                        f"{self.dataset} can make no problem of these options: {error}",
                        key="data.options",
                        value=self.options,
                    ) from error
                continue
            failures = 0
            yield entry

    def _problem(self, entry: dict[str, Any]) -> Problem:
        prompt = self.template.replace("{question}", entry["question"])
        facts = {"dataset": self.dataset, "options": self.options, "entry": entry}
        return Problem(prompt, entry["answer"] or "", facts)

    def _entry(self, place: int, *block_key: object) -> dict[str, Any]:
        if block_key not in self._blocks:
            if len(self._blocks) == _MAX_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[block_key] = self._make_block(*block_key)
        entry: dict[str, Any] = self._blocks[block_key][place]
        return entry

    def _make_block(self, *key: object) -> Any:
        # reasoning-gym adds the place in the block to the seed, and NumPy takes 32 bits.
        seed = generator("gym", *key).randrange(2**31)
        try:
            return reasoning_gym().create_dataset(
                self.dataset, size=_BLOCK_SIZE, seed=seed, **self.options
            )
        except (AssertionError, TypeError, ValueError) as error:
            if isinstance(error, TypeError):
                _check_types(self.dataset, self.options)
            raise UserError(
                f"{self.dataset} refuses these options: {error}",
                key="data.options",
                value=self.options,
            ) from error


def _check_options(dataset: str, options: Mapping[str, Any]) -> None:
    reasoning_gym()
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        raise UserError(
            "reasoning-gym has no such data set",
            key="data.dataset",
            value=dataset,
            hint=suggestion(dataset, DATASETS),
        )
    known = {field.name for field in dataclasses.fields(DATASETS[dataset][1])} - {"seed", "size"}
    for option in options:
        if option not in known:
            raise UserError(
                f"{dataset} has no such option",
                key=f"data.options.{option}",
                hint=suggestion(option, known),
            )


def _check_types(dataset: str, options: Mapping[str, Any]) -> None:
    """Name the option that is of another type than the data set declares.

    Asked once reasoning-gym has failed: some of its defaults are not of the types that it declares.
    """
    from reasoning_gym.factory import DATASETS

    types = typing.get_type_hints(DATASETS[dataset][1])
    for option, value in options.items():
        check_option(f"data.options.{option}", value, types[option])
