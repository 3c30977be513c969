"""Which part of which tensor a target takes from which lane's snapshot.

Every element of every box that the target wants comes from exactly one lane, and a region in as few
pieces as possible. The plan is a function of manifests alone, the same wherever it is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from m2flow.runtime.weights.boxes import Box
from m2flow.runtime.weights.manifest import ManifestError, TensorManifest


@dataclass(frozen=True, slots=True)
class TensorTransfer:
    """One piece on its way.

    Attributes:
        name: the tensor, by its name in the manifests.
        lane: who has it.
        source: the piece, counted from where that lane's part of the tensor begins.
        target: the piece, counted from where the box that the target wants begins.
    """

    name: str
    lane: int
    source: Box
    target: Box


def transfers(
    sources: Mapping[int, TensorManifest], wanted: Mapping[str, Box]
) -> list[TensorTransfer]:
    """Who gives what to one target, in the order of `wanted`.

    Args:
        sources: lane -> what it holds; `merged` has found that they agree.
        wanted: name -> the part of the tensor that the target needs, from `wanted_boxes`.

    Raises:
        ManifestError: elements are wanted that no lane holds.
    """
    plan = []
    for name, box in wanted.items():
        parts = [
            (lane, held.box, part)
            for lane, manifest in sources.items()
            if (held := manifest.get(name)) is not None and (part := box.intersect(held.box))
        ]
        rest = [box] if box.numel else []
        for lane, held_box, part in sorted(parts, key=lambda one: (-one[2].numel, one[0])):
            for region in rest[:]:
                common = region.intersect(part)
                if common is not None:
                    rest.remove(region)
                    rest += region.minus(common)
                    here = common.inside(box)
                    plan.append(TensorTransfer(name, lane, common.inside(held_box), here))
        if rest:
            missing = sum(region.numel for region in rest)
            raise ManifestError(
                f"{missing} of the {box.numel} elements wanted are on no lane, first {rest[0]}",
                key=name,
                hint=f"lanes {sorted(sources)} have to hold all of it between them",
            )
    return plan
