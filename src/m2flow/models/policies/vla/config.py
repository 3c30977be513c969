"""The `config.json` of an OpenVLA checkpoint, as far as the network depends on it.

The whole file is kept beside what is read from it, so that a saved checkpoint has every field of
the one it came from. A checkpoint of another family is refused in one line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from m2flow.errors import UserError, suggestion

# What the network is made of when the published file does not say (it leaves out what is usual).
_LLAMA = {"model_type": "llama"}
_BACKBONES = 2


@dataclass(frozen=True)
class VLAConfig:
    """What the file says.

    Attributes:
        raw: the file as it is.
        timm_model_ids: names of the vision towers; the first is DINOv2, the second SigLIP.
        timm_overrides: constructor arguments of timm that differ from those names; for small
            models, empty in published files.
        image_size: side of the pictures in pixels.
        text: `text_config`, the arguments of transformers' LlamaConfig.
        action_bins: number of bins of an action coordinate.
        vocabulary: number of token ids without the padding of the embedding matrix; the ids of the
            bins are the last ones of it.
        norm_stats: statistics of each data set, by name.
    """

    raw: Mapping[str, Any]
    timm_model_ids: tuple[str, ...]
    timm_overrides: tuple[Mapping[str, Any], ...]
    image_size: int
    text: Mapping[str, Any]
    action_bins: int
    vocabulary: int
    norm_stats: Mapping[str, Any]

    @classmethod
    def of(cls, raw: Mapping[str, Any], where: str = "config.json") -> VLAConfig:
        """Read the content of a `config.json`; `where` names it in errors."""
        family = raw.get("model_type")
        if family != "openvla":
            hint = "set policy.kind to pi0" if family == "pi0" else None
            raise UserError(
                "a checkpoint of another family of models",
                key=where,
                value=family,
                expected='model_type "openvla" (OpenVLA and OpenVLA-OFT)',
                hint=hint,
            )
        ids = tuple(raw.get("timm_model_ids", ()))
        text = dict(_LLAMA, **raw.get("text_config", {}))
        fused = raw.get("use_fused_vision_backbone")
        if len(ids) != _BACKBONES or not fused or text["model_type"] != "llama":
            raise UserError(
                "an OpenVLA of another structure",
                key=where,
                value=f"{len(ids)} vision towers on {text['model_type']}",
                expected="two fused vision towers and a Llama decoder",
            )
        if raw.get("image_resize_strategy", "resize-naive") != "resize-naive":
            raise UserError(
                "unknown way of resizing pictures",
                key=f"{where}: image_resize_strategy",
                value=raw["image_resize_strategy"],
                expected="resize-naive",
            )
        return cls(
            raw=raw,
            timm_model_ids=ids,
            timm_overrides=tuple(raw.get("timm_overrides", ({},) * _BACKBONES)),
            image_size=int(raw["image_sizes"][0]),
            text=text,
            action_bins=int(raw.get("n_action_bins", 256)),
            vocabulary=int(text["vocab_size"]) - int(raw.get("pad_to_multiple_of", 64)),
            norm_stats=raw.get("norm_stats", {}),
        )

    def statistics(self, name: str | None) -> Mapping[str, Any]:
        """Return the statistics of a data set; `name` may be left out where there is one only.

        LIBERO checkpoints name their suites with and without `_no_noops`; either is found.
        """
        found = sorted(self.norm_stats)
        if name is None and len(found) == 1:
            name = found[0]
        for candidate in (name or "", f"{name}_no_noops"):
            if candidate in self.norm_stats:
                return _with_percentiles(self.norm_stats[candidate], candidate)
        raise UserError(
            "the checkpoint has no statistics of that name",
            key="statistics",
            value=name,
            expected=f"one of: {', '.join(found)}" if found else "norm_stats in config.json",
            hint=suggestion(name, found) if name and len(found) > 1 else None,
        )


def _with_percentiles(statistics: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The statistics of a data set, which have the percentiles that actions are scaled by."""
    action = statistics.get("action")
    ends = [action.get(end) for end in ("q01", "q99")] if isinstance(action, Mapping) else []
    sizes = {len(end) if isinstance(end, Sequence) else 0 for end in ends}
    if len(sizes) != 1 or 0 in sizes:
        raise UserError(
            "the checkpoint's statistics have no percentiles of actions",
            key="statistics",
            value=name,
            expected="norm_stats.NAME.action.q01 and .q99, a figure for each coordinate",
        )
    return statistics
