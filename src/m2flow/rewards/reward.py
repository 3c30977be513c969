"""What a reward function is, and rewards put together by weight.

A reward function takes the prompt, the completion as text and as token ids, and the fields of the
data's row, and returns a finite number:

    def short(prompt, completion, completion_ids, row):
        return 1.0 if len(completion_ids) < row.get("limit", 100) else 0.0

`row` holds `answer`, `finished` (whether the model ended the completion by itself) and all other
fields of the row, as the data has them. A recipe names a function by its dotted path,
`reward: my_module:short`, or one of SHORT_NAMES. The function must be pure: the reward of a sample
may depend on its arguments alone.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar, cast

from m2flow.errors import M2FlowError, UserError, suggestion

SHORT_NAMES = {
    "addition": "m2flow.rewards.addition:addition_reward",
    "gym": "m2flow.rewards.gym:gym_reward",
    "math": "m2flow.rewards.mathematics:math_reward",
}
"""Names that a recipe may use in place of the paths of m2flow's own rewards."""


class Reward(Protocol):
    """A function that judges one completion."""

    def __call__(
        self, prompt: str, completion: str, completion_ids: Sequence[int], row: Mapping[str, Any]
    ) -> float:
        """The reward of the completion."""


class BatchReward(Protocol):
    """A function that judges several completions at once; marked by `batched`."""

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        rows: Sequence[Mapping[str, Any]],
    ) -> Sequence[float]:
        """The rewards of the completions, in their order."""


F = TypeVar("F", bound=Callable[..., Any])
Function: TypeAlias = "str | Reward | BatchReward"


def batched(function: F) -> F:
    """Mark a reward function that takes lists and returns a list; see `BatchReward`."""
    function.batched = True  # type: ignore[attr-defined]
    return function


class RewardFailed(M2FlowError):
    """A reward function raised, or returned what is no reward; names function and sample."""


@dataclass(frozen=True)
class WeightedReward:
    """A reward function and its weight in the sum.

    Attributes:
        function: dotted path `module:function`, a name in SHORT_NAMES, or the function itself.
        weight: its factor.
        folder: searched for the module beside what Python searches; "" for nothing more.
    """

    function: Function
    weight: float = 1.0
    folder: str = ""

    @property
    def name(self) -> str:
        """The function's path, for messages."""
        if isinstance(self.function, str):
            return self.function
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    def load(self) -> Reward | BatchReward:
        """Import the function.

        Raises:
            UserError: there is no such module or function, or it is a coroutine function.
        """
        if not isinstance(self.function, str):
            return self.function
        path = SHORT_NAMES.get(self.function, self.function)
        module_name, colon, attribute = path.partition(":")
        if not (module_name and colon and attribute):
            raise self._refused(
                "names no function", expected=f"module:function, or {', '.join(SHORT_NAMES)}"
            )
        if self.folder and self.folder not in sys.path:
            sys.path.append(self.folder)
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise self._refused(f"{module_name} cannot be imported ({reason})") from error
        function = getattr(module, attribute, None)
        if function is None:
            names = [name for name, value in vars(module).items() if callable(value)]
            hint = suggestion(attribute, names) if names else None
            raise self._refused(f"{module_name} has no {attribute}", hint=hint)
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise self._refused(
                f"{attribute} is no function that can be called and returns a number",
                expected="def reward(prompt, completion, completion_ids, row) -> float",
            )
        return cast("Reward | BatchReward", function)

    def _refused(
        self, message: str, *, expected: str | None = None, hint: str | None = None
    ) -> UserError:
        return UserError(message, key="reward", value=self.name, expected=expected, hint=hint)


@dataclass(frozen=True)
class Judged:
    """Completions to be judged, in columns of one length.

    Attributes:
        items: numbers of the samples, for messages.
        prompts, completions: texts.
        completion_ids: token ids.
        rows: fields of the data's rows, `answer` and `finished` among them.
    """

    items: Sequence[int]
    prompts: Sequence[str]
    completions: Sequence[str]
    completion_ids: Sequence[Sequence[int]]
    rows: Sequence[Mapping[str, Any]]


def weighted_sum(parts: Sequence[WeightedReward], judged: Judged) -> list[float]:
    """The sum of the parts' weighted rewards, for each completion.

    Raises:
        UserError: a function cannot be imported.
        RewardFailed: a function raised or returned no finite number.
    """
    totals = [0.0] * len(judged.items)
    for part in parts:
        for number, value in enumerate(_rewards(part, judged)):
            totals[number] += part.weight * value
    return totals


def _rewards(part: WeightedReward, judged: Judged) -> list[float]:
    function: Any = part.load()
    columns = (judged.prompts, judged.completions, judged.completion_ids, judged.rows)
    found: list[Any] = []
    if getattr(function, "batched", False):
        with _named(part, f"samples {list(judged.items)}"):
            found += function(*columns)
        if len(found) != len(judged.items):
            raise RewardFailed(
                f"reward {part.name} gave {len(found)} rewards for {len(judged.items)} samples"
            )
    else:
        for number, row in enumerate(zip(*columns, strict=True)):
            with _named(part, _sample(judged, number)):
                found.append(function(*row))
    return [_finite(value, part, judged, number) for number, value in enumerate(found)]


@contextmanager
def _named(part: WeightedReward, sample: str) -> Iterator[None]:
    """Say which reward raised, and on which sample."""
    try:
        yield
    except Exception as error:
        reason = f"raised {type(error).__name__}: {error}"
        raise RewardFailed(f"reward {part.name} {reason}; {sample}") from error


def _finite(value: Any, part: WeightedReward, judged: Judged, number: int) -> float:
    try:
        reward = float(value)
    except (TypeError, ValueError):
        reward = math.nan
    if not math.isfinite(reward):
        sample = _sample(judged, number)
        raise RewardFailed(
            f"reward {part.name} gave {value!r}, which is no finite number; {sample}"
        )
    return reward


def _sample(judged: Judged, number: int) -> str:
    prompt, completion = judged.prompts[number][-200:], judged.completions[number][-200:]
    return f"sample {judged.items[number]}, prompt {prompt!r}, completion {completion!r}"
