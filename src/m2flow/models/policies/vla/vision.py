"""The fused vision towers of OpenVLA: DINOv2 and SigLIP by timm, their patches side by side.

Each tower gives the patches of its second-to-last block, without its final norm; the features of
both are joined for each patch. Parameter names are those of the published checkpoints, which call
the first tower `featurizer`, the second `fused_featurizer`, and timm's `gamma` of a layer scale
`scale_factor`.

Legend: B batch, P patches, C channels of both towers together.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from m2flow.errors import UserError
from m2flow.models.policies.torchvision_import import import_torchvision
from m2flow.models.policies.vla.config import VLAConfig

_CHANNELS = 3


class LayerScale(nn.Module):
    """A learned factor per channel, under the name that the checkpoints give it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class VisionBackbone(nn.Module):
    """Both towers over one or several cameras."""

    def __init__(self, config: VLAConfig) -> None:
        super().__init__()
        towers = [
            _tower(name, config.image_size, dict(overrides))
            for name, overrides in zip(config.timm_model_ids, config.timm_overrides, strict=True)
        ]
        self.featurizer, self.fused_featurizer = towers
        self.channels = sum(tower.embed_dim for tower in towers)
        self.patches = towers[0].patch_embed.num_patches

    @property
    def towers(self) -> tuple[Any, Any]:
        """DINOv2 and SigLIP, of timm."""
        return self.featurizer, self.fused_featurizer

    def forward(self, pixels: Tensor) -> Tensor:
        """Return [B, cameras * P, C] for pixels [B, cameras * 6, side, side]."""
        cameras = pixels.split(2 * _CHANNELS, dim=1)
        return torch.cat([self._one(camera) for camera in cameras], dim=1)

    def _one(self, pixels_B6HW: Tensor) -> Tensor:
        parts = pixels_B6HW.split(_CHANNELS, dim=1)
        patches = []
        for tower, part in zip(self.towers, parts, strict=True):
            second_to_last = len(tower.blocks) - 2
            (features,) = tower.forward_intermediates(
                part,
                [second_to_last],
                output_fmt="NLC",
                intermediates_only=True,
                stop_early=True,  # the last block is not needed
            )
            patches.append(features)
        return torch.cat(patches, dim=2)


class Projector(nn.Module):
    """Patches to the decoder's embeddings: three layers with GELU between them."""

    def __init__(self, channels: int, embedding: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(channels, 4 * channels)
        self.fc2 = nn.Linear(4 * channels, embedding)
        self.fc3 = nn.Linear(embedding, embedding)
        self.act = nn.GELU()

    def forward(self, patches_BPC: Tensor) -> Tensor:
        return self.fc3(self.act(self.fc2(self.act(self.fc1(patches_BPC)))))


def _tower(name: str, image_size: int, overrides: dict[str, Any]) -> Any:
    timm = _import_timm()
    # Without pretrained weights: the checkpoint brings them. The tower's classifier is left out.
    tower = timm.create_model(
        name, pretrained=False, num_classes=0, img_size=image_size, **overrides
    )
    for block in tower.blocks:
        for scale in ("ls1", "ls2"):
            if hasattr(getattr(block, scale), "gamma"):
                setattr(block, scale, LayerScale(tower.embed_dim))
    return tower


def _import_timm() -> ModuleType:
    import_torchvision()
    try:
        import timm
    except ImportError as error:
        raise UserError(
            f"vision-language-action models need {error.name}",
            hint="pip install 'm2flow[vla]', or beside a CPU build of torch: "
            "pip install --no-deps timm torchvision",
        ) from error
    return timm
