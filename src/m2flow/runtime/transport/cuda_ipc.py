"""Hand-over between lanes on GPUs of one machine: device memory is opened by the other process.

On one GPU what arrives is the sender's own memory: not copied, and not to be changed in place. From
another GPU it is copied once, from device to device, and the sender's memory is let go at once;
CUDA opens memory of a GPU that the process does not see otherwise, if the two can reach each other.

Order and lifetime are those of torch.multiprocessing, on each side's current stream: on one GPU the
receiver's stream waits for an event of the sender's, for another GPU the sender waits itself. The
sender's memory stays until the receiver's tensors have died and its stream is through with them.
An offer that nobody reads is counted off by who made it, one that
cannot be opened by who tried to, who asks for host memory from then on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from m2flow.errors import M2FlowError
from m2flow.runtime.transport.peering import Location
from m2flow.runtime.transport.table import Scope

_log = logging.getLogger(__name__)

Handle: TypeAlias = tuple[Any, ...]
"""All that another process needs to open a tensor; plain values."""


class LinkRefused(M2FlowError):
    """CUDA IPC does not work between these two processes: use another way."""


class CudaIPC:
    """The GPU of this process, whose memory it hands over by torch.multiprocessing's handles.

    Attributes:
        gpu: its UUID.
        device: what this process calls it. Processes that see one GPU each all call theirs by the
            same number, so the receiver's own is put in the place of the sender's.
    """

    def __init__(self, gpu: str, device: torch.device) -> None:
        self.gpu, self.device = gpu, device
        self._unable = False
        self._lock = threading.Lock()  # torch's own counting expects one thread at a time

    def offer(self, pieces: Sequence[Tensor], asker: Location) -> tuple[Handle, ...]:
        """Handles of the pieces. Where sharing fails once, it is not tried again."""
        if self._unable:
            raise LinkRefused("its memory cannot be shared")
        same_gpu = asker.gpu == self.gpu
        handles: list[Handle] = []
        try:
            handles.extend(self._share(piece, same_gpu=same_gpu) for piece in pieces)
        except RuntimeError as error:
            self.withdraw(handles)
            self._unable = True
            why = f"memory of GPU {self.gpu} cannot be shared: {_first_line(error)}"
            _log.warning("host memory is used from now on: %s", why)
            raise LinkRefused(why) from error
        return tuple(handles)

    def _share(self, piece: Tensor, *, same_gpu: bool) -> Handle:
        with self._lock:
            try:
                return self.share(piece, same_gpu=same_gpu)
            except RuntimeError:  # a view from within an allocation, or another process's memory
                return self.share(piece.clone(), same_gpu=same_gpu)

    def withdraw(self, handles: Iterable[Handle]) -> None:
        """Release the sender's memory behind handles that nobody opens. Either side may."""
        for handle in handles:
            self.let_go(handle)

    def take(self, handles: Sequence[Handle], holder: Location) -> list[Tensor]:
        """Open the pieces that another process holds; copy those of another GPU."""
        opened: list[Tensor] = []
        for handle in handles:
            try:
                opened.append(self.open(handle))
            except RuntimeError as error:
                self.withdraw(handles[len(opened) :])
                opened.clear()  # the error is looked at for longer than they are needed
                reason = f"its memory cannot be opened: {_first_line(error)}"
                raise LinkRefused(reason) from None
        return opened if holder.gpu == self.gpu else [piece.clone() for piece in opened]

    def owns(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies on this GPU."""
        return tensor.device == self.device

    def test_piece(self, nbytes: int) -> Tensor:
        """Make a tensor of so many bytes, for a test transfer."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    # --- what the driver does; a RuntimeError says that it cannot ---------------------------------

    def share(self, piece: Tensor, *, same_gpu: bool) -> Handle:
        """Make a handle for a flat uint8 tensor, which can be opened once.

        The memory stays until the handle is opened and the tensor that was opened has died. For
        another GPU this waits until the current stream is done.
        """
        # Sharing puts a counter in the place of a storage's pointer, which another thread may be
        # about to read: so a second storage over the same memory is shared, and keeps the first.
        alias = _second_storage(piece)
        handle = _TorchHandle(*alias.untyped_storage()._share_cuda_())
        if not same_gpu:
            torch.cuda.current_stream(self.device).synchronize()
            handle = handle._replace(event_sync_required=False)
        return tuple(handle)

    def open(self, handle: Handle) -> Tensor:
        """Open another process's handle: a tensor in the memory of that process."""
        mine = _TorchHandle(*handle)._replace(device=self.device.index or 0)
        with torch.cuda.device(self.device):
            storage = torch.UntypedStorage._new_shared_cuda(*mine)
            return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    def let_go(self, handle: Handle) -> None:
        """Release the sender's memory behind a handle that nobody will open."""
        offered = _TorchHandle(*handle)
        let_go: Any = torch.UntypedStorage._release_ipc_counter
        let_go(offered.counters, offered.counter, device=self.device)


def devices_here(number: int = 0) -> CudaIPC | None:
    """The GPU of this process; None where torch sees none.

    Args:
        number: which of the GPUs that the process sees.
    """
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", number)
    return CudaIPC(str(torch.cuda.get_device_properties(device).uuid), device)


def scope_between(one: Location, other: Location) -> Scope | None:
    """How near two GPUs of a machine are; None where there is no direct way between the two."""
    if one.gpu is None or other.gpu is None or one.node != other.node:
        return None
    return "gpu" if one.gpu == other.gpu else "gpus"


def _second_storage(piece: Tensor) -> Tensor:
    """The memory of a tensor under a second storage, which keeps the first one alive."""
    to_capsule: Any = vars(torch.utils.dlpack)["to_dlpack"]
    alias: Tensor = vars(torch)["from_dlpack"](to_capsule(piece))
    return alias


class _TorchHandle(NamedTuple):
    """What `UntypedStorage._share_cuda_` returns and `_new_shared_cuda` wants."""

    device: int
    memory: bytes
    num_bytes: int
    offset_bytes: int
    counters: bytes
    counter: int
    event: bytes
    event_sync_required: bool


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
