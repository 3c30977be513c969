"""Colours and type of every picture and page, once for light and once for dark.

Promises: one set of names (CSS variables), two sets of values, chosen by the reader's own setting;
nothing is fetched from anywhere. Series colours differ in lightness as well as in hue, and text on
them is readable in both schemes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

SANS = (
    'ui-sans-serif, system-ui, -apple-system, "Segoe UI", Inter, Roboto, "Helvetica Neue", '
    '"Noto Sans", "DejaVu Sans", Arial, sans-serif'
)
MONO = 'ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace'

LIGHT: Mapping[str, str] = {
    "page": "#f5f6f8",
    "surface": "#ffffff",
    "ink": "#171a21",
    "muted": "#616977",
    "faint": "#8d95a3",
    "line": "#e2e5ea",
    "grid": "#eceef2",
    "track": "#f1f3f6",
    "hatch": "#dde1e8",
    "switch": "#a3abba",
    "transfer": "#79b8c9",
    "publish": "#d9799f",
    "wait": "#d9dde5",
    "good": "#187a45",
    "good-back": "#e7f5ec",
    "warn": "#96580a",
    "warn-back": "#fdf3e1",
    "bad": "#b3261e",
    "bad-back": "#fcebe9",
    "on-series": "#ffffff",
}
DARK: Mapping[str, str] = {
    "page": "#0e1116",
    "surface": "#161b22",
    "ink": "#e6e9ef",
    "muted": "#9aa4b2",
    "faint": "#6f7987",
    "line": "#2a313c",
    "grid": "#222932",
    "track": "#1c222b",
    "hatch": "#2b333e",
    "switch": "#667184",
    "transfer": "#4b8fa1",
    "publish": "#c0648b",
    "wait": "#343d4a",
    "good": "#5fce90",
    "good-back": "#12281d",
    "warn": "#e6b35c",
    "warn-back": "#2b2212",
    "bad": "#f48a82",
    "bad-back": "#311918",
    "on-series": "#0e1116",
}
SERIES_LIGHT = (
    "#2f66d0",
    "#c9621a",
    "#0f8a74",
    "#7a4fc4",
    "#b98a0b",
    "#c23b6c",
    "#1b84ad",
    "#5d6877",
)
SERIES_DARK = (
    "#7ba6ff",
    "#f2a063",
    "#46c9ae",
    "#b59bf6",
    "#dcbb4c",
    "#f188ab",
    "#66c5ea",
    "#a3adba",
)
NUM_SERIES = len(SERIES_LIGHT)


def variables(selector: str) -> str:
    """A style sheet that gives `selector` all variables, by the reader's colour scheme."""
    light = _declarations({**LIGHT, **_numbered(SERIES_LIGHT)})
    dark = _declarations({**DARK, **_numbered(SERIES_DARK)})
    return (
        f"{selector}{{color-scheme:light dark;{light}}}\n"
        f"@media(prefers-color-scheme:dark){{{selector}{{{dark}}}}}\n"
    )


def series_colour(index: int) -> str:
    """The CSS colour of the series with this index; they repeat after `NUM_SERIES`."""
    return f"var(--series-{index % NUM_SERIES})"


def stage_colours(stages: Iterable[str]) -> dict[str, str]:
    """A colour for each stage, in the order in which the stages come."""
    return {stage: series_colour(index) for index, stage in enumerate(dict.fromkeys(stages))}


def _numbered(colours: Sequence[str]) -> dict[str, str]:
    return {f"series-{index}": colour for index, colour in enumerate(colours)}


def _declarations(values: Mapping[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in values.items())
