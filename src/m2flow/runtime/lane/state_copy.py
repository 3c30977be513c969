"""`StateCopy`: what a worker has saved, in one piece of memory that others can be handed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from m2flow.runtime.transport.frame import aligned


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A copy of a state that a worker has saved.

    Attributes:
        memory: what it lies in, uint8 [bytes].
        tensors: the copy's, by name; they share that memory.
    """

    memory: Any
    tensors: Mapping[str, Any]

    @classmethod
    def empty(cls, state: Mapping[str, Any], room: Callable[[int], Any]) -> StateCopy:
        """Room for a state; `room` gives so many bytes of memory."""
        places = list(accumulate((aligned(x.nbytes) for x in state.values()), initial=0))
        memory = room(places[-1])
        parts = zip(state.items(), places, strict=False)
        return cls(
            memory,
            {
                name: memory[start : start + x.nbytes].view(x.dtype).view(x.shape)
                for (name, x), start in parts
            },
        )

    @classmethod
    def of(cls, state: Mapping[str, Any], room: Callable[[int], Any]) -> StateCopy:
        """A copy of a state."""
        copy = cls.empty(state, room)
        for name, there in copy.tensors.items():
            there.copy_(state[name])
        return copy

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether a state has these tensors, all of the same shape and type."""
        return self.tensors.keys() == state.keys() and all(
            (x.dtype, x.shape) == (state[name].dtype, state[name].shape)
            for name, x in self.tensors.items()
        )
