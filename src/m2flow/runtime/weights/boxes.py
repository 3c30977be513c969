"""`Box`: a rectangular part of a tensor, and the arithmetic of such parts.

A box says where it begins in each dimension and how long it is there. A scalar has one box, with no
dimensions and one element; a box without elements overlaps nothing. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Box:
    """Elements `offsets[d] ... offsets[d] + shape[d] - 1` in each dimension d.

    Attributes:
        offsets: where the box begins.
        shape: how long it is.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.offsets) == len(self.shape), self
        assert all(x >= 0 for x in (*self.offsets, *self.shape)), self

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that is all of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(int(size) for size in shape))

    @property
    def numel(self) -> int:
        """How many elements the box has."""
        return math.prod(self.shape)

    @property
    def ends(self) -> tuple[int, ...]:
        """The first index past the box in each dimension."""
        return tuple(start + size for start, size in zip(self.offsets, self.shape, strict=True))

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the box lies within a tensor of this shape."""
        return len(shape) == len(self.shape) and all(
            end <= size for end, size in zip(self.ends, shape, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """The elements that both have, or None where there are none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(
            min(a, b) - start for a, b, start in zip(self.ends, other.ends, starts, strict=True)
        )
        if any(size <= 0 for size in sizes):
            return None
        return Box(starts, sizes)

    def minus(self, other: Box) -> list[Box]:
        """Disjoint boxes that are this one without `other`; two in each dimension at most."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.numel else []
        rest = []
        offsets, shape = list(self.offsets), list(self.shape)
        for d in range(len(shape)):
            end = offsets[d] + shape[d]
            for start, stop in ((offsets[d], common.offsets[d]), (common.ends[d], end)):
                if stop > start:
                    rest.append(
                        Box(
                            (*offsets[:d], start, *offsets[d + 1 :]),
                            (*shape[:d], stop - start, *shape[d + 1 :]),
                        )
                    )
            offsets[d], shape[d] = common.offsets[d], common.shape[d]
        return rest

    def inside(self, outer: Box) -> Box:
        """This box, counted from where `outer` begins, which must contain it."""
        assert self.intersect(outer) == self, (self, outer)
        offsets = tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True))
        return Box(offsets, self.shape)

    def of(self, tensor: Any) -> Any:
        """This part of a tensor, as a view; the tensor itself where the box is all of it."""
        if self.shape == tuple(tensor.shape):
            return tensor
        slices = zip(self.offsets, self.ends, strict=True)
        return tensor[tuple(slice(start, end) for start, end in slices)]
