"""What a reward function is, and rewards put together by weight.

A reward function takes the prompt, the completion as text and as token ids, and the fields of the
data's row, and returns a finite number:

    def short(prompt, completion, completion_ids, row):
        return 1.0 if len(completion_ids) < row.get("limit", 100) else 0.0

`row` holds `answer`, `finished` (whether the model ended the completion by itself), `prompt_end`
(the end of the prompt as the chat template wrote it) and all other fields of the row, as the data
has them. A recipe names a function by its dotted path, `reward: my_module:short`, or one of
SHORT_NAMES. The function must be pure: the reward of a sample may depend on its arguments alone. It
may be a coroutine function (`async def`), which waits for a service: many of them are awaited at
once.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar, cast

from m2flow.errors import UserError
from m2flow.flow.progress import goes_on
from m2flow.plan.machine import available_cores
from m2flow.rewards.event_loop import SIGN_SECONDS, STUCK_SECONDS, LateCoroutine, run_coroutine
from m2flow.user_code import FUNCTION, caught, gives_coroutines, user_function, what_raised

SHORT_NAMES = {
    "addition": "m2flow.rewards.addition:addition_reward",
    "code": "m2flow.rewards.code:code_reward",
    "format": "m2flow.rewards.format:format_reward",
    "gym": "m2flow.rewards.gym:gym_reward",
    "math": "m2flow.rewards.mathematics:math_reward",
}
"""Names that a recipe may use in place of the paths of m2flow's own rewards."""


def path_of(function: str) -> str:
    """The dotted path of a reward function that is named by it, or by one of `SHORT_NAMES`."""
    return SHORT_NAMES.get(function, function)


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


LARGEST = 3.4028234663852886e38
"""The largest float32: what advantages, which learners take as float32, are computed from."""

TIMEOUTS_IN_A_ROW = 3
"""After so many calls in a row without an answer the others of the batch are not made: what they
wait for is down, and the stage would come to its own deadline."""

LONGEST_REASON = 400
"""Characters of a reason why there is no reward, which may quote what a function was given."""

_WITHOUT_ORDER = (Mapping, AbstractSet, str, bytes)
"""What can be gone through, and is no list of rewards in the order of the samples."""

_given_up: ContextVar[float] = ContextVar("when the call of a reward function is given up")

F = TypeVar("F", bound=Callable[..., Any])
Function: TypeAlias = "str | Reward | BatchReward"


_SIGNATURE = "def reward(prompt, completion, completion_ids, row) -> float"


def batched(function: F) -> F:
    """Mark a reward function that takes lists and returns a list; see `BatchReward`."""
    function.batched = True  # type: ignore[attr-defined]
    return function


def prepared_by(prepare: Callable[[], object]) -> Callable[[F], F]:
    """Have something called when a function is loaded; where the function cannot work, it says so.

    Args:
        prepare: raises `UserError`, so that a run is refused before anything starts.
    """

    def mark(function: F) -> F:
        vars(function)["prepare"] = prepare
        return function

    return mark


def threaded(function: F) -> F:
    """Mark a reward function that waits for something outside of Python, such as a process.

    As many threads call it at once as the process has cores when it judges.
    """
    vars(function)["threaded"] = True
    return function


def seconds_left() -> float:
    """Seconds until the call of a reward function is given up; infinite outside of such a call."""
    return _given_up.get(math.inf) - time.monotonic()


def _nothing() -> None:
    """Prepare nothing."""


@dataclass(frozen=True)
class WeightedReward:
    """A reward function and its weight in the sum.

    Attributes:
        function: dotted path `module:function`, a name in SHORT_NAMES, or the function itself.
        weight: its factor.
        deadline_seconds: longest that one call may take.
        concurrency: calls of a coroutine function that wait at a time.
    """

    function: Function
    weight: float = 1.0
    deadline_seconds: float = 60.0
    concurrency: int = 64

    @property
    def name(self) -> str:
        """The function's path, for messages."""
        if isinstance(self.function, str):
            return self.function
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    def load(self, key: str = "reward") -> Reward | BatchReward:
        """Import the function.

        Raises:
            UserError: under the name `key`, there is no such module or function, or it cannot work
                here.
        """
        if not isinstance(self.function, str):
            return self.function
        path = path_of(self.function)
        expected = f"{FUNCTION}, or {', '.join(SHORT_NAMES)}; {_SIGNATURE}"
        function = user_function(path, key, expected, SHORT_NAMES)
        if not _takes_four(function):
            raise UserError(
                f"{path.partition(':')[2]}{inspect.signature(function)} does not take four "
                "arguments",
                key=key,
                value=self.name,
                expected=_SIGNATURE,
            )
        getattr(function, "prepare", _nothing)()
        return cast("Reward | BatchReward", function)


def _takes_four(function: Callable[..., Any]) -> bool:
    """Whether a reward's four arguments fit a function; true where Python cannot tell."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some builtins do not tell
        return True
    try:
        signature.bind("prompt", "completion", (), {})
    except TypeError:
        return False
    return True


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


@dataclass(frozen=True)
class Scores:
    """What some completions earned.

    Attributes:
        rewards: the weighted sums; 0.0 for a completion that could not be judged.
        failures: in words why each could not be judged; "" for those that were.
    """

    rewards: list[float]
    failures: list[str]


def weighted_sum(parts: Sequence[WeightedReward], judged: Judged) -> Scores:
    """The sum of the parts' weighted rewards, for each completion.

    A function that raises, takes longer than its deadline or gives no finite number fails for its
    completion alone, and so does one that takes the sum beyond `LARGEST`; one that judges several
    at once fails for all of them. One that has taken too long `TIMEOUTS_IN_A_ROW` times fails for
    all completions that are left.

    Raises:
        UserError: a function cannot be imported.
    """
    each: list[list[float]] = [[] for _ in judged.items]
    failures = [""] * len(judged.items)
    for part in parts:
        for number, value in enumerate(_values(part, judged)):
            if isinstance(value, RewardFailure):
                why = value.why
            else:
                total = added = part.weight * value
                if abs(added) <= LARGEST:
                    total = math.fsum([*each[number], added])  # weights that come to 1 give 1
                if abs(total) <= LARGEST:
                    each[number].append(added)
                    continue
                why = f"makes it {total:g}, which float32 cannot hold"
            failures[number] = failures[number] or in_a_line(f"reward {part.name} {why}")
    rewards = [0.0 if why else math.fsum(some) for some, why in zip(each, failures, strict=True)]
    return Scores(rewards, failures)


def in_a_line(reason: str) -> str:
    """A reason in one short line, with its end, which says where it comes from."""
    line = " ".join(reason.split())
    if len(line) <= LONGEST_REASON:
        return line
    half = (LONGEST_REASON - len(" ... ")) // 2
    return f"{line[:half]} ... {line[-half:]}"


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """Why there is no reward: what the function raised, or that it took too long."""

    why: str


def _values(part: WeightedReward, judged: Judged) -> list[float | RewardFailure]:
    """Of each completion a finite number, or why there is none."""
    function: Any = part.load()
    columns = (judged.prompts, judged.completions, judged.completion_ids, judged.rows)
    rows = list(zip(*columns, strict=True))
    waits = gives_coroutines(function)
    if getattr(function, "batched", False):

        def judge(*given: Any) -> Any:
            if not waits:
                found = function(*given)
            else:
                try:
                    found = run_coroutine(function(*given), part.deadline_seconds)
                except LateCoroutine as error:
                    return RewardFailure(str(error))
            # What a generator does, it does when it is asked: here, where the deadline holds.
            return list(found) if isinstance(found, Iterator) else found

        seconds = part.deadline_seconds + (STUCK_SECONDS if waits else 0.0)
        (found,) = _called(judge, [columns], seconds)
        if isinstance(found, RewardFailure):
            return [found] * len(rows)
        try:
            values = None if isinstance(found, _WITHOUT_ORDER) else list(found)
        except TypeError:
            values = None
        except Exception as error:  # noqa: BLE001, whatever an object of the user's does
            return [_raised(error)] * len(rows)
        if values is None:
            return [RewardFailure(f"gave {_shown(found)}, no list of rewards")] * len(rows)
        if len(values) != len(rows):
            wrong = RewardFailure(f"gave {len(values)} rewards for {len(rows)} samples")
            return [wrong] * len(rows)
        return [_number(value) for value in values]
    if waits:
        gave: dict[int, Any] = {}
        seconds = (-(-len(rows) // part.concurrency) + 1) * part.deadline_seconds
        with suppress(LateCoroutine):  # told of each call that has given nothing
            run_coroutine(_awaited(function, rows, part, gave), seconds)
        late = _too_slow(seconds)
        return [_number(gave.get(number, late)) for number in range(len(rows))]
    threads = len(available_cores()) if getattr(function, "threaded", False) else 1
    found = _beside(function, rows, part.deadline_seconds, min(threads, len(rows)))
    return [_number(value) for value in found]


def _number(value: Any) -> float | RewardFailure:
    if isinstance(value, RewardFailure):
        return value
    try:
        number = float(value)
    except Exception:  # noqa: BLE001, a tensor of two elements raises a RuntimeError
        number = math.nan
    return number if math.isfinite(number) else RewardFailure(f"gave {_shown(value)}, no number")


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001, such as an integer of too many digits
        return f"a value of type {type(value).__name__}"


def _beside(
    function: Any, calls: Sequence[tuple[Any, ...]], seconds: float, threads: int
) -> list[Any]:
    """What `_called` gives, each n-th call by one of n threads; each counts timeouts of its own."""
    if threads <= 1:
        return _called(function, calls, seconds)
    found: list[Any] = [None] * len(calls)
    with ThreadPoolExecutor(threads) as pool:
        parts = [
            pool.submit(_called, function, calls[first::threads], seconds)
            for first in range(threads)
        ]
        while wait(parts, SIGN_SECONDS).not_done:
            goes_on()  # whoever watches the stage does not hear of these threads
        for first, part in enumerate(parts):
            found[first::threads] = part.result(0)
    return found


def _called(function: Any, calls: Sequence[tuple[Any, ...]], seconds: float) -> list[Any]:
    """What a function gives for each of some arguments, or the `RewardFailure`.

    They are called one after the other in a thread, which is left to itself, and another one
    begun, where a call does not return in time.
    """
    found: list[Any] = []
    slow = 0
    while len(found) < len(calls):
        if slow == TIMEOUTS_IN_A_ROW:
            return found + [_too_slow(seconds)] * (len(calls) - len(found))
        results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        left = threading.Event()
        arguments = function, calls[len(found) :], seconds, results, left
        threading.Thread(target=_call_each, args=arguments, daemon=True).start()
        while len(found) < len(calls):
            try:
                value = _next(results, seconds)
            except queue.Empty:
                found.append(_too_slow(seconds))
                slow += 1
                left.set()
                break
            found.append(value)
            slow = 0
    return found


def _next(results: queue.SimpleQueue[Any], seconds: float) -> Any:
    """What comes next within some seconds; meanwhile the stage says that it goes on.

    Raises:
        queue.Empty: nothing comes.
    """
    end = time.monotonic() + seconds
    while True:
        goes_on()
        left = end - time.monotonic()
        try:
            return results.get(timeout=max(0.0, min(left, SIGN_SECONDS)))
        except queue.Empty:
            if left <= SIGN_SECONDS:
                raise


def _call_each(
    function: Any,
    calls: Sequence[tuple[Any, ...]],
    seconds: float,
    results: Any,
    left: threading.Event,
) -> None:
    for arguments in calls:
        if left.is_set():
            return
        _given_up.set(time.monotonic() + seconds)
        try:
            results.put(function(*arguments))
        except BaseException as error:  # noqa: BLE001, `exit()` too ends one call and not the run
            results.put(_raised(error))


async def _awaited(
    function: Any, calls: Sequence[Any], part: WeightedReward, gave: dict[int, Any]
) -> None:
    """Call a coroutine function, as many times at once as `concurrency` says.

    What a call gives, or the `RewardFailure`, is in `gave` under the call's number as soon as it is
    known. Those that take too long count as in a row where no call has returned since they began.
    """
    turns = asyncio.Semaphore(part.concurrency)
    returned = slow = 0

    async def one(arguments: Any) -> Any:
        nonlocal returned, slow
        async with turns:
            if slow >= TIMEOUTS_IN_A_ROW:
                return _too_slow(part.deadline_seconds)
            before = returned
            _given_up.set(time.monotonic() + part.deadline_seconds)
            call = caught(function, *arguments)
            try:
                value, error = await asyncio.wait_for(call, part.deadline_seconds)
            except TimeoutError:
                slow += returned == before
                return _too_slow(part.deadline_seconds)
            returned, slow = returned + 1, 0
            return value if error is None else _raised(error)

    async def noted(number: int, arguments: Any) -> None:
        gave[number] = await one(arguments)

    await asyncio.gather(*(noted(number, arguments) for number, arguments in enumerate(calls)))


def _raised(error: BaseException) -> RewardFailure:
    return RewardFailure(f"raised {what_raised(error)}")


def _too_slow(seconds: float) -> RewardFailure:
    return RewardFailure(f"gave nothing within {seconds:g} s")
