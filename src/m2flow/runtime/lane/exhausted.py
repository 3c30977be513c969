"""A call that ran out of memory: what was on the lane beside it.

What was asked for stands in the library's own message; who held the rest is known to the lane.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from m2flow.flow.worker import Worker

_IN_WORDS = re.compile(
    r"can't allocate memory"  # PyTorch, on the CPU
    r"|CUDA (driver )?error: out of memory"  # PyTorch, of what it calls beside its allocator
    r"|CU[A-Z]+_STATUS_ALLOC_FAILED"  # cuBLAS, cuDNN and their like
    r"|Cuda failure (\d+ )?'out of memory'"  # NCCL
    r"|Triton Error \[CUDA\]: out of memory"
)
"""What libraries say in a RuntimeError; "out of memory" alone may be anybody's words."""


def is_exhaustion(error: BaseException) -> bool:
    """Whether memory did not suffice: Python's own error, or one of torch, NumPy, CUDA or what uses
    it."""
    named = type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError)
    return named or (isinstance(error, RuntimeError) and _IN_WORDS.search(str(error)) is not None)


def name_residents(
    error: BaseException,
    lane: int,
    call: str,
    workers: Mapping[str, Worker],
    away: Collection[str],
) -> None:
    """Add to an error of memory which states were on the lane; leave any other as it is.

    Args:
        error: what a call has raised.
        lane: its number.
        call: what ran, such as "learner.train".
        workers: all that have a state here.
        away: those that were put away.
    """
    if not is_exhaustion(error):
        return
    sizes = {name: one.state_bytes() for name, one in workers.items() if name not in away}
    held = ", ".join(f"{name} {size / 1e9:.3g} GB" for name, size in sizes.items() if size)
    asked = str(error) or type(error).__name__
    told = f"{call} ran out of memory on lane {lane}, which held {held or 'no state'}: {asked}"
    error.args = (told, *error.args[1:])
