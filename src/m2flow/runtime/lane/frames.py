"""A Batch as a frame in a file: no pickle, a checksum, and a torn end that is noticed.

A frame is a header (magic, bytes of the text, bytes of the tensors, CRC-32 of both), JSON that has
the structure, and a safetensors file that has the elements. What is read is what was written, to
the type: tuples stay tuples. Of classes only m2flow's own data classes are written and made again.
"""

from __future__ import annotations

import base64
import importlib
import json
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from m2flow.flow.batch import Batch, Ragged
from m2flow.flow.rollouts import Rollouts

_HEADER = struct.Struct("<4sIQI")
_MAGIC = b"m2j1"
_OWN = "m2flow."


_OTHERS = (
    ValueError, KeyError, IndexError, TypeError, AttributeError, ImportError, OverflowError,
    RecursionError, SafetensorError,
)  # fmt: skip
"""What reading a frame may raise whose checksum is right, but which no release of ours has made."""


class Unwritable(TypeError):
    """A value that a frame cannot hold; the message says of which type."""


def frame_bytes(frame: Rollouts) -> bytes:
    """The frame as bytes for a file.

    Raises:
        Unwritable: a column holds something else than tensors, arrays and plain values.
    """
    tensors: dict[str, torch.Tensor] = {}
    columns = {name: _written(column, tensors) for name, column in frame.batch.columns.items()}
    told = {
        "step": frame.step,
        "stage": frame.stage,
        "version": frame.version,
        "ids": frame.batch.ids,
        "columns": columns,
    }
    text, elements = json.dumps(told).encode(), save(tensors)
    crc = zlib.crc32(elements, zlib.crc32(text))
    return _HEADER.pack(_MAGIC, len(text), len(elements), crc) + text + elements


def read_frames(path: Path) -> Iterator[Rollouts]:
    """The whole frames of a file, in order. What is torn or was damaged is left out."""
    data = memoryview(path.read_bytes())
    start = 0
    while start + _HEADER.size <= len(data):
        magic, text_size, elements_size, crc = _HEADER.unpack_from(data, start)
        middle = start + _HEADER.size + text_size
        end = middle + elements_size
        if magic != _MAGIC or end > len(data):
            return
        content, start = data[start + _HEADER.size : end], end
        if zlib.crc32(content) != crc:
            continue
        try:
            yield _read_frame(content[:text_size], content[text_size:])
        except _OTHERS:
            continue  # of another release


def _read_frame(text: memoryview, elements: memoryview) -> Rollouts:
    told, tensors = json.loads(bytes(text)), load(bytes(elements))
    columns = {name: _read(column, tensors) for name, column in told["columns"].items()}
    batch = Batch(columns, told["ids"])
    return Rollouts(int(told["step"]), str(told["stage"]), int(told["version"]), batch)


# --- values ---------------------------------------------------------------------------------------

_PLAIN = (type(None), bool, int, float, str)


def _written(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """A value in terms of JSON; an object `{tag: content}` stands for what JSON does not know."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_written(one, tensors) for one in value]
    if kind is tuple:
        return {"tuple": [_written(one, tensors) for one in value]}
    if kind is range:
        return {"range": [value.start, value.stop, value.step]}
    if kind is dict:
        items = [[_written(k, tensors), _written(v, tensors)] for k, v in value.items()]
        return {"dict": items}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is Ragged:
        return {"ragged": [_written(value.values, tensors), list(value.lengths)]}
    if kind is torch.Tensor:
        return {"tensor": _kept(value.detach(), tensors)}
    if kind is np.ndarray or isinstance(value, np.generic):
        return {"array" if kind is np.ndarray else "scalar": _kept(_tensor_of(value), tensors)}
    if is_dataclass(kind) and kind.__module__.startswith(_OWN):
        parts = {one.name: _written(getattr(value, one.name), tensors) for one in fields(kind)}
        return {"data": [kind.__module__, kind.__qualname__, parts]}
    raise Unwritable(f"{kind.__module__}.{kind.__qualname__}")


def _tensor_of(value: Any) -> torch.Tensor:
    try:
        return torch.from_numpy(np.array(value, order="C"))
    except (TypeError, ValueError):  # texts, dates, objects, another machine's order of bytes
        raise Unwritable(f"numpy {value.dtype}") from None


def _kept(tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> str:
    """Add a copy of a tensor, in host memory, that shares memory with no other one."""
    if tensor.layout is not torch.strided or tensor.is_complex() or tensor.is_quantized:
        raise Unwritable(f"tensors of {tensor.layout} and {tensor.dtype}")
    name = str(len(tensors))
    tensors[name] = tensor.to("cpu", copy=True).contiguous()
    return name


def _read(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_read(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    return _READERS[tag](content, tensors)


def _read_data(content: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    module, name, parts = content
    if not str(module).startswith(_OWN):
        raise ValueError(f"{module} is none of m2flow's own")
    kind = getattr(importlib.import_module(module), name)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise ValueError(f"{name} is no data class")
    return kind(**{key: _read(part, tensors) for key, part in parts.items()})


_READERS: dict[str, Callable[[Any, Mapping[str, torch.Tensor]], Any]] = {
    "tuple": lambda content, tensors: tuple(_read(one, tensors) for one in content),
    "range": lambda content, _: range(*content),
    "dict": lambda content, tensors: {
        _read(key, tensors): _read(one, tensors) for key, one in content
    },
    "bytes": lambda content, _: base64.b64decode(content),
    "ragged": lambda content, tensors: Ragged(_read(content[0], tensors), content[1]),
    "tensor": lambda content, tensors: tensors[content],
    "array": lambda content, tensors: tensors[content].numpy(),
    "scalar": lambda content, tensors: tensors[content].numpy()[()],
    "data": _read_data,
}
