"""Films of episodes, for people: pictures as one animated WebP, which browsers show."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

FRAMES = 120
"""Of a film at most; of longer episodes so many are picked evenly."""

FRAME_MILLISECONDS = 60


def encoded(pictures: Sequence[Tensor] | None) -> bytes:
    """The film; empty where there are no pictures, or no Pillow to write them.

    Args:
        pictures: uint8 [H, W, 3] each; all are shown in the size of the first.
    """
    if not pictures:
        return b""
    try:
        from PIL import Image
    except ImportError:
        return b""
    every = max(1, len(pictures) / FRAMES)
    chosen = sorted({min(len(pictures) - 1, int(n * every)) for n in range(FRAMES)})
    first, *rest = [Image.fromarray(pictures[n].numpy()) for n in chosen]
    file = BytesIO()
    first.save(
        file,
        "WEBP",
        save_all=True,
        append_images=[one if one.size == first.size else one.resize(first.size) for one in rest],
        duration=FRAME_MILLISECONDS,
        loop=0,
        quality=60,
    )
    return file.getvalue()
