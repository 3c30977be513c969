"""What `m2flow eval` prints of the figures that a workload gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from m2flow.errors import UserError

Figures = Mapping[str, Any]

SHARES = ("accuracy", "maj@", "pass@", "success")
"""How names of figures begin that are shares of 1."""

FAILED = "failed_share"
"""The share of answers that could not be scored: in a table where there are such."""


def chat_options(said: Sequence[str] | None) -> dict[str, Any] | None:
    """What `--chat-option KEY=VALUE` says, with values as in a recipe; None where nothing is said.

    Raises:
        UserError: one has no name or no value, or its value is not YAML.
    """
    from m2flow.observe.yaml_text import plain
    from m2flow.workloads.common.reading import parsed

    options = {}
    for one in said or ():
        key, equals, value = one.partition("=")
        if not key or not equals:
            raise UserError(
                "is no variable of a chat template",
                key="--chat-option",
                value=one,
                expected="KEY=VALUE, such as enable_thinking=false",
            )
        options[key] = plain(parsed(value, f"--chat-option {key}"))
    return options if said else None


def figure_lines(figures: Figures) -> list[str]:
    """A figure a line, for people."""
    lines = [str(figures["about"])]
    for name, value in figures.items():
        if name.startswith(SHARES):
            lines.append(f"  {name:<16} {value:.4f}")
        elif isinstance(value, float) and name != "temperature":
            lines.append(f"  {name:<16} {value:.2f}")
    return lines


def markdown_table(found: Sequence[Figures]) -> list[str]:
    """A row for each data set and one for their mean, in per cent, as papers print them.

    A cell is empty where a data set has no such figure; so is the mean then.
    """
    every = dict.fromkeys(name for one in found for name in one)
    names = [name for name in every if name.startswith(SHARES) and not _is_bound(name)]
    names += [FAILED] if any(one.get(FAILED) for one in found) else []
    rows = [
        [called, *(_cell(one, name) for name in names)]
        for called, one in zip(_called(found), found, strict=True)
    ]
    if len(found) > 1:
        means = {
            name: sum(one[name] for one in found) / len(found)
            for name in names
            if all(name in one for one in found)
        }
        rows.append(["mean", *(_cell(means, name) for name in names)])
    header = ["data", *names]
    return [_row(header), _row(["---", *["---:"] * len(names)]), *map(_row, rows)]


def _is_bound(name: str) -> bool:
    return name.endswith(("_low", "_high"))


def _called(found: Sequence[Figures]) -> list[str]:
    """What each data set is called: its file's stem, with as much of the path as tells it apart."""
    from m2flow.observe.formatting import told_apart

    files = [Path(str(one["data"])) for one in found if one.get("data") is not None]
    stems = [file.parent / file.stem for file in files]
    names = iter(told_apart(stems if len(set(stems)) == len(set(files)) else files))
    return [str(one["about"]) if one.get("data") is None else next(names) for one in found]


def _cell(figures: Figures, name: str) -> str:
    """A share with half the width of its interval, where it has one; empty without a share."""
    if name not in figures:
        return ""
    value = f"{100 * figures[name]:.2f}"
    low, high = figures.get(f"{name}_low"), figures.get(f"{name}_high")
    return value if low is None or high is None else f"{value} ± {50 * (high - low):.2f}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
