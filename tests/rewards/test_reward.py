"""Reward functions by dotted path: named, weighted, in batches, and what is said when one fails."""

from __future__ import annotations

import asyncio
import math
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from m2flow.errors import UserError
from m2flow.flow.progress import heard_by
from m2flow.rewards import addition_reward, batched, gym_reward, math_reward
from m2flow.rewards.event_loop import MOST_THREADS, LateCoroutine, run_coroutine
from m2flow.rewards.reward import (
    LONGEST_REASON,
    TIMEOUTS_IN_A_ROW,
    Judged,
    Scores,
    WeightedReward,
    threaded,
    weighted_sum,
)

JUDGED = Judged(
    items=[7, 9],
    prompts=["What is 2+3?", "What is 4+4?"],
    completions=["It is 5.", "It is 9."],
    completion_ids=[[1, 2], [3, 4, 5]],
    rows=[
        {"answer": "5", "finished": True, "line": 1, "level": "easy"},
        {"answer": "8", "finished": False, "line": 2, "level": "hard"},
    ],
)

MODULE = """
import asyncio
import threading
import time

from m2flow.rewards import batched

calls = []

def fields(prompt, completion, completion_ids, row):
    calls.append((prompt, completion, list(completion_ids), row))
    return len(completion_ids) + (0.5 if row["level"] == "hard" else 0)

@batched
def shares(prompts, completions, completion_ids, rows):
    return [len(ids) / sum(map(len, completion_ids)) for ids in completion_ids]

@batched
def too_few(prompts, completions, completion_ids, rows):
    return [1.0]

@batched
def none_at_all(prompts, completions, completion_ids, rows):
    return None

def of_two(completion, answer):
    return 1.0

def raises(prompt, completion, completion_ids, row):
    return {"5": 1.0}[row["answer"]]

def words(prompt, completion, completion_ids, row):
    return "good"

begun = []
waiting = [0, 0]  # now, and at most

async def later(prompt, completion, completion_ids, row):
    begun.append(row["line"])
    waiting[0] += 1
    waiting[1] = max(waiting)
    try:
        await asyncio.sleep(0.01 if row["level"] == "easy" else 60)
    finally:
        waiting[0] -= 1
    return 1.0

async def fails(prompt, completion, completion_ids, row):
    return {"5": 1.0}[row["answer"]]

async def hangs_in_thread(prompt, completion, completion_ids, row):
    wait = threading.Event().wait if row["level"] == "hard" else float
    await asyncio.to_thread(wait)
    return 1.0

async def stays(prompt, completion, completion_ids, row):
    while row["level"] == "hard":
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
    return 1.0

def hangs(prompt, completion, completion_ids, row):
    begun.append(row["line"])
    time.sleep(60 if row["level"] == "hard" else 0)
    return 1.0

def leaves(prompt, completion, completion_ids, row):
    return 1.0 if row["level"] == "easy" else exit(0)

def interrupts(prompt, completion, completion_ids, row):
    if row["level"] == "hard":
        raise KeyboardInterrupt
    return 1.0

async def leaves_later(prompt, completion, completion_ids, row):
    return 1.0 if row["level"] == "easy" else exit(0)

async def gives_up(prompt, completion, completion_ids, row):
    if row["level"] == "hard":
        raise asyncio.CancelledError
    return 1.0

@batched
async def shares_later(prompts, completions, completion_ids, rows):
    await asyncio.sleep(0)
    return shares(prompts, completions, completion_ids, rows)

class Judge:
    async def __call__(self, prompt, completion, completion_ids, row):
        return 1.0 if row["level"] == "easy" else 0.5

judge = Judge()

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "rewards_of_a_user.py").write_text(MODULE)
    (tmp_path / "rewards_that_break.py").write_text("import no_such_package\n")
    (tmp_path / "rewards_that_leave.py").write_text("raise SystemExit(0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return str(tmp_path)


def of(folder: str, name: str, weight: float = 1.0, **limits: Any) -> WeightedReward:
    return WeightedReward(f"rewards_of_a_user:{name}", weight, **limits)


def test_a_function_is_given_all_of_a_row(folder: str) -> None:
    assert weighted_sum([of(folder, "fields")], JUDGED) == Scores([2.0, 3.5], ["", ""])
    import rewards_of_a_user  # type: ignore[import-not-found]

    assert rewards_of_a_user.calls[-1] == (
        "What is 4+4?", "It is 9.", [3, 4, 5], JUDGED.rows[1],
    )  # fmt: skip


def test_several_functions_add_up_by_weight(folder: str) -> None:
    parts = [of(folder, "fields", 0.5), WeightedReward("math", 10), of(folder, "shares", -1)]
    rewards = weighted_sum(parts, JUDGED).rewards
    assert rewards == pytest.approx([0.5 * 2 + 10 - 0.4, 0.5 * 3.5 - 0.6])


def test_one_that_judges_several_may_be_a_coroutine_function(folder: str) -> None:
    assert weighted_sum([of(folder, "shares_later")], JUDGED) == Scores([0.4, 0.6], ["", ""])


def test_an_object_whose_calls_are_coroutines_is_awaited(folder: str) -> None:
    assert weighted_sum([of(folder, "judge")], JUDGED) == Scores([1.0, 0.5], ["", ""])


def test_a_function_itself_will_do_and_travels() -> None:
    reward = pickle.loads(pickle.dumps(WeightedReward(math_reward, 2.0)))
    assert weighted_sum([reward], JUDGED).rewards == [2.0, 0.0]

    @batched
    def both(*columns: Sequence[Any]) -> list[float]:
        return [1.0, 2.0]

    assert weighted_sum([WeightedReward(both)], JUDGED).rewards == [1.0, 2.0]


def test_each_is_usable_alone() -> None:
    assert math_reward("", r"so \boxed{\frac{1}{2}}", [], {"answer": "0.5"}) == 1.0
    assert addition_reward("2+3=", "#5", [], {"answer": "5", "finished": True}) == 1.0


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        ("nothing", ["names no function", "module:function, or addition, code, format, gym, math"]),
        ("rewards_of_a_user", ["names no function"]),
        ("rewards_of_a_user.fields", ["did you mean 'rewards_of_a_user:fields'?"]),
        ("mathh", ["names no function", "did you mean 'math'?"]),
        ("rewards_that_leave:fn", ["cannot be imported", "it calls exit(0) where it is imported"]),
        ("no_such_module:fn", ["there is no module no_such_module"]),
        ("rewards_that_break:fn", ["cannot be imported", "no_such_package"]),
        ("rewards_of_a_user:field", ["has no field", "did you mean 'fields'?"]),
        ("rewards_of_a_user:number", ["number is no function", "def reward("]),
        (
            "rewards_of_a_user:of_two",
            ["of_two(completion, answer) does not take four arguments", "def reward("],
        ),
    ],
)
def test_what_cannot_be_a_reward_is_refused(folder: str, function: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        WeightedReward(function).load()
    for part in ("reward: ", f"(got {function!r})", *parts):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "rewards", "failures"),
    [
        (
            "raises",
            [1.0, 0.0],
            ["", "rewards_of_a_user:raises raised KeyError: '8' ("],
        ),
        (
            "fails",
            [1.0, 0.0],
            ["", "rewards_of_a_user:fails raised KeyError: '8' ("],
        ),
        ("leaves", [1.0, 0.0], ["", "rewards_of_a_user:leaves raised SystemExit: 0 ("]),
        ("leaves_later", [1.0, 0.0], ["", "rewards_of_a_user:leaves_later raised SystemExit: 0 ("]),
        (
            "interrupts",
            [1.0, 0.0],
            ["", "rewards_of_a_user:interrupts raised KeyboardInterrupt ("],
        ),
        ("gives_up", [1.0, 0.0], ["", "rewards_of_a_user:gives_up raised CancelledError"]),
        ("words", [0.0] * 2, ["rewards_of_a_user:words gave 'good', no number"] * 2),
        ("too_few", [0.0] * 2, ["rewards_of_a_user:too_few gave 1 rewards for 2 samples"] * 2),
        (
            "none_at_all",
            [0.0] * 2,
            ["rewards_of_a_user:none_at_all gave None, no list of rewards"] * 2,
        ),
        ("hangs", [1.0, 0.0], ["", "rewards_of_a_user:hangs gave nothing within 0.5 s"]),
        ("later", [1.0, 0.0], ["", "rewards_of_a_user:later gave nothing within 0.5 s"]),
        (
            "hangs_in_thread",
            [1.0, 0.0],
            ["", "rewards_of_a_user:hangs_in_thread gave nothing within 0.5 s"],
        ),
        ("stays", [1.0, 0.0], ["", "rewards_of_a_user:stays gave nothing within 1 s"]),
    ],
)
def test_a_reward_that_fails_marks_its_sample(
    folder: str, name: str, rewards: list[float], failures: list[str]
) -> None:
    found = weighted_sum([of(folder, name, deadline_seconds=0.5)], JUDGED)
    assert found.rewards == rewards
    for said, why in zip(found.failures, failures, strict=True):
        assert said.startswith(why and f"reward {why}")
        assert bool(said) == bool(why)
        assert "raised" not in said or "(rewards_of_a_user.py:" in said


def test_a_thread_that_hangs_holds_up_neither_a_batch_nor_the_end_of_the_program(
    folder: str,
) -> None:
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from m2flow.rewards.reward import Judged, WeightedReward, weighted_sum\n"
        "rows = [{'level': level} for level in ('easy', 'hard')]\n"
        "judged = Judged([1, 2], ['?'] * 2, ['!'] * 2, [[1]] * 2, rows)\n"
        "part = WeightedReward('rewards_of_a_user:hangs_in_thread', deadline_seconds=0.5)\n"
        "print(weighted_sum([part], judged).rewards)\n"
    )
    words = [sys.executable, "-c", code]
    ended = subprocess.run(
        words, check=False, cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout) == (0, "[1.0, 0.0]\n"), ended.stderr


def test_calls_in_threads_are_carried_out_by_few_threads() -> None:
    names: set[str] = set()

    async def asks() -> list[int]:
        def answer(number: int) -> int:
            names.add(threading.current_thread().name)
            return number * number

        return await asyncio.gather(*(asyncio.to_thread(answer, n) for n in range(200)))

    assert run_coroutine(asks(), 60.0) == [n * n for n in range(200)]
    assert len(names) <= MOST_THREADS


def test_what_coroutines_keep_in_a_module_serves_every_batch() -> None:
    """Each batch had a loop of its own: a semaphore failed from the second one on, as did a
    client."""
    limit, loops = asyncio.Semaphore(1), set[Any]()

    async def limited(*columns: Any) -> float:
        async with limit:
            loops.add(asyncio.get_running_loop())
            await asyncio.sleep(0)
        return 1.0

    @batched
    async def together(*columns: Any) -> list[float]:
        return await asyncio.gather(*(limited() for _ in columns[0]))

    for function in (limited, together) * 2:
        assert weighted_sum([WeightedReward(function)], JUDGED) == Scores([1.0] * 2, [""] * 2)
    assert len(loops) == 1


def test_a_coroutine_that_blocks_the_loop_holds_up_no_other() -> None:
    """What comes next has a loop that works, which is shared from then on."""
    left, here = threading.Event(), asyncio.get_running_loop

    async def blocks(*columns: Any) -> float:
        left.wait(60)
        return 1.0

    async def where() -> Any:
        return here()

    try:
        before = run_coroutine(where(), 60.0)
        found = weighted_sum([WeightedReward(blocks, deadline_seconds=0.1)], JUDGED)
        assert all("gave nothing within 0.2 s" in why for why in found.failures)
        after = run_coroutine(where(), 60.0)
        assert after is not before
        assert run_coroutine(where(), 60.0) is after
    finally:
        left.set()
    assert run_coroutine(where(), 60.0) is after


def test_calls_that_nobody_waits_for_any_more_leave_threads_to_others() -> None:
    """All batches have the same threads: as many calls as these that hang would be the end."""
    hang = threading.Event()

    async def give_up() -> None:
        await asyncio.wait_for(asyncio.to_thread(hang.wait, 60), 0.05)

    async def asks() -> int:
        gone = await asyncio.gather(
            *(give_up() for _ in range(MOST_THREADS)), return_exceptions=True
        )
        assert {type(one) for one in gone} == {TimeoutError}
        return await asyncio.wait_for(asyncio.to_thread(lambda: 3), 30)

    try:
        for _ in range(2):
            assert run_coroutine(asks(), 60.0) == 3
    finally:
        hang.set()


def test_exit_in_a_task_does_not_end_the_loop() -> None:
    async def leaves() -> None:
        sys.exit(3)

    async def asks() -> None:
        await asyncio.gather(asyncio.create_task(leaves()))

    async def answers() -> int:
        return 3

    with pytest.raises(SystemExit):
        run_coroutine(asks(), 60.0)
    assert run_coroutine(answers(), 60.0) == 3


def test_what_takes_too_long_is_cancelled_and_a_timeout_of_its_own_is_raised() -> None:
    ended = threading.Event()

    async def late() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def gives_up() -> None:
        raise TimeoutError("the service is down")

    with pytest.raises(LateCoroutine, match=r"^gave nothing within 0\.1 s$"):
        run_coroutine(late(), 0.1)
    assert ended.wait(30)
    with pytest.raises(TimeoutError, match="the service is down"):
        run_coroutine(gives_up(), 60.0)


def test_a_coroutine_that_cancels_all_others_costs_its_own_batch() -> None:
    async def cancels(*columns: Any) -> float:
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.sleep(0)
        return 1.0

    found = weighted_sum([WeightedReward(cancels)], JUDGED)
    assert all(found.failures)
    assert weighted_sum([WeightedReward(one)], JUDGED).rewards == [1.0, 1.0]


def test_a_forked_process_has_a_loop_of_its_own() -> None:
    code = (
        "import asyncio, os\n"
        "from m2flow.rewards.event_loop import run_coroutine\n"
        "async def three(): return 3\n"
        "assert run_coroutine(three(), 60.0) == 3\n"
        "child = os.fork()\n"
        "if child == 0: os._exit(run_coroutine(three(), 60.0))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    words = [sys.executable, "-c", code]
    ended = subprocess.run(words, check=False, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "3\n"), ended.stderr


def test_after_a_call_that_hangs_the_others_are_made(folder: str) -> None:
    columns = {name: 2 * list(getattr(JUDGED, name))[::-1] for name in vars(JUDGED)}
    found = weighted_sum([of(folder, "hangs", deadline_seconds=0.3)], Judged(**columns))
    assert found.rewards == [0.0, 1.0, 0.0, 1.0]


def of_levels(levels: str) -> Judged:
    """Samples that are easy ("e") or hard ("h"), in this order."""
    picked = ["eh".index(level) for level in levels]
    columns = {name: [getattr(JUDGED, name)[n] for n in picked] for name in vars(JUDGED)}
    return Judged(**columns)


@pytest.mark.parametrize(("name", "calls"), [("hangs", 1), ("later", 2)])
def test_of_a_service_that_is_down_few_calls_are_waited_for(
    folder: str, name: str, calls: int
) -> None:
    """Many samples would take longer one by one than the whole stage may: what is not waited for is
    not even begun."""
    part = of(folder, name, deadline_seconds=0.3, concurrency=calls)
    begun: list[int] = part.load().__globals__["begun"]
    begun.clear()
    found = weighted_sum([part], of_levels("h" * 40))
    assert TIMEOUTS_IN_A_ROW <= len(begun) < TIMEOUTS_IN_A_ROW + calls
    assert found.rewards == [0.0] * 40
    assert len(set(found.failures)) == 1
    assert found.failures[0].endswith(f"{name} gave nothing within 0.3 s")


@pytest.mark.parametrize("name", ["hangs", "later"])
def test_calls_that_time_out_are_counted_in_a_row(folder: str, name: str) -> None:
    """An answer between them says that the service is there; the end of a row says nothing."""
    assert TIMEOUTS_IN_A_ROW == 3
    part = of(folder, name, deadline_seconds=0.3, concurrency=1)
    found = weighted_sum([part], of_levels("hhehhehhhe"))
    assert found.rewards == [0.0, 0.0, 1.0, 0.0, 0.0, 1.0] + [0.0] * 4


def test_some_that_hang_together_while_others_answer_are_no_row(folder: str) -> None:
    part = of(folder, "later", deadline_seconds=0.3, concurrency=4)
    found = weighted_sum([part], of_levels("hhh" + 60 * "e"))
    assert found.rewards == [0.0] * 3 + [1.0] * 60


def test_a_call_that_returns_too_late_is_not_followed_by_the_others(folder: str) -> None:
    """They are made in another thread by then."""
    calls: list[str] = []
    last = threading.Event()

    def slow(prompt: str, *columns: Any) -> float:
        calls.append(prompt)
        if len(calls) == 1:
            time.sleep(0.6)
            last.set()
        return 1.0

    columns = {name: 2 * list(getattr(JUDGED, name)) for name in vars(JUDGED)}
    found = weighted_sum([WeightedReward(slow, deadline_seconds=0.2)], Judged(**columns))
    assert found.rewards == [0.0, 1.0, 1.0, 1.0]
    assert last.wait(60)
    time.sleep(0.05)
    assert len(calls) == 4


def test_a_function_that_waits_outside_of_python_is_called_by_several_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each keeps its order, its deadline and its failures. Cores are those of when it judges."""
    together = threading.Barrier(3)

    @threaded
    def meets(prompt: str, completion: str, ids: Sequence[int], row: Any) -> float:
        if row["item"] == 4:
            time.sleep(4)
        if row["item"] == 7:
            raise KeyError("seven")
        if row["item"] < 3:
            together.wait(60)
        return float(row["item"])

    count = 11
    judged = Judged(
        range(count),
        ["?"] * count,
        ["!"] * count,
        [[1]] * count,
        [{"item": n} for n in range(count)],
    )
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(3))
    found = weighted_sum([WeightedReward(meets, deadline_seconds=2.0)], judged)
    assert found.rewards == [0.0, 1.0, 2.0, 3.0, 0.0, 5.0, 6.0, 0.0, 8.0, 9.0, 10.0]
    assert [n for n, why in enumerate(found.failures) if why] == [4, 7]
    assert vars(math_reward)["threaded"], "its processes are asked side by side"


def test_a_coroutine_function_is_awaited_within_an_event_loop_too(folder: str) -> None:
    easy = {name: [getattr(JUDGED, name)[0]] for name in vars(JUDGED)}

    async def notebook() -> Scores:
        return weighted_sum([of(folder, "later")], Judged(**easy))

    assert asyncio.run(notebook()) == Scores([1.0], [""])


def test_a_sample_that_one_part_cannot_judge_has_no_reward_of_the_others(folder: str) -> None:
    found = weighted_sum([of(folder, "fields"), of(folder, "raises")], JUDGED)
    assert found.rewards == [3.0, 0.0]
    assert [bool(why) for why in found.failures] == [False, True]


def test_coroutine_functions_wait_at_the_same_time(folder: str) -> None:
    easy = {name: [getattr(JUDGED, name)[0]] * 6 for name in vars(JUDGED)}
    found = weighted_sum([of(folder, "later", concurrency=4)], Judged(**easy))
    assert found == Scores([1.0] * 6, [""] * 6)
    import rewards_of_a_user

    assert rewards_of_a_user.waiting == [0, 4]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_not_trained_on(value: float) -> None:
    found = weighted_sum([WeightedReward(lambda *_: value)], JUDGED)
    assert found.rewards == [0.0, 0.0]
    assert f"gave {value}, no number" in found.failures[0]


class Unprintable:
    """No number, and nothing that could be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("cannot be shown")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (10**400, "gave 1000"),
        (10**5000, "gave a value of type int, no number"),
        (torch.tensor([1.0, 2.0]), "gave tensor([1., 2.]), no number"),
        (Unprintable(), "gave a value of type Unprintable, no number"),
    ],
    ids=["large", "long", "tensor", "unprintable"],
)
def test_what_float_refuses_costs_the_sample_and_not_the_run(value: Any, why: str) -> None:
    """`float` raises an OverflowError or a RuntimeError of these, which ended the run."""
    found = weighted_sum([WeightedReward(lambda *_: value)], JUDGED)
    assert found.rewards == [0.0, 0.0]
    assert why in found.failures[0]


def test_a_generator_of_rewards_that_raises_costs_its_samples() -> None:
    @batched
    def some(*columns: Any) -> Iterator[float]:
        yield 1.0
        raise KeyError("level")

    found = weighted_sum([WeightedReward(some)], JUDGED)
    assert found.rewards == [0.0, 0.0]
    assert "raised KeyError: 'level'" in found.failures[0]


@pytest.mark.parametrize(("value", "weight"), [(1e300, 1.0), (1e30, -1e30)])
def test_a_reward_beyond_float32_is_not_trained_on(value: float, weight: float) -> None:
    """The deviation of its group was infinite, and all advantages 0 without a word."""
    small = WeightedReward(lambda *_: 1.0)
    found = weighted_sum([small, WeightedReward(lambda *_: value, weight)], JUDGED)
    assert found.rewards == [0.0, 0.0]
    assert f"makes it {value * weight:g}, which float32 cannot hold" in found.failures[0]


def test_a_gym_scorer_s_exception_is_no_reward_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """It once counted as reward 0 in silence."""

    class Scorer:
        def score_answer(self, text: str, entry: object) -> float:
            raise ZeroDivisionError("in the scorer")

    monkeypatch.setattr("m2flow.rewards.gym._scorer", lambda dataset, options: Scorer())
    row = {"dataset": "chain_sum", "options": {}, "entry": {}, "answer": "1", "finished": True}
    with pytest.raises(ZeroDivisionError):
        gym_reward("", "<answer>1</answer>", [], row)
    judged = Judged([3], ["What?"], ["<answer>1</answer>"], [[1]], [row])
    assert (
        "reward gym raised ZeroDivisionError"
        in weighted_sum([WeightedReward("gym")], judged).failures[0]
    )


def one(prompt: str, completion: str, completion_ids: Any, row: Any) -> float:
    return 1.0


@pytest.mark.parametrize("weights", [(0.7, 0.2, 0.1), (0.6, 0.3, 0.1), (0.1,) * 10])
def test_weights_that_come_to_one_give_one(weights: tuple[float, ...]) -> None:
    """Added one after the other they come to less, and every full reward would count as wrong."""
    assert weighted_sum([WeightedReward(one, weight) for weight in weights], JUDGED).rewards == [
        1,
        1,
    ]


@pytest.mark.parametrize(
    "given",
    [{0: 1.0, 1: 0.5}, {1.0, 0.5}, frozenset({1.0, 0.5}), "10", b"10"],
    ids=lambda given: type(given).__name__,
)
def test_what_has_no_order_of_rewards_is_no_list_of_them(given: Any) -> None:
    """The keys of a dictionary, the bytes and letters of a text and a set's own order are none."""

    @batched
    def judge(prompts: Any, completions: Any, completion_ids: Any, rows: Any) -> Any:
        return given

    judged = Judged([0, 1], ["", ""], ["", ""], [[], []], [{}, {}])
    scores = weighted_sum([WeightedReward(judge)], judged)
    assert scores.rewards == [0.0, 0.0]
    assert all("no list of rewards" in why for why in scores.failures)


def test_a_generator_of_rewards_has_a_deadline() -> None:
    """What it does when it is asked is not waited for any longer: here it would go on for ever."""
    judged = threading.Event()

    @batched
    def waits(*columns: Any) -> Iterator[float]:
        judged.wait()
        yield from (1.0, 1.0)

    found = weighted_sum([WeightedReward(waits, deadline_seconds=0.2)], JUDGED)
    judged.set()
    assert all("gave nothing within 0.2 s" in why for why in found.failures)


def test_why_there_is_no_reward_is_one_short_line() -> None:
    """A whole completion, or an array of many lines, stood in the log and with each sample."""

    def raises(*_: Any) -> float:
        raise ValueError("no such thing:\n" + "x\n" * 100_000)

    def gives(*_: Any) -> Any:
        return ["some text\nof many lines"] * 10_000

    judged = Judged([0], ["p"], ["c"], [[1]], [{}])
    for function, begin in ((raises, "raised ValueError: no such"), (gives, "gave ['some text")):
        reward: Any = function
        (why,) = weighted_sum([WeightedReward(reward)], judged).failures
        assert begin in why
        assert len(why) <= LONGEST_REASON
        assert len(why.splitlines()) == 1


@pytest.mark.parametrize("name", ["hangs", "later", "threaded"])
def test_a_stage_that_waits_for_rewards_says_that_it_goes_on(folder: str, name: str) -> None:
    """Some calls that hung, or many that took their time, ended the run."""
    part = of(folder, "hangs" if name == "threaded" else name, deadline_seconds=2.6, concurrency=1)
    if name == "threaded":
        part = WeightedReward(threaded(part.load()), deadline_seconds=2.6)
    heard: list[None] = []
    with heard_by(lambda: heard.append(None)):
        weighted_sum([part], of_levels("he"))
    assert len(heard) >= 2, "one for each second but the last"
