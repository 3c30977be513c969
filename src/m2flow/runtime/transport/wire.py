"""A value as a small head and raw buffers: what every link sends.

`pack` pickles the structure alone (protocol 5). The elements of tensors and arrays stay where they
are, as `Buffer`s that the link copies once, straight to where they go. What arrives:
  * a tensor with the same dtype, shape and elements, contiguous; a Parameter as a Parameter. A leaf
    that requires a gradient still does; a result of a computation arrives detached;
  * only the elements a view shows. One tensor object met twice arrives as one object; two views of
    one storage (tied weights under two names) arrive as two tensors with memory of their own;
  * a tensor of an accelerator in host memory, or on the device that the receiver names; one that
    came there by a link of its own stays where it came.
Functions and classes that cannot be imported elsewhere (lambdas, local ones, those of the main
program) go through cloudpickle. Unpacked tensors are views of the buffers that were handed in.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, partial
from io import BytesIO
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch

from m2flow.flow.batch import Batch
from m2flow.runtime.transport.buffers import Buffer, Memory


class UnsendableError(TypeError):
    """A value that no pickler can take; the message says where in the structure it stands."""


class Packed(NamedTuple):
    """A value ready to be sent.

    Attributes:
        head: the structure, with a gap for each buffer.
        buffers: what fills the gaps, in order. They refer to the value's own memory, so the value
            must not change before the link has copied them.
        nbytes: bytes of head and buffers together.
    """

    head: bytes
    buffers: Sequence[Buffer]
    nbytes: int


def pack(value: Any) -> Packed:
    """Split a nested structure of tensors, arrays, Batches and Python values into head and buffers.

    Raises:
        UnsendableError: something in it cannot be pickled.
    """
    try:
        head, buffers = _pickled(StructurePickler, value)
    except _PLAIN_PICKLE_FAILS:
        head, buffers = _pack_by_value(value)
    return Packed(head, buffers, len(head) + sum([buffer.nbytes for buffer in buffers]))


def unpack(
    head: Any,
    buffers: Iterable[Any],
    *,
    device: str | torch.device | None = None,
) -> Any:
    """Put a value together again, around the given memory and without copying it.

    Args:
        head: `Packed.head`, as bytes or any memory that holds them.
        buffers: writable memory for each of `Packed.buffers`, in order: flat uint8 arrays,
            bytearrays or memoryviews, aligned to the elements; or flat uint8 tensors on a device,
            for tensors that stood on one.
        device: where tensors go that stood on an accelerator; host memory when left out.
    """
    before = getattr(_receiver, "device", None)
    _receiver.device = device
    try:
        return pickle.loads(head, buffers=map(_as_memory, buffers))
    finally:
        _receiver.device = before


_receiver = threading.local()

_PLAIN_PICKLE_FAILS = (pickle.PicklingError, AttributeError, TypeError)

# Stands in the pickle stream for a buffer kept beside it. Pickle asks for writable memory, and
# hands back, on loading, whatever object comes next among the buffers.
_GAP = pickle.PickleBuffer(bytearray(1))

_DTYPE_NAMES = {
    dtype: name for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)
}


def _keep(buffers: list[Buffer], gap: pickle.PickleBuffer) -> bool:
    """Pickle met a PickleBuffer: one of ours, kept already, or one of another library.

    Returns whether it goes into the head: never for ours, and always for empty ones.
    """
    if gap is _GAP:
        return False
    memory = gap.raw()
    if memory.nbytes == 0:
        return True
    buffers.append(Buffer(memory, memory.nbytes))
    return False


def _reduce(value: Any, buffers: list[Buffer]) -> Any:
    reducer = _REDUCERS.get(type(value))
    return NotImplemented if reducer is None else reducer(value, buffers)


class StructurePickler(pickle.Pickler):
    """Pickles all but the elements of tensors and arrays, which it adds to `buffers`."""

    def __init__(self, file: BytesIO, buffers: list[Buffer]) -> None:
        self.buffers = buffers
        # No bound method of its own: the cycle would keep the value alive.
        super().__init__(file, 5, buffer_callback=partial(_keep, buffers))

    def reducer_override(self, value: Any) -> Any:
        """Reduce a value of no builtin type, as pickle's documentation says."""
        if isinstance(value, _BY_NAME) and value.__module__ == "__main__":
            # Another process has another main program.
            raise pickle.PicklingError(f"{value!r} belongs to the main program")
        return _reduce(value, self.buffers)


_BY_NAME = (type, FunctionType)


@cache
def _by_value_pickler() -> type[Any]:
    from ray.cloudpickle import CloudPickler

    class ByValuePickler(CloudPickler):
        def __init__(self, file: BytesIO, buffers: list[Buffer]) -> None:
            self.buffers = buffers
            super().__init__(file, 5, buffer_callback=partial(_keep, buffers))

        def reducer_override(self, value: Any) -> Any:
            reduced = _reduce(value, self.buffers)
            return super().reducer_override(value) if reduced is NotImplemented else reduced

    return ByValuePickler


def _pickled(pickler: type[Any], value: Any) -> tuple[bytes, list[Buffer]]:
    file, buffers = BytesIO(), list[Buffer]()
    pickler(file, buffers).dump(value)
    return file.getvalue(), buffers


def _pack_by_value(value: Any) -> tuple[bytes, list[Buffer]]:
    try:
        return _pickled(_by_value_pickler(), value)
    except Exception as error:
        name = type(value).__name__
        where, kind, why = culprit(value, name) or (name, name, str(error))
        raise UnsendableError(f"cannot send {where} (a {kind}): {why}") from error


def culprit(value: Any, where: str, depth: int = 8) -> tuple[str, str, str] | None:
    """The innermost part that cannot be pickled: (where, its type, why); None if all can."""
    from ray.cloudpickle import dumps

    try:
        dumps(value)
    except Exception as error:  # noqa: BLE001 - a type may refuse in any way
        for name, part in _parts(value) if depth else ():
            found = culprit(part, where + name, depth - 1)
            if found is not None:
                return found
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return where, kind.removeprefix("builtins."), str(error)
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Batch):
        value = value.columns
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{field.name}", getattr(value, field.name)) for field in fields(value))
    elif hasattr(value, "__dict__"):
        yield from ((f".{name}", part) for name, part in vars(value).items())


def _as_memory(memory: Any) -> Any:
    kept = type(memory) is np.ndarray or isinstance(memory, torch.Tensor)
    return memory if kept else np.frombuffer(memory, np.uint8)


# --- how each type is taken apart, and put together again ---


def _reduce_tensor(tensor: torch.Tensor, buffers: list[Buffer]) -> Any:
    if (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_meta
    ):
        return NotImplemented  # torch takes it apart itself, into tensors that come by here again
    requires_grad = tensor.requires_grad
    if requires_grad:
        requires_grad = tensor.is_leaf
        tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    nbytes = tensor.nbytes
    gap = None
    if nbytes:
        in_order = tensor.is_cpu and tensor.is_contiguous()
        buffers.append(Buffer(tensor, nbytes, tensor.data_ptr() if in_order else None))
        gap = _GAP
    made_of = (gap, _DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
    if requires_grad or tensor.device.type != "cpu":
        return _tensor, (*made_of, requires_grad, tensor.device.type != "cpu")
    return _tensor, made_of


def _reduce_parameter(parameter: torch.nn.Parameter, _buffers: list[Buffer]) -> Any:
    return torch.nn.Parameter, (parameter.detach(), parameter.requires_grad)


_PLAIN_KINDS = "biufcmMSU"  # NumPy's letters for types whose bytes say everything


def _reduce_array(array: np.ndarray[Any, Any], buffers: list[Buffer]) -> Any:
    dtype = array.dtype
    if dtype.kind not in _PLAIN_KINDS:
        return NotImplemented  # objects, records, other libraries' types: NumPy's own way
    nbytes = array.nbytes
    gap = None
    if nbytes:
        in_order = array.flags.c_contiguous
        buffers.append(Buffer(array, nbytes, array.ctypes.data if in_order else None))
        gap = _GAP
    return _array, (gap, dtype.str, array.shape)


_REDUCERS: dict[type, Callable[[Any, list[Buffer]], Any]] = {
    torch.Tensor: _reduce_tensor,
    torch.nn.Parameter: _reduce_parameter,
    np.ndarray: _reduce_array,
}


def _tensor(
    memory: Memory | torch.Tensor | None,
    dtype: str,
    shape: tuple[int, ...],
    requires_grad: bool = False,
    on_accelerator: bool = False,
) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if memory is None:
        tensor = torch.empty(shape, dtype=kind)
    else:
        flat = memory if isinstance(memory, torch.Tensor) else torch.from_numpy(memory)
        tensor = flat.view(kind).view(shape)
    if on_accelerator and (device := getattr(_receiver, "device", None)) is not None:
        tensor = tensor.to(device)
    return tensor.requires_grad_() if requires_grad else tensor


def _array(
    memory: Memory | None, dtype: str, shape: tuple[int, ...]
) -> np.ndarray[Any, np.dtype[Any]]:
    if memory is None:
        return np.empty(shape, dtype)
    return memory.view(dtype).reshape(shape)
