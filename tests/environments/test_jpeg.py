"""Pictures through JPEG, against what TensorFlow makes of them."""

from __future__ import annotations

import hashlib
import sys

import numpy as np
import pytest

from m2flow.environments.jpeg import check_jpeg, through_jpeg
from m2flow.errors import UserError

TENSORFLOW = {
    "waves": "6a552ca7f217f9a4",
    "blocks": "a20a732eff1d7675",
    "noise": "da2e32533bb0228d",
    "ramp": "6ff5028eb4d6256b",
}
"""SHA-256 of `tf.io.decode_image(tf.image.encode_jpeg(picture))`, TensorFlow 2.21 on x86-64."""


def picture(name: str) -> np.ndarray:
    y, x = np.mgrid[0:64, 0:96]
    drawn = np.zeros((64, 96, 3))
    match name:
        case "waves":
            waves = [128 + 100 * np.sin(x / 7 + k) * np.cos(y / 5 - k) for k in range(3)]
            drawn = np.stack(waves, -1)
        case "blocks":
            drawn[10:30, 15:70] = 220, 30, 40
            drawn[25:60, 5:40] = 10, 90, 240
        case "noise":
            drawn = np.random.default_rng(0).integers(0, 256, (64, 96, 3))
        case "ramp":
            drawn = np.stack([2 * x, 3 * y, x + y], -1)
    return drawn.astype(np.uint8)


@pytest.mark.parametrize("name", TENSORFLOW)
def test_to_the_bit_as_tensorflow(name):
    pytest.importorskip("simplejpeg", reason='needs the extra "libero"')
    found = through_jpeg(picture(name))
    assert (found.shape, found.dtype) == ((64, 96, 3), np.uint8)
    assert hashlib.sha256(found.tobytes()).hexdigest()[:16] == TENSORFLOW[name]
    turned = picture(name)[::-1, ::-1]  # a view with steps of its own, as simulators' pictures are
    assert np.array_equal(through_jpeg(turned), through_jpeg(turned.copy()))


def test_a_missing_package_is_said_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(UserError, match=r"environment\.options\.jpeg: needs .*simplejpeg.*pip"):
        check_jpeg()
