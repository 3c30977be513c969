"""Films of episodes, for people: an animated WebP, and a strip of frames where nothing moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING

from m2flow.observe.films import Film

if TYPE_CHECKING:
    from torch import Tensor

FRAMES = 120
"""Of a film at most; of longer episodes so many are picked evenly."""

STRIP_FRAMES = 8
"""Of a strip at most."""

FRAME_MILLISECONDS = 60
QUALITY = 60


class Pictures:
    """Pictures of an episode as it goes on: from the first to the last, evenly thinned out."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._every, self._seen = 1, 0
        self._last: Tensor | None = None

    def add(self, picture: Tensor) -> None:
        """The next picture, uint8 [H, W, 3]."""
        if self._seen % self._every == 0:
            self._kept.append(picture)
            if len(self._kept) >= 2 * FRAMES:
                self._kept, self._every = self._kept[::2], 2 * self._every
        self._last, self._seen = picture, self._seen + 1

    def all(self) -> list[Tensor]:
        """Pictures that are kept, the last one among them."""
        if self._last is None or self._kept[-1] is self._last:
            return list(self._kept)
        return [*self._kept, self._last]


def filmed(
    pictures: Sequence[Tensor] | None, episode: Mapping[str, float] | None, instruction: str = ""
) -> Film | None:
    """The film of an episode; None where there are no pictures, or no Pillow to write them.

    Args:
        pictures: uint8 [H, W, 3] each; all are shown in the size of the first.
        episode: its figures; None for one that did not come to an end.
        instruction: what it was to do.
    """
    if not pictures or episode is None:
        return None
    try:
        from PIL import Image
    except ImportError:
        return None
    frames = [Image.fromarray(pictures[n].numpy()) for n in _evenly(len(pictures), FRAMES)]
    first, *rest = [
        one if one.size == frames[0].size else one.resize(frames[0].size) for one in frames
    ]
    film = BytesIO()
    first.save(
        film, "WEBP", save_all=True, append_images=rest, duration=FRAME_MILLISECONDS, loop=0,
        quality=QUALITY,
    )  # fmt: skip
    shown = [(first, *rest)[n] for n in _evenly(len(frames), STRIP_FRAMES)]
    strip = Image.new("RGB", (first.width * len(shown), first.height))
    for place, one in enumerate(shown):
        strip.paste(one, (place * first.width, 0))
    still = BytesIO()
    strip.save(still, "WEBP", quality=QUALITY)
    outcome = "solved" if episode["success_once"] else "unsolved"
    words = (outcome, instruction, f"return {episode['return']:.3g}")
    return Film(film.getvalue(), still.getvalue(), " · ".join(filter(None, words)))


def _evenly(count: int, most: int) -> list[int]:
    """So many of `count` places at most, evenly picked, the first and the last among them."""
    picked = min(count, most)
    return [n * (count - 1) // max(1, picked - 1) for n in range(picked)]
