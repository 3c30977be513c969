"""Colours and type of every picture and page, once for light and once for dark.

Promises: one set of names (CSS variables), two sets of values, chosen by the reader's own setting;
nothing is fetched from anywhere. Series colours differ in lightness as well as in hue, and text on
them is readable in both schemes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

SANS = (
    'ui-sans-serif, system-ui, -apple-system, "Segoe UI", Inter, Roboto, "Helvetica Neue", '
    '"Noto Sans", "DejaVu Sans", Arial, sans-serif'
)
MONO = 'ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace'

COLOURS: Mapping[str, tuple[str, str]] = {
    "page": ("#f5f6f8", "#0e1116"),
    "surface": ("#ffffff", "#161b22"),
    "ink": ("#171a21", "#e6e9ef"),
    "muted": ("#616977", "#9aa4b2"),
    "faint": ("#69717f", "#8a94a3"),
    "line": ("#e2e5ea", "#2a313c"),
    "grid": ("#eceef2", "#222932"),
    "track": ("#f1f3f6", "#1c222b"),
    "hatch": ("#dde1e8", "#2b333e"),
    "switch": ("#a3abba", "#667184"),
    "transfer": ("#79b8c9", "#4b8fa1"),
    "publish": ("#d9799f", "#c0648b"),
    "wait": ("#d9dde5", "#343d4a"),
    "good": ("#187a45", "#5fce90"),
    "good-back": ("#e7f5ec", "#12281d"),
    "warn": ("#96580a", "#e6b35c"),
    "warn-back": ("#fdf3e1", "#2b2212"),
    "bad": ("#b3261e", "#f48a82"),
    "bad-back": ("#fcebe9", "#311918"),
    "on-series": ("#ffffff", "#0e1116"),
}
"""Each variable in the light scheme, and in the dark one."""

SERIES = (
    ("#2f66d0", "#7ba6ff"),
    ("#c9621a", "#f2a063"),
    ("#0f8a74", "#46c9ae"),
    ("#7a4fc4", "#b59bf6"),
    ("#b98a0b", "#dcbb4c"),
    ("#c23b6c", "#f188ab"),
    ("#1b84ad", "#66c5ea"),
    ("#5d6877", "#a3adba"),
)


def variables(selector: str) -> str:
    """A style sheet that gives `selector` all variables, by the reader's colour scheme."""
    named = {**COLOURS, **{f"series-{index}": pair for index, pair in enumerate(SERIES)}}
    light, dark = (
        "".join(f"--{name}:{pair[scheme]};" for name, pair in named.items()) for scheme in (0, 1)
    )
    return (
        f"{selector}{{color-scheme:light dark;{light}}}\n"
        f"@media(prefers-color-scheme:dark){{{selector}{{{dark}}}}}\n"
    )


def series_colour(index: int) -> str:
    """The CSS colour of the series with this index; colours repeat after the last."""
    return f"var(--series-{index % len(SERIES)})"


def stage_colours(stages: Iterable[str]) -> dict[str, str]:
    """A colour for each stage, in the order in which the stages come."""
    return {stage: series_colour(index) for index, stage in enumerate(dict.fromkeys(stages))}
