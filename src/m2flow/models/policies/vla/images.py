"""Pictures as OpenVLA's two vision towers take them.

A picture is resized without keeping its proportions: bicubic with antialiasing, as Pillow and the
checkpoints' own processor do, or by Lanczos' filter, as published evaluations on LIBERO do with
tf.image.resize (they pass pictures through JPEG before, which is the environment's to do:
`environments.jpeg`). It is optionally cropped to the middle 90 % of its area and resized again
(what fine-tuned checkpoints saw on average, since they were trained on random crops of that area),
and normalised once per tower.

Legend: B batch, H, W height and width.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

# Of `preprocessor_config.json` in openvla/openvla-7b: ImageNet's for DINOv2, rounded to bfloat16
# there, and one half for SigLIP.
DINO_MEAN = (0.484375, 0.455078125, 0.40625)
DINO_STD = (0.228515625, 0.2236328125, 0.224609375)
SIGLIP_MEAN = (0.5, 0.5, 0.5)
SIGLIP_STD = (0.5, 0.5, 0.5)
CROPPED_AREA = 0.9
LOBES = 3
"""Of Lanczos' filter."""

Resize = Literal["bicubic", "lanczos"]


def preprocess(
    image_BHW3: Tensor, size: int, centre_crop: bool, resize: Resize = "bicubic"
) -> Tensor:
    """Return float32 [B, 6, size, size]: DINOv2's three channels, then SigLIP's.

    Args:
        image_BHW3: uint8.
        size: side in pixels.
        centre_crop: crop to the middle 90 % of the area; for checkpoints that were fine-tuned
            with image augmentation (all LIBERO ones), not for openvla-7b itself.
        resize: see the module docstring.
    """
    pixels = image_BHW3.permute(0, 3, 1, 2).double()
    if resize == "lanczos":
        pixels = _lanczos(pixels, size)
    else:  # the width before the height with rounding in between: as Pillow does it
        pixels = _resize(pixels, (pixels.shape[2], size))
        pixels = _resize(pixels, (size, size))
    pixels = pixels.float() / 255.0
    if centre_crop:
        pixels = _crop_middle(pixels, CROPPED_AREA)
    normed = [
        (pixels - _channels(mean, pixels)) / _channels(std, pixels)
        for mean, std in ((DINO_MEAN, DINO_STD), (SIGLIP_MEAN, SIGLIP_STD))
    ]
    return torch.cat(normed, dim=1)


def _resize(pixels: Tensor, shape: tuple[int, int]) -> Tensor:
    if pixels.shape[-2:] == shape:
        return pixels
    resized = F.interpolate(pixels, shape, mode="bicubic", antialias=True)
    return (resized + 0.5).floor().clamp(0, 255)


def _lanczos(pixels_B3HW: Tensor, size: int) -> Tensor:
    rows, columns = (_filter(length, size).to(pixels_B3HW) for length in pixels_B3HW.shape[-2:])
    return (rows @ pixels_B3HW @ columns.T).round().clamp(0, 255)


@lru_cache
def _filter(length: int, size: int) -> Tensor:
    """Weights of so many pixels in each of `size`, float64 [size, length]; rows sum to 1."""
    if length == size:
        return torch.eye(size, dtype=torch.float64)
    step = length / size
    wide = max(step, 1.0)  # antialiasing: the filter grows with the step
    centres = (torch.arange(size, dtype=torch.float64) + 0.5) * step
    places = torch.arange(length, dtype=torch.float64) + 0.5
    away = (places - centres[:, None]) / wide
    weights = torch.sinc(away) * torch.sinc(away / LOBES) * (away.abs() < LOBES)
    return weights / weights.sum(1, keepdim=True)


def _crop_middle(pixels_B3HW: Tensor, area: float) -> Tensor:
    """Crop to that part of the area and resize back, bilinear, corners on corners.

    The crop's corners need not lie on pixels; values between pixels are interpolated. The result
    is a picture again, of 256 levels, cut as TensorFlow's `convert_image_dtype` cuts them.
    """
    side = area**0.5
    theta = pixels_B3HW.new_tensor([[side, 0.0, 0.0], [0.0, side, 0.0]])
    batch = pixels_B3HW.shape[0]
    grid = F.affine_grid(theta.expand(batch, 2, 3), list(pixels_B3HW.shape), align_corners=True)
    cropped = F.grid_sample(pixels_B3HW, grid, align_corners=True)
    return (cropped.clamp(0, 1) * 255.5).floor() / 255


def _channels(values: tuple[float, ...], like: Tensor) -> Tensor:
    return like.new_tensor(values).view(1, 3, 1, 1)
