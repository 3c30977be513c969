"""Films of evaluation episodes: what one is, its files in a run directory, its card in the report.

Film N of step S is `step_S_N.webp`, which moves; `strip_S_N.webp`, pictures of it side by side,
for where nothing moves; and `title_S_N.txt`, one line. A film may lack the other two.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from m2flow.observe.jsonl import write_atomically


@dataclass(frozen=True, slots=True)
class Film:
    """An episode, for people.

    Attributes:
        moving: an animated WebP.
        strip: evenly picked frames of it side by side, a still WebP.
        title: how the episode ended, in a few words.
    """

    moving: bytes
    strip: bytes
    title: str


def write_films(folder: Path, step: int, films: Sequence[Film]) -> list[Path]:
    """Write the films of an evaluation into a folder that is there.

    Returns:
        The files that move.
    """
    written = []
    for number, film in enumerate(films):
        name = f"{step:06d}_{number}"
        write_atomically(folder / f"title_{name}.txt", film.title.encode())
        write_atomically(folder / f"strip_{name}.webp", film.strip)
        written.append(folder / f"step_{name}.webp")
        write_atomically(written[-1], film.moving)
    return written


def film_cards(folder: Path) -> str:
    """Cards of the films of the first and of the last evaluation, as HTML; "" where none are."""
    found = (film.stem.removeprefix("step_") for film in folder.glob("step_*.webp"))
    names = sorted(name for name in found if name.partition("_")[0].isdecimal())
    steps = [name.partition("_")[0] for name in names]
    shown = [name for name, step in zip(names, steps, strict=True) if step in (steps[0], steps[-1])]
    return "".join(_card(folder, name) for name in shown)


def _card(folder: Path, name: str) -> str:
    told, strip = folder / f"title_{name}.txt", folder / f"strip_{name}.webp"
    title = escape(told.read_text("utf-8", "replace") if told.is_file() else "an episode")
    pictures = _picture(folder / f"step_{name}.webp", title)
    if strip.is_file():
        pictures += _picture(strip, f"frames of it: {title}")
    step = int(name.partition("_")[0])
    return (
        f'<article class="card"><header><h3>step {step}</h3></header><p>{title}</p>'
        f"{pictures}</article>"
    )


def _picture(file: Path, alt: str) -> str:
    content = base64.b64encode(file.read_bytes()).decode()
    return f'<img alt="{alt}" style="width:100%" src="data:image/webp;base64,{content}">'
