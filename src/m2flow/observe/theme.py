"""Colours and type of every picture and page, once for light and once for dark.

Promises: one set of names (CSS variables), two sets of values, chosen by the reader's own setting
(on paper the light one); nothing is fetched from anywhere. A worker has a hue, and each further
stage of it a shade of that hue; text on all of them is readable in both schemes.
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
    "switch": ("#828c9f", "#7b879b"),
    "transfer": ("#79b8c9", "#4b8fa1"),
    "publish": ("#d9799f", "#c0648b"),
    "wait": ("#c7cedb", "#3f4959"),
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
    ("#b9540f", "#f2a063"),
    ("#0c806b", "#46c9ae"),
    ("#7a4fc4", "#b59bf6"),
    ("#94700a", "#dcbb4c"),
    ("#c23b6c", "#f188ab"),
    ("#1778a0", "#66c5ea"),
    ("#5d6877", "#a3adba"),
)
SHADES = (0.0, 0.3, 0.5)
"""How far each shade of a series colour lies towards the ink, whose contrast it has then too."""


def all_colours() -> dict[str, tuple[str, str]]:
    """Each variable's value in the light scheme, and in the dark one."""
    found = dict(COLOURS)
    (light_ink, dark_ink) = COLOURS["ink"]
    for index, (light, dark) in enumerate(SERIES):
        for shade, share in enumerate(SHADES):
            mixed = _mixed(light, light_ink, share), _mixed(dark, dark_ink, share)
            found[_series_name(index, shade)] = mixed
    return found


def variables(selector: str) -> str:
    """A style sheet that gives `selector` all variables, by the reader's colour scheme."""
    light, dark = (
        "".join(f"--{name}:{pair[scheme]};" for name, pair in all_colours().items())
        for scheme in (0, 1)
    )
    return (
        f"{selector}{{color-scheme:light dark;{light}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{{selector}{{{dark}}}}}\n"
    )


def series_colour(index: int, shade: int = 0) -> str:
    """The CSS colour of the series with this index; colours repeat after the last, shades too."""
    return f"var(--{_series_name(index % len(SERIES), shade % len(SHADES))})"


def _series_name(index: int, shade: int) -> str:
    return f"series-{index}" + ("", "b", "c")[shade]


def stage_colours(stages: Iterable[str]) -> dict[str, str]:
    """A colour for each stage: a hue for its worker, in the order in which workers come."""
    workers: dict[str, list[str]] = {}
    for stage in dict.fromkeys(stages):
        workers.setdefault(stage.partition(".")[0], []).append(stage)
    return {
        stage: series_colour(index, shade)
        for index, own in enumerate(workers.values())
        for shade, stage in enumerate(own)
    }


def _mixed(colour: str, other: str, share: float) -> str:
    """Mix two colours: with share 0 the first one, with share 1 the other."""
    pairs = ((int(one[i : i + 2], 16) for one in (colour, other)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)
