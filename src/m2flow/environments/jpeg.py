"""Pictures as they come out of JPEG, to the bit as TensorFlow writes and reads it.

The pictures of published data sets were stored so, and published evaluations pass what a simulator
draws through it. Pillow writes the same bytes as `tf.image.encode_jpeg`; `tf.io.decode_image` reads
them by libjpeg's faster integer transform, which Pillow has no switch for, and simplejpeg has.
"""

from __future__ import annotations

import importlib
import io

import numpy as np

from m2flow.environments.environment import Array
from m2flow.errors import UserError

QUALITY = 95
"""The default of `tf.image.encode_jpeg`, which halves the colours' resolution (4:2:0)."""


def through_jpeg(picture: Array) -> Array:
    """Write a picture as JPEG and read it again.

    Args:
        picture: uint8 [H, W, 3].

    Returns:
        uint8 [H, W, 3].
    """
    import simplejpeg
    from PIL import Image

    written = io.BytesIO()
    image = Image.fromarray(np.ascontiguousarray(picture))
    image.save(written, "JPEG", quality=QUALITY, subsampling="4:2:0")
    read: Array = simplejpeg.decode_jpeg(
        written.getvalue(), "RGB", fastdct=True, fastupsample=False
    )
    return read


def check_jpeg() -> None:
    """Refuse, before a picture is drawn, an interpreter that cannot do it.

    Raises:
        UserError: simplejpeg or Pillow is missing.
    """
    try:
        for name in ("simplejpeg", "PIL.Image"):
            importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"needs a package that is missing ({error})",
            key="environment.options.jpeg",
            value=True,
            hint="run: pip install 'simplejpeg>=1.7' pillow (the extra libero brings both)",
        ) from error
