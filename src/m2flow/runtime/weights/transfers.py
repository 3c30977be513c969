"""The plan of a transfer: which lane sends which part of which tensor to a target.

Every element of every box that the target wants comes from exactly one lane, the cheapest that has
it. Among lanes that cost the same, a region comes in as few pieces as possible, and then from the
lane that has least to send: replicas share the work. The plan is a function of manifests alone, and
the same wherever it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from itertools import groupby

from m2flow.runtime.weights.boxes import Box
from m2flow.runtime.weights.manifest import ManifestError, TensorManifest


@dataclass(frozen=True, slots=True)
class TensorTransfer:
    """One piece on its way.

    Attributes:
        name: the tensor, by its name in the manifests.
        lane: who sends it.
        source: the piece, counted from where the sender's part of the tensor begins.
        target: the piece, counted from where the box that the target wants begins.
        num_bytes: its size.
    """

    name: str
    lane: int
    source: Box
    target: Box
    num_bytes: int


def transfers(
    sources: Mapping[int, TensorManifest],
    wanted: Mapping[str, Box],
    cost: Callable[[int], float],
    sent: MutableMapping[int, int] | None = None,
) -> list[TensorTransfer]:
    """Who sends what to one target, in the order of `wanted`.

    Args:
        sources: lane -> what it holds.
        wanted: name -> the part of the tensor that the target needs, in global indices.
        cost: lane -> what a byte from there costs the target, in any unit: 0 for the target's own
            lane, more for its node, more still for another.
        sent: lane -> bytes that it sends already; counted on. Given from one target to the next, it
            spreads the work over lanes that hold the same.

    Raises:
        ManifestError: nobody has a tensor of this name, lanes disagree about its shape or dtype, or
            elements are wanted that no lane holds.
    """
    sent = {} if sent is None else sent
    costs = {lane: cost(lane) for lane in sources}
    order = sorted(sources, key=lambda lane: (costs[lane], lane))
    tiers = [list(lanes) for _, lanes in groupby(order, key=costs.__getitem__)]
    plan = []
    for name, box in wanted.items():
        holders, itemsize = _holders(name, box, sources)
        rest = [box] if box.numel else []
        for tier in tiers:
            near = [
                (-part.numel, sent.get(lane, 0), lane, part)
                for lane in tier
                if lane in holders and (part := box.intersect(holders[lane])) is not None
            ]
            for _, _, lane, held in sorted(near, key=lambda entry: entry[:3]):
                for region in rest[:]:
                    part = region.intersect(held)
                    if part is None:
                        continue
                    rest.remove(region)
                    rest += region.minus(part)
                    num_bytes = part.numel * itemsize
                    sent[lane] = sent.get(lane, 0) + num_bytes
                    there, here = part.inside(holders[lane]), part.inside(box)
                    plan.append(TensorTransfer(name, lane, there, here, num_bytes))
                if not rest:
                    break
        if rest:
            missing = sum(part.numel for part in rest)
            raise ManifestError(
                f"{missing} of the {box.numel} elements wanted are on no lane, first {rest[0]}",
                key=name,
                hint=f"lanes {sorted(sources)} have to hold all of it between them",
            )
    return plan


def _holders(
    name: str, box: Box, sources: Mapping[int, TensorManifest]
) -> tuple[dict[int, Box], int]:
    """Lane -> the part of the tensor it has, where it has any, and bytes of an element.

    Checks that the lanes agree.
    """
    holders: dict[int, Box] = {}
    first = None
    for lane, manifest in sources.items():
        held = manifest.get(name)
        if held is None:
            continue
        if first is None:
            first = (lane, held)
        elif (held.global_shape, held.dtype) != (first[1].global_shape, first[1].dtype):
            raise ManifestError(
                f"lane {first[0]} holds {first[1].dtype} {first[1].global_shape}, "
                f"lane {lane} holds {held.dtype} {held.global_shape}",
                key=name,
            )
        if held.box.numel:
            holders[lane] = held.box
    if first is None:
        raise ManifestError("no lane of the source has weights of this name", key=name)
    if not box.fits(first[1].global_shape):
        raise ManifestError(
            f"the box wanted does not fit the tensor's shape {first[1].global_shape}",
            key=name,
            value=box,
        )
    return holders, first[1].itemsize
