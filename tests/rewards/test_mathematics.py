"""The rule reward: right answers in every spelling, wrong ones in none, any text without harm."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path

import math_verify
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from math_verify import ExprExtractionConfig, LatexExtractionConfig

from m2flow.rewards import math_reward, symbolic
from m2flow.rewards.final_answer import extract_answer
from m2flow.rewards.format import format_reward
from m2flow.rewards.gym import gym_answer
from m2flow.rewards.mathematics import verify
from m2flow.rewards.number import read_number, same_number


def number_spellings(x: int) -> list[str]:
    """The usual ways to write a whole number."""
    return [
        str(x),
        f"{x:,}",
        f"{x:,}".replace(",", "{,}"),
        f"{x}.0",
        f"{x:,}.00",
        f"${x}",
        f"${x:,}.00",
        f"\\${x:,}",
        f"{2 * x}/2",
        f"\\frac{{{2 * x}}}{{2}}",
        f"\\dfrac{{{6 * x}}}{{6}}",
        f"{x} dollars",
        f"{x}\\text{{ dollars}}",
        f"n = {x}",
    ]


def completion_spellings(x: int) -> list[str]:
    """The usual ways to end a completion with that number."""
    ends = number_spellings(x)
    return [
        *ends,
        *(f"There are 7 of 9.\nSo it is \\boxed{{{end}}}." for end in ends),
        *(f"There are 7 of 9.\n#### {end}" for end in ends),
        *(f"There are 7 of 9. The answer is {end}." for end in ends),
        f"There are 7. **{x}**",
        f"**Answer:** ${x:,}$",
        f"so \\( {x} \\).",
        f"\\[ 3 + 4 = {x} \\]",
    ]


def _golds(shared_data: Path, name: str) -> list[str]:
    lines = (shared_data / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["answer"].rpartition("####")[2].strip() for line in lines]


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("aime24.jsonl", 30),
        ("multiarith.jsonl", 600),
        ("gsm8k_test.jsonl", 1319),
        pytest.param("gsm8k_train.jsonl", 7473, marks=pytest.mark.slow),
    ],
)
def test_every_gold_answer_in_every_spelling(shared_data: Path, name: str, rows: int) -> None:
    golds = _golds(shared_data, name)
    assert len(golds) == rows
    for gold in golds:
        x = int(gold.replace(",", ""))
        right, wrong = completion_spellings(x), completion_spellings(x + 1)
        missed = [text for text in (gold, *right) if verify(gold, text) != 1.0]
        believed = [text for text in wrong if verify(gold, text) != 0.0]
        assert not missed, (gold, missed)
        assert not believed, (gold, believed)


def test_gsm8k_solutions_verify_as_they_stand(shared_data: Path) -> None:
    lines = (shared_data / "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()
    solutions = [json.loads(line)["answer"] for line in lines]
    golds = _golds(shared_data, "gsm8k_test.jsonl")
    rows = zip(golds, solutions, strict=True)
    assert {math_reward("", text, (), {"answer": gold}) for gold, text in rows} == {1.0}


MATRIX = r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"

RIGHT = [
    ("18", "18."),
    ("18", r"\boxed{\text{18}}"),
    ("18", r"\boxed{$18$}"),
    ("18", r"\boxed{\$18}"),
    ("18", r"\boxed 18"),
    ("18", r"\fbox{18}"),
    ("18", r"\boxed{18 eggs}"),
    ("18", r"\boxed{18km}"),
    ("18", r"\boxed{18 m}"),
    ("18", r"\boxed{USD 18}"),
    ("1e5", r"\boxed{100 000}"),
    ("18", r"\boxed{18\text{ cm}^2}"),
    ("18", "It has 18 cm^2"),
    ("18", "The answer is...18"),
    ("18", "It is 18 (six a day for three days)"),
    ("18", "She pays $5 + $13 = $18."),
    ("18", "the greatest of [12, 9, 18] is (18)"),
    ("2500", "It is two thousand five hundred (2,500)"),
    ("18", r"first \boxed{17}, no: \boxed{18}"),
    ("18", r"\boxed{18}, put into \boxed{}"),
    ("18", "#### 17\n#### 18"),
    ("18", r"#### 17 and \boxed{18}"),
    ("18", "#### Result\nShe has 18 apples."),
    ("18", r"the side is $\sqrt{324}$ cm"),
    ("18", r"\boxed{\sqrt{324}}"),
    ("18", r"\boxed{9 \cdot 2}"),
    ("18", r"\boxed{2 \times 9}"),
    ("1024", "it is 2^10"),
    ("20", r"\boxed{20^\circ}"),
    ("-3", "the change is -3"),
    ("-3", "the change is −3 degrees"),
    ("-10", "he lost money: -$10"),
    ("3", "16-13 is 16-13=3"),
    ("0.5", r"\boxed{\frac12}"),
    ("0.5", r"\boxed{\frac{1}{2}}"),
    ("0.5", "1/2"),
    ("0.5", ".5"),
    ("1/2", "0.50"),
    ("5/2", r"\boxed{2\frac{1}{2}}"),
    ("2.5", "#### 2 1/2"),
    ("1/3", "0.333333"),
    ("2/3", "0.666667"),
    ("2/3", "0.666666"),
    ("-2/3", "-0.666667"),
    ("0.3333333", "0.333333"),
    ("300000", r"\boxed{3 \times 10^5}"),
    ("5000000", "He earns $5 million."),
    ("1234567", r"\boxed{1\,234\,567}"),
    ("025", "25"),
    ("$18", "18"),
    (r"\frac{\sqrt{2}}{2}", r"Answer: $\frac{1}{\sqrt 2}$."),
    (r"\frac{\sqrt{2}}{2}", r"\boxed{\dfrac{\sqrt{2}}{2}}"),
    ("x^2-1", r"\boxed{(x-1)(x+1)}"),
    ("(1,2)", r"\boxed{(1, 2)}"),
    (r"2\pi", r"Hence the answer is \(2\pi\)."),
    ("Paris", "The answer is Paris."),
    ("A", r"\boxed{(A)}"),
    ("yes", "So, after all:\nYes."),
    (r"\sum_{k=1}^n k", r"\boxed{\sum_{k=1}^n  k}"),
    ("C", r"\boxed{\text{C}}"),
    ("C", r"\boxed{\textbf{(C)}}"),
    ("C", r"\boxed{\mathrm{C}}"),
    (r"\text{(C)}", r"\boxed{C}"),
    ("36", r"\boxed{36^{\circ}}"),
    ("36", r"\boxed{36°}"),
    (r"36^{\circ}", "The angle is 36."),
    (MATRIX, r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}"),
    (MATRIX, r"\boxed{\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}}"),
    ("9 (apples)", r"\boxed{9}"),
    ("9", r"\boxed{9 (apples)}"),
    ("x=1, y=7", r"\boxed{x=1,y=7}"),
    ("7", r"\boxed{3 + 4 = 7}"),
    (r"\frac{2}{3}", r"\boxed{\frac{2}{3} = 0.67}"),
    (r"\frac{2}{3}", r"\boxed{x = \frac{2}{3} = 0.7}"),
    ("2/3", r"\boxed{2/3 = 66.7\%}"),
    ("1/3", "#### 1/3 = 0.333"),
    ("1/8", r"\boxed{1/8 = 0.13}"),
    ("1234", r"\boxed{(\$1,234)}"),
    ("1234", r"\boxed{x = 1,234}"),
    ("(0,100)", r"\boxed{(0,100)}"),
    ("(1,234)", r"\boxed{(1, 234)}"),
    ("1/30", "0.033333"),
    ("5e-05", r"\boxed{5 \times 10^{-5}}"),
    ("5e-05", r"\boxed{5\cdot10^{-5}}"),
    ("5e-05", r"\boxed{5 \times 10^{-5} \text{ meters}}"),
    ("5e-05", "It is 5 × 10^{−5}."),
    ("5e-05", "so 5*10^(-5) in all"),
    ("5e-05", "which gives 5e-05."),
    ("5e-05", "#### 5 x 10^-5"),
    ("5e-05", "0.00005"),
    ("5e-05", r"\boxed{\frac{1}{20000}}"),
    ("5e-05", r"\boxed{\frac{1}{2 \cdot 10^{4}}}"),
    ("1e-05", r"\boxed{10^{-5}}"),
    ("6.02e+23", r"\boxed{6.02 \times 10^{23}}"),
    ("1e+16", "it is 10^16"),
    (r"3 \times 10^8", "3e8"),
    (r"3 \times 10^8", r"\boxed{c = 300{,}000{,}000}"),
    ("0.0000002", r"\boxed{\sqrt{4 \cdot 10^{-14}}}"),
    ("0.00005", r"\boxed{5 × 10⁻⁵}"),
    ("49", "so it is 7²"),
    ("x^{2}+1", r"\boxed{x²+1}"),
    ("x_1+x_2", "$x₁ + x₂$"),
    (r"\frac{\sqrt{3}}{2}", r"\boxed{√3/2}"),
    (r"2\sqrt{x+1}", r"\boxed{2√(x+1)}"),
    ("3.5", r"\boxed{3½}"),
    ("9", "it is 9 cm²"),
    ("B", "The answer is B) $4.5$"),
    ("B", r"\boxed{B) 4.5 eV}"),
    ("B", "#### B) 4.5 eV"),
    ("B", "The answer is B) Paris"),
    ("B", "The answer is **B)** Paris."),
    ("B", "Answer: (B) Paris"),
    ("B", r"\boxed{Option B}"),
    ("B", r"\boxed{\textbf{(B)}\ 4.5}"),
    ("D", r"\boxed{D. Both A and B}"),
    (r"\text{(B)}", r"\boxed{\text{choice B: Paris}}"),
    ("B", "The correct option is B"),
    ("B", "So the correct choice is **(B)**"),
    ("B", "Final choice: B) Paris."),
    ("B", "The correct answer choice is (B)."),
    ("B", "The answer is B, since the energy"),
    ("B", "Therefore, B"),
    ("B", "What is the answer? It moves.\n**Hence (B).**"),
    ("B", "The answer is clear: the correct option is B."),
    ("B", "The answer is A? No, the answer is B."),
    ("B", "The answer is B. This answer fits."),
    ("B", "The answer is B.\nThe option C is for another field."),
    ("B", "The answer is B.\nThe incorrect option is C."),
    ("B", "The answer is B.\nSo C) is wrong."),
    ("1/3", r"\boxed{0.\overline{3}}"),
    ("1/6", r"\boxed{x = 0.1\overline{6}}"),
    (r"0.\overline{81}", r"\boxed{\frac{9}{11}}"),
    (r"-12.\bar{3}", r"so it is $-\frac{37}{3}$."),
    (r"0.\overline{3}", r"\boxed{0.\dot{3}}"),
    ("0.5", r"\boxed{0.4\overline{9}}"),
    ("60", r"\boxed{60\degree}"),
    (r"\emptyset", r"\boxed{\varnothing}"),
    (r"\varnothing", "the set is $\\emptyset$."),
    ("18", r"\boxed{18元}"),
    ("18", r"\boxed{18 平方米}"),
    ("18", r"\boxed{18 千克}"),
    ("18", r"\boxed{18\text{ 千米}}"),
    ("18", "答案是18元。"),
    ("18", "#### 18。"),
    ("18", r"\boxed{１８}"),
    ("180000", r"\boxed{18万}"),
    ("180000", r"\boxed{18\text{万元}}"),
    ("180000", "一共是18万元。"),
    ("350000000", r"\boxed{3.5亿}"),
    ("(1,2)", r"\boxed{（1，2）}"),
    ("B", "Answer：（B）"),
]

WRONG = [
    ("18", "18 eggs ... so #### 17"),
    ("18", "18 eggs ... so 17"),
    ("18", "18 eggs ... so #### unknown"),
    ("18", "18\n####"),
    ("18", r"18 is wrong, it is \boxed{17}"),
    ("18", r"\boxed{18} or rather \boxed{17}"),
    ("18", r"\boxed{18} or rather \boxed{17"),
    ("18", r"\boxed{18"),
    ("18", r"\boxed{18 or 19}"),
    ("18", r"\boxed{17, 18}"),
    ("18", r"\boxed{18x}"),
    ("18", r"\boxed{18 m n}"),
    ("18", r"\boxed{18i}"),
    ("18", r"\boxed{18\pi}"),
    ("18", r"\boxed{18%}" + " of 100 is 18, \\boxed{1800}"),
    ("18", "180"),
    ("18", "118"),
    ("18", "1.18"),
    ("18", "18,000"),
    ("18", "-18"),
    ("-18", "18"),
    ("18", "18 million"),
    ("18", "18.5"),
    ("18", "It costs $18 and $5."),
    ("18", r"\boxed{\frac{18}{0}}"),
    ("2", "it is 2^10"),
    ("4", r"it is $\sqrt{4}$"),
    ("50", "0.5"),
    ("1/3", "0.33"),
    ("1/3", "0.333334"),
    ("2/3", "0.666668"),
    ("2/3", "-0.666667"),
    ("0.0000001", "0.0000002"),
    ("x+1", r"\boxed{y+1}"),
    ("Paris", "Prais"),
    ("Paris", "18"),
    ("18", ""),
    ("18", "no idea"),
    ("", ""),
    ("", r"\boxed{}"),
    ("C", r"\boxed{\text{D}}"),
    (MATRIX, r"\boxed{\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}}"),
    (MATRIX, r"\boxed{\begin{pmatrix} 1 & 2 & 3 & 4 \end{pmatrix}}"),
    ("x=1, y=7", r"\boxed{x=5, y=7}"),
    ("7", r"\boxed{x=5, y=7}"),
    ("7", r"\boxed{x=5 \text{ and } y=7}"),
    ("7", r"\boxed{1=7}"),
    (r"\frac{2}{3}", r"\boxed{\frac{2}{3} = 0.66}"),
    (r"\frac{2}{3}", r"\boxed{\frac{3}{2} = 0.67}"),
    (r"\frac{2}{3}", r"\boxed{0.67}"),
    ("2/3", r"\boxed{2/3 = 1}"),
    ("2/3", r"\boxed{2/3 = 67}"),
    ("2/3", r"\boxed{0.666667 = 0.67}"),
    ("(0,100)", r"\boxed{100}"),
    ("100", r"\boxed{(0,100)}"),
    ("100", r"\boxed{0,100}"),
    ("(2,500)", r"\boxed{2500}"),
    ("2500", r"\boxed{(2,500)}"),
    ("2500", r"\boxed{\left(2,500\right)}"),
    ("2500", r"\boxed{x = (2,500)}"),
    ("-2500", r"\boxed{(-2,500)}"),
    ("2500", "so it is $(2,500)$."),
    ("100", "the range is (0, 100)"),
    ("100", "The range is [0,100]."),
    ("7", "so the point is (-5, 2.5, 7) at last."),
    ("5", r"\boxed{5 factorial}"),
    ("5", r"\boxed{5 ninths}"),
    ("1.6e-19", r"\boxed{0.000000}"),
    ("0.000001", "0.0000019"),
    ("0.0000012", "0.000001"),
    ("0.0000001", r"\boxed{2 \times 10^{-7}}"),
    ("0.0000001", r"\boxed{\frac{2}{3} \times 10^{-7}}"),
    ("0.0000001", r"\boxed{\sqrt{4 \cdot 10^{-14}}}"),
    ("1.6e-19", r"\boxed{\sqrt{4 \cdot 10^{-14}}}"),
    ("5e-05", r"\boxed{5 \times 10^{-4}}"),
    ("5e-05", r"\boxed{5 \times 10^{5}}"),
    ("5e-05", r"\boxed{5 \times 10^{-5} + 1}"),
    ("5e-05", r"\boxed{5e - 5}"),
    ("500000", r"\boxed{5 \times 10}"),
    ("500000", r"\boxed{5 \times 10^{x}}"),
    ("500000", r"\boxed{5 \times 10^{5.5}}"),
    ("500000", r"\boxed{(5 \times 10^5)^2}"),
    ("500000", r"\boxed{5 \times 10^5 \text{ or } 6}"),
    ("5", r"\boxed{2 \times 3}"),
    ("100000", "so it is 3 × 10^5"),
    ("5", "It is 5e-05"),
    ("B", r"\boxed{A) B-field}"),
    ("B", r"\boxed{B-field}"),
    ("B", "The answer is A) $B$"),
    ("B", "The answer is B) $4.5$ or C) $5$"),
    ("7", "so it is 7²"),
    ("2", r"\boxed{√2}"),
    ("B", r"\boxed{B, C}"),
    ("B", r"\boxed{B) or C)}"),
    ("B", r"\boxed{B) 4 or C) 5}"),
    ("B", r"\boxed{Option B or C}"),
    ("B", "The answer is Option C"),
    ("B", "B) 4.5 eV\nC) 5 eV"),
    ("A", "The answer is A person"),
    ("A", "The correct option is A person"),
    ("A", "So A person"),
    ("B", "The answer is B, or C"),
    ("B", "The answer is B, C"),
    ("B", "The answer is B, (C)"),
    ("A", r"\boxed{A, B, C}"),
    ("B", "Therefore, B or C"),
    ("B", "The answer is unclear:\nA) 4\nB) 5"),
    ("B", "The correct option is B.\nNo: the correct option is C."),
    ("B", "The answer is B.\nNo, the answer is 42."),
    ("C", "The answer is B.\nThe incorrect option is C."),
    ("1/3", r"\boxed{0.\overline{33}4}"),
    ("0.3", r"\boxed{0.\overline{3}}"),
    ("1/6", r"\boxed{0.\overline{16}}"),
    ("0.16", r"\boxed{0.1\overline{6}}"),
    ("3", r"\boxed{\overline{3}}"),
    (r"\emptyset", r"\boxed{\{0\}}"),
    ("18", r"\boxed{18万}"),
    ("18", r"\boxed{18\text{万元}}"),
    ("18", "一共是18万元。"),
    ("18", r"\boxed{18或19}"),
    ("18", r"\boxed{18 或}"),
    ("18", r"\boxed{18个半}"),
    ("18", r"\boxed{18以上}"),
    ("18", r"\boxed{18多}"),
    ("18", r"\boxed{18千}"),
    ("400", r"\boxed{3，400}"),
    ("3400", r"\boxed{（3，400）}"),
]


@pytest.mark.parametrize(("gold", "completion"), RIGHT)
def test_right(gold: str, completion: str) -> None:
    assert verify(gold, completion) == 1.0


@pytest.mark.parametrize(("gold", "completion"), WRONG)
def test_wrong(gold: str, completion: str) -> None:
    assert verify(gold, completion) == 0.0


SPELLINGS = [
    # the answer; the same in other words; wrong, but near
    (
        r"\frac{3}{4}",
        [r"\dfrac34", "0.75", r"\tfrac{6}{8}", "75\\%"],
        [r"\frac{4}{3}", "0.7", "-\\frac34"],
    ),
    (
        r"\frac{\sqrt{3}}{2}",
        [r"\sqrt{3}/2", r"\frac12\sqrt3", r"\cos\frac{\pi}{6}"],
        [r"\frac{\sqrt2}{2}", r"\sqrt{3}"],
    ),
    (
        r"2\sqrt{5}",
        [r"\sqrt{20}", r"2 \sqrt 5", r"\frac{10}{\sqrt{5}}"],
        [r"5\sqrt{2}", r"2+\sqrt{5}"],
    ),
    (r"\frac{\pi}{6}", [r"\pi/6", r"\tfrac{1}{6}\pi"], [r"\frac{\pi}{3}", r"\frac{1}{6}"]),
    (r"16\pi", [r"16 \pi", r"\pi \cdot 16", r"4^2\pi"], ["16", r"8\pi"]),
    ("x^2+2x+1", ["(x+1)^2", "1+2x+x^2", r"x^{2} + 2 x + 1"], ["x^2+2x", "(x+2)^2", "y^2+2y+1"]),
    (r"\frac{x+1}{x-1}", ["(x+1)/(x-1)", r"\dfrac{1+x}{x-1}"], [r"\frac{x-1}{x+1}"]),
    ("(3,-2)", ["(3, -2)", r"\left(3,-2\right)"], ["(-2,3)", "(3,2)"]),
    ("[0,1)", ["[0, 1)", r"\left[0,1\right)"], ["(0,1]", "[0,2)"]),
    (r"(-\infty,2]", [r"\left(-\infty, 2\right]"], [r"(-\infty,2)", r"[2,\infty)"]),
    (r"\{1,2,3\}", [r"\{3, 2, 1\}", r"\left\{1,2,3\right\}"], [r"\{1,2\}", r"\{1,2,4\}"]),
    ("5x-7y", ["5x - 7y", "-7y+5x"], ["5x+7y", "7x-5y"]),
    ("y=2x+1", ["y = 2x + 1", "y=1+2x"], ["y=2x-1", "y = x + 2"]),
    (r"\log_2 3", [r"\log_{2}3", r"\log_2(3)"], [r"\log_3 2"]),
    ("2516_8", ["2516_{8}", "(2516)_8", "2516", "02516_8"], ["2516_9", "2517_8", "1358", "2516_1"]),
    ("1A3_{16}", ["1A3_16", "1A3"], ["1A3_{15}", "1B3_{16}", "419"]),
    ("10", ["1010_2", "10_{10}"], ["10_2", "10_{16}", "1010"]),
    ("x_1", ["x_{1}"], ["x_2", "x"]),
    ("e^{2}", ["e^2"], ["2e", "e^3"]),
    ("3+4i", ["4i+3", "3 + 4i"], ["3-4i", "4+3i"]),
    (r"\binom{5}{2}", ["10", r"{5 \choose 2}", "5 \\cdot 2"], [r"\binom{5}{1}", "20"]),
    (r"120^\circ", ["120", r"120^{\circ}", "120°", r"120\text{ degrees}"], [r"60^\circ", "1200"]),
    (r"\$12.50", ["12.50", "12.5", r"\$12.5", "12.50 dollars"], ["125", "12.05"]),
    ("1,000,000", ["1000000", "10^6", r"1{,}000{,}000", "1 million"], ["100000", "1,000"]),
    ("-\\frac{1}{2}", ["-0.5", r"\frac{-1}{2}", "-1/2"], ["1/2", "-2"]),
    (r"3\frac{1}{4}", ["13/4", "3.25", r"\frac{13}{4}"], ["3/4", "31/4"]),
    (r"\text{(B)}", ["B", "(B)", r"\textbf{B}", r"\mathrm{(B)}"], ["A", "(D)", "b = 1"]),
    (r"\text{Monday}", ["Monday", "monday", r"\textbf{Monday}"], ["Sunday", "Mon"]),
    (
        r"\begin{pmatrix}1\\-2\end{pmatrix}",
        [r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}", r"\begin{bmatrix}1\\-2\end{bmatrix}"],
        [r"\begin{pmatrix}-2\\1\end{pmatrix}", r"\begin{pmatrix}1&-2\end{pmatrix}"],
    ),
]


def test_own_spellings_and_near_misses() -> None:
    right = [(gold, one) for gold, same, _ in SPELLINGS for one in (gold, *same)]
    missed = [(gold, one) for gold, one in right if verify(gold, f"so \\boxed{{{one}}}.") != 1.0]
    near = [(gold, one) for gold, _, wrong in SPELLINGS for one in wrong]
    believed = [(gold, one) for gold, one in near if verify(gold, f"so \\boxed{{{one}}}.") != 0.0]
    assert not missed
    assert not believed


def math_verify_alone(gold: str, completion: str) -> float:
    """What math-verify says, with its own reading of the completion."""
    read = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    answer = math_verify.parse(completion, extraction_config=read)
    return float(math_verify.verify(math_verify.parse(f"${gold}$", extraction_config=read), answer))


@pytest.mark.parametrize(
    ("gold", "completion", "reward"),
    [
        ("18", r"first \boxed{17}, no: \boxed{18}", 1.0),
        ("18", r"\boxed{18} or rather \boxed{17", 0.0),
        ("18", r"\boxed{18}, put into \boxed{}", 1.0),
        ("18", "#### 17\n#### 18\n17 was wrong", 1.0),
        ("18", "18 million", 0.0),
        ("18", r"\boxed{18 eggs}", 1.0),
        ("-3", "the change is −3 degrees", 1.0),
        ("2.5", "#### 2 1/2", 1.0),
        ("1234567", r"\boxed{1\,234\,567}", 1.0),
        ("0.0000001", "0.0000002", 0.0),
        ("2/3", "0.666666", 1.0),
        ("Paris", "The answer is Paris.", 1.0),
    ],
)
def test_what_math_verify_alone_gets_wrong(gold: str, completion: str, reward: float) -> None:
    """Why the last answer is found, and a plain number read, by code of our own."""
    assert verify(gold, completion) == reward
    assert math_verify_alone(gold, completion) != reward


def test_math_verify_bounds_its_work_by_a_clock_that_threads_have_not() -> None:
    """Why expressions are compared in processes of their own."""
    caught: list[BaseException] = []

    def compare() -> None:
        try:
            math_verify.parse("$2^{10}$", parsing_timeout=5, raise_on_error=True)
        except ValueError as error:
            caught.append(error)

    thread = threading.Thread(target=compare)
    thread.start()
    thread.join()
    assert "doesn't support threaded environment" in str(caught)


@pytest.mark.parametrize(
    ("gold", "completion", "reward"),
    [
        ("50", "50%", 1.0),
        ("50", r"\boxed{50\%}", 1.0),
        ("50", "50 percent", 1.0),
        ("50%", "50", 1.0),
        ("50%", "0.5", 1.0),
        ("0.5", "50%", 1.0),
        ("0.5", "0.5%", 1.0),  # who asks for a percentage may have half a percent as answer
        ("50", "0.5", 0.0),
        ("50", "5000%", 1.0),
        ("50%", "5%", 0.0),
        ("50%", "0.5%", 0.0),
    ],
)
def test_a_percent_sign_reads_both_ways_only_where_one_side_has_it(
    gold: str, completion: str, reward: float
) -> None:
    assert verify(gold, completion) == reward


NUMBERS = st.integers(-(10**7), 10**7)


@given(NUMBERS, NUMBERS.filter(bool), NUMBERS, st.integers(1, 9))
def test_fractions_are_read_exactly(top: int, bottom: int, other: int, factor: int) -> None:
    value = Fraction(top, bottom)
    spelled = f"\\frac{{{top * factor}}}{{{bottom * factor}}}"
    read = read_number(spelled)
    assert read is not None
    assert read.value == value
    gold = read_number(str(other))
    assert gold is not None
    assert same_number(gold, read) == (value == other)


@given(st.integers(0, 9999), st.integers(-40, 40), st.integers(-40, 40))
@example(5, -5, -4)
def test_scientific_notation_is_read_exactly(digits: int, exponent: int, other: int) -> None:
    """Two that differ never count as one, however small both are."""
    factor, value = f"{digits // 1000}.{digits % 1000:03}", Fraction(digits, 1000)
    gold = read_number(f"{factor}e{exponent}")
    assert gold is not None
    assert gold.value == value * Fraction(10) ** exponent
    for form in (r"{} \times 10^{{{}}}", r"{}\cdot 10^{{{}}}", "{} x 10^{}", "{}*10**({})"):
        read = read_number(form.format(factor, other))
        assert read is not None
        assert same_number(gold, read) == (other == exponent or not digits)


@settings(max_examples=40, deadline=None)
@given(st.integers(-999, 999), st.integers(1, 99), st.integers(-999, 999), st.integers(1, 99))
@example(6, 2, 3, 1)
@example(-1, 2, 1, -2)
def test_the_fast_path_agrees_with_math_verify(a: int, b: int, c: int, d: int) -> None:
    gold, answer = f"\\frac{{{a}}}{{{b}}}", f"\\frac{{{c}}}{{{d}}}"
    fast = verify(gold, f"\\boxed{{{answer}}}")
    assert fast == float(symbolic.same_expression(gold, answer))
    assert verify(gold, f"\\boxed{{{gold}}}") == 1.0


@settings(deadline=None)
@given(st.text(max_size=300), st.text(max_size=20))
def test_any_text_is_scored(completion: str, gold: str) -> None:
    assert verify(gold, completion) in (0.0, 1.0)
    assert verify("18", completion) in (0.0, 1.0)


PIECES = st.sampled_from(
    (
        r"\boxed{ } { ( ) [ ] \frac \sqrt \left( \right) ^ _ ^{ $ \( \) #### 18 0 1 2 , . / - + = "
        r"< % ! \text{ \pi x y \begin{pmatrix} \end{pmatrix} & \\ \cup \in \cdot \leq \infty | and "
        r"\log \sin"
    ).split()
)


@settings(max_examples=60, deadline=None)
@given(st.lists(PIECES, max_size=16), st.sampled_from(["18", r"\sqrt{2}", "x+1", "(1,2)"]))
def test_any_broken_formula_is_scored(pieces: list[str], gold: str) -> None:
    assert verify(gold, "\\boxed{" + "".join(pieces) + "}") in (0.0, 1.0)
    assert verify(gold, " ".join(pieces)) in (0.0, 1.0)


BOMBS = [
    r"(1+\sqrt{2}+\sqrt{3})^{99999}",
    "9^{9^{9^9}}",
    "9^(9^(9^9))",
    "9^{99999999}",
    r"9^\frac{99999999}{1}",
    "((9^{999})^{999})^{999}",
    "(((3!)!)!)!",
    "(10^9)!",
    "9999!",
    r"\binom{10^9}{10^8}",
    r"\sum_{k=1}^{10^9} k!",
    r"\prod_{k=1}^{99999999} k",
    r"\gamma(10^9)",
    r"\operatorname{eye}(99999)",
    r"\exp(\exp(\exp(\exp(9))))",
    r"\sqrt[\frac{1}{99999999}]{9}",
    r"(a+b+c+d)^{99999}",
    r"\sin^{9999}(x)\cos^9(x)",
    "1" * 257,
    "9" * 41,
]


FEW = [BOMBS[number] for number in (0, 1, 5, 9, 12, 18)]


@pytest.mark.parametrize(
    "bomb", FEW + [pytest.param(one, marks=pytest.mark.slow) for one in BOMBS if one not in FEW]
)
def test_what_asks_for_endless_work_is_wrong_and_the_next_answer_is_judged(bomb: str) -> None:
    assert verify(r"\sqrt{3}", f"\\boxed{{{bomb}}}") == 0.0
    assert verify("18", f"\\boxed{{{bomb}}}") == 0.0
    assert verify("x^2-1", r"\boxed{(x-1)(x+1)}") == 1.0
    process = symbolic._processes._idle[-1]._process
    assert resource.prlimit(process.pid, resource.RLIMIT_AS)[0] == symbolic.MEMORY_BYTES


@pytest.mark.parametrize(
    "answer", ["2^{100}", r"\binom{20}{10}", "10!", r"\frac{n!}{2}", "e^{x^2}"]
)
def test_large_ordinary_answers_are_compared(answer: str) -> None:
    assert verify(f"1 \\cdot {answer}", f"\\boxed{{{answer}}}") == 1.0


def test_a_process_that_no_clock_interrupts_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert symbolic.same_expression("x^2-7^2", "(x-7)(x+7)")
    process = symbolic._processes._idle[-1]
    process._process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(symbolic, "DEADLINE_SECONDS", 0.2)
    assert not symbolic.same_expression("x^2-5^2", "(x-5)(x+5)")
    assert process._process.poll() == -signal.SIGKILL
    monkeypatch.undo()
    assert symbolic.same_expression("x^2-5^2", "(x-5)(x+5)")


def test_a_process_that_was_killed_costs_one_answer() -> None:
    assert symbolic.same_expression("x^2-7^2", "(x-7)(x+7)")
    symbolic._processes._idle[-1]._process.kill()
    assert not symbolic.same_expression("x^2-5^2", "(x-5)(x+5)")
    assert symbolic.same_expression("x^2-5^2", "(x-5)(x+5)")


def test_it_works_in_any_thread() -> None:
    pairs = [("18", r"\boxed{\sqrt{324}}"), ("x^2-1", r"\boxed{(x+1)(x-1)}"), ("18", "#### 17")] * 3
    results: list[list[float]] = []

    def work() -> None:
        results.append([verify(gold, text) for gold, text in pairs])

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[1.0, 1.0, 0.0] * 3] * 3


def test_the_verdict_on_a_long_completion_looks_at_its_end() -> None:
    ramble = "then 3 of the 18 eggs are $5 each, " * 20_000
    assert verify("18", ramble + "which leaves 18.") == 1.0
    assert verify("18", ramble + "which leaves 17.") == 0.0
    assert verify("18", r"\boxed{" * 20_000) == 0.0


def test_extraction_keeps_the_spelling() -> None:
    assert extract_answer(r"so \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert extract_answer("it is -$1,234.50 in all") == "-$1,234.50"
    assert extract_answer("nothing here") is None
    assert extract_answer("The answer is **blue**.", numeric=False) == "**blue**."
    tagged = "I see 3.\n<answer>the {}</answer>\nThat took 2 lines."
    assert extract_answer(tagged.format("sky"), numeric=False) == "the sky"
    assert extract_answer(tagged.format("7")) == "7"
    assert extract_answer(tagged.format(r"\boxed{8}")) == "8"


def test_importing_it_is_light() -> None:
    code = (
        "import sys, m2flow.workloads.reasoning.tasks, m2flow.workloads.reasoning.data\n"
        "from m2flow.rewards import math_reward\n"
        "assert math_reward('', 'it is 18', (), {'answer': '18'}) == 1.0\n"
        "heavy = {'math_verify', 'sympy', 'reasoning_gym', 'torch', 'ray', 'transformers'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_tags_without_an_end_cost_no_more_than_other_text() -> None:
    """Each was looked for to the end of the text: a minute for a policy that repeats one."""
    assert verify("18", "<answer>" * 20_000) == 0.0
    assert gym_answer("<answer>" * 20_000) is not None
    assert format_reward("", "<think>" + "</think><answer>" * 20_000, [], {}) == 0.0
    nested = "<answer>7</answer> or <answer>8<answer>9</answer> and <answer>10"
    assert gym_answer(nested) == "8<answer>9"
