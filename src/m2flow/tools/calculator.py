"""A calculator: numbers, parentheses, `+ - * / // % **` and a few functions, with bounded work.

The formula is Python's syntax, read by `ast` and never executed. Whole numbers are exact, and cut
short where they would have thousands of digits.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from m2flow.tools.tool import ToolError, schema, text_argument

MAX_CHARACTERS, MAX_BITS = 1000, 4096

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def _rounded(value: float, digits: int | None = None) -> float:
    """`round`, which for whole numbers computes ten to the power of the digits."""
    if digits is not None and abs(digits) > MAX_CHARACTERS:
        raise ToolError("too many digits")
    return round(value, digits)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "round": _rounded, "min": min, "max": max, "sqrt": math.sqrt, "exp": math.exp,
    "log": math.log, "log10": math.log10, "sin": math.sin, "cos": math.cos, "tan": math.tan,
    "floor": math.floor, "ceil": math.ceil, "gcd": math.gcd,
}  # fmt: skip
_CONSTANTS = {"pi": math.pi, "e": math.e}


class Calculator:
    """Says what a formula comes to."""

    name = "calculator"
    description = "Compute a formula with numbers, such as (3 + 4) * 12 / 5 or sqrt(2) ** 3."
    parameters = schema(formula="the formula")

    def call(self, arguments: Mapping[str, Any], seconds: float) -> str:
        """The value as text; formulas are bounded, so that no call takes long."""
        return calculate(text_argument(arguments, "formula"))

    def close(self) -> None:
        """There is nothing to let go of."""


def calculate(formula: str) -> str:
    """The value of a formula: a whole number exactly, another one with 12 digits.

    Raises:
        ToolError: it is no formula, has no value, or one that is too large.
    """
    if len(formula) > MAX_CHARACTERS:
        raise ToolError(f"formula of more than {MAX_CHARACTERS} characters")
    try:
        value = _value(ast.parse(formula.strip(), mode="eval").body)
    except SyntaxError:
        raise ToolError("no formula") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (ArithmeticError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ToolError(str(error) or type(error).__name__) from None
    if isinstance(value, float):
        whole = value.is_integer() and abs(value) < 1e15
        return str(int(value)) if whole else f"{value:.12g}"
    return str(value)


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            first, second = _value(left), _value(right)
            bits = first.bit_length() if isinstance(first, int) else 0
            if isinstance(op, ast.Pow) and bits * second > 2 * MAX_BITS:
                raise ToolError("the value is too large")
            return _bounded(_BINARY[type(op)](first, second))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _bounded(_UNARY[type(op)](_value(operand)))
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*map(_value, args)))
    raise ToolError(f"cannot compute {ast.unparse(node)}")


def _bounded(value: Any) -> int | float:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ToolError("the value is too large")
    if not isinstance(value, int) and not (isinstance(value, float) and math.isfinite(value)):
        raise ToolError("there is no such value")
    return value
