"""The calculator, programs, retrieval, functions, and the box that carries their calls out."""

from __future__ import annotations

import ast
import asyncio
import json
import math
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2flow.errors import UserError
from m2flow.rewards import sandbox
from m2flow.rewards.reward import LONGEST_REASON
from m2flow.rewards.sandbox import Limits, ProgramOutcome
from m2flow.tools import (
    Toolbox,
    ToolCall,
    ToolError,
    calculator,
    make_tools,
    python,
    search,
    toolbox,
)
from m2flow.tools.bm25 import BM25, terms_of
from m2flow.tools.calculator import MAX_BITS, calculate
from m2flow.tools.function import FunctionTool
from m2flow.tools.python import PythonTool
from m2flow.tools.search import Search
from m2flow.tools.toolbox import MAX_CHARACTERS, TIMEOUTS_IN_A_ROW


@given(st.integers(-999, 999), st.integers(-99, 99), st.sampled_from(["+", "-", "*", "//", "%"]))
def test_the_calculator_is_python(a: int, b: int, op: str) -> None:
    if op in ("//", "%") and b == 0:
        b = 7
    assert calculate(f"({a}) {op} ({b})") == str(eval(f"({a}) {op} ({b})"))


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("(3 + 4) * 12 / 5", "16.8"),
        ("6/3", "2"),
        ("2**100", str(2**100)),
        ("sqrt(2)", "1.41421356237"),
        ("max(3, abs(-7), pi)", "7"),
    ],
)
def test_values_are_short(formula: str, value: str) -> None:
    assert calculate(formula) == value


@pytest.mark.parametrize(
    "formula",
    [
        "1/0", "2 +", "", "9**9**9**9", "x", "__import__('os')", "(1).real", "'a'*9", "True",
        "1e308*10", "(-2)**0.5", "f(2)", "[1]", "1 if 2 else 3", "9" * 2000, "(" * 900 + "1",
        "2**2000*2**2000*2**2000", "sqrt(1, 2, 3)", "exp(1e9)",
        "round(5, -10**9)", "round(5, 10**9)", "round(5, 0.5)",
    ],
)  # fmt: skip
def test_what_is_no_formula_is_the_callers_mistake(
    formula: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Powers that would take long, or all memory, are not even begun."""

    def small_power(base: Any, exponent: Any) -> Any:
        assert not isinstance(base, int) or base.bit_length() * exponent <= 2 * MAX_BITS
        return base**exponent

    monkeypatch.setitem(calculator._BINARY, ast.Pow, small_power)
    with pytest.raises(ToolError):
        calculate(formula)


def okapi(texts: list[str], query: str) -> list[float]:
    """The formula as it is printed, document by document."""
    documents = [Counter(terms_of(text)) for text in texts]
    lengths = [sum(document.values()) for document in documents]
    mean, scores = sum(lengths) / len(lengths), []
    for document, length in zip(documents, lengths, strict=True):
        score = 0.0
        for term in terms_of(query):
            n = sum(term in other for other in documents)
            idf = math.log(1 + (len(texts) - n + 0.5) / (n + 0.5))
            tf = document[term]
            score += idf * tf * 2.5 / (tf + 1.5 * (0.25 + 0.75 * length / mean))
        scores.append(score)
    return scores


def random_texts(seed: int) -> list[str]:
    words = [f"w{n}" for n in range(30)]
    draw = random.Random(seed)
    return [" ".join(draw.choices(words, k=draw.randint(1, 20))) for _ in range(40)]


@pytest.mark.parametrize("seed", range(5))
def test_the_index_against_the_formula(seed: int) -> None:
    texts = random_texts(seed)
    found = BM25(texts).search("w1 w2 W3 w3 unknown", 10)
    scores = okapi(texts, "w1 w2 W3 w3 unknown")
    wanted = sorted(range(len(texts)), key=lambda n: (-round(scores[n], 9), n))[:10]
    assert [n for n, _ in found] == [n for n in wanted if scores[n] > 0]
    assert [score for _, score in found] == pytest.approx([scores[n] for n, _ in found])


def test_the_index_against_bm25s() -> None:
    bm25s = pytest.importorskip("bm25s", reason="needs the package bm25s")
    texts = random_texts(9)
    theirs = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
    theirs.index([terms_of(text) for text in texts], show_progress=False)
    scores = theirs.get_scores(terms_of("w4 w5 w6"))
    # That form leaves out the factor k1 + 1, which is the same for all.
    for number, score in BM25(texts).search("w4 w5 w6", 40):
        assert score == pytest.approx(2.5 * float(scores[number]), rel=1e-5)


@pytest.mark.parametrize(
    ("query", "found"),
    [("法国的首都", 0), ("法国 首都", 0), ("日本の首都", 1), ("サーバー", 2), ("ｶﾀｶﾅ", 2),
     ("서울", 3), ("京", 1), ("capital of France", 4)],
)  # fmt: skip
def test_what_is_written_without_spaces_is_found(query: str, found: int) -> None:
    """A sentence of Chinese or Japanese was one term, and no query found it."""
    texts = [
        "巴黎是法国的首都。",
        "東京は日本の首都です。",
        "データ・サーバーとｶﾀｶﾅ",
        "서울은 한국의 수도이다.",
        "Paris is the capital of France.",
    ]
    assert BM25(texts).search(query, 1)[0][0] == found


def test_terms_of_mixed_scripts() -> None:
    assert terms_of("Die iPhone15手机壳・_x") == [
        "die",
        "iphone15",
        *"手机壳",
        "手机",
        "机壳",
        "_x",
    ]


def test_of_equal_scores_the_first_documents_win() -> None:
    index = BM25(["b", *["a"] * 50, "a a a", *["a"] * 50])
    assert [number for number, _ in index.search("a", 4)] == [51, 1, 2, 3]


def corpus_in(folder: Path) -> Path:
    path = folder / "corpus.jsonl"
    rows = [
        {"title": "Bern", "text": "The capital\nof Switzerland."},
        {"contents": "Paris is the capital of France."},
        {"text": "Rivers flow."},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_search_gives_passages_in_lines(tmp_path: Path) -> None:
    tool = Search(str(corpus_in(tmp_path)), top=2)
    assert tool.call({"query": "capital of Switzerland"}, 1.0).splitlines() == [
        "Doc 1: Bern: The capital of Switzerland.",
        "Doc 2: Paris is the capital of France.",
    ]
    assert tool.call({"query": "zebra"}, 1.0) == "nothing found"
    for wrong in ({}, {"query": 3}, {"query": " "}, {"query": "x", "top": 9}):
        with pytest.raises(ToolError):
            tool.call(wrong, 1.0)


def test_a_corpus_is_indexed_once_and_not_for_its_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher indexed it to say what the tool is called; calls had waited within their own
    deadline."""
    indexing: list[str] = []

    class Index(BM25):
        def __init__(self, texts: Sequence[str]) -> None:
            indexing.append(threading.current_thread().name)
            super().__init__(texts)

    monkeypatch.setattr(search, "BM25", Index)
    box = Toolbox(make_tools([("search", {"corpus": str(corpus_in(tmp_path)), "top": 1})]))
    assert box.schemas()
    assert not indexing
    found = box.carry_out([ToolCall("search", "capital of Switzerland")] * 8)
    assert [one.text for one in found] == ["Doc 1: Bern: The capital of Switzerland."] * 8
    assert indexing == [threading.current_thread().name]


def test_programs_run_in_the_sandbox() -> None:
    python = PythonTool()
    assert python.call({"code": "print(sum(range(10)))"}, 20.0) == "45\n"
    with pytest.raises(ToolError, match="ZeroDivisionError"):
        python.call({"code": "print(1); 1/0"}, 20.0)
    with pytest.raises(ToolError, match="did not end within"):
        python.call({"code": "while True: pass"}, 1.0)
    with pytest.raises(ToolError, match="wrote more than"):
        python.call({"code": "print('x' * 10**7)"}, 20.0)


@pytest.mark.parametrize(("seconds", "cpu_seconds"), [(1.0, 10), (10.0, 10), (100.0, 90)])
def test_a_programs_processor_time_is_that_of_its_deadline(
    seconds: float, cpu_seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer deadline did not hold: after ten seconds of computing a program was ended."""
    seen = []

    def run(source: str, *, limits: Limits) -> ProgramOutcome:
        seen.append((limits.seconds, limits.cpu_seconds))
        return ProgramOutcome("", "", 0)

    monkeypatch.setattr(python, "run_python", run)
    PythonTool().call({"code": "pass"}, seconds)
    assert seen == [(0.9 * seconds, cpu_seconds)]


def test_arguments_that_are_no_text_are_the_callers_mistake() -> None:
    """JSON can spell half of a surrogate pair; it had counted as the tool's own failure."""

    def write(text: str) -> str:
        return str(text.encode())

    box = Toolbox([FunctionTool(write)])
    found = box.carry_out(
        [ToolCall("write", json.loads(r'{"text": "a\ud83d"}')), ToolCall("write", {"\udc00": "a"}),
         ToolCall("write", "\ud83d"), ToolCall("write", "\U0001f600")]
    )  # fmt: skip
    assert not any(one.failure for one in found)
    assert [one.error for one in found] == [True, True, True, False]
    assert "cannot be written in UTF-8" in found[0].text


def test_a_function_is_a_tool() -> None:
    def repeat(word: str, times: int = 2) -> str:
        """Say a word often."""
        return word * times

    tool = FunctionTool(repeat)
    assert (tool.name, tool.description) == ("repeat", "Say a word often.")
    assert tool.parameters["properties"]["times"] == {"type": "integer"}
    assert tool.parameters["required"] == ["word"]
    box = Toolbox([tool])
    found = box.carry_out(
        [ToolCall("repeat", {"word": "ab"}), ToolCall("repeat", "x"), ToolCall("repeat", {})]
    )
    assert [one.text for one in found[:2]] == ["abab", "xx"]
    assert found[2].error


def test_a_text_is_the_argument_that_a_tool_needs() -> None:
    """A tool without parameters was given an `input`, another one its first, needed or not."""

    def clock() -> str:
        return "12:00"

    def zone(name: str = "UTC") -> str:
        return name

    class Nearest:
        name, description = "nearest", "As a server may tell it."
        parameters: ClassVar[dict[str, Any]] = {
            "type": "object", "required": ["place"],
            "properties": {"count": {"type": "integer"}, "place": {"type": "string"}},
        }  # fmt: skip

        def call(self, arguments: Any, seconds: float) -> str:
            return json.dumps(arguments)

        def close(self) -> None: ...

    box = Toolbox([FunctionTool(clock), FunctionTool(zone), Nearest()])
    asked = [("clock", ""), ("zone", ""), ("zone", "CET"), ("nearest", "Bern"), ("clock", "now")]
    found = box.carry_out([ToolCall(*one) for one in asked])
    assert [one.text for one in found[:4]] == ["12:00", "UTC", "CET", '{"place": "Bern"}']
    assert (found[4].error, found[4].text) == (True, "clock takes no argument, and got 'now'")


def test_a_coroutine_function_is_a_tool_and_runs_to_its_end() -> None:
    async def later(city: str) -> str:
        """Weather."""
        await asyncio.sleep(0)
        return f"sun in {city}"

    (answer,) = Toolbox([FunctionTool(later)]).carry_out([ToolCall("later", "Rome")])
    assert answer.text == "sun in Rome"


def test_what_a_coroutine_tool_keeps_serves_every_call() -> None:
    """Each call had a loop of its own: a semaphore that a tool kept failed, as did a client."""
    limit = asyncio.Semaphore(1)

    async def web(query: str) -> str:
        async with limit:
            await asyncio.sleep(0.05)  # others come meanwhile
        return query

    box = Toolbox([FunctionTool(web)])
    for _ in range(2):
        found = box.carry_out([ToolCall("web", str(n)) for n in range(8)])
        assert [one.text for one in found] == [str(n) for n in range(8)], found


def test_coroutine_tools_that_block_their_loop_do_so_beside_each_other() -> None:
    together = threading.Barrier(4)

    async def blocks(query: str) -> str:
        together.wait(60)
        return query

    box = Toolbox([FunctionTool(blocks)], seconds=60.0)
    found = box.carry_out([ToolCall("blocks", str(n)) for n in range(4)])
    assert [one.text for one in found] == ["0", "1", "2", "3"], found


def test_a_thread_of_a_coroutine_tool_that_hangs_does_not_hold_up_the_end_of_the_program() -> None:
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "import asyncio, threading\n"
        "from m2flow.tools import Toolbox, ToolCall\n"
        "from m2flow.tools.function import FunctionTool\n"
        "async def ask(text: str) -> str:\n"
        "    return await asyncio.to_thread(threading.Event().wait)\n"
        "box = Toolbox([FunctionTool(ask)], seconds=0.5)\n"
        "print(box.carry_out([ToolCall('ask', 'a')])[0].failure)\n"
    )
    words = [sys.executable, "-c", code]
    ended = subprocess.run(words, check=False, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "tool ask: gave nothing within 0.5 s\n"


def test_what_a_tool_does_wrong_costs_its_own_call() -> None:
    def slow(text: str) -> str:
        time.sleep(30)
        return text

    def broken(text: str) -> str:
        raise OSError("no disk")

    def large(text: str) -> str:
        return text * 10_000_000

    box = Toolbox([*map(FunctionTool, (slow, broken, large))], seconds=0.1)
    found = box.carry_out([ToolCall(n, "ab") for n in ("slow", "broken", "large", "brokn")])
    assert found[0].failure == "tool slow: gave nothing within 0.1 s"
    assert found[1].failure == "tool broken: no disk"
    assert (len(found[2].text), found[2].failure) == (MAX_CHARACTERS, "")
    assert found[3].error
    assert found[3].text == "no tool 'brokn'; did you mean 'broken'?"


def test_why_a_tool_gave_nothing_is_one_short_line() -> None:
    """What packages raise fills the terminal: schemas, rows of a table, a page of their site."""

    def broken() -> str:
        raise OSError("no disk\n" + "  row\n" * 1000 + "see the manual")

    (found,) = Toolbox([FunctionTool(broken)]).carry_out([ToolCall("broken", {})])
    assert found.failure.startswith("tool broken: no disk row row ")
    assert found.failure.endswith(" row see the manual")
    assert len(found.failure) <= LONGEST_REASON


def test_a_tool_that_is_down_is_not_called_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call waited for its own deadline, and all of them came to the run's."""
    monkeypatch.setattr(toolbox, "GRACE_SECONDS", 0.1)
    calls, up = list[str](), threading.Event()

    def down(text: str) -> str:
        calls.append(text)
        up.wait(30)
        return text

    def fine(text: str) -> str:
        return text

    box = Toolbox([FunctionTool(down), FunctionTool(fine)], seconds=0.5, concurrency=4)
    try:
        found = box.carry_out([*[ToolCall("down", "a")] * 200, ToolCall("fine", "a")])
        assert TIMEOUTS_IN_A_ROW <= len(calls) <= 4 + TIMEOUTS_IN_A_ROW
        assert all("tool down: gave nothing within 0.5 s" in one.failure for one in found[:-1])
        assert found[-1].text == "a", "another tool"
        up.set()
        assert box.carry_out([ToolCall("down", "b")])[0].text == "b", "a later turn"
    finally:
        up.set()


def test_calls_that_hang_between_others_are_no_sign_that_a_tool_is_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(toolbox, "GRACE_SECONDS", 0.1)
    left = threading.Event()

    def shaky(text: str) -> str:
        if text == "hang":
            left.wait(30)
        return text

    box = Toolbox([FunctionTool(shaky)], seconds=0.5, concurrency=1)
    try:
        found = box.carry_out([ToolCall("shaky", text) for text in ("hang", "a") * 4])
    finally:
        left.set()
    assert [bool(one.failure) for one in found] == [True, False] * 4


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("calculater", {}, "is no tool .*did you mean 'calculator'"),
        ("search", {"corpus": "/none/c.jsonl"}, "the corpus cannot be read: No such file"),
        (
            "search",
            {},
            r"missing a required argument: 'corpus' .*; expected options: corpus, top, numbered$",
        ),
        ("calculator", {"x": 1}, "unexpected keyword argument 'x' .*; expected options: none$"),
        ("search", {"corpus": __file__}, "is no passage"),
        ("no_module:f", {}, "there is no module no_module"),
        ("json:dumps", {"x": 1}, "a function has no options"),
        ("json:__doc__", {}, "is no function"),
        ("json:JSONDecoder", {}, "is a class"),
        ("builtins:max", {}, "its types cannot be read: no signature found"),
    ],
)
def test_wrong_tools_are_refused_in_one_line(
    name: str, options: dict[str, object], said: str
) -> None:
    with pytest.raises(UserError, match=said) as refused:
        make_tools([(name, options)])
    assert "\n" not in str(refused.value)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(UserError, match="two tools have this name"):
        make_tools([("calculator", {}), ("calculator", {})])


def test_a_corpus_that_is_nearly_there_is_named(tmp_path: Path) -> None:
    corpus_in(tmp_path)
    with pytest.raises(UserError, match=r"did you mean .*corpus\.jsonl"):
        Search(str(tmp_path / "corpus.json"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="holds no passage"):
        Search(str(tmp_path / "empty.jsonl"))
    with pytest.raises(UserError, match="is no number of passages"):
        Search(str(tmp_path / "corpus.jsonl"), top=0)


def test_arguments_are_of_the_types_of_the_functions_parameters() -> None:
    """A dialect of tags gives texts; what is none of the type is told to the model."""

    def times(value: int, share: float = 1.0, round_up: bool = False) -> str:
        return str(math.ceil(value * share) if round_up else value * share)

    box = Toolbox([FunctionTool(times)])

    def said(arguments: Any) -> tuple[str, bool]:
        (found,) = box.carry_out([ToolCall("times", arguments)])
        assert not found.failure
        return found.text, found.error

    assert said("5") == ("5.0", False)
    assert said({"value": 5, "share": "0.5", "round_up": "true"}) == ("3", False)
    assert said({"value": 5.0, "share": 1}) == ("5.0", False)
    assert said({"value": "five"})[1]
    assert said({"value": float("inf")})[1]
    assert said({"value": 5.5})[1]
    assert said({"value": True})[1]
    assert said({"value": 1, "round_up": 1})[1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"word": None}, {"word": "a", "times": None}, {"word": "a", "marks": [1, None]},
        {"word": "a", "size": None}, {"word": "a", "share": 10**400}, {"word": "a", "plain": None},
    ],
)  # fmt: skip
def test_arguments_that_the_function_would_raise_of_are_the_callers_mistake(wrong: Any) -> None:
    """`null` was of every type, and a whole number no float holds raised in the reading."""

    def order(
        word: str,
        times: int = 2,
        marks: list[int] = [],  # noqa: B006
        size: Literal["small", "large"] = "small",
        share: float = 1.0,
        plain="",  # type: ignore[no-untyped-def]
    ) -> str:
        return f"{word * times}{sum(marks)}{size.upper()}{2 * share}{plain.upper()}"

    (found,) = Toolbox([FunctionTool(order)]).carry_out([ToolCall("order", wrong)])
    assert (found.error, found.failure) == (True, "")
    assert f"{list(wrong)[-1]} must be " in found.text


def test_null_is_an_argument_where_the_type_or_the_default_says_so() -> None:
    def order(
        one: int | None,
        other: Any,
        noted: Annotated[int | None, "a number"] = 3,
        several: list[int | None] = [],  # noqa: B006
        last: str = None,  # type: ignore[assignment]  # noqa: RUF013
    ) -> str:
        return f"{one} {other} {noted} {several} {last}"

    given = {"one": None, "other": None, "noted": None, "several": [None, "1"], "last": None}
    assert FunctionTool(order).call(given, 1.0) == "None None None [None, 1] None"


def test_a_parameter_that_has_no_name_for_callers_is_filled_by_its_name() -> None:
    """As those of most functions in C; a model names every argument."""

    def power(base: int, exponent: int = 2, /, *, minus: int = 0) -> int:
        return base**exponent - minus

    box = Toolbox([FunctionTool(math.sqrt), FunctionTool(power)])
    assert [one.text for one in box.carry_out([ToolCall("sqrt", {"x": 9})])] == ["3.0"]
    for given_, text in (
        ({"base": 3}, "9"),
        ({"base": 3, "minus": 2}, "7"),
        ({"exponent": 3, "base": 2}, "8"),
    ):
        (found,) = box.carry_out([ToolCall("power", given_)])
        assert (found.text, found.error, found.failure) == (text, False, "")
    (found,) = box.carry_out([ToolCall("power", {"exponent": 3})])
    assert found.error
    assert "base" in found.text


def test_the_types_of_parameters_are_told_as_they_are() -> None:
    """All but texts, numbers and truth values were told as texts, `**others` among them."""

    def order(
        item: str,
        count: Optional[int],  # noqa: UP045
        size: Literal["small", "large"],
        marks: list[int],
        more: dict[str, Any],
        price: float | None = None,
        note: Annotated[str, "for the kitchen"] = "",
        rest: Any = None,
        *several: int,
        **others: str,
    ) -> str:
        return f"{item} {count} {size} {marks} {more}"

    tool = FunctionTool(order)
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "item": {"type": "string"},
            "count": {"type": "integer"},
            "size": {"type": "string", "enum": ["small", "large"]},
            "marks": {"type": "array", "items": {"type": "integer"}},
            "more": {"type": "object"},
            "price": {"type": "number"},
            "note": {"type": "string"},
            "rest": {},
        },
        "required": ["item", "count", "size", "marks", "more"],
    }
    given: dict[str, Any] = {
        "item": "soup", "count": "2", "size": "small", "marks": "[1, 2.0]", "more": {"a": 1},
    }  # fmt: skip
    assert tool.call(given, 1.0) == "soup 2 small [1, 2] {'a': 1}"
    assert tool.call({**given, "count": None}, 1.0).startswith("soup None")
    for wrong in ({"size": "huge"}, {"marks": ["x"]}, {"marks": "1, 2"}, {"more": []}):
        with pytest.raises(ToolError, match=f"{next(iter(wrong))} must be"):
            tool.call({**given, **wrong}, 1.0)


def of_a_set(words: set[str]) -> str:
    return " ".join(words)


def of_two(word: str | int) -> str:
    return f"{word}"


def of_a_mixture(word: Literal["a", 1]) -> str:
    return f"{word}"


def of_an_unknown(word: Unknown) -> str:  # type: ignore[name-defined]  # noqa: F821
    return f"{word}"


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (of_a_set, "the type of 'words'"),
        (of_two, "the type of 'word'"),
        (of_a_mixture, "the type of 'word'"),
        (of_an_unknown, "types cannot be read: name 'Unknown' is not defined"),
    ],
)
def test_a_type_that_a_model_cannot_be_told_is_refused(function: Any, said: str) -> None:
    with pytest.raises(UserError, match=f"^tools: .*{said}.*{function.__name__}") as refused:
        make_tools([(f"{__name__}:{function.__name__}", {})])
    assert "\n" not in str(refused.value)


def test_a_corpus_may_be_a_function_in_the_folder_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_passages.py").write_text(
        "def texts():\n    return ['a red fox', 'a blue whale']\n"
        "def broken():\n    raise OSError('no disk')\n"
        "def numbers():\n    return [1]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    assert "whale" in Search("own_passages:texts", top=1).call({"query": "blue"}, 1.0)
    for name, why in (("broken", "no disk"), ("numbers", "no text"), ("text", "did you mean")):
        with pytest.raises(UserError, match=why) as refused:
            Search(f"own_passages:{name}")
        assert refused.value.key == "tools.search.corpus"


def test_long_whole_numbers_are_exact() -> None:
    assert calculate("2**2000") == str(2**2000)


def test_a_call_that_takes_long_gives_signs_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool with more time than a call of a stage ended the run."""
    monkeypatch.setattr(toolbox, "SIGN_SECONDS", 0.05)
    heard: list[int] = []

    def slow(text: str) -> str:
        time.sleep(1.0)
        return text

    box = Toolbox([FunctionTool(slow)], seconds=30.0)
    (found,) = box.carry_out([ToolCall("slow", "a")], lambda: heard.append(0))
    assert found.text == "a"
    assert len(heard) > 3


def test_without_a_sandbox_the_tool_is_named_and_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "WAYS", ())
    sandbox.find_way.cache_clear()
    try:
        with pytest.raises(UserError, match=r"^tools: no sandbox"):
            make_tools([("python", {})])
    finally:
        sandbox.find_way.cache_clear()
