"""Colours: text can be read on what it stands on, in both schemes; a worker has one hue."""

from __future__ import annotations

import pytest

from m2flow.observe.theme import COLOURS, SERIES, SHADES, all_colours, stage_colours

ENOUGH = 4.5
"""Contrast that WCAG 2.2 asks for of text of this size (criterion 1.4.3)."""

TEXT_ON = [
    *((text, ground) for text in ("ink", "muted", "faint") for ground in ("page", "surface")),
    *((tone, f"{tone}-back") for tone in ("good", "warn", "bad")),
    *(("ink", f"{tone}-back") for tone in ("good", "warn", "bad")),
    ("muted", "track"),
    *(("on-series", name) for name in all_colours() if name.startswith("series-")),
]


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb` (WCAG 2.2)."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(("text", "ground"), TEXT_ON)
def test_text_has_contrast(text: str, ground: str, scheme: int) -> None:
    colours = all_colours()
    both = luminance(colours[text][scheme]), luminance(colours[ground][scheme])
    assert (max(both) + 0.05) / (min(both) + 0.05) >= ENOUGH


def test_a_worker_has_a_hue_and_each_of_its_stages_a_shade() -> None:
    colours = stage_colours(["generator.generate", "learner.logprobs", "mean", "learner.train"])
    assert colours == {
        "generator.generate": "var(--series-0)",
        "learner.logprobs": "var(--series-1)",
        "learner.train": "var(--series-1b)",
        "mean": "var(--series-2)",
    }


def test_colours_differ() -> None:
    colours = all_colours()
    assert len(colours) == len(COLOURS) + len(SERIES) * len(SHADES)
    for scheme in (0, 1):
        series = [pair[scheme] for name, pair in colours.items() if name.startswith("series-")]
        assert len(set(series)) == len(series)
