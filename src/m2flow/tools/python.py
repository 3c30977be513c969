"""Python in the sandbox of `m2flow.rewards.sandbox`: what a program prints is its answer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from m2flow.errors import UserError
from m2flow.rewards.sandbox import LIMITS, find_way, run_python
from m2flow.tools.tool import ToolError, schema, text_argument

OUTPUT_BYTES = 64 << 10
"""Of what a program writes; one that writes more is told so."""


class PythonTool:
    """Runs a program: no network, no files but a scratch folder, bounded in all else.

    Raises:
        UserError: no sandbox can be made on this machine.
    """

    name = "python"
    description = "Run a Python program without network. What it prints comes back."
    parameters = schema(code="the program")

    def __init__(self) -> None:
        try:
            find_way()
        except UserError as error:
            raise UserError(error.message, key="tools", value="python", hint=error.hint) from None

    def call(self, arguments: Mapping[str, Any], seconds: float) -> str:
        """What the program has printed, and the last line of its error if it ended by one."""
        source = text_argument(arguments, "code")
        limits = replace(
            LIMITS,
            seconds=0.9 * seconds,
            cpu_seconds=max(LIMITS.cpu_seconds, math.ceil(0.9 * seconds)),
            output_bytes=OUTPUT_BYTES,
        )
        outcome = run_python(source, limits=limits)
        if outcome.why:
            raise ToolError(f"the program {outcome.why}")
        if not outcome.ok:
            lines = outcome.stderr.strip().splitlines()
            raise ToolError(outcome.stdout + (lines[-1] if lines else "the program was ended"))
        return outcome.stdout

    def close(self) -> None:
        """A program ends with its call."""
