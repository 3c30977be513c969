"""An item as the parts of one body, and back.

A body is: number of buffers and bytes of the head, the size of each buffer, the pickled head, and
the buffers, each aligned. Nothing is joined here: the parts are handed to the socket as they lie.
Where neither torch nor NumPy is loaded a value cannot hold tensors, and they are not loaded for it.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections.abc import Sequence
from types import FunctionType
from typing import Any

from m2flow.runtime.transport.channel.protocol import aligned

COUNTS = struct.Struct("<II")


def pack(value: Any) -> list[Any]:
    """The parts of a value's body, in order. They share memory with its tensors.

    Raises:
        TypeError: something in the value cannot be pickled.
    """
    packed = _packed_plainly(value)
    if packed is not None:
        return [COUNTS.pack(0, len(packed)), packed]
    from m2flow.runtime.transport import wire

    taken_apart = wire.pack(value)
    head, buffers = taken_apart.head, taken_apart.buffers
    sizes = [buffer.nbytes for buffer in buffers]
    parts: list[Any] = [COUNTS.pack(len(sizes), len(head)), struct.pack(f"<{len(sizes)}Q", *sizes)]
    parts.append(head)
    end = COUNTS.size + 8 * len(sizes) + len(head)
    for buffer in buffers:
        parts += [bytes(aligned(end) - end), buffer.memory()]
        end = aligned(end) + buffer.nbytes
    return parts


def unpack(body: memoryview) -> Any:
    """The value; its tensors are views of `body`, which must be writable."""
    count, head_bytes = COUNTS.unpack_from(body)
    start = COUNTS.size + 8 * count
    end = start + head_bytes
    if not count:
        return pickle.loads(body[start:end])
    from m2flow.runtime.transport import wire

    head = body[start:end]
    buffers = []
    for size in struct.unpack_from(f"<{count}Q", body, COUNTS.size):
        start, end = aligned(end), aligned(end) + size
        buffers.append(body[start:end])
    return wire.unpack(head, buffers)


def size_of(parts: Sequence[Any]) -> int:
    """Bytes of a body."""
    return sum(part.nbytes if hasattr(part, "nbytes") else len(part) for part in parts)


def _packed_plainly(value: Any) -> bytes | None:
    """The value pickled where it can hold no tensor; None where that is not enough."""
    if type(value) not in _PLAIN and not sys.modules.keys().isdisjoint(_TENSOR_LIBRARIES):
        return None
    file = io.BytesIO()
    try:
        _Plain(file, 5).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None  # the full way knows more types, and says what it cannot take
    return file.getvalue()


_TENSOR_LIBRARIES = ("torch", "numpy")
_PLAIN = (bytes, str, int, float, bool, type(None))


class _Plain(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            raise pickle.PicklingError("another process has another main program")
        return NotImplemented
